//! A process guest that can fail on request, lack a device, or report another machine type.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use sterna::ram::{DirtySource, GuestRam, PAGE_SIZE};
use sterna::{
    Address, Capabilities, Device, FreePageHints, FreePages, Hook, Incoming, Migration, Observer, Parameters,
    RunState, SourceVm, TargetVm, Throttle, VcpuDirtyRate, Vm, VmError,
};
use sterna_guests::process::ProcessGuest;

use super::bank::{Bank, BankDevice};

/// Delegates to a process guest, except for the configured failures.
pub struct TestVm {
    pub guest: Arc<ProcessGuest>,
    pub machine_type: Mutex<String>,
    pub uuid: Mutex<Option<[u8; 16]>>,
    pub fail_stop: AtomicBool,
    pub fail_resume: AtomicBool,
    /// Number of resumes that fail before one succeeds.
    pub fail_resumes: AtomicU32,
    /// Fails before any device runs.
    pub fail_start: AtomicBool,
    /// Fails after devices have run.
    pub fail_start_late: AtomicBool,
    /// The engine's throttling calls, in order. The guest is throttled accordingly.
    pub throttled: Mutex<Vec<u8>>,
    /// Each vCPU's dirty limit, bytes per second. If empty, the VM does not count dirty rates.
    pub dirty_limits: Mutex<Vec<Option<u64>>>,
    /// The engine's calls for dirty limits: a vCPU or all of them, and the limit.
    pub limited: Mutex<Vec<(Option<usize>, Option<u64>)>>,
    pub starts: Mutex<u32>,
    pub resumes: Mutex<u32>,
    /// Whether the guest gives hints for its zero pages when it is asked.
    pub hints: AtomicBool,
    /// The configuration for a destination that makes its VM from it.
    pub configuration: Mutex<Option<Vec<u8>>>,
    /// How often the engine has asked for it.
    pub configured: AtomicU32,
    /// Devices with large state, in addition to the guest's own devices.
    pub banks: Vec<Arc<Bank>>,
}

impl TestVm {
    pub fn new(guest: Arc<ProcessGuest>) -> Arc<Self> {
        Self::with_banks(guest, Vec::new())
    }

    pub fn with_banks(guest: Arc<ProcessGuest>, banks: Vec<Arc<Bank>>) -> Arc<Self> {
        Arc::new(Self {
            banks,
            guest,
            machine_type: Mutex::new("sterna-process".into()),
            uuid: Mutex::new(None),
            fail_stop: AtomicBool::new(false),
            fail_resume: AtomicBool::new(false),
            fail_resumes: AtomicU32::new(0),
            fail_start: AtomicBool::new(false),
            fail_start_late: AtomicBool::new(false),
            throttled: Mutex::default(),
            dirty_limits: Mutex::default(),
            limited: Mutex::default(),
            starts: Mutex::new(0),
            resumes: Mutex::new(0),
            hints: AtomicBool::new(false),
            configuration: Mutex::default(),
            configured: AtomicU32::new(0),
        })
    }

    pub fn is_machine(&self, name: &str) {
        *self.machine_type.lock().unwrap() = name.to_owned();
    }
}

pub fn order(flag: &AtomicBool, fails: bool) {
    flag.store(fails, Ordering::SeqCst);
}

fn unless(flag: &AtomicBool, what: &str) -> Result<(), VmError> {
    if flag.load(Ordering::SeqCst) { Err(VmError::new(what, "told to fail")) } else { Ok(()) }
}

/// Entry among the banks' calls that marks the stop of the guest.
pub const GUEST_STOPS: &str = "guest stops";

impl Vm for TestVm {
    fn machine_type(&self) -> String {
        self.machine_type.lock().unwrap().clone()
    }
    fn uuid(&self) -> Option<[u8; 16]> {
        *self.uuid.lock().unwrap()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        let banks = self.banks.iter().map(|bank| Arc::new(BankDevice(Arc::clone(bank))) as Arc<dyn Device>);
        self.guest.devices().into_iter().chain(banks).collect()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.guest.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.guest.hooks()
    }
}

impl SourceVm for TestVm {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        unless(&self.fail_stop, "stop")?;
        if let Some(bank) = self.banks.first() {
            bank.calls.lock().unwrap().push((u32::MAX, GUEST_STOPS));
        }
        self.guest.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        unless(&self.fail_resume, "resume")?;
        let fewer = |left: u32| left.checked_sub(1);
        if self.fail_resumes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer).is_ok() {
            return Err(VmError::new("resume", "told to fail"));
        }
        *self.resumes.lock().unwrap() += 1;
        self.guest.resume()
    }
    fn throttle(&self) -> Option<&dyn Throttle> {
        Some(self)
    }
    fn configuration(&self) -> Option<Vec<u8>> {
        self.configured.fetch_add(1, Ordering::SeqCst);
        self.configuration.lock().unwrap().clone()
    }
    fn free_page_hints(&self) -> Option<&dyn FreePageHints> {
        self.hints.load(Ordering::SeqCst).then_some(self)
    }
}

