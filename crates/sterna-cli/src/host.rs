//! A VM in this process, as `sterna run` hosts it: machine, monitor, guest.
//!
//! - [`Machine`]: functions of a machine that only hosting needs; [`kvm`] and [`process`] implement it.
//! - [`Hosted`]: any machine, with its `quit` reported to the command that waits for it.
//! - [`GuestMonitor`]: the monitor's commands, and three of Sterna's own for the guest.

mod kvm;
mod meter;
mod monitor;
mod process;
mod protection;
mod tide;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use sterna::ram::{Backing, DirtySource, GuestRam};
use sterna::replica::EpochGate;
use sterna::{
    Device, FreePageHints, Hook, HostDescriptors, RunState, SourceVm, TargetVm, Throttle, Vm, VmError,
};
use sterna_qmp::migration::ProtectionMeans;
use sterna_qmp::{Announcing, BlockDevice, MonitoredVm};

pub use kvm::{GuestChoice, kvm_machine, kvm_usable};
pub use monitor::{GUEST_COMMANDS, GuestMonitor};
pub use process::process_machine;
pub use protection::{Console, Protection};

use meter::Meter;

use crate::exit::Stop;
use crate::interrupts::Interrupts;

/// The configuration of a hosted VM.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name of the VM, for people.
    pub name: String,
    /// Must be equal on both sides of a migration.
    pub uuid: Option<[u8; 16]>,
    /// Bytes of guest RAM.
    pub ram_bytes: u64,
    /// Number of vCPUs, or of threads of the process guest.
    pub vcpus: u8,
    /// The kind of memory that backs guest RAM.
    pub backing: Backing,
    /// Entries of each vCPU's dirty ring; none: the dirty log tracks writes.
    pub dirty_ring_size: Option<u32>,
    /// Sockets of vfio-user devices.
    pub vfio_user: Vec<std::path::PathBuf>,
    /// Virtio devices in other processes.
    pub vhost_user: Vec<crate::vhost_user::VhostUser>,
    /// Virtio disks of the guest.
    pub disks: Vec<sterna_vmm::DiskOptions>,
    /// Virtio network cards of the guest.
    pub nets: Vec<sterna_vmm::NetOptions>,
    /// Whether the guest can report unused memory at any time (free page reporting).
    pub free_page_reporting: bool,
    /// Whether the guest can report unused memory during a migration (free page hints).
    pub free_page_hinting: bool,
    /// Whether the guest has a virtio entropy device.
    pub entropy: bool,
    /// Whether the guest has a virtio console.
    pub virtio_console: bool,
    /// Whether the guest arrives from another process on this host, with its memory and its taps.
    pub takes_over: bool,
    /// Whether the VM waits for a guest instead of booting one.
    pub incoming: bool,
    /// How the guest writes its memory.
    pub load: Load,
    /// The rate of a guest after its arrival; none: unchanged.
    pub arrival_rate: Option<u64>,
}

/// How the guest writes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The order in which pages are written.
    pub pattern: sterna_guests::Pattern,
    /// The content of RAM before the first write.
    pub fill: sterna_guests::Fill,
    /// Pages per second and vCPU; 0: as fast as possible.
    pub rate: u64,
    /// Bytes that the guest writes repeatedly, over all vCPUs; none: all RAM.
    pub working_set_bytes: Option<u64>,
}

/// Counters that show the progress of a guest.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GuestProgress {
    /// Pages that each vCPU or thread has written.
    pub steps: Vec<u64>,
    /// Beats (signs of life) of each vCPU or thread.
    pub beats: Vec<u64>,
    /// The longest time between two beats of a vCPU, seconds; none if the guest has no clock.
    pub longest_gap_seconds: Option<f64>,
    /// Pages per second and vCPU that the guest has written over the last 2 s. Equals `--rate` if the guest
    /// can keep it.
    #[serde(default)]
    pub pages_per_second: Option<f64>,
}

/// How a guest ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestEnd {
    /// The reason, for people.
    pub why: String,
    /// QEMU's name of the cause, in the event SHUTDOWN.
    pub cause: &'static str,
}

impl GuestEnd {
    /// The cause of a guest that switched its machine off, which is no failure.
    pub const POWERED_OFF: &'static str = "guest-shutdown";
}

