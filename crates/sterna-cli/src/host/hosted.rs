//! A machine whose `quit` is reported to the command that waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use sterna::ram::{DirtySource, GuestRam};
use sterna::{
    Device, FreePageHints, Hook, HostDescriptors, RunState, SourceVm, TargetVm, Throttle, Vm, VmError,
};
use sterna_qmp::migration::ProtectionMeans;
use sterna_qmp::{Announcing, BlockDevice, MonitoredVm};

use crate::host::machine::{Guest, GuestProgress, Machine, Parts};
use crate::host::meter::Meter;
use crate::host::protection::Protection;
use crate::interrupts::Interrupts;

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
    fn quiesce(&self) -> Result<(), VmError> {
        self.machine.quiesce()
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
