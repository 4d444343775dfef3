//! Whatever goes wrong with a device ends in an error that names the device and its state, and the source goes on.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Plan, Served, TIMEOUT, alone, migrate, serve_with};
use sterna::{DeviceStream, VmError};
use sterna_devices::statebank::{Fault, FaultKind, StateBankConfig};
use sterna_devices::vfio::{MigState, MigrationPort, VfioDevice};
use sterna_devices::vfio_user::{Client, ClientOptions};

/// Every place where a device that is saved can go wrong: state, byte, and the state that the error names.
const SOURCE: &[(MigState, Option<u64>, MigState)] = &[
    (MigState::PreCopy, None, MigState::Running),
    (MigState::PreCopy, Some(300_000), MigState::PreCopy),
    (MigState::PreCopyP2p, None, MigState::PreCopy),
    (MigState::StopCopy, None, MigState::PreCopyP2p),
    (MigState::StopCopy, Some(0), MigState::StopCopy),
    (MigState::StopCopy, Some(500_000), MigState::StopCopy),
];

/// As above, of one that is loaded.
const TARGET: &[(MigState, Option<u64>, MigState)] = &[
    (MigState::Resuming, None, MigState::Running),
    (MigState::Resuming, Some(0), MigState::Resuming),
    (MigState::Resuming, Some(700_000), MigState::Resuming),
    (MigState::Running, None, MigState::Stop),
];

fn config(fault: Option<Fault>) -> StateBankConfig {
    StateBankConfig { state_bytes: 2 << 20, precopy_percent: 50, fault, ..StateBankConfig::default() }
}

/// Only a device that hangs is given up on soon: on a busy machine a healthy one may be slow.
fn served(fault: Option<Fault>) -> Served {
    let hangs = fault.is_some_and(|fault| fault.kind == FaultKind::Hang);
    let patient = ClientOptions { timeout: Duration::from_secs(60) };
    serve_with(config(fault), &if hangs { ClientOptions { timeout: TIMEOUT } } else { patient })
}

fn names_device_and_state(error: &VmError, device: &str, state: MigState) {
    let text = error.to_string();
    assert!(text.contains(device), "{device:?} is not named: {text}");
    assert!(text.contains(&format!("in state {state}:")), "{state} is not named: {text}");
}

#[test]
fn fail_at_the_source_is_told_and_the_device_runs_on() {
    for (state, byte, named) in SOURCE {
        let (source, target) =
            (served(Some(Fault { kind: FaultKind::Fail, state: *state, byte: *byte })), served(None));

        let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

        names_device_and_state(&error, &source.client.name(), *named);
        assert!(error.to_string().contains("refuses"), "{error}");
        assert_eq!(source.bank().status().state, MigState::Running, "{state} {byte:?}");
        // It fails once: the next migration works.
        migrate(&source.device, &target.device, Plan::plain()).unwrap();
        assert_eq!(source.bank().status().digest, target.bank().status().digest);
    }
}

#[test]
fn fail_at_the_destination_is_told_and_the_source_runs_on() {
    for (state, byte, named) in TARGET {
        let (source, target) =
            (served(None), served(Some(Fault { kind: FaultKind::Fail, state: *state, byte: *byte })));

        let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

        names_device_and_state(&error, &target.client.name(), *named);
        assert_eq!(source.bank().status().state, MigState::Running, "{state} {byte:?}");
        migrate(&source.device, &target.device, Plan::plain()).unwrap();
    }
}

#[test]
fn die_at_the_source_is_told() {
    for (state, byte, named) in SOURCE {
        let (source, target) =
            (served(Some(Fault { kind: FaultKind::Die, state: *state, byte: *byte })), served(None));

        let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

        names_device_and_state(&error, &source.client.name(), *named);
        assert!(error.to_string().contains("is gone"), "{error}");
        assert!(!source.client.is_connected());
        // The destination's device is as before, and takes another's state.
        migrate(&served(None).device, &target.device, Plan::plain()).unwrap();
    }
}

