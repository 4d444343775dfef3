//! A process guest whose calls from the engine all pass the [`Stage`].

use std::sync::Arc;
use std::time::Duration;

use sterna::ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, SyncReport};
use sterna::{
    Device, Event, Hook, Observer, RunState, SourceVm, Status, SwitchoverStep, TargetVm, Vm, VmError,
};
use sterna_guests::ProcessGuest;

use crate::bank::{Bank, StagedBank};
use crate::ledger::Ledger;
use crate::stage::Stage;
use crate::stop::{Side, Stop};

/// The VM of one side.
pub struct Staged {
    /// The guest, or a place that waits for one.
    pub guest: Arc<ProcessGuest>,
    /// Its devices with large state.
    pub banks: Vec<Arc<Bank>>,
    stage: Arc<Stage>,
    ledger: Arc<Ledger>,
    side: Side,
    dirty: StagedDirty,
}

impl Staged {
    /// Makes the VM of `side` from `guest` and `banks`.
    pub fn new(
        guest: Arc<ProcessGuest>,
        banks: Vec<Arc<Bank>>,
        stage: Arc<Stage>,
        ledger: Arc<Ledger>,
        side: Side,
    ) -> Arc<Self> {
        let dirty = StagedDirty { guest: Arc::clone(&guest), stage: Arc::clone(&stage) };
        Arc::new(Self { guest, banks, stage, ledger, side, dirty })
    }

    /// An observer that passes the stops that events mark.
    pub fn observer(&self) -> Arc<dyn Observer> {
        let (stage, side) = (Arc::clone(&self.stage), self.side);
        Arc::new(move |event: &Event| {
            if let Some(stop) = stop_of(event, side) {
                stage.at(stop);
            }
        })
    }

    fn staged_devices(&self, of_guest: Vec<Arc<dyn Device>>) -> Vec<Arc<dyn Device>> {
        let bank = |bank| {
            Arc::new(StagedBank { bank: Arc::clone(bank), stage: Arc::clone(&self.stage) }) as Arc<dyn Device>
        };
        let marker: Arc<dyn Device> = Arc::new(Marker(Arc::clone(&self.stage)));
        of_guest.into_iter().chain(self.banks.iter().map(bank)).chain([marker]).collect()
    }

    fn lease(&self) -> Vec<Arc<dyn Hook>> {
        vec![Arc::new(Lease {
            stage: Arc::clone(&self.stage),
            ledger: Arc::clone(&self.ledger),
            side: self.side,
        })]
    }
}

fn stop_of(event: &Event, side: Side) -> Option<Stop> {
    Some(match (side, event) {
        (Side::Source, Event::Status(Status::Setup)) => Stop::Setup,
        (Side::Source, Event::Round(1)) => Stop::FirstPass,
        (Side::Source, Event::Round(3)) => Stop::LaterPass,
        (Side::Source, Event::Status(Status::PreSwitchover)) => Stop::PreSwitchover,
        (Side::Source, Event::SwitchoverStep { step, .. }) => return stop_of_step(*step),
        (Side::Source, Event::Committed) => Stop::AfterCommit,
        (Side::Source, Event::Status(Status::Undecided)) => Stop::Undecided,
        (Side::Destination, Event::Status(Status::Setup)) => Stop::Arrival,
        (Side::Destination, Event::Prepared) => Stop::BeforeCommit,
        (Side::Destination, Event::Resumed) => Stop::BeforeShut,
        _ => return None,
    })
}

fn stop_of_step(step: SwitchoverStep) -> Option<Stop> {
    Some(match step {
        SwitchoverStep::Stop => Stop::StepStop,
        SwitchoverStep::ReleaseHooks => Stop::StepRelease,
        SwitchoverStep::LastSync => Stop::LastSync,
        SwitchoverStep::LastPages => Stop::LastPages,
        SwitchoverStep::Devices => Stop::StepDevices,
        SwitchoverStep::Prepare => Stop::StepPrepare,
        SwitchoverStep::Start => Stop::StepStart,
        SwitchoverStep::Streams => Stop::StepStreams,
        _ => return None,
    })
}

