//! Opens a layer with the chain of its bases (`specs/image.md §9`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::image::StoredImage;
use crate::blob::{Blob, FileBlob};
use crate::digest::Digest;
use crate::error::StoreError;
use crate::key::Key;
use crate::place::Place;

/// The largest number of layers in a chain, including the complete image at its end.
pub(crate) const LAYERS_MOST: usize = 64;

/// Finds the bases of layers.
pub trait Bases {
    /// Opens the blob of the image with `digest`; none if it is not there. `hint` is the name that its layer remembers.
    ///
    /// The caller checks the digest.
    ///
    /// # Errors
    /// The errors of opening a blob that is there.
    fn find(&self, digest: &Digest, hint: &str) -> Result<Option<Arc<dyn Blob>>, StoreError>;

    /// Opens the image with `digest`, without its base; none if it is not there.
    ///
    /// # Errors
    /// The errors of opening an image.
    fn open(
        &self,
        digest: &Digest,
        hint: &str,
        key: Option<&Key>,
    ) -> Result<Option<StoredImage>, StoreError> {
        self.find(digest, hint)?.map(|blob| StoredImage::open_one(blob, key)).transpose()
    }
}

/// Bases are where the caller says (files, directories of files, objects, stores), or in the directory of the layer.
#[derive(Debug, Clone, Default)]
pub struct FileBases {
    directory: Option<PathBuf>,
    named: Vec<PathBuf>,
}

impl FileBases {
    /// Searches in the directory of the layer at `path`.
    pub fn beside(path: &Path) -> Self {
        Self::default().in_directory_of(path)
    }

    /// Also searches in the directory of the layer at `path`.
    #[must_use]
    pub(crate) fn in_directory_of(mut self, path: &Path) -> Self {
        self.directory = path.parent().map(Path::to_owned);
        self
    }

    /// Also searches at `path`, for whichever layer it fits: a file, a directory of files, or another [`Place`].
    #[must_use]
    pub fn and(mut self, path: &Path) -> Self {
        self.named.push(path.to_owned());
        self
    }
}