#[test]
fn die_at_the_destination_is_told_and_the_source_runs_on() {
    for (state, byte, named) in TARGET {
        let (source, target) =
            (served(None), served(Some(Fault { kind: FaultKind::Die, state: *state, byte: *byte })));

        let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

        names_device_and_state(&error, &target.client.name(), *named);
        assert_eq!(source.bank().status().state, MigState::Running, "{state} {byte:?}");
        migrate(&source.device, &served(None).device, Plan::plain()).unwrap();
    }
}

#[test]
fn hang_at_the_source_is_told_after_the_time_that_was_set() {
    for (state, byte, named) in SOURCE {
        let (source, target) =
            (served(Some(Fault { kind: FaultKind::Hang, state: *state, byte: *byte })), served(None));

        let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

        names_device_and_state(&error, &source.client.name(), *named);
        assert!(error.to_string().contains(&format!("no answer within {TIMEOUT:?}")), "{error}");
        assert!(source.client.is_connected(), "a hung server is still there");
    }
}

#[test]
fn hang_at_the_destination_is_told_and_the_source_runs_on() {
    for (state, byte, named) in TARGET {
        let (source, target) =
            (served(None), served(Some(Fault { kind: FaultKind::Hang, state: *state, byte: *byte })));

        let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

        names_device_and_state(&error, &target.client.name(), *named);
        assert!(error.to_string().contains("no answer within"), "{error}");
        assert_eq!(source.bank().status().state, MigState::Running, "{state} {byte:?}");
    }
}

#[test]
fn fault_without_a_protocol_is_told_alike() {
    for kind in [FaultKind::Fail, FaultKind::Die, FaultKind::Hang] {
        for (state, byte, named) in SOURCE {
            let fault = Some(Fault { kind, state: *state, byte: *byte });
            let impatient = StateBankConfig { hang_limit: TIMEOUT, ..config(fault) };
            let ((source, bank), (target, _)) = (alone(impatient), alone(config(None)));

            let error = migrate(&source, &target, Plan::plain()).unwrap_err();

            names_device_and_state(&error, "statebank", *named);
            if kind != FaultKind::Die {
                assert_eq!(bank.status().state, MigState::Running, "{kind:?} {state} {byte:?}");
            }
        }
    }
}

#[test]
fn fail_of_a_device_with_the_least_states_is_told_and_it_runs_on() {
    for (state, byte, named) in [
        (MigState::Stop, None, MigState::Running),
        (MigState::StopCopy, None, MigState::Running),
        (MigState::StopCopy, Some(1_000_000), MigState::StopCopy),
    ] {
        let least = |fault| StateBankConfig { p2p: false, precopy_percent: 0, ..config(fault) };
        let fault = Fault { kind: FaultKind::Fail, state, byte };
        let options = ClientOptions { timeout: Duration::from_secs(60) };
        let (source, target) = (serve_with(least(Some(fault)), &options), serve_with(least(None), &options));

        let error = migrate(&source.device, &target.device, Plan::plain()).unwrap_err();

        names_device_and_state(&error, &source.client.name(), named);
        assert_eq!(source.bank().status().state, MigState::Running, "{fault}");
        migrate(&source.device, &target.device, Plan::plain()).unwrap();
    }
}

#[test]
fn fail_on_the_way_back_is_told_and_can_be_tried_again() {
    for (state, undo_fails, run_fails) in
        [(MigState::Stop, true, false), (MigState::RunningP2p, false, true), (MigState::Running, false, true)]
    {
        let source = served(Some(Fault::entering(FaultKind::Fail, state)));
        let device = &source.device;
        device.begin_save().unwrap();
        device.quiesce().unwrap();
        device.stop().unwrap();

        let (undone, runs) = (device.end_save(), device.run());

        assert_eq!((undone.is_err(), runs.is_err()), (undo_fails, run_fails), "{state}: {undone:?} {runs:?}");
        for error in [undone.err(), runs.err()].into_iter().flatten() {
            assert!(error.to_string().contains(&source.client.name()), "{error}");
        }
        device.end_save().unwrap();
        device.run().unwrap();
        assert_eq!(source.bank().status().state, MigState::Running, "{state}");
    }
}

