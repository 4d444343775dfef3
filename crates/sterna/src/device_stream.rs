//! Devices with large state: a stream of bytes, sent in parallel with RAM and with other devices' streams.
//!
//! # The model
//! A device's *stream* is what its save side reads and its load side writes: the same bytes in the same order, in
//! chunks whose boundaries have no meaning. Part of it may be read while the guest still runs (*initial* bytes, read
//! once, and *dirty* ones, which changed since); the remaining bytes only once the device has stopped. After the stream comes
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
//! call to that stream (the device's small section may be loaded meanwhile). Until it runs, loading does not touch the guest's
//! memory: that comes beside the stream, and in postcopy after it. Transitions (quiesce, stop, run) of all
//! devices run in parallel. No call may block without limit:
//! a call that waits for another process gives up after a time limit and names the device. (Calls of the kernel's own
//! drivers cannot be given up; they are trusted to return.)

use std::sync::Arc;

use crate::error::VmError;

/// Asks for a checkpoint at once, from any thread.
pub type AskCheckpoint = Arc<dyn Fn() + Send + Sync>;

/// How much of a device's stream is remaining, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemainingState {
    /// Readable while the guest runs, not read yet.
    pub initial_bytes: u64,
    /// Readable while the guest runs, changed since it was read.
    pub dirty_bytes: u64,
    /// Readable only once the device has stopped; an estimate.
    pub stopped_bytes: u64,
}

impl RemainingState {
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
    /// Source: the device will be saved. It runs on; from now on [`DeviceStream::remaining`] counts.
    fn begin_save(&self) -> Result<(), VmError>;

    /// Source, in place of [`DeviceStream::begin_save`] with `mode` `cpr-transfer`: the device goes to another process of this host.
    /// Where it keeps its state itself, because its process is [handed over](crate::HostDescriptors) with the guest, its stream
    /// is empty. From [`DeviceStream::stop`] on that process hears nothing of this side any more, unless the migration is undone.
    fn begin_hand_over(&self) -> Result<(), VmError> {
        self.begin_save()
    }

    /// Source: how much is remaining. Called between two reads.
    fn remaining(&self) -> Result<RemainingState, VmError>;

    /// Source: reads the next bytes. While the device runs, 0 means that nothing is available now; after it has stopped,
    /// 0 means that all was read. A device that cannot be read while it runs returns 0 until it has stopped.
    fn read(&self, to: &mut [u8]) -> Result<usize, VmError>;

    /// Source, vCPUs stopped: the device stops sending requests to other devices, but still answers theirs (VFIO's
    /// RUNNING_P2P). When the calls of all devices have returned, no device sends requests.
    fn quiesce(&self) -> Result<(), VmError> {
        Ok(())
    }

    /// Source, all devices quiesced: the device stops completely. On return every write of its DMA is visible to
    /// the VM's dirty source.
    fn stop(&self) -> Result<(), VmError>;

    /// Source, all was read: what the device needs last, at most 64 KiB. It cannot be loaded in parallel with anything,
    /// so keep it small.
    fn configuration(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }

    /// Source: the migration has ended or was undone; no more reads follow. A stopped device stays stopped, a running
    /// one runs. Idempotent.
    fn end_save(&self) -> Result<(), VmError>;

    /// Destination: a stream will come.
    fn begin_load(&self) -> Result<(), VmError>;

    /// Destination: the next bytes of the stream. They are the peer's and may be anything: check them.
    fn write(&self, bytes: &[u8]) -> Result<(), VmError>;

    /// Destination: the stream has ended; `configuration` is what [`DeviceStream::configuration`] returned. Checks that
    /// everything arrived. Must not start the device.
    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError>;

    /// Destination: the migration failed; discards what was loaded, even if the device ran and was stopped again.
    /// Idempotent.
    fn end_load(&self) -> Result<(), VmError>;

    /// Either side: the device runs (again). Before the vCPUs do. Idempotent: it may not have stopped. A guest that
    /// arrives paused, or stays paused at the source, has its devices stopped: call this before the guest resumes.
    fn run(&self) -> Result<(), VmError>;

    /// Bytes per second at which the stopped device's bytes can be read here and loaded there, if the device knows it. The
    /// expected downtime uses it until a rate has been measured.
    fn expected_bytes_per_second(&self) -> Option<u64> {
        None
    }

    /// How it goes on behind the seeding of a standby; `None` for a device whose guest cannot be protected.
    fn epochs(&self) -> Option<&dyn EpochStream> {
        None
    }
}

/// A stream that goes on after the seeding of a standby, epoch by epoch, until [`DeviceStream::end_save`].
///
/// What belongs to an epoch is read at its end, while the guest stands. The standby [writes](DeviceStream::write) it when the epoch is held,
/// again from its beginning should that have failed; and [finishes](DeviceStream::finish_load) when it takes over. So the bytes of an
/// epoch begin and end with a whole record, and may be written twice.
pub trait EpochStream: Send + Sync {
    /// Source, seeded: when more than `limit_bytes` have changed since the last epoch's end, calls `ask`, and takes nothing more of the guest
    /// that would change it until they are read or the stream ends.
    fn limit(&self, limit_bytes: u64, ask: AskCheckpoint);

    /// Standby, before it promises to hold an epoch: whether this is what [`DeviceStream::write`] takes, whole. They are the peer's and may be
    /// anything. Changes nothing.
    ///
    /// # Errors
    /// What is wrong with them.
    fn check_epoch(&self, bytes: &[u8]) -> Result<(), VmError>;
}