fn thread_is(name: &str) -> bool {
    std::thread::current().name().is_some_and(|own| own.starts_with(name))
}

impl Vm for Staged {
    fn machine_type(&self) -> String {
        self.guest.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        // The destination's control thread calls this once, when it checks whether everything has arrived.
        if thread_is("incoming") {
            self.stage.at(Stop::Completing);
        }
        self.staged_devices(self.guest.devices())
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        let device = self.guest.compatibility()?;
        Some(Arc::new(Compared { device, stage: Arc::clone(&self.stage) }))
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.lease()
    }
}

impl SourceVm for Staged {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.dirty
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        self.stage.at(Stop::Stopping);
        self.guest.stop()?;
        self.ledger.stopped(self.side);
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.ledger.starts(self.side);
        self.guest.resume()
    }
}

impl TargetVm for Staged {
    fn prepare_start(&self) -> Result<(), VmError> {
        self.guest.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        self.stage.at(Stop::AwaitingAck);
        self.ledger.starts(self.side);
        self.guest.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.guest.take_over_paused()
    }
    fn reset(&self) {
        self.guest.reset();
    }
}

struct StagedDirty {
    guest: Arc<ProcessGuest>,
    stage: Arc<Stage>,
}

impl DirtySource for StagedDirty {
    fn start(&self) -> Result<(), DirtyError> {
        self.guest.dirty_source().start()
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.stage.at(Stop::AfterShut);
        self.guest.dirty_source().stop()
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        // Waits for a write, because a further round occurs only if the guest has written.
        if self.stage.wants(Stop::LaterPass) && self.guest.run_state() == RunState::Running {
            self.guest.wait_progress(1, Duration::from_secs(5));
        }
        self.guest.dirty_source().sync(into)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        if thread_is("lane") {
            self.stage.at(Stop::Lane);
        }
        self.guest.dirty_source().rearm(block, first, count, synced)
    }
    fn initially_set(&self) -> bool {
        self.guest.dirty_source().initially_set()
    }
    fn name(&self) -> &'static str {
        self.guest.dirty_source().name()
    }
}

/// A device without content, whose save and load pass stops.
struct Marker(Arc<Stage>);

impl Device for Marker {
    fn name(&self) -> String {
        "soak-marker".into()
    }
    fn version(&self) -> u32 {
        1
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        self.0.at(Stop::Devices);
        Ok(b"marker".to_vec())
    }
    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        self.0.at(Stop::LoadingDevices);
        match body {
            b"marker" => Ok(()),
            other => Err(VmError::new("load soak-marker", format!("its state is {other:?}"))),
        }
    }
}

/// The guest's compatibility record, whose calls pass stops.
struct Compared {
    device: Arc<dyn Device>,
    stage: Arc<Stage>,
}

impl Device for Compared {
    fn name(&self) -> String {
        self.device.name()
    }
    fn version(&self) -> u32 {
        self.device.version()
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        self.device.save()
    }
    fn load(&self, version: u32, body: &[u8]) -> Result<(), VmError> {
        self.stage.at(Stop::Comparing);
        self.device.load(version, body)
    }
}

/// The lease, a hook that only one side may hold.
struct Lease {
    stage: Arc<Stage>,
    ledger: Arc<Ledger>,
    side: Side,
}

impl Hook for Lease {
    fn name(&self) -> String {
        "lease".into()
    }
    fn release(&self) -> Result<(), VmError> {
        self.stage.at(Stop::Releasing);
        self.ledger.release(self.side);
        Ok(())
    }
    fn take_back(&self) -> Result<(), VmError> {
        self.stage.at(Stop::Cancelling);
        self.stage.at(Stop::Failing);
        self.ledger.acquire(self.side)
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.stage.at(Stop::Acquiring);
        self.ledger.acquire(self.side)
    }
    fn give_back(&self) {
        self.stage.at(Stop::GivingBack);
        self.ledger.release(self.side);
    }
}
