//! Opens images in files and on block devices.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;
use sterna_store::{Place, StoredImage};

use crate::error::ImageError;
use crate::read::begun::Begun;
use crate::read::device;
use crate::read::framed::{self, Access};
use crate::read::image::Image;
use crate::read::source::ReadAt;

impl Image {
    /// Opens the image at `path` and reads everything except its pages.
    ///
    /// An image with truncated devices can be opened for inspection ([`Shape::has_eof`](crate::Shape::has_eof) is
    /// false then). An image that is truncated before the devices has no shape and cannot be opened.
    ///
    /// # Errors
    /// [`ImageError`]: the file is not an image, breaks a rule (with its place), or is still being written.
    pub fn open(path: &Path) -> Result<Image, ImageError> {
        Self::open_with(path, &Access::default())
    }

    /// Like [`open`](Self::open), with the key of an encrypted image, or with the places of a layer's bases.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_with(path: &Path, access: &Access) -> Result<Image, ImageError> {
        Self::open_unwrapped(open_with(path, access)?, &path.display().to_string())
    }

    /// Like [`open_with`](Self::open_with), and records the place of each page of a legacy stream
    /// ([`places`](Self::places)).
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_indexed(path: &Path, access: &Access) -> Result<Image, ImageError> {
        let (name, source) = (path.display().to_string(), open_with(path, access)?);
        let stamp = source.stamp().map_err(|error| ImageError::io(&name, "fstat", error))?;
        let begun = Begun::of_source(&source, &name, None)?;
        Self::finish(begun, source, stamp, true)
    }
}

/// Opens the image at `path`. An image in Sterna's own format becomes the mapped-ram image that it contains.
pub(crate) fn open_with(path: &Path, access: &Access) -> Result<Arc<dyn ReadAt>, ImageError> {
    match Place::parse(path)? {
        Place::File(path) => framed::unwrapped(open_file(&path)?, &path.display().to_string(), access),
        Place::Object { .. } | Place::Store { .. } => framed::view_of(&open_stored(path, access)?, None),
    }
}

/// Opens the image in Sterna's own format at `path`, of whatever VMM; none if the file has another format.
///
/// # Errors
/// [`ImageError::Io`], [`ImageError::Store`], also for a key and a file of another format.
pub fn open_frames(path: &Path, access: &Access) -> Result<Option<Arc<StoredImage>>, ImageError> {
    if let Place::File(path) = Place::parse(path)? {
        let (name, source) = (path.display().to_string(), open_file(&path)?);
        let mut magic = [0; 8];
        let count = source.read_at(0, &mut magic).map_err(|error| ImageError::io(&name, "read", error))?;
        if !StoredImage::is_magic(&magic[..count]) {
            return access.check_plain(&name).map(|()| None);
        }
        return Ok(Some(framed::stored(&source, &name, access)?));
    }
    Ok(Some(open_stored(path, access)?))
}

/// Opens an image in Sterna's own format with its bases, in a file or in a store.
///
/// # Errors
/// [`ImageError`]: there is no image, it has another format, or the key or a base is missing.
pub fn open_stored(path: &Path, access: &Access) -> Result<Arc<StoredImage>, ImageError> {
    match Place::parse(path)? {
        Place::File(path) => framed::stored(&open_file(&path)?, &path.display().to_string(), access),
        place => Ok(place.open(access.key.as_ref(), access.bases())?),
    }
}

/// Opens a regular file, or a block device, which ends where its image ends.
pub(crate) fn open_file(path: &Path) -> Result<Arc<dyn ReadAt>, ImageError> {
    let name = path.display().to_string();
    // Opening a pipe without a writer would block. The flag has no effect on files.
    let opened = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    let file = opened.map_err(|error| ImageError::io(&name, "open", error))?;
    let metadata = file.metadata().map_err(|error| ImageError::io(&name, "fstat", error))?;
    if metadata.file_type().is_block_device() {
        return device::open(file, &name);
    }
    if !metadata.is_file() {
        let why = "it is neither a regular file nor a block device, and an image needs random access";
        return Err(ImageError::io(
            &name,
            "open",
            std::io::Error::new(std::io::ErrorKind::InvalidInput, why),
        ));
    }
    Ok(Arc::new(file))
}
