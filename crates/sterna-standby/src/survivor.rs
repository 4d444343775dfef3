//! How a guest continues after a takeover: the trait, and its implementation that makes an image.

use std::fs::File;

use parking_lot::Mutex;
use sterna::error::{MigrationError, VmError};
use sterna_image::{MappedWriter, Shape};
use sterna_opaque::ImagePlan;
use sterna_ram::{GuestRam, PAGE_SIZE, PageBitmap, RamBlock};
use sterna_transport::{PageQueue, QueueOptions};

use super::disk::StandbyDisk;
use super::held::{HeldDevice, HeldGuest, PIECE_PAGES};

/// Makes a running guest or an image from the last checkpoint. `prepare`, `start` and `discard` are never called in
/// parallel.
pub trait Survivor: Send + Sync {
    /// Names the files in which the guest's blocks must be placed, because another process also maps them. Called
    /// when the blocks' names and lengths are known.
    ///
    /// A file must have its block's length and read as zero. Blocks without a file are placed in memory of this
    /// process.
    ///
    /// # Errors
    /// Why such a guest cannot be taken over here. It is refused while it still runs at the primary.
    fn memory(&self, blocks: &[(&str, u64)]) -> Result<Vec<Option<File>>, VmError> {
        Ok(blocks.iter().map(|_| None).collect())
    }
    /// A device's stream begins: it carries the content of a disk, and replaces this side's content.
    ///
    /// # Errors
    /// Why this side has no disk for it. The seeding is refused, and the guest continues to run at the primary.
    fn begin_stream(&self, device: &str, instance: u32) -> Result<(), VmError> {
        let why = "the guest's disks are not copied to this standby: use a VM with the disks as the standby (`sterna \
                   run --incoming defer --disk`)";
        Err(VmError::new(format!("the stream of device {device:?}, instance {instance}"), why))
    }
    /// Writes the next bytes of a stream. They belong to the seeding, or are a held checkpoint's bytes from their
    /// beginning. The peer sent them, so they may have any content.
    ///
    /// # Errors
    /// Why they cannot be written.
    fn write_stream(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        let _ = bytes;
        self.begin_stream(device, instance)
    }
    /// The guest's disks whose content is replicated here. Names are unique. Called once, before a primary can
    /// connect. At takeover, their files are released before [`prepare`](Self::prepare) is called.
    fn disks(&self) -> Vec<StandbyDisk> {
        Vec::new()
    }
    /// Checks a checkpoint's bytes of a stream before the checkpoint is held: [`write_stream`](Self::write_stream)
    /// must accept them later.
    ///
    /// # Errors
    /// The rule that the bytes break. The checkpoint is refused.
    fn check_stream(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        let (_, _, _) = (device, instance, bytes);
        Ok(())
    }
    /// Checks, after a complete seeding, that such a machine can continue here.
    ///
    /// # Errors
    /// Why not. The seeding is refused, and the guest continues to run at the primary.
    fn check(&self, machine: &Shape, devices: &[HeldDevice]) -> Result<(), VmError> {
        let (_, _) = (machine, devices);
        Ok(())
    }
    /// Prepares the start as far as possible, before it is decided that the guest may run here. The primary may still
    /// run the guest.
    ///
    /// # Errors
    /// Why the guest could not start. The checkpoint stays held, and this may be called again.
    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError>;
    /// Starts the guest, or renames its image to its place.
    ///
    /// # Errors
    /// The guest does not run. This may be called again.
    fn start(&self) -> Result<(), VmError>;
    /// The guest never runs here: drops the results of `prepare`, and the files that [`memory`](Self::memory)
    /// returned.
    fn discard(&self);
}

/// Makes an image: a staging file first, which is renamed when the guest may be started.
pub struct ImageSurvivor {
    plan: ImagePlan,
    made: Mutex<Option<(MappedWriter, Shape)>>,
}

impl ImageSurvivor {
    /// Creates a survivor that makes an image at the place in `plan`.
    pub fn new(plan: ImagePlan) -> Self {
        Self { plan, made: Mutex::default() }
    }

    pub(super) fn make(&self, guest: &HeldGuest) -> Result<(), MigrationError> {
        let mut made = self.made.lock();
        // Dropped first, because its staging file has the same name as the next one.
        *made = None;
        let shape = guest.shape();
        let writer = self.plan.begin(shape)?;
        write_pages(&writer, guest.ram())?;
        self.plan.keep(&writer, shape)?;
        *made = Some((writer, shape.clone()));
        Ok(())
    }

    pub(super) fn publish(&self) -> Result<(), MigrationError> {
        let made = self.made.lock();
        let missing = || MigrationError::Internal("the image is started before it was made".to_owned());
        let (writer, shape) = made.as_ref().ok_or_else(missing)?;
        self.plan.complete(writer, shape, false)
    }

    fn error(&self, error: MigrationError) -> VmError {
        let what = format!("the image {}", self.plan.path.display());
        VmError::new(what, format!("{error}; the checkpoint is still held: mend that and try again"))
    }
}

impl Survivor for ImageSurvivor {
    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        self.make(guest).map_err(|error| self.error(error))
    }

    fn start(&self) -> Result<(), VmError> {
        self.publish().map_err(|error| self.error(error))
    }

    fn discard(&self) {
        *self.made.lock() = None;
    }
}

/// Writes every page that is not zero.
fn write_pages(writer: &MappedWriter, ram: &GuestRam) -> Result<(), MigrationError> {
    let mut queue = PageQueue::with_ram(writer.file(), ram, QueueOptions::default());
    for (index, block) in ram.blocks().iter().enumerate() {
        let absent = PageBitmap::new(block.pages());
        if let Err(error) = block.mark_absent(0, block.pages(), &absent) {
            tracing::warn!("cannot find out which pages are populated, so all are read: {error}");
        }
        let mut write = |first: u64, count: u64| {
            let (offset, length) = (first * PAGE_SIZE as u64, count as usize * PAGE_SIZE);
            let place = writer.pages_offset(index) + offset;
            queue.write_ram(place, index, offset, length).map_err(MigrationError::storage)?;
            writer.mark(index, first, count);
            Ok(())
        };
        for first in (0..block.pages()).step_by(PIECE_PAGES as usize) {
            let count = PIECE_PAGES.min(block.pages() - first);
            if absent.count_range(first, count) < count {
                write_piece(block, (first, count), &mut write)?;
            }
        }
    }
    queue.drain().map_err(MigrationError::storage)
}

/// Writes the non-zero pages of a piece in as few runs as possible.
fn write_piece(
    block: &RamBlock,
    (first, count): (u64, u64),
    write: &mut impl FnMut(u64, u64) -> Result<(), MigrationError>,
) -> Result<(), MigrationError> {
    let mut zero = [0u64; (PIECE_PAGES / 64) as usize];
    let piece = block.slice(first * PAGE_SIZE as u64, count as usize * PAGE_SIZE)?;
    piece.zero_page_bits(&mut zero)?;
    let is_zero = |page: u64| zero[(page / 64) as usize] >> (page % 64) & 1 == 1;
    let mut page = 0;
    while page < count {
        let from = page;
        while page < count && !is_zero(page) {
            page += 1;
        }
        if page > from {
            write(first + from, page - from)?;
        }
        while page < count && is_zero(page) {
            page += 1;
        }
    }
    Ok(())
}
