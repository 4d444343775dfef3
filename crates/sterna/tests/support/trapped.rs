//! A VM of which one callback panics, once.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;

use sterna::ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, RamError, SyncReport};
use sterna::{
    Device, DeviceStream, Event, Hook, Observer, RemainingState, RunState, SourceVm, TargetVm, Throttle, Vm,
    VmError,
};

use super::TestVm;

/// Panics in one callback. If the callback's name ends in `, done`, it panics after the callback's work.
pub struct Bomb {
    at: Mutex<Option<String>>,
    disarmed: Condvar,
    /// Blocks the calling thread until disarmed, instead of panicking.
    waits: bool,
    /// Calls from this thread, which runs the test, do not panic.
    test: ThreadId,
}

impl Bomb {
    pub fn new(at: Option<&str>) -> Arc<Self> {
        Self::of(at, false)
    }

    /// A bomb that does not panic: a thread that calls this callback waits until the bomb is disarmed.
    pub fn waiting(at: &str) -> Arc<Self> {
        Self::of(Some(at), true)
    }

    fn of(at: Option<&str>, waits: bool) -> Arc<Self> {
        let at = Mutex::new(at.map(str::to_owned));
        Arc::new(Self { at, disarmed: Condvar::new(), waits, test: std::thread::current().id() })
    }

    /// Whether the bomb has not been triggered or disarmed yet.
    pub fn is_armed(&self) -> bool {
        self.at.lock().unwrap().is_some()
    }

    pub fn disarm(&self) {
        *self.at.lock().unwrap() = None;
        self.disarmed.notify_all();
    }

    fn at(&self, callback: &str) {
        if std::thread::current().id() == self.test {
            return;
        }
        let mut at = self.at.lock().unwrap();
        if self.waits {
            drop(self.disarmed.wait_while(at, |at| at.as_deref() == Some(callback)));
            return;
        }
        let explodes = at.take_if(|at| at == callback).is_some();
        drop(at);
        assert!(!explodes, "told to panic in {callback}");
    }

    fn around<T>(&self, callback: &str, act: impl FnOnce() -> T) -> T {
        self.at(callback);
        let result = act();
        self.at(&format!("{callback}, done"));
        result
    }
}

/// One side's VM. Every callback passes the bomb.
pub struct Trapped {
    vm: Arc<TestVm>,
    bomb: Arc<Bomb>,
    side: &'static str,
}

impl Trapped {
    pub fn source(vm: &Arc<TestVm>, bomb: &Arc<Bomb>) -> Arc<Self> {
        Arc::new(Self { vm: Arc::clone(vm), bomb: Arc::clone(bomb), side: "source" })
    }

    pub fn target(vm: &Arc<TestVm>, bomb: &Arc<Bomb>) -> Arc<Self> {
        Arc::new(Self { vm: Arc::clone(vm), bomb: Arc::clone(bomb), side: "destination" })
    }

    /// A callback that both sides have. The bomb's name includes the side.
    fn at(&self, callback: &str) {
        self.bomb.at(&format!("{} Vm::{callback}", self.side));
    }

    fn trap(&self, device: Arc<dyn Device>) -> Arc<dyn Device> {
        Arc::new(TrappedDevice { device, bomb: Arc::clone(&self.bomb) })
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        let trap = |hook| Arc::new(TrappedHook { hook, bomb: Arc::clone(&self.bomb) }) as Arc<dyn Hook>;
        self.vm.hooks().into_iter().map(trap).collect()
    }
}

impl Vm for Trapped {
    fn machine_type(&self) -> String {
        self.vm.machine_type()
    }
    fn uuid(&self) -> Option<[u8; 16]> {
        self.at("uuid");
        None
    }
    fn ram(&self) -> GuestRam {
        self.vm.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.at("devices");
        self.vm.devices().into_iter().map(|device| self.trap(device)).collect()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.at("hooks");
        Trapped::hooks(self)
    }
}

impl SourceVm for Trapped {
    fn dirty_source(&self) -> &dyn DirtySource {
        self
    }
    fn run_state(&self) -> RunState {
        self.bomb.around("SourceVm::run_state", || self.vm.run_state())
    }
    fn stop(&self) -> Result<(), VmError> {
        self.bomb.around("SourceVm::stop", || SourceVm::stop(self.vm.as_ref()))
    }
    fn resume(&self) -> Result<(), VmError> {
        self.bomb.around("SourceVm::resume", || self.vm.resume())
    }
    fn throttle(&self) -> Option<&dyn Throttle> {
        Some(self)
    }
}

impl TargetVm for Trapped {
    fn prepare_start(&self) -> Result<(), VmError> {
        self.vm.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        self.bomb.at("TargetVm::start");
        self.vm.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.bomb.around("TargetVm::take_over_paused", || self.vm.take_over_paused())
    }
    fn reset(&self) {
        self.bomb.around("TargetVm::reset", || self.vm.reset());
    }
}

