//! An image that is ready to be served: opened, checked, and readable at random.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use sterna_image::{ImageError, ImageKind, Shape};
use sterna_transport::Direct;

use super::cache::{ChunkCache, LEAST_BYTES};
use super::store::{Access, ImageStore};
use crate::error::MigrationError;
use crate::start_error::StartError;
use crate::threads;

/// Threads that read ahead, for all who are served.
const READERS: usize = 2;

/// How an image is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOptions {
    /// Whether pages go past the page cache. Pages of a stream never do.
    pub direct: Direct,
    /// Most memory for pages that are read ahead, over all who are served; at least [`ImageOptions::LEAST_CACHE_BYTES`] is taken.
    pub cache_limit_bytes: u64,
    /// Where an image that cannot be read at random is unpacked to, in a sparse file without a name. `None`: beside the
    /// image.
    pub spool: Option<PathBuf>,
    /// Serve an image with damaged devices or description, too.
    pub force_damaged: bool,
}

impl ImageOptions {
    /// The least memory for pages that are read ahead: 1 MiB.
    pub const LEAST_CACHE_BYTES: u64 = LEAST_BYTES;
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self { direct: Direct::Off, cache_limit_bytes: 64 << 20, spool: None, force_damaged: false }
    }
}

/// An image that is ready to be served, to any number of destinations at once.
pub struct ServedImage {
    cache: Arc<ChunkCache>,
    path: PathBuf,
    readers: Mutex<Vec<JoinHandle<()>>>,
}

impl ServedImage {
    /// Opens the image at `path`. A legacy stream is read once; one that cannot be read at random is unpacked.
    ///
    /// # Errors
    /// [`StartError::Image`] for an image that is torn, has no bitmaps, or cannot be served;
    /// [`StartError::DamagedImage`]; [`StartError::System`] for what the system refused.
    pub fn open(path: &Path, options: &ImageOptions) -> Result<Self, StartError> {
        let ImageOptions { direct, force_damaged, .. } = *options;
        let store =
            ImageStore::open(path, direct, options.spool.as_deref(), force_damaged).map_err(of_image)?;
        check(&store)?;
        let system = |error: MigrationError| StartError::System(error.to_string());
        let cache = Arc::new(ChunkCache::new(Arc::new(store), options.cache_limit_bytes).map_err(system)?);
        let served = Self { cache, path: path.to_owned(), readers: Mutex::default() };
        for number in 0..READERS {
            let cache = Arc::clone(&served.cache);
            // Without its readers an image is served all the same, only not ahead of time.
            let reader = threads::spawn(&format!("reader {number}"), move || cache.work(), |_| ());
            served.readers.lock().push(reader.map_err(system)?);
        }
        Ok(served)
    }

    /// The image's place.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What kind of image is read: a spooled one is mapped-ram.
    pub fn kind(&self) -> &ImageKind {
        self.cache.store().image().kind()
    }

    /// The machine without its pages.
    pub fn shape(&self) -> &Shape {
        self.cache.store().shape()
    }

    /// How its pages are read at random.
    pub fn access(&self) -> Access {
        self.cache.store().access()
    }

    /// Whether pages go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.cache.store().is_direct()
    }

    pub(crate) fn cache(&self) -> &ChunkCache {
        &self.cache
    }
}

impl Drop for ServedImage {
    fn drop(&mut self) {
        self.cache.close();
        for reader in self.readers.lock().drain(..) {
            // One that panicked has said so.
            let _ = reader.join();
        }
    }
}

fn check(store: &ImageStore) -> Result<(), StartError> {
    let (image, shape) = (store.image(), store.shape());
    let refuse = |why: &str| Err(StartError::Image(format!("{}: {why}", image.path_name())));
    if !shape.has_eof {
        return refuse("it ends inside the devices' state: it cannot be restored");
    }
    if image.lacks_bitmaps() {
        return refuse(
            "it is a background snapshot whose bitmaps were never written; all of RAM would be zero: `sterna repair` mends \
             it",
        );
    }
    if shape.has_capability("x-ignore-shared") {
        return refuse(
            "it was saved with x-ignore-shared and does not hold all of RAM; QEMU excludes that from postcopy: restore it \
             without --lazy",
        );
    }
    if let Some(block) = shape.ram.blocks.iter().find(|block| block.host_page_bytes.is_some()) {
        return refuse(&format!(
            "its block {:?} was in huge pages, and QEMU's postcopy needs the same at the destination: restore it without \
             --lazy",
            block.name
        ));
    }
    if !shape.ram.footers {
        return refuse("its machine type is older than QEMU's postcopy: restore it without --lazy");
    }
    Ok(())
}

fn of_image(error: ImageError) -> StartError {
    match error {
        ImageError::Damaged { .. } => StartError::DamagedImage(error.to_string()),
        error if error.is_image_at_fault() => StartError::Image(error.to_string()),
        error => StartError::System(error.to_string()),
    }
}
