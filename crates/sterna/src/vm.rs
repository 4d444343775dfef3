//! What a VMM implements: the virtual machine as the engine sees it.
//!
//! [`Vm`] is what both sides need. The same object is usually a [`TargetVm`] while it waits for a guest, and a
//! [`SourceVm`] once it has one. All methods may be called from the engine's control thread; none may call back into the engine.
//!
//! A method that panics has failed: the engine treats the panic as that method's error
//! ([`crate::MigrationError::Panicked`]) and undoes what the migration did to the guest. It calls other methods for that, so
//! they must work after a panic (a mutex of the VMM may be poisoned). This needs a program built with
//! `panic = "unwind"`; with `panic = "abort"` the process ends, and the guest with it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sterna_ram::{DirtySource, GuestRam};

use crate::device_stream::DeviceStream;
use crate::error::VmError;
use crate::free_page_hints::FreePageHints;
use crate::hooks::Hook;
use crate::throttle::Throttle;

/// Whether the guest's vCPUs run (QEMU's run states, as far as migration distinguishes them;
/// specs/stream.md §1.10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// vCPUs run.
    Running,
    /// Stopped by an operator.
    Paused,
}

/// What both sides of a migration need of a virtual machine. For methods that panic see [the module](self).
pub trait Vm: Send + Sync {
    /// The machine type's name in the configuration (specs/stream.md §1.2). Equal on both sides.
    fn machine_type(&self) -> String;
    /// The VM's UUID. The peer compares it on every multifd channel; without multifd it is not sent. Equal on both
    /// sides, if either has one.
    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }
    /// The guest's RAM as it is now: every block that migrates, with the same names and lengths on both sides. A
    /// migration calls this once, when it starts, and keeps the result. Cheap: clones of a [`GuestRam`] share it.
    fn ram(&self) -> GuestRam;
    /// The devices. The source saves them in this order; the destination loads them in the order of the stream, and
    /// each of its devices must come.
    fn devices(&self) -> Vec<Arc<dyn Device>>;
    /// A record of what both machines must have in common (CPUID, TSC frequency). The source saves it and the
    /// destination loads it, which checks it, before any RAM moves. Its section's name is the engine's
    /// (specs/extension.md §3), its version its own.
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        None
    }
    /// What else has the guest's RAM mapped: devices in processes of their own, by name. With it, postcopy is refused.
    fn shares_ram_with(&self) -> Option<String> {
        None
    }
    /// What of [`Vm::shares_ram_with`] could not follow the guest to another process of this host, or into memory that comes from
    /// one. With it, `mode` `cpr-transfer` is refused on either side. All of it, unless the VMM says otherwise: a device's
    /// process can follow if the connection to it is among [`Vm::host_descriptors`], and if the device tells its process, when it
    /// [runs](DeviceStream::run) in the new place, what is different there.
    fn cannot_follow(&self) -> Option<String> {
        self.shares_ram_with()
    }
    /// What of the host this machine has open and another process could not open beside it, such as taps and connections to the
    /// processes of devices. With `mode` `cpr-transfer` the source's machine gives it to the destination's.
    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        Vec::new()
    }
    /// Disks, locks, network: the source releases them in this order, the destination acquires them in this order.
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }
}

/// Descriptors that go with the guest's memory to another process on the same host.
pub trait HostDescriptors: Send + Sync {
    /// What they are, the same on both sides. With [`HostDescriptors::instance`] it finds the destination's counterpart.
    fn name(&self) -> String;
    /// Distinguishes those of one name.
    fn instance(&self) -> u32 {
        0
    }
    /// At the source: duplicates of all, in order. The source goes on to use its own until the guest stops.
    fn give(&self) -> Result<Vec<OwnedFd>, VmError>;
    /// At the destination, before the commit: they are the machine's from now on. Nothing is read, written or changed with them
    /// before the guest starts: the source may still take its guest back.
    fn take(&self, descriptors: Vec<OwnedFd>) -> Result<(), VmError>;
    /// Closes what this machine has: at the source after the commit, at the destination after a failure.
    fn let_go(&self);
}

