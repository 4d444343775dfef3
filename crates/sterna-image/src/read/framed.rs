//! Images in Sterna's own format (`specs/image.md`), seen as the files that they contain.
//!
//! Such an image contains the recipe of a mapped-ram file, its *view*. The other readers and all tools read the view, and
//! need to know nothing of frames.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_store::{Blob, FileBases, FileReader, Key, StoreError, StoredImage};

use super::source::{ReadAt, Stamp};
use crate::error::ImageError;

/// Name of the file in an image that its readers see.
pub(crate) const VIEW: &str = "view";
/// Name of the legacy stream in an image that was made from one.
pub(crate) const STREAM: &str = "stream";

/// What a reader needs for an image beyond its path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// The key of an encrypted image.
    pub key: Option<Key>,
    /// Where bases of a layer may be: files, directories of files, objects, or names in stores. Bases in the layer's
    /// directory are found without.
    pub bases: Vec<PathBuf>,
}

impl Access {
    /// Refuses a key for an image of another format, which holders of the key need not have written.
    pub(crate) fn check_plain(&self, name: &str) -> Result<(), ImageError> {
        match &self.key {
            Some(_) => Err(StoreError::NotEncrypted { name: name.to_owned() }.into()),
            None => Ok(()),
        }
    }

    /// The places that the caller names for bases.
    pub(crate) fn bases(&self) -> FileBases {
        self.bases_from(FileBases::default())
    }

    fn bases_from(&self, first: FileBases) -> FileBases {
        self.bases.iter().fold(first, |bases, path| bases.and(path))
    }
}

/// The bytes that readers see: `source` itself, or the view of an image in Sterna's format.
pub(crate) fn unwrapped(
    source: Arc<dyn ReadAt>,
    name: &str,
    access: &Access,
) -> Result<Arc<dyn ReadAt>, ImageError> {
    let mut magic = [0; 8];
    let count = source.read_at(0, &mut magic).map_err(|error| ImageError::io(name, "read", error))?;
    if source.stored().is_some() {
        return Ok(source);
    }
    if !StoredImage::is_magic(&magic[..count]) {
        return access.check_plain(name).map(|()| source);
    }
    let stored = stored(&source, name, access)?;
    view_of(&stored, Some(source))
}

/// The view of an image in Sterna's format, which `below` contains; none if it is in a store.
pub(crate) fn view_of(
    stored: &Arc<StoredImage>,
    below: Option<Arc<dyn ReadAt>>,
) -> Result<Arc<dyn ReadAt>, ImageError> {
    match stored.file(VIEW)? {
        Some(reader) => Ok(Arc::new(Framed { reader, below })),
        None => {
            let (name, kind) = (stored.name(), stored.kind());
            let text = format!(
                "{name} is an image of {kind}, not of QEMU: `sterna convert` writes its files into a directory"
            );
            Err(ImageError::Request(text))
        }
    }
}

/// The image in Sterna's format that `source` contains.
pub(crate) fn stored(
    source: &Arc<dyn ReadAt>,
    name: &str,
    access: &Access,
) -> Result<Arc<StoredImage>, ImageError> {
    let length_bytes = source.len_bytes().map_err(|error| ImageError::io(name, "fstat", error))?;
    let blob = SourceBlob { source: Arc::clone(source), name: name.to_owned(), length_bytes };
    let bases = access.bases_from(FileBases::beside(Path::new(name)));
    Ok(StoredImage::open_blob(Arc::new(blob), access.key.as_ref(), &bases)?)
}

/// A file of an image in Sterna's format, which `below` contains.
pub(crate) struct Framed {
    reader: FileReader,
    /// None for an image in a store, whose objects never change.
    below: Option<Arc<dyn ReadAt>>,
}

impl Framed {
    /// The legacy stream of the image that makes `view`; none if it was made from another form.
    pub(crate) fn stream_of(view: &Arc<dyn ReadAt>) -> Result<Option<Arc<dyn ReadAt>>, ImageError> {
        let Some(stored) = view.stored() else { return Ok(None) };
        let Some(reader) = stored.file(STREAM)? else { return Ok(None) };
        Ok(Some(Arc::new(Self { reader, below: Some(Arc::clone(view)) })))
    }
}

impl ReadAt for Framed {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<usize> {
        self.reader.read_at(offset, to).map_err(io::Error::other)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.reader.len_bytes())
    }

    fn stamp(&self) -> io::Result<Stamp> {
        // Frames are checked when they are read. The stamp finds a change earlier, and in frames that were read before.
        self.below.as_ref().map_or(Ok(Stamp::default()), |below| below.stamp())
    }

    fn stored(&self) -> Option<&Arc<StoredImage>> {
        Some(self.reader.image())
    }
}

/// A source as a blob.
struct SourceBlob {
    source: Arc<dyn ReadAt>,
    name: String,
    length_bytes: u64,
}

impl Blob for SourceBlob {
    fn len_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn read_exact_at(&self, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let mut done = 0;
        while done < to.len() {
            match self.source.read_at(offset + done as u64, &mut to[done..]) {
                Ok(0) => {
                    return Err(StoreError::Torn {
                        name: self.name.clone(),
                        length_bytes: self.length_bytes,
                    });
                }
                Ok(count) => done += count,
                Err(error) => return Err(StoreError::io(&self.name, "read", error)),
            }
        }
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn file(&self) -> Option<&std::fs::File> {
        self.source.file()
    }
}
