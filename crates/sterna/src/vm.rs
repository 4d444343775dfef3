//! The traits that a VMM implements: the virtual machine as the engine sees it.
//!
//! [`Vm`] contains the methods that both sides need. The same object is usually a [`TargetVm`] while it waits for a
//! guest, and a [`SourceVm`] once it has one. All methods may be called from the engine's control thread; none may
//! call back into the engine.
//!
//! If a method panics, the engine treats the panic as that method's error ([`crate::MigrationError::Panicked`]) and
//! undoes the migration's changes to the guest. It calls other methods to do so. Therefore they must work after a
//! panic (a mutex of the VMM may be poisoned). This needs a program built with `panic = "unwind"`. With
//! `panic = "abort"` the process ends, and the guest with it.

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
    /// vCPUs are stopped because an operator paused the guest.
    Paused,
}

/// The methods that both sides of a migration need. For methods that panic see [the module](self).
pub trait Vm: Send + Sync {
    /// The machine type's name in the configuration (specs/stream.md §1.2). Equal on both sides.
    fn machine_type(&self) -> String;
    /// The VM's UUID. The peer compares it on every multifd channel; without multifd it is not sent. Equal on both
    /// sides, if either has one.
    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }
    /// The guest's RAM as it is now: every block that migrates. Both sides have the same names and lengths. A
    /// migration calls this once, when it starts, and keeps the result. Cheap: clones of a [`GuestRam`] share the
    /// memory. After a guest has arrived, return the same object: the next migration from here needs its custody.
    fn ram(&self) -> GuestRam;
    /// The devices. The source saves them in this order; the destination loads them in the stream's order. The stream
    /// must contain each of the destination's devices.
    fn devices(&self) -> Vec<Arc<dyn Device>>;
    /// A record of properties that both machines must share (CPUID, TSC frequency). The source saves it. The
    /// destination loads and checks it before any RAM is sent. The engine names its section (specs/extension.md §3);
    /// the record has its own version.
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        None
    }
    /// Other processes that have the guest's RAM mapped, such as devices in processes of their own, by name. If it is
    /// `Some`, postcopy is refused.
    fn shares_ram_with(&self) -> Option<String> {
        None
    }
    /// The part of [`Vm::shares_ram_with`] that cannot follow the guest to another process of this host. This
    /// includes the move into memory from such a process. If it is `Some`, `mode` `cpr-transfer` is refused on either
    /// side.
    ///
    /// The default names all of them. A device's process can follow under two conditions: the connection to it is
    /// among [`Vm::host_descriptors`], and the device informs its process of the changes when it
    /// [runs](DeviceStream::run) in the new place.
    fn cannot_follow(&self) -> Option<String> {
        self.shares_ram_with()
    }
    /// Open resources of the host that another process could not open as well. Examples are taps, and connections to
    /// the processes of devices. With `mode` `cpr-transfer` the source's machine passes them to the destination's.
    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        Vec::new()
    }
    /// Disks, locks, network: the source releases them in this order, the destination acquires them in this order.
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }
}

/// Descriptors that are passed, with the guest's memory, to another process on the same host.
pub trait HostDescriptors: Send + Sync {
    /// Name of the descriptors, the same on both sides. The engine finds the destination's counterpart by name and
    /// [`HostDescriptors::instance`].
    fn name(&self) -> String;
    /// Distinguishes descriptors of the same name.
    fn instance(&self) -> u32 {
        0
    }
    /// Source: duplicates of all descriptors, in order. The source continues to use its own until the guest stops.
    fn give(&self) -> Result<Vec<OwnedFd>, VmError>;
    /// Destination, before the commit: the machine owns the descriptors from now on. Do not read, write or change
    /// anything with them before the guest starts, because the source may still take its guest back.
    fn take(&self, descriptors: Vec<OwnedFd>) -> Result<(), VmError>;
    /// Closes this machine's descriptors: at the source after the commit, at the destination after a failure.
    fn let_go(&self);
}

