//! The VMM of the guests, with callbacks that fail as planned.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use parking_lot::Mutex;
use sterna::ram::{DirtySource, GuestRam};
use sterna::{Device, Hook, RunState, SourceVm, TargetVm, Throttle, Vm, VmError};
use sterna_guests::ProcessGuest;

/// A callback in which a case can plan a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Callback {
    /// `Device::save` at the primary, in the pause of a checkpoint.
    Save,
    /// `SourceVm::stop` at the primary.
    Stop,
    /// `SourceVm::resume` at the primary.
    Resume,
    /// `Device::load` at the standby, when the takeover is prepared.
    Load,
    /// `TargetVm::start` at the standby.
    Start,
}

/// The planned result of one call.
#[derive(Debug, Clone)]
pub(super) enum Deed {
    Fail,
    Panic,
    /// Notifies a thread, and waits for this duration so that it can act.
    Tell(Sender<()>, Duration),
}

/// The call, counted from now on, and its planned result.
#[derive(Debug, Clone)]
struct Plan {
    callback: Callback,
    calls: u64,
    deed: Deed,
}

/// The planned failures of a case.
#[derive(Default)]
pub(super) struct Plans(Mutex<Vec<Plan>>);

impl Plans {
    pub(super) fn add(&self, callback: Callback, calls: u64, deed: Deed) {
        self.0.lock().push(Plan { callback, calls, deed });
    }

    fn come(&self, callback: Callback) -> Result<(), VmError> {
        let mut due = Vec::new();
        self.0.lock().retain_mut(|plan| {
            if plan.callback != callback {
                return true;
            }
            plan.calls = plan.calls.saturating_sub(1);
            if plan.calls == 0 {
                due.push(plan.deed.clone());
            }
            plan.calls > 0
        });
        for deed in due {
            match deed {
                Deed::Tell(tell, time) => {
                    let _ = tell.send(());
                    std::thread::sleep(time);
                }
                Deed::Fail => return Err(VmError::new(format!("{callback:?}"), "planned")),
                // `resume_unwind` prints no backtrace. The first printed backtrace would keep the program's
                // symbols in memory, which would count as a leak.
                Deed::Panic => std::panic::resume_unwind(Box::new(format!("planned in {callback:?}"))),
            }
        }
        Ok(())
    }
}

/// A VM of the process guest, with planned failures.
pub(super) struct Troubled {
    guest: Arc<ProcessGuest>,
    plans: Arc<Plans>,
}

impl Troubled {
    pub(super) fn new(guest: &Arc<ProcessGuest>, plans: &Arc<Plans>) -> Arc<Self> {
        Arc::new(Self { guest: Arc::clone(guest), plans: Arc::clone(plans) })
    }
}

impl Vm for Troubled {
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
        let mut devices = self.guest.devices();
        devices.push(Arc::new(Probe(Arc::clone(&self.plans))));
        devices
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.guest.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.guest.hooks()
    }
}

impl SourceVm for Troubled {
    fn dirty_source(&self) -> &dyn DirtySource {
        self.guest.dirty_source()
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.plans.come(Callback::Stop)?;
        self.guest.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.plans.come(Callback::Resume)?;
        self.guest.resume()
    }
    fn may_hold_writes(&self) -> bool {
        self.guest.may_hold_writes()
    }
    fn throttle(&self) -> Option<&dyn Throttle> {
        self.guest.throttle()
    }
}

impl TargetVm for Troubled {
    fn prepare_start(&self) -> Result<(), VmError> {
        self.guest.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        self.plans.come(Callback::Start)?;
        self.guest.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.guest.take_over_paused()
    }
    fn reset(&self) {
        self.guest.reset();
    }
}

/// A device without a state of its own, whose callbacks follow the plans.
struct Probe(Arc<Plans>);

impl Device for Probe {
    fn name(&self) -> String {
        "soak/probe".into()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        self.0.come(Callback::Save)?;
        Ok(b"probe".to_vec())
    }
    fn load(&self, _: u32, body: &[u8]) -> Result<(), VmError> {
        self.0.come(Callback::Load)?;
        if body == b"probe" { Ok(()) } else { Err(VmError::new("the probe", "another state came")) }
    }
}