impl Bases for FileBases {
    fn find(&self, digest: &Digest, hint: &str) -> Result<Option<Arc<dyn Blob>>, StoreError> {
        for path in &self.named {
            let found = match Place::parse(path)? {
                Place::File(path) if path.is_dir() => in_directory(&path, digest, hint)?,
                Place::Store { .. } => None,
                place => fitting(&place, digest)?,
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        let Some(directory) = self.directory.as_ref().filter(|_| is_plain(hint)) else { return Ok(None) };
        match FileBlob::open(&directory.join(hint)) {
            Ok(blob) => Ok(Some(Arc::new(blob))),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn open(
        &self,
        digest: &Digest,
        hint: &str,
        key: Option<&Key>,
    ) -> Result<Option<StoredImage>, StoreError> {
        for path in &self.named {
            if let Place::Store { directory, .. } = Place::parse(path)? {
                let base = Place::store(&directory, key.cloned(), false)?.open(digest, hint, key)?;
                if base.is_some() {
                    return Ok(base);
                }
            }
        }
        self.find(digest, hint)?.map(|blob| StoredImage::open_one(blob, key)).transpose()
    }
}

/// The file of a directory that is the image with `digest`. The file with the layer's hint is looked at first.
fn in_directory(directory: &Path, digest: &Digest, hint: &str) -> Result<Option<Arc<dyn Blob>>, StoreError> {
    let failed = |error| StoreError::io(&directory.display().to_string(), "readdir", error);
    let mut paths = vec![directory.join(hint)];
    for entry in directory.read_dir().map_err(failed)? {
        paths.push(entry.map_err(failed)?.path());
    }
    // Other entries of the directory need not be files, or readable.
    let files = paths.into_iter().filter(|path| path.is_file());
    let blobs = files.map(|path| fitting(&Place::File(path), digest));
    Ok(blobs.filter_map(Result::ok).flatten().next())
}

/// The file or the object at `place`, if its footer names `digest`.
fn fitting(place: &Place, digest: &Digest) -> Result<Option<Arc<dyn Blob>>, StoreError> {
    let blob = place.blob()?;
    Ok((footer_digest(&*blob)? == Some(*digest)).then_some(blob))
}

/// No base is found: for images that are complete.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoBases;

impl Bases for NoBases {
    fn find(&self, _: &Digest, _: &str) -> Result<Option<Arc<dyn Blob>>, StoreError> {
        Ok(None)
    }
}

impl StoredImage {
    /// Opens the image in the file at `path`. Bases are searched next to it, under the names that the layers contain.
    ///
    /// # Errors
    /// [`StoreError`]: the image is damaged, the key is wrong, or a base is missing.
    pub fn open(path: &Path, key: Option<&Key>) -> Result<Arc<Self>, StoreError> {
        Self::open_blob(Arc::new(FileBlob::open(path)?), key, &FileBases::beside(path))
    }

    /// Opens the image in `blob`, and the chain of its bases.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_blob(
        blob: Arc<dyn Blob>,
        key: Option<&Key>,
        bases: &dyn Bases,
    ) -> Result<Arc<Self>, StoreError> {
        open(blob, key, bases)
    }
}

/// Opens the image in `blob`, and its bases.
fn open(blob: Arc<dyn Blob>, key: Option<&Key>, bases: &dyn Bases) -> Result<Arc<StoredImage>, StoreError> {
    let image = StoredImage::open_one(blob, key)?;
    if image.is_packed() {
        let text =
            format!("{} is the index of a store: give the image as store:DIRECTORY#NAME", image.name());
        return Err(StoreError::Request(text));
    }
    link(image, key, bases)
}

/// Opens the bases of `top`.
pub(crate) fn link(
    top: StoredImage,
    key: Option<&Key>,
    bases: &dyn Bases,
) -> Result<Arc<StoredImage>, StoreError> {
    let name = top.name().to_owned();
    let mut chain = vec![top];
    while let Some((digest, hint)) = chain[chain.len() - 1].named_base() {
        let upper = &chain[chain.len() - 1];
        if chain.iter().any(|image| image.digest == digest) {
            return Err(StoreError::BaseLoop { name, digest });
        }
        if chain.len() == LAYERS_MOST {
            return Err(StoreError::ChainTooLong { name, limit: LAYERS_MOST, digest });
        }
        let Some(base) = bases.open(&digest, hint, key)? else {
            return Err(StoreError::BaseMissing {
                name: upper.name().to_owned(),
                digest,
                hint: hint.to_owned(),
            });
        };
        if base.digest != digest {
            let (base, found) = (base.name().to_owned(), base.digest);
            return Err(StoreError::BaseWrong { name: upper.name().to_owned(), digest, base, found });
        }
        base.check_alike(upper.name(), upper.blocks())?;
        chain.push(base);
    }
    let mut below: Option<Arc<StoredImage>> = None;
    while let Some(mut image) = chain.pop() {
        image.base = below.take();
        below = Some(Arc::new(image));
    }
    // The chain has at least the image itself.
    below.ok_or_else(|| StoreError::Request(format!("{name} has no layer")))
}

impl StoredImage {
    /// Refuses a file at `path` that is this image or one of its bases, because a layer over this image would replace it.
    ///
    /// # Errors
    /// [`StoreError::Request`]; [`StoreError::Io`].
    pub fn check_kept(&self, path: &Path) -> Result<(), StoreError> {
        let digest = match FileBlob::open(path) {
            Ok(blob) => footer_digest(&blob)?,
            Err(StoreError::Missing { .. }) => None,
            Err(error) => return Err(error),
        };
        let mut chain = std::iter::successors(Some(self), |image| image.base.as_deref());
        match chain.find(|image| Some(image.digest) == digest) {
            Some(_) => Err(StoreError::Request(format!(
                "{} would be replaced by a layer that needs it, over {}: choose another output, or another base",
                path.display(),
                self.name()
            ))),
            None => Ok(()),
        }
    }
}

/// A hint names a file in the layer's directory. A layer must not lead to another directory.
fn is_plain(hint: &str) -> bool {
    !hint.is_empty() && hint != "." && hint != ".." && !hint.contains('/')
}

/// The digest that the image's footer names; none if the blob has no footer.
fn footer_digest(blob: &dyn Blob) -> Result<Option<Digest>, StoreError> {
    use crate::layout::{FOOTER_BYTES, Footer};
    let mut footer = [0; FOOTER_BYTES];
    let Some(at) = blob.len_bytes().checked_sub(FOOTER_BYTES as u64) else { return Ok(None) };
    blob.read_exact_at(at, &mut footer)?;
    Ok(Footer::decode(&footer).ok().map(|footer| footer.digest))
}