/// A virtual machine that has a guest. For methods that panic see [the module](self).
pub trait SourceVm: Vm {
    /// Reports which pages the guest (and devices' DMA) wrote.
    fn dirty_source(&self) -> &dyn DirtySource;
    /// Whether the guest runs now.
    fn run_state(&self) -> RunState;
    /// Stops the guest. When this returns, no vCPU runs, pending I/O is completed, no device writes RAM, and every
    /// write made so far is visible to [`SourceVm::dirty_source`]. Writes to RAM during this call still reach the
    /// destination. Idempotent. After an error the guest runs as
    /// before; after a panic [`SourceVm::resume`] is called.
    fn stop(&self) -> Result<(), VmError>;
    /// Lets stopped devices write to RAM for the last time: requests in flight that are completed now, rings of a
    /// vhost-user device whose process is stopped only here. The engine calls this after the hooks are released and
    /// immediately before the last sync.
    ///
    /// On return no device writes RAM any more, and every write is visible to [`SourceVm::dirty_source`]. No write
    /// to RAM after this call reaches the destination: neither [`Device::save`] nor [`DeviceStream::read`] may cause one.
    /// [`Parameters::check_last_sync`](crate::Parameters::check_last_sync) finds such writes.
    ///
    /// Its time is downtime. [`SourceVm::resume`] undoes it, too. After a lost connection or for the next checkpoint
    /// it is called again. On error the migration fails, and the guest resumes. The default does nothing.
    fn quiesce(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Undoes [`SourceVm::stop`]: the guest resumes. The engine has already started its devices with a stream.
    fn resume(&self) -> Result<(), VmError>;
    /// Throttles the guest if it dirties memory too fast. With `None`, `auto-converge` and `dirty-limit` are refused.
    fn throttle(&self) -> Option<&dyn Throttle> {
        None
    }
    /// Whether the engine can intercept every write to the guest's RAM (userfaultfd). This requires two conditions:
    /// - This process makes all writes, or the kernel does so on its behalf (KVM, `read(2)`), through the blocks' own
    ///   mappings.
    /// - Memory of the blocks is given back only through [`sterna_ram::RamBlock`].
    ///
    /// Return false if another process or a device writes RAM (vhost-user, vfio-user, VFIO). Such writes would change
    /// pages of a checkpoint before they are copied. A checkpoint's pages are then copied while the guest is paused.
    fn may_hold_writes(&self) -> bool {
        false
    }
    /// The configuration from which the destination makes its VM, in a form of the VMM's own: at most 1 MiB.
    ///
    /// Called at most once in a migration, before [`Vm::compatibility`] is saved, and only if the destination asks for
    /// it ([`crate::Incoming::listen_with`]). It must describe the machine whose memory [`Vm::ram`] has returned. With
    /// `None`, such a destination is refused.
    fn configuration(&self) -> Option<Vec<u8>> {
        None
    }
    /// Asks the guest for free page hints. `None` if the guest cannot give hints now. Not `None` between
    /// [`FreePageHints::begin`] and [`FreePageHints::end`], whatever the guest does meanwhile.
    fn free_page_hints(&self) -> Option<&dyn FreePageHints> {
        None
    }
}

/// A virtual machine that waits for a guest. For methods that panic see [the module](self).
pub trait TargetVm: Vm {
    /// Whether block `block` (index in [`GuestRam`]) contains data of the VMM that must stay. Examples are ROMs and
    /// preloaded memory: they stay unless the source sends a page for them. In all other blocks, a page that is
    /// populated when the first page arrives reads as zero at the end unless the source sends it. Such a block must not be
    /// declared fresh ([`sterna_ram::RamBlock::declare_fresh`]), because then its bytes count as zero.
    fn may_hold_bytes(&self, block: usize) -> bool {
        let _ = block;
        false
    }
    /// Checks everything that can prevent the guest from starting, before any of its devices runs here. Called after
    /// the commit, immediately before the devices with a stream and the guest are started. No device or
    /// vCPU may run yet, and guest memory must not be written. After an error the source has its guest again.
    ///
    /// If the guest moves within this host and has a device with a stream, the source can get it back only until now.
    /// A [`TargetVm::start`] that fails later leaves the guest held here. So do here whatever can fail.
    fn prepare_start(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// Starts the guest from the loaded state. Called after the commit.
    ///
    /// An error or a panic means that the guest did not run. The engine then gives it back to the source, which
    /// resumes it. No vCPU may therefore run after an error, and guest memory must be unchanged.
    fn start(&self) -> Result<(), VmError>;
    /// Accepts the loaded state without starting the guest, because the guest was paused at the source. Called in place
    /// of [`TargetVm::start`]; no vCPU may run. The default does nothing, which is correct if [`Device::load`] has done
    /// everything.
    fn take_over_paused(&self) -> Result<(), VmError> {
        Ok(())
    }
    /// The threads that run the guest's vCPUs (`gettid(2)`), in the vCPUs' order. Called after the guest was started.
    /// With `postcopy-blocktime` the engine reports how long each of them waited for pages.
    fn threads_of_vcpus(&self) -> Vec<u32> {
        Vec::new()
    }
    /// Discards what the devices have loaded, so that the VM is as before [`crate::Incoming::listen`] and another
    /// migration may arrive. The engine discards RAM itself, after this call: do not write RAM here.
    ///
    /// Also called if the connection was lost after devices had arrived, and the source reconnects. The devices are
    /// then loaded again, and RAM stays.
    fn reset(&self);
}

/// One device's saved state: one FULL section of the stream (specs/stream.md §1.4). A device with large state also
/// has a [`DeviceStream`].
pub trait Device: Send + Sync {
    /// The section's name, 1 to 255 bytes.
    fn name(&self) -> String;
    /// Distinguishes devices of the same name.
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
    /// Saves the device's state. The guest is stopped, and the last sync is over: writes to the guest's RAM do not
    /// reach the destination any more. A device that completes requests when it is saved completes them in
    /// [`SourceVm::stop`] or [`SourceVm::quiesce`].
    fn save(&self) -> Result<Vec<u8>, VmError>;
    /// Loads the state that [`Device::save`] wrote on the other side.
    ///
    /// The peer sent `body`, so it may have any content: check it. Must not start the device; [`TargetVm::start`]
    /// follows. Must not write the guest's RAM: if the connection is lost before the commit, the guest resumes at the
    /// source, and a page that was changed here is not sent again. After such a loss, the engine calls
    /// [`TargetVm::reset`] and then this method again.
    fn load(&self, version: u32, body: &[u8]) -> Result<(), VmError>;
    /// With `switchover-ack`: whether the switchover must wait until this device is ready at the destination. Both
    /// sides must return the same value.
    fn asks_switchover_ack(&self) -> bool {
        false
    }
    /// Destination, for a device that requires an acknowledgement: whether the device is ready. Called during
    /// precopy, after every section of RAM. Once true, it stays true.
    fn is_ready_for_switchover(&self) -> bool {
        true
    }
    /// Maximum length of a body, in bytes. A longer body is refused before it is read.
    fn body_limit(&self) -> usize {
        16 << 20
    }
    /// The device's large state, in addition to the small state of [`Device::save`]. Both sides must have the stream,
    /// or neither.
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        None
    }
}