#[test]
fn late_answer_is_skipped_and_the_connection_goes_on() {
    // A server that answers the first wish for the state late, and then all others.
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || slow_server::run(theirs, TIMEOUT * 2));
    let client = Client::over(ours, "slow".into(), &ClientOptions { timeout: TIMEOUT }).unwrap();
    let client = Arc::new(client);

    let late = client.state().unwrap_err();
    std::thread::sleep(TIMEOUT * 2);
    let then = client.state().unwrap();

    assert!(late.to_string().contains("no answer within"), "{late}");
    assert_eq!(then, MigState::Running);
    let device = VfioDevice::new(Arc::clone(&client)).unwrap();
    device.begin_save().unwrap();
    drop((device, client));
    server.join().unwrap();
}

mod slow_server {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use sterna_devices::statebank::{StateBank, StateBankConfig};
    use sterna_devices::vfio::{MigState, MigrationFeatures};
    use sterna_devices::vfio_user::wire::{DeviceInfo, DmaLogRange, PrecopySizes, RegionInfo};
    use sterna_devices::vfio_user::{Backend, BackendError, DmaRegion, serve};

    struct Slow {
        bank: std::sync::Arc<StateBank>,
        first: AtomicBool,
        delay: Duration,
    }

    /// Serves until the client goes.
    pub fn run(stream: UnixStream, delay: Duration) {
        let bank = StateBank::new(StateBankConfig::default()).unwrap();
        serve(stream, &Slow { bank, first: AtomicBool::new(true), delay });
    }

    impl Backend for Slow {
        fn info(&self) -> DeviceInfo {
            self.bank.info()
        }
        fn region_info(&self, index: u32) -> Result<RegionInfo, BackendError> {
            self.bank.region_info(index)
        }
        fn region_read(&self, region: u32, offset: u64, to: &mut [u8]) -> Result<(), BackendError> {
            self.bank.region_read(region, offset, to)
        }
        fn region_write(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), BackendError> {
            self.bank.region_write(region, offset, from)
        }
        fn dma_map(&self, region: DmaRegion) -> Result<(), BackendError> {
            self.bank.dma_map(region)
        }
        fn dma_unmap(&self, address: u64, size: u64) -> Result<(), BackendError> {
            self.bank.dma_unmap(address, size)
        }
        fn dma_unmap_all(&self) {
            self.bank.dma_unmap_all();
        }
        fn reset(&self) -> Result<(), BackendError> {
            Backend::reset(&*self.bank)
        }
        fn features(&self) -> MigrationFeatures {
            Backend::features(&*self.bank)
        }
        fn state(&self) -> MigState {
            if self.first.swap(false, Ordering::Relaxed) {
                std::thread::sleep(self.delay);
            }
            Backend::state(&*self.bank)
        }
        fn set_state(&self, to: MigState) -> Result<(), BackendError> {
            Backend::set_state(&*self.bank, to)
        }
        fn read_data(&self, to: &mut [u8]) -> Result<usize, BackendError> {
            Backend::read_data(&*self.bank, to)
        }
        fn write_data(&self, from: &[u8]) -> Result<(), BackendError> {
            Backend::write_data(&*self.bank, from)
        }
        fn data_size(&self) -> Result<u64, BackendError> {
            Backend::data_size(&*self.bank)
        }
        fn precopy_sizes(&self) -> Result<PrecopySizes, BackendError> {
            Backend::precopy_sizes(&*self.bank)
        }
        fn start_logging(&self, page_size: u64, ranges: &[DmaLogRange]) -> Result<(), BackendError> {
            self.bank.start_logging(page_size, ranges)
        }
        fn stop_logging(&self) {
            self.bank.stop_logging();
        }
        fn report_logged(
            &self,
            range: DmaLogRange,
            page_size: u64,
            bitmap: &mut [u64],
        ) -> Result<(), BackendError> {
            self.bank.report_logged(range, page_size, bitmap)
        }
    }
}
