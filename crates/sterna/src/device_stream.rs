//! Devices with large state: a stream of bytes, sent in parallel with RAM and with other devices' streams.
//!
//! # The model
//! A device's *stream* is a sequence of bytes: the source's device produces it, and the destination's device consumes
//! it in the same order. The engine cuts it into chunks whose boundaries have no meaning. Part of the stream may be
//! read while the guest still runs: *initial* bytes, which are read once, and *dirty* bytes, which changed since they
//! were read. The remaining bytes can be read only after the device has stopped. The device's *configuration* follows
//! the stream: a few bytes that the device needs last and that no chunk may overtake.
//!
//! At the source, in this order:
//!
//! ```text
//! begin_save ─► read while running … ─► quiesce ─► stop ─► read … until 0 ─► configuration
//!                                          │ every device of the VM is quiesced before the first stops
//!     undone at any point by:  end_save, and run if the guest continues to run
//! ```
//!
//! and at the destination:
//!
//! ```text
//! begin_load ─► write … ─► finish_load ─► run
//!     undone at any point by:  quiesce and stop if a device already runs, and end_load
//! ```
//!
//! Each device has its own thread, which reads or writes. While that thread is inside a call, the engine makes no
//! other call to that stream. (The device's small section may be loaded meanwhile.) Loading a stream does not touch
//! the guest's memory before the device runs. Memory arrives in parallel with the stream, and in postcopy after it.
//! Transitions (quiesce, stop, run) of all devices run in parallel.
//!
//! No call may block without limit: a call that waits for another process gives up after a time limit and names the
//! device. (Calls of the kernel's own drivers cannot be abandoned; they are trusted to return.)

use std::sync::Arc;

use crate::error::VmError;

/// Requests a checkpoint immediately. Any thread may call it.
pub type AskCheckpoint = Arc<dyn Fn() + Send + Sync>;

/// Remaining bytes of a device's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemainingState {
    /// Bytes that can be read while the guest runs and were not read yet.
    pub initial_bytes: u64,
    /// Bytes that can be read while the guest runs and have changed since they were read.
    pub dirty_bytes: u64,
    /// Bytes that can be read only after the device has stopped; an estimate.
    pub stopped_bytes: u64,
}

impl RemainingState {
    /// Sum of all three kinds.
    pub fn total_bytes(&self) -> u64 {
        self.initial_bytes.saturating_add(self.dirty_bytes).saturating_add(self.stopped_bytes)
    }

    /// Bytes that can be read while the guest runs.
    pub fn running_bytes(&self) -> u64 {
        self.initial_bytes.saturating_add(self.dirty_bytes)
    }
}

/// Large state of one device, read at the source and loaded at the destination.
pub trait DeviceStream: Send + Sync {
    /// Source: prepares the device for saving. The device continues to run. [`DeviceStream::remaining`] is valid from
    /// now on.
    fn begin_save(&self) -> Result<(), VmError>;

    /// Source, instead of [`DeviceStream::begin_save`] with `mode` `cpr-transfer`: the device moves to another
    /// process of this host.
    ///
    /// If the device's process is [handed over](crate::HostDescriptors) with the guest, that process keeps the state
    /// and the stream is empty. After [`DeviceStream::stop`], this side sends no further request to that process,
    /// unless the migration is undone.
    fn begin_hand_over(&self) -> Result<(), VmError> {
        self.begin_save()
    }

    /// Source: the remaining bytes. Called between two reads.
    fn remaining(&self) -> Result<RemainingState, VmError>;

    /// Source: reads the next bytes. While the device runs, 0 means that no bytes are available now. After the device
    /// has stopped, 0 means that all bytes were read. A device that cannot be read while it runs returns 0 until it
    /// has stopped.
    fn read(&self, to: &mut [u8]) -> Result<usize, VmError>;

    /// Source, vCPUs stopped: the device stops sending requests to other devices, but still answers theirs (VFIO's
    /// RUNNING_P2P).
    ///
    /// When the calls of all devices have returned, no device sends requests. A device that has already stopped stays
    /// stopped: this happens if the guest was paused, and an earlier migration or switchover was undone.
    fn quiesce(&self) -> Result<(), VmError> {
        Ok(())
    }

    /// Source, all devices quiesced: stops the device completely, unless it has stopped before. When the call
    /// returns, the VM's dirty source reports every page that the device wrote by DMA.
    fn stop(&self) -> Result<(), VmError>;

    /// Source, all bytes read: the bytes that the device needs last, at most 64 KiB. Keep them few: the configuration
    /// cannot be loaded in parallel with anything else.
    fn configuration(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }

    /// Source: the migration has ended or was undone; no more reads follow. A stopped device stays stopped, a running
    /// device continues to run. Idempotent.
    fn end_save(&self) -> Result<(), VmError>;

    /// Destination: prepares the device for a stream.
    fn begin_load(&self) -> Result<(), VmError>;

    /// Destination: loads the next bytes of the stream. The peer sent them, so they may have any content: check them.
    fn write(&self, bytes: &[u8]) -> Result<(), VmError>;

    /// Destination: the stream has ended. `configuration` is the result of [`DeviceStream::configuration`] at the
    /// source. Checks that the state is complete. Must not start the device.
    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError>;

    /// Destination: the migration failed. Discards the loaded state, even if the device ran and was stopped again.
    /// Idempotent.
    fn end_load(&self) -> Result<(), VmError>;

    /// Destination, all state loaded: checks that the device could run. It may fail, for example, because the
    /// device's process has ended. The check must not start the device.
    ///
    /// The engine checks all devices before the first one runs. Until then, a failure gives the guest back to the
    /// source; a later failure may be final (docs/same-host.md).
    fn check_run(&self) -> Result<(), VmError> {
        Ok(())
    }

    /// Either side: starts or resumes the device, before the vCPUs run. Idempotent: the device may not have stopped.
    /// If the guest arrives paused or stays paused at the source, its devices are stopped: call this before the guest
    /// resumes.
    fn run(&self) -> Result<(), VmError>;

    /// Expected rate for the stopped device's bytes, read here and loaded there, in bytes per second, if known. The
    /// expected downtime is computed with it until a rate has been measured.
    fn expected_bytes_per_second(&self) -> Option<u64> {
        None
    }

    /// How the stream continues after the standby was seeded; `None` if the device's guest cannot be protected.
    fn epochs(&self) -> Option<&dyn EpochStream> {
        None
    }
}

/// A stream that continues epoch by epoch after the seeding of a standby, until [`DeviceStream::end_save`].
///
/// The primary reads the bytes of an epoch at its end, while the guest is paused. The standby
/// [writes](DeviceStream::write) them when the checkpoint is held; if that fails, it writes them again from the
/// beginning. It [finishes](DeviceStream::finish_load) the stream when it takes over. Therefore the bytes of an epoch
/// begin and end with a whole record, and may be written twice.
pub trait EpochStream: Send + Sync {
    /// Source, after seeding: calls `ask` when more than `limit_bytes` have changed since the last epoch's end. The
    /// device then accepts no guest request that would change more, until these bytes are read or the stream ends.
    fn limit(&self, limit_bytes: u64, ask: AskCheckpoint);

    /// Standby, before it promises to hold an epoch: checks that `bytes` are whole records that
    /// [`DeviceStream::write`] accepts. The peer sent them, so they may have any content. Changes nothing.
    ///
    /// # Errors
    /// The rule that the bytes break.
    fn check_epoch(&self, bytes: &[u8]) -> Result<(), VmError>;
}