/// Functions of a machine that only hosting needs.
pub trait Machine: SourceVm + TargetVm + 'static {
    /// Pauses the guest; see [`MonitoredVm::pause`].
    fn pause(&self) -> Result<(), VmError>;
    /// Lets the guest run; see [`MonitoredVm::cont`].
    fn cont(&self) -> Result<(), VmError>;
    /// Ends the guest; called when the VM quits.
    fn end(&self);
    /// Why the guest ended by itself; none if it did not.
    fn ended(&self) -> Option<GuestEnd> {
        None
    }
    /// Whether the VM has its guest; see [`MonitoredVm::has_guest`].
    fn has_guest(&self) -> bool;
    /// The VM's name; see [`MonitoredVm::name`].
    fn name(&self) -> String;
    /// Ids of the vCPUs' threads; see [`MonitoredVm::vcpu_threads`].
    fn vcpu_threads(&self) -> Vec<i32> {
        Vec::new()
    }
    /// Types `bytes` into the guest's console, if it has one. Returns the number of accepted bytes; the
    /// caller may retry the others.
    fn type_in(&self, bytes: &[u8]) -> usize {
        bytes.len()
    }
    /// The gate that holds packets of the network cards while the guest is protected; none without cards.
    fn packet_gate(&self) -> Option<Arc<dyn EpochGate>> {
        None
    }
    /// Whether KVM runs the guest.
    fn uses_kvm(&self) -> bool;
    /// The guest's disks; see [`MonitoredVm::disks`].
    fn disks(&self) -> Vec<BlockDevice> {
        Vec::new()
    }
    /// Changes the length of a disk; see [`MonitoredVm::resize_disk`].
    fn resize_disk(&self, index: usize, _len_bytes: u64) -> Result<(), VmError> {
        Err(VmError::new("block_resize", format!("this machine has no disk {index}")))
    }
    /// Sets how arriving guests are announced; see [`MonitoredVm::set_announcing`].
    fn set_announcing(&self, _announcing: Announcing) {}
    /// Announces network cards now; see [`MonitoredVm::announce`].
    fn announce(&self, _announcing: Announcing, _cards: &[usize], _id: &str) -> Result<(), VmError> {
        Ok(())
    }
}

/// A guest that writes its memory by rules, so that the host can check it.
pub trait Guest: Send + Sync {
    /// Whether RAM is one consistent cut. The guest must be paused. The error tells why RAM cannot be
    /// checked.
    fn check(&self) -> Result<sterna_guests::Verdict, String>;
    /// The guest's counters. The error tells why they are not available.
    fn progress(&self) -> Result<GuestProgress, String>;
    /// Changes the rate, pages per second and vCPU.
    fn set_rate(&self, pages_per_second: u64) -> Result<(), String>;
    /// Resets the longest gap between beats.
    fn reset_gap(&self) -> Result<(), String>;
}

/// A machine and, if it can be checked, the guest in it.
pub struct Parts {
    /// The machine, which runs the guest.
    pub machine: Arc<dyn Machine>,
    /// Access to the guest's counters and its check; none if its writes follow no known rule.
    pub guest: Option<Arc<dyn Guest>>,
}

/// A machine whose `quit` is counted as an interrupt of the command that hosts it.
pub struct Hosted {
    machine: Arc<dyn Machine>,
    guest: Option<Arc<dyn Guest>>,
    arrival_rate: Option<u64>,
    meter: Meter,
    quit: Interrupts,
    protection: Protection,
    /// The guest was protected, and its standby has taken it over.
    is_lost: AtomicBool,
}

impl Hosted {
    /// Hosts `parts`. `quit` counts requests to end the VM.
    /// A guest that arrives gets `arrival_rate`, if set, before it runs.
    pub fn new(
        parts: Parts,
        arrival_rate: Option<u64>,
        quit: Interrupts,
        protection: Protection,
    ) -> Arc<Self> {
        Arc::new(Self {
            protection,
            is_lost: AtomicBool::new(false),
            machine: parts.machine,
            guest: parts.guest,
            arrival_rate,
            meter: Meter::default(),
            quit,
        })
    }

    /// Whether the guest was protected and its standby has taken it over.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// The machine, without the counting of `quit`.
    pub fn machine(&self) -> &dyn Machine {
        &*self.machine
    }

    /// Samples the guest's progress for [`Hosted::progress`]; call it regularly.
    /// Blocks in postcopy until the pages with the counters have arrived.
    pub fn note_progress(&self) {
        if let Some(guest) = self.guest.as_deref().filter(|_| self.machine.has_guest())
            && let Ok(progress) = guest.progress()
        {
            self.meter.note(Instant::now(), progress.steps.iter().sum());
        }
    }