/// A virtual machine that has a guest. For methods that panic see [the module](self).
pub trait SourceVm: Vm {
    /// Reports which pages the guest (and devices' DMA) wrote.
    fn dirty_source(&self) -> &dyn DirtySource;
    /// Whether the guest runs now.
    fn run_state(&self) -> RunState;
    /// Stops the guest: on return no vCPU runs, pending I/O is completed, no device writes RAM, and
    /// every write made so far is visible to [`SourceVm::dirty_source`]. Idempotent. After an error the guest runs as
    /// before; after a panic [`SourceVm::resume`] is called.
    fn stop(&self) -> Result<(), VmError>;
    /// Undoes [`SourceVm::stop`]: the guest runs on. Its devices with a stream have been started before.
    fn resume(&self) -> Result<(), VmError>;
    /// What throttles the guest if it writes too fast. With `None`, `auto-converge` and `dirty-limit` are refused.
    fn throttle(&self) -> Option<&dyn Throttle> {
        None
    }
    /// Whether every write to the guest's RAM can be held by the engine (userfaultfd): all are made by this process, or by the kernel on its
    /// behalf (KVM, `read(2)`), by way of the blocks' own mappings; and nobody gives memory of the blocks back but by
    /// [`sterna_ram::RamBlock`]. False where another process or a device writes it (vhost-user, vfio-user, VFIO), for such writes
    /// would change pages of a checkpoint that are not copied yet. Then checkpoints' pages are copied while the guest stands.
    fn may_hold_writes(&self) -> bool {
        false
    }
    /// What asks the guest which pages it does not use. `None`: the guest cannot say that now. Not `None` between
    /// [`FreePageHints::begin`] and [`FreePageHints::end`], whatever the guest does meanwhile.
    fn free_page_hints(&self) -> Option<&dyn FreePageHints> {
        None
    }
}

/// A virtual machine that waits for a guest. For methods that panic see [the module](self).
pub trait TargetVm: Vm {
    /// Whether the VMM has put data into block `block` (index in [`GuestRam`]) that must stay if the source sends no
    /// page for it: ROMs, preloaded memory. In all other blocks, a page that is populated when the first page arrives
    /// reads as zero at the end unless the source sends it.
    fn may_hold_bytes(&self, block: usize) -> bool {
        let _ = block;
        false
    }
    /// Starts the guest from the loaded state. An error or a panic means that it did not run and never will. The source
    /// may then run it, so no vCPU may have started.
    fn start(&self) -> Result<(), VmError>;
    /// Accepts the loaded state without starting the guest, because it was paused at the source. Empty if
    /// [`Device::load`] has done everything.
    fn take_over_paused(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// The threads that run the guest's vCPUs (`gettid(2)`), in the vCPUs' order, once the guest was started: with
    /// `postcopy-blocktime` the engine says how long each of them waited for pages.
    fn threads_of_vcpus(&self) -> Vec<u32> {
        Vec::new()
    }
    /// Discards all loaded state, so that another migration may come. The engine discards RAM itself. Also called where the
    /// connection was lost after devices had come and the source comes back: they are loaded again then, and RAM stays.
    fn reset(&self);
}

/// One device's saved state: one FULL section of the stream (specs/stream.md §1.4), and for a device with large state
/// a [`DeviceStream`] beside it.
pub trait Device: Send + Sync {
    /// The section's name, 1 to 255 bytes.
    fn name(&self) -> String;
    /// Distinguishes devices of one name.
    fn instance(&self) -> u32 {
        0
    }
    /// The version of the body that [`Device::save`] writes. Increase it when the body changes.
    fn version(&self) -> u32 {
        1
    }
    /// The oldest version that [`Device::load`] accepts.
    fn oldest_version(&self) -> u32 {
        1
    }
    /// The device's state; the guest is stopped.
    fn save(&self) -> Result<Vec<u8>, VmError>;
    /// Loads the state that [`Device::save`] wrote on the other side. `body` is the peer's and may be
    /// anything: check it. Must not start anything; [`TargetVm::start`] follows.
    fn load(&self, version: u32, body: &[u8]) -> Result<(), VmError>;
    /// With `switchover-ack`: whether the switchover must wait until this device is ready at the destination.
    /// The same on both sides.
    fn asks_switchover_ack(&self) -> bool {
        false
    }
    /// At the destination, for a device that requires an acknowledgement: whether it is ready. Called during precopy,
    /// after every section of RAM; once true, it stays true.
    fn is_ready_for_switchover(&self) -> bool {
        true
    }
    /// The most bytes that a body may have; a longer one is refused before it is read.
    fn body_limit(&self) -> usize {
        16 << 20
    }
    /// The device's large state, beside the small one of [`Device::save`]. The same on both sides.
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        None
    }
}
