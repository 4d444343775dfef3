//! Where the guest goes on that was taken over.

use std::fs::File;

use parking_lot::Mutex;
use sterna_image::{MappedWriter, Shape};
use sterna_ram::{GuestRam, PAGE_SIZE, PageBitmap, RamBlock};
use sterna_transport::{PageQueue, QueueOptions};

use super::disk::StandbyDisk;
use super::held::{HeldDevice, HeldGuest, PIECE_PAGES};
use crate::error::{MigrationError, VmError};
use crate::opaque::ImagePlan;

/// What the last checkpoint becomes. `prepare`, `start` and `discard` are called one after the other, and never at once.
pub trait Survivor: Send + Sync {
    /// The guest's blocks are known, their names and lengths: which of them lie in a file that another process has, too. The file
    /// has the block's length and reads as zero. Blocks without one lie in memory of this process.
    ///
    /// # Errors
    /// Why such a guest cannot be taken over here. It is refused while it still runs at the primary.
    fn memory(&self, blocks: &[(&str, u64)]) -> Result<Vec<Option<File>>, VmError> {
        Ok(blocks.iter().map(|_| None).collect())
    }
    /// A device's stream begins: the content of a disk. What this side has in its place is lost.
    ///
    /// # Errors
    /// Why it has no place here. The seeding is refused, and the guest runs on at the primary.
    fn begin_stream(&self, device: &str, instance: u32) -> Result<(), VmError> {
        let why = "here a guest goes on without the content of its disks: let it go on in a VM that has them (`sterna run --incoming defer \
                   --disk`)";
        Err(VmError::new(format!("the stream of device {device:?}, instance {instance}"), why))
    }
    /// The next bytes of a stream that began: of the seeding, or of a checkpoint that is held, from its beginning. They may be anything.
    ///
    /// # Errors
    /// Why they cannot be written.
    fn write_stream(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        let _ = bytes;
        self.begin_stream(device, instance)
    }
    /// The guest's disks whose content comes here, each under a name of its own. Asked once, before anybody may come. When the guest is taken
    /// over, their files are released before [`prepare`](Self::prepare) is called.
    fn disks(&self) -> Vec<StandbyDisk> {
        Vec::new()
    }
    /// What a checkpoint brings of a stream, before it is held: whether [`write_stream`](Self::write_stream) will take it.
    ///
    /// # Errors
    /// What is wrong with it. The checkpoint is refused.
    fn check_stream(&self, device: &str, instance: u32, bytes: &[u8]) -> Result<(), VmError> {
        let (_, _, _) = (device, instance, bytes);
        Ok(())
    }
    /// The seeding has come whole: could such a machine go on here?
    ///
    /// # Errors
    /// Why not. The seeding is refused, and the guest runs on at the primary.
    fn check(&self, machine: &Shape, devices: &[HeldDevice]) -> Result<(), VmError> {
        let (_, _) = (machine, devices);
        Ok(())
    }
    /// Does all that can be done before it is decided that the guest may run here: it may still be the primary's.
    ///
    /// # Errors
    /// Why the guest could not start. The checkpoint is still held, and this may be tried again.
    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError>;
    /// Lets the guest run, or puts its image in its place.
    ///
    /// # Errors
    /// The guest does not run. It may be tried again.
    fn start(&self) -> Result<(), VmError>;
    /// The guest never runs here: forgets what was made ready, and what [`memory`](Self::memory) gave.
    fn discard(&self);
}

/// Makes an image: a staging file first, which is renamed when the guest may be started.
pub struct ImageSurvivor {
    plan: ImagePlan,
    made: Mutex<Option<(MappedWriter, Shape)>>,
}

impl ImageSurvivor {
    /// An image in the place that `plan` names.
    pub fn new(plan: ImagePlan) -> Self {
        Self { plan, made: Mutex::default() }
    }

    pub(super) fn make(&self, guest: &HeldGuest) -> Result<(), MigrationError> {
        let mut made = self.made.lock();
        // One of an earlier try has the name that the next one's needs.
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

/// Writes the pages of a piece that are not zero, as few runs.
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