    /// The guest's counters and its current rate.
    pub fn progress(&self) -> Result<GuestProgress, String> {
        let progress = self.guest()?.progress()?;
        let vcpus = progress.steps.len().max(1) as f64;
        let pages_per_second = self.meter.pages_per_second().map(|rate| rate / vcpus);
        Ok(GuestProgress { pages_per_second, ..progress })
    }

    /// The guest, or the reason why it cannot be asked.
    pub fn guest(&self) -> Result<&dyn Guest, String> {
        self.guest.as_deref().ok_or_else(|| {
            "this guest's writes cannot be checked, because they follow no known rule: use `--guest tide`"
                .into()
        })
    }
}

impl Vm for Hosted {
    fn machine_type(&self) -> String {
        self.machine.machine_type()
    }
    fn uuid(&self) -> Option<[u8; 16]> {
        self.machine.uuid()
    }
    fn ram(&self) -> GuestRam {
        self.machine.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.machine.devices()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.machine.compatibility()
    }
    fn shares_ram_with(&self) -> Option<String> {
        self.machine.shares_ram_with()
    }
    fn cannot_follow(&self) -> Option<String> {
        self.machine.cannot_follow()
    }
    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        self.machine.host_descriptors()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.machine.hooks()
    }
}

impl SourceVm for Hosted {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.machine.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.machine.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.machine.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.machine.resume()
    }
    fn may_hold_writes(&self) -> bool {
        self.machine.may_hold_writes()
    }
    fn throttle(&self) -> Option<&dyn Throttle> {
        self.machine.throttle()
    }
    fn free_page_hints(&self) -> Option<&dyn FreePageHints> {
        self.machine.free_page_hints()
    }
}

impl TargetVm for Hosted {
    fn may_hold_bytes(&self, block: usize) -> bool {
        self.machine.may_hold_bytes(block)
    }
    fn prepare_start(&self) -> Result<(), VmError> {
        self.machine.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        if let (Some(rate), Some(guest)) = (self.arrival_rate, &self.guest) {
            guest.set_rate(rate).map_err(|why| VmError::new("set the guest's rate", why))?;
        }
        self.machine.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.machine.take_over_paused()
    }
    fn threads_of_vcpus(&self) -> Vec<u32> {
        self.machine.vcpu_threads().into_iter().filter_map(|thread| u32::try_from(thread).ok()).collect()
    }
    fn reset(&self) {
        self.machine.reset();
    }
}

impl MonitoredVm for Hosted {
    fn pause(&self) -> Result<(), VmError> {
        self.machine.pause()
    }
    fn cont(&self) -> Result<(), VmError> {
        self.machine.cont()
    }
    fn quit(&self) {
        self.quit.add();
    }
    fn has_guest(&self) -> bool {
        self.machine.has_guest()
    }
    fn name(&self) -> String {
        self.machine.name()
    }
    fn vcpu_threads(&self) -> Vec<i32> {
        self.machine.vcpu_threads()
    }
    fn uses_kvm(&self) -> bool {
        self.machine.uses_kvm()
    }
    fn disks(&self) -> Vec<BlockDevice> {
        self.machine.disks()
    }
    fn resize_disk(&self, index: usize, len_bytes: u64) -> Result<(), VmError> {
        self.machine.resize_disk(index, len_bytes)
    }
    fn protection(&self) -> Option<ProtectionMeans> {
        self.protection.means(self.machine.packet_gate())
    }
    fn guest_is_lost(&self) {
        self.is_lost.store(true, Ordering::Release);
        self.quit();
    }
    fn set_announcing(&self, announcing: Announcing) {
        self.machine.set_announcing(announcing);
    }
    fn announce(&self, announcing: Announcing, cards: &[usize], id: &str) -> Result<(), VmError> {
        self.machine.announce(announcing, cards, id)
    }
}

/// The blocks of guest RAM: memory below the hole under 4 GiB, and the rest.
fn blocks(ram_bytes: u64) -> Vec<(String, u64)> {
    sterna_vmm::layout::ranges(ram_bytes)
        .iter()
        .map(|range| {
            let name = [sterna_vmm::layout::LOW_BLOCK, sterna_vmm::layout::HIGH_BLOCK][range.block];
            (name.to_owned(), range.len_bytes)
        })
        .collect()
}

fn cannot_build(machine: &str, why: impl std::fmt::Display) -> Stop {
    Stop::failed(format!("cannot build the {machine} machine: {why}"))
}
