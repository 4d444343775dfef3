//! An image that is ready to be served: opened, checked, and readable at random.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use sterna::StartError;
use sterna::internals::threads::{self, ThreadRole};
use sterna::{SystemRefusal, UnusableImage};
use sterna_image::{Format, ImageError, LibvirtHeader, Shape};
use sterna_transport::Direct;

use super::cache::{ChunkCache, LEAST_BYTES};
use super::commands;
use super::store::{Access, ImageStore};

/// Number of threads that read ahead, for all destinations together.
const READERS: usize = 2;

/// How an image is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOptions {
    /// Whether reads of pages bypass the page cache. Pages of a legacy stream never bypass it.
    pub direct: Direct,
    /// Most memory for pages that are read ahead, in bytes, over all destinations (default 64 MiB). At least
    /// [`ImageOptions::LEAST_CACHE_BYTES`] is used.
    pub cache_limit_bytes: u64,
    /// Directory for a temporary copy of an image that cannot be read at random. The copy is a sparse file
    /// without a name. `None`: the image's directory.
    pub spool: Option<PathBuf>,
    /// Serve an image with a damaged device state or description, too.
    pub force_damaged: bool,
    /// The key of an encrypted image, and the bases of a layer.
    pub opening: sterna_image::Access,
}

impl ImageOptions {
    /// The least memory for pages that are read ahead: 1 MiB.
    pub const LEAST_CACHE_BYTES: u64 = LEAST_BYTES;
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            direct: Direct::Off,
            cache_limit_bytes: 64 << 20,
            spool: None,
            force_damaged: false,
            opening: sterna_image::Access::default(),
        }
    }
}

/// An image that is ready to be served to any number of destinations in parallel.
pub struct ServedImage {
    cache: Arc<ChunkCache>,
    shape: Shape,
    path: PathBuf,
    readers: Mutex<Vec<JoinHandle<()>>>,
}

impl ServedImage {
    /// Opens the image at `path`. A legacy stream is read once. A stream that cannot be read at random is
    /// unpacked.
    ///
    /// Its threads have the hook of the calling thread ([`sterna_ram::threads::hooked`]).
    ///
    /// # Errors
    /// [`StartError::Image`] for an image that is truncated, has no bitmaps, or cannot be served;
    /// [`StartError::DamagedImage`] for a damaged one; [`StartError::System`] if the system refused a request.
    pub fn open(path: &Path, options: &ImageOptions) -> Result<Self, StartError> {
        let ImageOptions { direct, force_damaged, .. } = *options;
        let spool = options.spool.as_deref();
        let store =
            ImageStore::open(path, &options.opening, direct, spool, force_damaged).map_err(of_image)?;
        let shape = check(&store)?;
        let cache = Arc::new(
            ChunkCache::new(Arc::new(store), options.cache_limit_bytes).map_err(StartError::system)?,
        );
        let served = Self { cache, shape, path: path.to_owned(), readers: Mutex::default() };
        for number in 0..READERS {
            let cache = Arc::clone(&served.cache);
            // An image without readers is served as well, but is not read ahead.
            let reader = threads::spawn(ThreadRole::Reader.of(number), move || cache.work(), |_| ());
            served.readers.lock().push(reader.map_err(StartError::system)?);
        }
        Ok(served)
    }

    /// The path of the image's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format of the image that is read. A spooled image is in the format mapped-ram.
    pub fn format(&self) -> Format {
        self.cache.store().image().format()
    }

    /// The header and the texts of libvirt's container. `None` if the image has no container.
    pub fn libvirt_header(&self) -> Option<&LibvirtHeader> {
        self.cache.store().image().libvirt_header()
    }

    /// The machine without its pages, and without the commands that the serving side sends itself.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How the image's pages are read at random.
    pub fn access(&self) -> Access {
        self.cache.store().access()
    }

    /// Whether reads of pages bypass the page cache.
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
            // An error of the join is ignored: a panic in the thread was already reported.
            let _ = reader.join();
        }
    }
}

/// Checks that the image can be served, and returns the machine as it is served.
fn check(store: &ImageStore) -> Result<Shape, UnusableImage> {
    let (image, shape) = (store.image(), store.shape());
    let name = || image.path_name().to_owned();
    if !shape.has_eof {
        return Err(UnusableImage::CutOff { image: name() });
    }
    if image.lacks_bitmaps() {
        return Err(UnusableImage::NoBitmaps { image: name() });
    }
    if shape.has_capability("x-ignore-shared") {
        return Err(UnusableImage::WithoutSharedMemory { image: name() });
    }
    if let Some(block) = shape.ram.blocks.iter().find(|block| block.host_page_bytes.is_some()) {
        return Err(UnusableImage::HugePages { image: name(), block: block.name.clone() });
    }
    if !shape.ram.footers {
        return Err(UnusableImage::OldMachineType { image: name() });
    }
    commands::served(shape, image.path_name())
}

fn of_image(error: ImageError) -> StartError {
    match error {
        ImageError::Damaged { .. } => StartError::DamagedImage(Arc::new(error)),
        error if error.is_image_at_fault() => UnusableImage::Unreadable(Arc::new(error)).into(),
        error => SystemRefusal::Image(Arc::new(error)).into(),
    }
}
