//! Stores: images that share frames (`specs/image.md §10`). Everything goes over [`Objects`].

mod collect;
mod directory;
mod lease;
mod packs;
mod place;

use std::collections::HashMap;
use std::sync::Arc;

pub use collect::{Collected, StoreStat};
pub use directory::DirectoryObjects;
pub use place::Place;

use crate::digest::Digest;
use crate::error::StoreError;
use crate::key::{Crypt, Key};
use crate::layout::{Block, features};
use crate::objects::Objects;
use crate::read::{Bases, StoredImage, link};
use crate::write::{ImageWriter, WriteOptions};
use lease::Lease;
use packs::{PackSink, PackSource};

const NAMES: &str = "names/";
const IMAGES: &str = "images/";
const PACKS: &str = "packs/";
/// Limit of the object of a name in bytes.
const NAME_OBJECT_MOST: u64 = 128;
/// Bytes of other images' indexes that a save reads to find frames that are there already.
const KNOWN_BYTES: u64 = 256 << 20;

/// A store of images.
#[derive(Clone)]
pub struct ImageStore {
    objects: Arc<dyn Objects>,
    key: Option<Key>,
}

impl std::fmt::Debug for ImageStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageStore").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// A name in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedImage {
    /// The image's name; a keyed digest of it if the image is encrypted with another key, or no key was given.
    pub name: String,
    /// Digest of the image.
    pub digest: Digest,
    /// Whether the image can be read with the store's key, or without one.
    pub is_readable: bool,
}

impl ImageStore {
    /// Takes a storage. `key` is for encrypted images.
    pub fn new(objects: Arc<dyn Objects>, key: Option<Key>) -> Self {
        Self { objects, key }
    }

    /// The storage's address.
    pub fn name(&self) -> &str {
        self.objects.name()
    }

    /// All names, in the order of their keys.
    ///
    /// # Errors
    /// The storage's errors; [`StoreError::Broken`] for an object of a name without a digest.
    pub fn list(&self) -> Result<Vec<NamedImage>, StoreError> {
        let mut named = Vec::new();
        for key in self.keys(NAMES)? {
            let digest = match self.digest_at(&key) {
                // Removed since the list was made.
                Err(StoreError::Missing { .. }) => continue,
                digest => digest?,
            };
            let shown = key[NAMES.len()..].to_owned();
            let (name, is_readable) = match self.open_one(&digest, &shown) {
                Ok(image) if image.is_encrypted() => (image.index().name.clone(), true),
                Ok(_) => (shown, true),
                Err(
                    StoreError::KeyNeeded { .. }
                    | StoreError::WrongKey { .. }
                    | StoreError::NotEncrypted { .. },
                ) => (shown, false),
                Err(StoreError::Missing { .. }) => (shown, false),
                Err(error) => return Err(error),
            };
            named.push(NamedImage { name, digest, is_readable });
        }
        Ok(named)
    }

    /// Opens the image `name` with its bases, which are in the same store.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if the store has no such name; the errors of images.
    pub fn image(&self, name: &str) -> Result<Arc<StoredImage>, StoreError> {
        check_name(name)?;
        let digest = self.digest_at(&self.name_key(name)).map_err(|error| match error {
            StoreError::Missing { .. } => StoreError::Missing { name: self.shown(name) },
            error => error,
        })?;
        link(self.open_one(&digest, name)?, self.key.as_ref(), self)
    }

    /// Starts an image with the name `name`. Frames that other images have are not stored again.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the name exists and may not be replaced; the errors of [`ImageWriter::create`].
    pub fn writer(
        &self,
        name: &str,
        blocks: Vec<Block>,
        options: WriteOptions,
    ) -> Result<ImageWriter, StoreError> {
        check_name(name)?;
        let store = Self { objects: Arc::clone(&self.objects), key: options.key.clone() };
        let key = store.name_key(name);
        if !options.replace && store.objects.get(&key, NAME_OBJECT_MOST).is_ok() {
            return Err(StoreError::Conflict { name: self.shown(name) });
        }
        let lease = Lease::take(&store)?;
        if let Some(base) = &options.base {
            let base_key = format!("{IMAGES}{}", base.digest());
            if lease.condemned.contains(&base_key) || store.objects.open(&base_key).is_err() {
                let text = format!(
                    "the base {} of {} is not in the store: convert it into the store first, or leave --base out",
                    base.name(),
                    self.shown(name)
                );
                return Err(StoreError::Request(text));
            }
        }
        let known = store.known_frames(&lease, options.extent_bytes)?;
        let (ids, frames) = (known.ids, known.frames);
        let sink = PackSink::new(&store, name, lease, ids, options.replace);
        let writer =
            ImageWriter::with_sink(Box::new(sink), blocks, options, name.to_owned(), features::PACKS)?;
        writer.preload(frames);
        Ok(writer)
    }

