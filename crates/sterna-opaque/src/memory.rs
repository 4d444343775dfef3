//! An opaque machine in memory of this process.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna::SettingsError;
use sterna::StartError;
use sterna::UnusableImage;
use sterna::error::MigrationError;
use sterna::events::Observer;
use sterna::incoming::Incoming;
use sterna::internals::{PageReader, RamReader};
use sterna::outgoing::Migration;
use sterna::params::{Capabilities, Parameters};
use sterna_image::Shape;
use sterna_ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, SyncReport};
use sterna_transport::Address;

use super::machine::{OpaqueMachine, Pages};
use super::memory_target::MemoryTarget;

/// An opaque machine whose RAM is memory of this process. It arrives from a QEMU or a Sterna, is paused here, and is
/// sent on to a QEMU or a Sterna with the same devices. Cloning gives another handle to the same machine.
///
/// In contrast to an image, a peer can write its RAM directly. Therefore it can also be received and sent over
/// `rdma:`.
#[derive(Clone)]
pub struct MemoryMachine {
    ram: GuestRam,
    /// The machine without its pages; `None` until it has arrived.
    shape: Arc<Mutex<Option<Shape>>>,
}

impl MemoryMachine {
    /// Prepares for a machine that has `ram`: blocks with the source's names and lengths, in any order. QEMU's
    /// `info ramblock` prints them, or an image of the machine contains them ([`Shape::ram`]).
    pub fn new(ram: GuestRam) -> Self {
        Self { ram, shape: Arc::default() }
    }

    /// Creates a machine that is already in memory. `ram` has the blocks that `shape` lists.
    ///
    /// # Errors
    /// [`StartError::Image`] if `ram` has other blocks.
    pub fn of(ram: GuestRam, shape: Shape) -> Result<Self, StartError> {
        let has = |name: &str, length: u64| {
            ram.blocks().iter().any(|b| b.name() == name && b.len_bytes() == length)
        };
        let listed = &shape.ram.blocks;
        if listed.len() != ram.blocks().len() || !listed.iter().all(|b| has(&b.name, b.length_bytes)) {
            return Err(UnusableImage::OtherBlocks.into());
        }
        Ok(Self { ram, shape: Arc::new(Mutex::new(Some(shape))) })
    }

    /// RAM of the machine.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// The machine without its pages; `None` until it has arrived.
    pub fn shape(&self) -> Option<Shape> {
        self.shape.lock().clone()
    }

    /// Waits at `at` for a source. The machine has arrived when the returned [`Incoming`] has completed. A source
    /// that sends *prepare* receives its success only then.
    ///
    /// # Errors
    /// Like [`Incoming::listen`].
    pub fn receive(
        &self,
        at: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Incoming, StartError> {
        if matches!(at, Address::File { .. }) {
            return Err(SettingsError::ImageIntoFile.into());
        }
        // Managed mode would wait for a release of the guest. Here the guest never runs, but is paused until it is
        // sent on.
        let capabilities = Capabilities { unmanaged: true, ..capabilities };
        let target = MemoryTarget::new(self.ram.clone(), Arc::clone(&self.shape));
        let target = target.map_err(StartError::system)?;
        Incoming::listen_for(Arc::new(target), at, params, capabilities, observer)
    }

    /// Sends the machine to `to`. The guest runs there if it ran at its original source.
    ///
    /// # Errors
    /// Like [`Migration::start`]; [`StartError::Image`] if no machine has arrived.
    pub fn send(
        &self,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Migration, StartError> {
        if matches!(to, Address::File { .. }) {
            return Err(SettingsError::ImageIntoFile.into());
        }
        let mut shape = self.shape().ok_or_else(|| UnusableImage::NotArrived)?;
        // Lanes identify blocks by their index in RAM, so the shape must list them in the same order.
        shape.ram.blocks.sort_by_key(|block| self.ram.blocks().iter().position(|b| b.name() == block.name));
        let pages = MemoryPages(self.ram.clone());
        let machine = OpaqueMachine::new(pages, shape, self.ram.clone(), None, NeverWritten);
        Migration::begin(Arc::new(machine), to, params, capabilities, observer)
    }
}

struct MemoryPages(GuestRam);

impl Pages for MemoryPages {
    fn is_in_memory(&self) -> bool {
        true
    }

    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        Ok(Arc::new(RamReader(self.0.clone())))
    }

    fn check_unchanged(&self) -> Result<(), MigrationError> {
        Ok(())
    }
}

/// Dirty source of a guest that does not run.
struct NeverWritten;

impl DirtySource for NeverWritten {
    fn start(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn sync(&self, _: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        Ok(SyncReport::default())
    }

    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }

    fn name(&self) -> &'static str {
        "stopped machine"
    }
}
