//! A VM in this process, as `sterna run` hosts it: machine, monitor, guest.
//!
//! - [`Machine`]: what hosting needs of a machine besides what the engine and the monitor need; [`kvm`] and
//!   [`process`] are the two.
//! - [`Hosted`]: any machine with its `quit` made known to the command that waits for it.
//! - [`GuestMonitor`]: the monitor's commands and three of our own, about the guest inside.

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
pub use monitor::GuestMonitor;
pub use process::process_machine;
pub use protection::{Console, Protection};

use meter::Meter;

use crate::exit::Stop;
use crate::interrupts::Interrupts;

/// What to host.
#[derive(Debug, Clone)]
pub struct Config {
    /// For people.
    pub name: String,
    /// Must be equal on both sides of a migration.
    pub uuid: Option<[u8; 16]>,
    /// Bytes of guest RAM.
    pub ram_bytes: u64,
    /// vCPUs, or threads of the process guest.
    pub vcpus: u8,
    /// What RAM is made of.
    pub backing: Backing,
    /// Entries of each vCPU's dirty ring; none: writes are found by the dirty log.
    pub dirty_ring_size: Option<u32>,
    /// Sockets of vfio-user devices.
    pub vfio_user: Vec<std::path::PathBuf>,
    /// Virtio devices in other processes.
    pub vhost_user: Vec<crate::vhost_user::VhostUser>,
    /// Virtio disks.
    pub disks: Vec<sterna_vmm::DiskOptions>,
    /// Virtio network cards.
    pub nets: Vec<sterna_vmm::NetOptions>,
    /// The guest says which memory it does not use.
    pub free_page_reporting: bool,
    /// The guest says, when it is migrated, which memory it does not use.
    pub free_page_hinting: bool,
    /// The guest gets random bytes by virtio.
    pub entropy: bool,
    /// It has a virtio console.
    pub virtio_console: bool,
    /// The guest comes from another process on this host, with its memory and its taps.
    pub takes_over: bool,
    /// Wait for a guest instead of booting one.
    pub incoming: bool,
    /// What the guest does to its memory.
    pub load: Load,
    /// The rate at which a guest goes on that arrives; none: as before.
    pub arrival_rate: Option<u64>,
}

/// What the guest does to its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The order in which pages are written.
    pub pattern: sterna_guests::Pattern,
    /// What RAM holds before.
    pub fill: sterna_guests::Fill,
    /// Pages per second and vCPU; 0: as fast as it can.
    pub rate: u64,
    /// Bytes that are written over and over, over all vCPUs; none: all RAM.
    pub working_set_bytes: Option<u64>,
}

/// How far a guest has come.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GuestProgress {
    /// Pages that each vCPU or thread has written.
    pub steps: Vec<u64>,
    /// Signs of life of each.
    pub beats: Vec<u64>,
    /// The longest time between two beats of one, seconds; none where the guest has no clock.
    pub longest_gap_seconds: Option<f64>,
    /// Pages per second and vCPU that it has written over the last 2 s: what `--rate` asked for, if it can.
    #[serde(default)]
    pub pages_per_second: Option<f64>,
}

/// How a guest ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestEnd {
    /// For people.
    pub why: String,
    /// QEMU's word in the event SHUTDOWN.
    pub cause: &'static str,
}

impl GuestEnd {
    /// The cause of a guest that switched its machine off: nothing went wrong.
    pub const POWERED_OFF: &'static str = "guest-shutdown";
}

/// What hosting needs of a machine.
pub trait Machine: SourceVm + TargetVm + 'static {
    /// See [`MonitoredVm::pause`].
    fn pause(&self) -> Result<(), VmError>;
    /// See [`MonitoredVm::cont`].
    fn cont(&self) -> Result<(), VmError>;
    /// Ends the guest.
    fn end(&self);
    /// Why the guest ended by itself, if it did.
    fn ended(&self) -> Option<GuestEnd> {
        None
    }
    /// See [`MonitoredVm::has_guest`].
    fn has_guest(&self) -> bool;
    /// See [`MonitoredVm::name`].
    fn name(&self) -> String;
    /// See [`MonitoredVm::vcpu_threads`].
    fn vcpu_threads(&self) -> Vec<i32> {
        Vec::new()
    }
    /// Types into its console, if it has one. How many of the bytes it took; the others may be tried again.
    fn type_in(&self, bytes: &[u8]) -> usize {
        bytes.len()
    }
    /// Holds what its network cards send while the guest is protected, if it has any.
    fn packet_gate(&self) -> Option<Arc<dyn EpochGate>> {
        None
    }
    /// Whether KVM runs it.
    fn uses_kvm(&self) -> bool;
    /// See [`MonitoredVm::disks`].
    fn disks(&self) -> Vec<BlockDevice> {
        Vec::new()
    }
    /// See [`MonitoredVm::resize_disk`].
    fn resize_disk(&self, index: usize, _len_bytes: u64) -> Result<(), VmError> {
        Err(VmError::new("block_resize", format!("this machine has no disk {index}")))
    }
    /// See [`MonitoredVm::set_announcing`].
    fn set_announcing(&self, _announcing: Announcing) {}
    /// See [`MonitoredVm::announce`].
    fn announce(&self, _announcing: Announcing, _cards: &[usize], _id: &str) -> Result<(), VmError> {
        Ok(())
    }
}

/// A guest that writes its memory by rules, so that it can be checked.
pub trait Guest: Send + Sync {
    /// Whether RAM is one consistent cut; the guest stands still. The error says why that cannot be known.
    fn check(&self) -> Result<sterna_guests::Verdict, String>;
    /// How far it has come; the error says why that cannot be known.
    fn progress(&self) -> Result<GuestProgress, String>;
    /// Changes the rate, pages per second and vCPU.
    fn set_rate(&self, pages_per_second: u64) -> Result<(), String>;
    /// Forgets the longest gap so far.
    fn reset_gap(&self) -> Result<(), String>;
}

/// A machine and, if it can be checked, the guest in it.
pub struct Parts {
    /// The machine.
    pub machine: Arc<dyn Machine>,
    /// Its guest.
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
    /// The guest that was here was protected, and its standby has it.
    is_lost: AtomicBool,
}

impl Hosted {
    /// Hosts `parts`; `quit` is where its end will be asked for. A guest that arrives is given
    /// `arrival_rate`, if there is one, before it runs.
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

    /// Whether the guest that was here was protected, and its standby has it.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// The machine.
    pub fn machine(&self) -> &dyn Machine {
        &*self.machine
    }

    /// Notes how far the guest has come; to be called every now and then, for [`Hosted::progress`]. Waits for a guest in postcopy
    /// whose pages are not there.
    pub fn note_progress(&self) {
        if let Some(guest) = self.guest.as_deref().filter(|_| self.machine.has_guest())
            && let Ok(progress) = guest.progress()
        {
            self.meter.note(Instant::now(), progress.steps.iter().sum());
        }
    }

    /// How far the guest has come, and how fast it goes.
    pub fn progress(&self) -> Result<GuestProgress, String> {
        let progress = self.guest()?.progress()?;
        let vcpus = progress.steps.len().max(1) as f64;
        let pages_per_second = self.meter.pages_per_second().map(|rate| rate / vcpus);
        Ok(GuestProgress { pages_per_second, ..progress })
    }

    /// The guest, or why it cannot be asked.
    pub fn guest(&self) -> Result<&dyn Guest, String> {
        self.guest.as_deref().ok_or_else(|| {
            "this guest's writes follow no rule that can be checked; use `--guest tide`".into()
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

/// RAM as the machines lay it out: what lies below the hole under 4 GiB, and the rest.
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