    /// Removes a name. The image's frames stay until a garbage collection.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if the store has no such name.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        check_name(name)?;
        let key = self.name_key(name);
        match self.objects.get(&key, NAME_OBJECT_MOST) {
            Ok(_) => self.objects.delete(&key),
            Err(StoreError::Missing { .. }) => Err(StoreError::Missing { name: self.shown(name) }),
            Err(error) => Err(error),
        }
    }

    /// The key of the object of a name.
    fn name_key(&self, name: &str) -> String {
        match &self.key {
            None => format!("{NAMES}{name}"),
            key => format!("{NAMES}{}", Crypt::new(key.as_ref()).digest(&[b"name", name.as_bytes()])),
        }
    }

    fn shown(&self, name: &str) -> String {
        format!("{}#{name}", self.name())
    }

    fn digest_at(&self, key: &str) -> Result<Digest, StoreError> {
        let (bytes, _) = self.objects.get(key, NAME_OBJECT_MOST)?;
        let text = String::from_utf8_lossy(&bytes);
        text.trim().parse().map_err(|rule| StoreError::Broken {
            name: format!("{}/{key}", self.name()),
            part: "the object of a name",
            rule,
            paragraph: "§10",
        })
    }

    /// Opens an image of the store without its base.
    fn open_one(&self, digest: &Digest, name: &str) -> Result<StoredImage, StoreError> {
        let blob = self.objects.open(&format!("{IMAGES}{digest}"))?;
        let index_bytes = blob.len_bytes();
        // An image without encryption in a store with a key is read without it.
        let image = match StoredImage::open_one(Arc::clone(&blob), self.key.as_ref()) {
            Err(StoreError::NotEncrypted { .. }) => StoredImage::open_one(blob, None)?,
            image => image?,
        };
        if image.digest() != *digest {
            return Err(StoreError::Broken {
                name: self.shown(name),
                part: "the index",
                rule: format!("it is of image {}, and its key is {digest}", image.digest()),
                paragraph: "§10",
            });
        }
        let packs = image.index().packs.clone();
        let source = PackSource::new(self.clone(), self.shown(name), index_bytes, packs);
        Ok(image.with_source(Box::new(source)))
    }

    fn keys(&self, prefix: &str) -> Result<Vec<String>, StoreError> {
        let mut keys = Vec::new();
        self.objects.list(prefix, &mut |listed| {
            keys.push(listed.key);
            Ok(())
        })?;
        Ok(keys)
    }

    /// Frames of the newest images that a new image may name, too.
    fn known_frames(&self, lease: &Lease, extent_bytes: u32) -> Result<Known, StoreError> {
        let mut images = Vec::new();
        self.objects.list(IMAGES, &mut |listed| {
            images.push(listed);
            Ok(())
        })?;
        images.sort_by_key(|listed| std::cmp::Reverse(listed.modified));
        let (mut known, mut bytes, mut numbers) = (Known::default(), 0, HashMap::new());
        for listed in images {
            bytes += listed.length_bytes;
            if bytes > KNOWN_BYTES {
                break;
            }
            let Ok(digest) = listed.key[IMAGES.len()..].parse() else { continue };
            if lease.condemned.contains(&listed.key) {
                continue;
            }
            // An image with another key, or a damaged one, shares nothing.
            let Ok(image) = self.open_one(&digest, "") else { continue };
            if image.extent_bytes() != extent_bytes || image.is_encrypted() != self.key.is_some() {
                continue;
            }
            for frame in &image.index().frames {
                let id = image.index().packs[frame.pack as usize];
                if lease.condemned.contains(&pack_key(&id)) {
                    continue;
                }
                let next = known.ids.len() as u32;
                let number = *numbers.entry(id).or_insert(next);
                if number == next {
                    known.ids.push(id);
                }
                known.frames.push(crate::layout::FrameEntry { pack: number, ..*frame });
            }
        }
        Ok(known)
    }
}

/// Frames that are in the store, and the packs that have them.
#[derive(Default)]
struct Known {
    ids: Vec<[u8; 16]>,
    frames: Vec<crate::layout::FrameEntry>,
}

impl Bases for ImageStore {
    fn find(&self, digest: &Digest, _: &str) -> Result<Option<Arc<dyn crate::blob::Blob>>, StoreError> {
        found(self.objects.open(&format!("{IMAGES}{digest}")))
    }

    fn open(&self, digest: &Digest, hint: &str, _: Option<&Key>) -> Result<Option<StoredImage>, StoreError> {
        found(self.open_one(digest, hint))
    }
}

fn found<T>(result: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(StoreError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Refuses a name that is no part of a key, or that looks like a digest.
fn check_name(name: &str) -> Result<(), StoreError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_good =
        !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.bytes().all(is_plain);
    if is_good && name.parse::<Digest>().is_err() {
        return Ok(());
    }
    let text = format!(
        "{name:?} is not a name for an image: use up to 200 letters, digits, - _ . (no . at the start)"
    );
    Err(StoreError::Request(text))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn pack_key(id: &[u8; 16]) -> String {
    format!("{PACKS}{}", packs::pack_id(id))
}
