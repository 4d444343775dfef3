//! A checkpoint's pause that outlasts the lease: the guest that was paused for it is not resumed.

use std::sync::atomic::AtomicU32;

use sterna::ram::{DirtySource, GuestRam};
use sterna::{Device, Hook, VmError};

use super::*;

/// A device whose saving waits once, until the test continues it.
struct SlowDevice {
    is_slow: AtomicBool,
    begun: Mutex<Sender<()>>,
    go: Mutex<Receiver<()>>,
}

impl SlowDevice {
    fn new() -> (Arc<Self>, Receiver<()>, Sender<()>) {
        let ((begun, has_begun), (goes, go)) = (channel(), channel());
        let this = Self { is_slow: AtomicBool::new(false), begun: Mutex::new(begun), go: Mutex::new(go) };
        (Arc::new(this), has_begun, goes)
    }
}

impl Device for SlowDevice {
    fn name(&self) -> String {
        "slow".into()
    }
    fn version(&self) -> u32 {
        1
    }
    fn oldest_version(&self) -> u32 {
        1
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        if self.is_slow.swap(false, Ordering::SeqCst) {
            self.begun.lock().send(()).expect("it is awaited");
            self.go.lock().recv_timeout(PATIENCE).expect("an end");
        }
        Ok(b"state".to_vec())
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
}

/// Counts the resumes of its guest.
struct SlowVm {
    guest: Arc<ProcessGuest>,
    device: Arc<SlowDevice>,
    resumes: AtomicU32,
}

impl SlowVm {
    fn new(guest: &Arc<ProcessGuest>, device: Arc<SlowDevice>) -> Arc<Self> {
        Arc::new(Self { guest: Arc::clone(guest), device, resumes: AtomicU32::new(0) })
    }
}

impl Vm for SlowVm {
    fn machine_type(&self) -> String {
        self.guest.machine_type()
    }
    fn uuid(&self) -> Option<[u8; 16]> {
        self.guest.uuid()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        let slow = Arc::clone(&self.device) as Arc<dyn Device>;
        self.guest.devices().into_iter().chain([slow]).collect()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.guest.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.guest.hooks()
    }
}

impl SourceVm for SlowVm {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.guest.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.resumes.fetch_add(1, Ordering::SeqCst);
        self.guest.resume()
    }
}

impl TargetVm for SlowVm {
    fn start(&self) -> Result<(), VmError> {
        self.guest.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.guest.take_over_paused()
    }
    fn reset(&self) {
        self.guest.reset();
    }
}

/// A protected pair in a checkpoint's pause. The guest stays paused until the sender is used.
fn paused(way: &Way) -> (Pair, Arc<SlowVm>, Sender<()>) {
    let (guest, _) = pair(&writer());
    let there = ProcessGuest::waiting(writer()).expect("destination");
    let ((slow, has_begun, go), (other, _, _)) = (SlowDevice::new(), SlowDevice::new());
    let vm = SlowVm::new(&guest, Arc::clone(&slow));
    let vms: (Arc<dyn SourceVm>, Arc<dyn TargetVm>) = (vm.clone(), SlowVm::new(&there, other));
    let terms = Terms { lease: Duration::from_secs(3), ..TERMS };
    let pair = join((guest, there), vms, way, terms, Arc::new(NoOutput)).expect("protected");
    pair.wait_for_held(5);
    slow.is_slow.store(true, Ordering::SeqCst);
    has_begun.recv_timeout(PATIENCE).expect("a pause");
    (pair, vm, go)
}

/// With buffered pages, and with a pause that lasts until all pages are sent.
const WAYS: [Way; 2] = [PLAIN, Way { buffer_bytes: 4096, ..PLAIN }];

#[test]
fn guest_is_not_resumed_after_a_pause_that_outlasts_its_lease() {
    for way in WAYS {
        let (pair, vm, go) = paused(&way);
        *pair.arbiter.0.lock() = Some("standby");
        pair.link.knobs.cut.store(0, Ordering::SeqCst);
        wait_for("the survivor", || pair.there.run_state() == RunState::Running);
        assert!(!pair.primary.may_guest_run(), "{way:?}");
        let (resumes, steps) = (vm.resumes.load(Ordering::SeqCst), pair.guest.progress().total_steps());

        go.send(()).expect("it waits");

        assert_eq!(pair.primary.wait(), primary::Outcome::Lost, "{way:?}");
        assert_eq!(vm.resumes.load(Ordering::SeqCst), resumes, "{way:?}: both guests ran");
        assert_eq!(pair.guest.progress().total_steps(), steps, "{way:?}: both guests ran");
        assert_eq!((pair.guest.run_state(), pair.guest.ram().custody()), (RunState::Paused, Custody::Gone));
        assert_lives_on(&pair.there);
    }
}

#[test]
fn guest_that_was_kept_stopped_by_its_lease_is_resumed_when_the_claim_is_won() {
    // The order to stop the guest arrives when the pause ends, or was already waiting for that.
    for (way, before) in
        WAYS.iter().flat_map(|way| [Duration::ZERO, Duration::from_millis(300)].map(|before| (way, before)))
    {
        let (pair, _, go) = paused(way);
        let mut claim = pair.arbiter.0.lock();
        pair.link.knobs.cut.store(0, Ordering::SeqCst);
        // The arbiter answers only after the lease has ended.
        wait_for("the lease's end", || !pair.primary.may_guest_run());
        std::thread::sleep(before);

        go.send(()).expect("it waits");

        *claim = Some("primary");
        drop(claim);
        let won = primary::Outcome::Alone(primary::Because::Claim);
        assert_eq!(pair.primary.wait(), won, "{way:?}: {:?}", pair.primary.state());
        assert_lives_on(&pair.guest);
        assert_ne!(pair.there.run_state(), RunState::Running);
    }
}