/// A page that is written while or after it is checked is reported as dirty, which cancels its hint.
impl FreePageHints for TestVm {
    fn begin(&self, free: FreePages) {
        let ram = self.guest.ram();
        let mut content = [0; PAGE_SIZE];
        for (index, block) in ram.blocks().iter().enumerate() {
            for page in 0..block.pages() {
                block.read(page * PAGE_SIZE as u64, &mut content).unwrap();
                if content == [0; PAGE_SIZE] {
                    free.hint(index, page, 1);
                }
            }
        }
        free.complete();
    }
    fn stop(&self) {}
    fn end(&self) {}
}

/// Steps per second of a guest that is not throttled.
pub const FREE_RATE: u64 = 20_000;

impl Throttle for TestVm {
    fn set_cpu_throttle(&self, percent: u8) {
        self.throttled.lock().unwrap().push(percent);
        self.guest.set_rate(FREE_RATE * u64::from(100 - percent) / 100);
    }

    fn can_limit_dirty_rate(&self) -> bool {
        !self.dirty_limits.lock().unwrap().is_empty()
    }

    /// The guest as a whole dirties memory as fast as all of its vCPUs together may.
    fn set_dirty_limit(&self, vcpu: Option<usize>, bytes_per_second: Option<u64>) -> Result<(), VmError> {
        self.limited.lock().unwrap().push((vcpu, bytes_per_second));
        let mut limits = self.dirty_limits.lock().unwrap();
        for (_, limit) in limits.iter_mut().enumerate().filter(|(at, _)| vcpu.is_none_or(|vcpu| vcpu == *at))
        {
            *limit = bytes_per_second;
        }
        let pages: Option<u64> = limits.iter().map(|limit| limit.map(|bytes| bytes / 4096)).sum();
        self.guest.set_rate(pages.map_or(FREE_RATE, |pages| pages.clamp(1, FREE_RATE)));
        Ok(())
    }

    fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        let limits = self.dirty_limits.lock().unwrap();
        limits.iter().map(|limit| VcpuDirtyRate { rate_bytes: 0, limit_bytes: *limit }).collect()
    }
}

impl TargetVm for TestVm {
    fn prepare_start(&self) -> Result<(), VmError> {
        unless(&self.fail_start, "start")
    }
    fn start(&self) -> Result<(), VmError> {
        unless(&self.fail_start_late, "start")?;
        *self.starts.lock().unwrap() += 1;
        self.guest.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.guest.take_over_paused()
    }
    fn reset(&self) {
        self.guest.reset();
    }
}

pub fn listen(target: &Arc<TestVm>, params: &Parameters, capabilities: Capabilities) -> Incoming {
    listen_told(target, params, capabilities, Arc::new(()))
}

/// Like [`listen`], with an observer.
pub fn listen_told(
    target: &Arc<TestVm>,
    params: &Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Incoming {
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let address = if params.rdma.fabric.is_some() { "rdma:10.0.0.1:0" } else { "tcp:127.0.0.1:0" };
    let address: Address = address.parse().unwrap();
    Incoming::listen(vm, &address, params.clone(), capabilities, observer).expect("listening")
}

pub fn start(
    source: &Arc<TestVm>,
    to: &Address,
    params: &Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Migration {
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    Migration::start(vm, to, params.clone(), capabilities, observer).expect("started")
}

/// A device whose state is a fixed text. It fails on request.
pub struct TestDevice {
    pub name: &'static str,
    pub version: u32,
    pub fail_save: AtomicBool,
    pub fail_load: AtomicBool,
}

impl TestDevice {
    pub fn new(name: &'static str, version: u32) -> Arc<Self> {
        Arc::new(Self { name, version, fail_save: AtomicBool::new(false), fail_load: AtomicBool::new(false) })
    }
}

impl Device for TestDevice {
    fn name(&self) -> String {
        self.name.into()
    }
    fn version(&self) -> u32 {
        self.version
    }
    fn oldest_version(&self) -> u32 {
        self.version
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        unless(&self.fail_save, "save")?;
        Ok(b"state".to_vec())
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        unless(&self.fail_load, "load")?;
        if body == b"state" { Ok(()) } else { Err(VmError::new("load", "another state")) }
    }
}
