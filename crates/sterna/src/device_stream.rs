//! Devices with large state: a stream of bytes that moves beside RAM, in parallel with other devices'.
//!
//! # The model
//! A device's *stream* is what its save side reads and its load side writes: the same bytes in the same order, in
//! chunks whose borders mean nothing. Part of it may be read while the guest still runs (*initial* bytes, read
//! once, and *dirty* ones, which changed since); the rest only once the device has stopped. After the stream comes
//! its *configuration*: a few bytes that the device needs last and that no chunk may overtake.
//!
//! At the source, in this order:
//!
//! ```text
//! begin_save ─► read while running … ─► quiesce ─► stop ─► read … until 0 ─► configuration
//!                                          │ every device of the VM is quiesced before the first stops
//!     undone at any place by:  end_save, and run if the guest runs on
//! ```
//!
//! and at the destination:
//!
//! ```text
//! begin_load ─► write … ─► finish_load ─► run
//!     undone at any place by:  quiesce and stop if some device ran already, and end_load
//! ```
//!
//! Each device has a thread of its own that reads or writes; while it is inside a call, the engine makes no other
//! call to that stream (the device's small section may be loaded meanwhile). Transitions (quiesce, stop, run) of all
//! devices run in parallel. No call may take for ever:
//! one that speaks to another process gives up after a time and says which device did not answer. (Of the kernel's own
//! drivers nobody can give up on a call; they are trusted to return.)

use crate::error::VmError;

/// How much of a device's stream is left to be read, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PendingState {
    /// Readable while the guest runs, never read so far.
    pub initial_bytes: u64,
    /// Readable while the guest runs, changed since it was read.
    pub dirty_bytes: u64,
    /// Readable only once the device has stopped; an estimate.
    pub stopped_bytes: u64,
}

impl PendingState {
    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.initial_bytes.saturating_add(self.dirty_bytes).saturating_add(self.stopped_bytes)
    }

    /// What can be read while the guest runs.
    pub fn running_bytes(&self) -> u64 {
        self.initial_bytes.saturating_add(self.dirty_bytes)
    }
}

/// The large state of a device, of either side.
pub trait DeviceStream: Send + Sync {
    /// Source: the device will be saved. It runs on; from now on [`DeviceStream::pending`] counts.
    fn begin_save(&self) -> Result<(), VmError>;

    /// Source: how much is left. Looked at between two reads.
    fn pending(&self) -> Result<PendingState, VmError>;

    /// Source: reads on. While the device runs, 0 means that there is nothing to be read now; once it has stopped, 0
    /// means that all was read. A device of which nothing can be read while it runs answers 0 until it has stopped.
    fn read(&self, to: &mut [u8]) -> Result<usize, VmError>;

    /// Source, vCPUs stopped: the device starts nothing towards other devices any more, but still answers them
    /// (VFIO's RUNNING_P2P). On return of all devices' calls, none starts anything.
    fn quiesce(&self) -> Result<(), VmError> {
        Ok(())
    }

    /// Source, all devices quiesced: the device does nothing any more. On return every write of its DMA is visible to
    /// the VM's dirty source.
    fn stop(&self) -> Result<(), VmError>;

    /// Source, all was read: what the device needs last, at most 64 KiB. Loading it cannot be done in parallel with
    /// anything: keep it small.
    fn configuration(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }

    /// Source: the migration is over or undone; nothing is read any more. A stopped device stays stopped, a running
    /// one runs. Idempotent.
    fn end_save(&self) -> Result<(), VmError>;

    /// Destination: a stream will come.
    fn begin_load(&self) -> Result<(), VmError>;

    /// Destination: the next bytes of the stream. They are the peer's and may be anything: check them.
    fn write(&self, bytes: &[u8]) -> Result<(), VmError>;

    /// Destination: the stream is over; `configuration` is what [`DeviceStream::configuration`] gave. Checks that all
    /// is there. Must not start the device.
    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError>;

    /// Destination: the migration failed; forgets what was loaded, also where the device ran and was stopped again.
    /// Idempotent.
    fn end_load(&self) -> Result<(), VmError>;

    /// Either side: the device runs (again). Before the vCPUs do. Idempotent: it may not have stopped. A guest that
    /// arrives paused, or stays paused at the source, has its devices stopped: whoever lets it run calls this first.
    fn run(&self) -> Result<(), VmError>;

    /// Bytes per second at which the stopped rest can be read here and loaded there, if the device knows: for the
    /// expected downtime, before anything was measured.
    fn expected_bytes_per_second(&self) -> Option<u64> {
        None
    }
}