impl Throttle for Trapped {
    fn set_cpu_throttle(&self, percent: u8) {
        self.vm.set_cpu_throttle(percent);
        self.bomb.at(if percent == 0 {
            "Throttle::set_cpu_throttle 0"
        } else {
            "Throttle::set_cpu_throttle"
        });
    }
}

impl DirtySource for Trapped {
    fn start(&self) -> Result<(), DirtyError> {
        self.bomb.at("DirtySource::start");
        self.vm.guest.dirty_source().start()
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.bomb.around("DirtySource::stop", || self.vm.guest.dirty_source().stop())
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        self.bomb.at("DirtySource::sync");
        self.vm.guest.dirty_source().sync(into)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.bomb.at("DirtySource::rearm");
        self.vm.guest.dirty_source().rearm(block, first, count, synced)
    }
    fn initially_set(&self) -> bool {
        self.vm.guest.dirty_source().initially_set()
    }
    fn mark_absent(
        &self,
        ram: &GuestRam,
        block: usize,
        first: u64,
        count: u64,
        absent: &PageBitmap,
    ) -> Result<(), RamError> {
        self.bomb.at("DirtySource::mark_absent");
        self.vm.guest.dirty_source().mark_absent(ram, block, first, count, absent)
    }
    fn name(&self) -> &'static str {
        self.vm.guest.dirty_source().name()
    }
}

/// Receives every event; panics for `Observer::event`.
impl Observer for Bomb {
    fn event(&self, _: &Event) {
        self.at("Observer::event");
    }
}

struct TrappedDevice {
    device: Arc<dyn Device>,
    bomb: Arc<Bomb>,
}

impl Device for TrappedDevice {
    fn name(&self) -> String {
        self.device.name()
    }
    fn instance(&self) -> u32 {
        self.device.instance()
    }
    fn version(&self) -> u32 {
        self.device.version()
    }
    fn oldest_version(&self) -> u32 {
        self.device.oldest_version()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        self.bomb.at("Device::save");
        self.device.save()
    }
    fn load(&self, version: u32, body: &[u8]) -> Result<(), VmError> {
        self.bomb.at("Device::load");
        self.device.load(version, body)
    }
    fn body_limit(&self) -> usize {
        self.device.body_limit()
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        let stream = self.device.stream()?;
        Some(Arc::new(TrappedStream { stream, bomb: Arc::clone(&self.bomb) }))
    }
}

struct TrappedStream {
    stream: Arc<dyn DeviceStream>,
    bomb: Arc<Bomb>,
}

impl DeviceStream for TrappedStream {
    fn begin_save(&self) -> Result<(), VmError> {
        self.bomb.around("begin to save", || self.stream.begin_save())
    }
    fn remaining(&self) -> Result<RemainingState, VmError> {
        self.bomb.around("ask what is remaining", || self.stream.remaining())
    }
    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        self.bomb.around("read", || self.stream.read(to))
    }
    fn quiesce(&self) -> Result<(), VmError> {
        self.bomb.around("quiesce", || self.stream.quiesce())
    }
    fn stop(&self) -> Result<(), VmError> {
        self.bomb.around("stop", || self.stream.stop())
    }
    fn configuration(&self) -> Result<Vec<u8>, VmError> {
        self.bomb.around("read its configuration", || self.stream.configuration())
    }
    fn end_save(&self) -> Result<(), VmError> {
        self.bomb.around("end saving", || self.stream.end_save())
    }
    fn begin_load(&self) -> Result<(), VmError> {
        self.bomb.around("begin to load", || self.stream.begin_load())
    }
    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        self.bomb.around("load", || self.stream.write(bytes))
    }
    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError> {
        self.bomb.around("finish loading", || self.stream.finish_load(configuration))
    }
    fn end_load(&self) -> Result<(), VmError> {
        self.bomb.around("forget what was loaded", || self.stream.end_load())
    }
    fn run(&self) -> Result<(), VmError> {
        self.bomb.around("run", || self.stream.run())
    }
    fn expected_bytes_per_second(&self) -> Option<u64> {
        self.bomb.at("expected_bytes_per_second");
        self.stream.expected_bytes_per_second()
    }
}

struct TrappedHook {
    hook: Arc<dyn Hook>,
    bomb: Arc<Bomb>,
}

impl Hook for TrappedHook {
    fn name(&self) -> String {
        self.hook.name()
    }
    fn release(&self) -> Result<(), VmError> {
        self.bomb.around("Hook::release", || self.hook.release())
    }
    fn take_back(&self) -> Result<(), VmError> {
        self.bomb.around("Hook::take_back", || self.hook.take_back())
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.bomb.around("Hook::acquire", || self.hook.acquire())
    }
    fn give_back(&self) {
        self.bomb.around("Hook::give_back", || self.hook.give_back());
    }
    fn announce(&self) -> Result<(), VmError> {
        self.bomb.around("Hook::announce", || self.hook.announce())
    }
}
