//! Tests of device faults. Each must end in an error that names the device and its state. The source must
//! continue.

use std::sync::Arc;
use std::time::Duration;

use super::slow::{Stall, patiently, slow};
use super::support::{Chunks, Plan, Served, TIMEOUT, alone, migrate, serve, serve_with};
use sterna::{DeviceStream, VmError};
use sterna_devices::statebank::{Fault, FaultKind, StateBankConfig, Verdict};
use sterna_devices::vfio::{MigState, MigrationPort, VfioDevice};
use sterna_devices::vfio_user::{ClientOptions, DmaLog};
use sterna_ram::dirty::LoggedRange;
use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, RamBlock};

/// Faults of a device that is saved: state, byte, and the state in the error.
pub const SOURCE: &[(MigState, Option<u64>, MigState)] = &[
    (MigState::PreCopy, None, MigState::Running),
    (MigState::PreCopy, Some(300_000), MigState::PreCopy),
    (MigState::PreCopyP2p, None, MigState::PreCopy),
    (MigState::StopCopy, None, MigState::PreCopyP2p),
    (MigState::StopCopy, Some(0), MigState::StopCopy),
    (MigState::StopCopy, Some(500_000), MigState::StopCopy),
];

/// The same for a device that is loaded.
pub const TARGET: &[(MigState, Option<u64>, MigState)] = &[
    (MigState::Resuming, None, MigState::Running),
    (MigState::Resuming, Some(0), MigState::Resuming),
    (MigState::Resuming, Some(700_000), MigState::Resuming),
    (MigState::Running, None, MigState::Stop),
];

fn config(fault: Option<Fault>) -> StateBankConfig {
    StateBankConfig { state_bytes: 2 << 20, precopy_percent: 50, fault, ..StateBankConfig::default() }
}

/// A short time limit only for a device that hangs. A healthy one may be slow on a busy machine.
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
        assert!(error.to_string().contains("refused"), "{error}");
        assert_eq!(source.bank().status().state, MigState::Running, "{state} {byte:?}");
        // The fault occurs once, so the next migration succeeds.
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
        assert!(error.to_string().contains("is lost"), "{error}");
        assert!(!source.client.is_connected());
        // The destination's device is unchanged and accepts the state of another device.
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
    let slow = slow(Stall::State, 0, config(None));

    let late = slow.client.state().unwrap_err();
    slow.wake();
    let then = patiently(|| slow.client.state());

    assert!(late.to_string().contains("no answer within"), "{late}");
    assert_eq!(then, MigState::Running);
    VfioDevice::new(Arc::clone(&slow.client)).unwrap().begin_save().unwrap();
}

#[test]
fn hang_in_the_live_phase_is_undone_when_it_wakes_up_and_the_next_migration_brings_every_byte() {
    let (source, target) = (slow(Stall::Read, 2, config(None)), served(None));
    let device = VfioDevice::new(Arc::clone(&source.client)).unwrap();
    let small = || Plan { chunks: Chunks::up_to(100_000), ..Plan::plain() };

    let error = migrate(&device, &target.device, small()).unwrap_err();
    source.wake();

    names_device_and_state(&error, "slow", MigState::PreCopy);
    // The request was sent while the server hung. The server executes it before it answers this one.
    assert_eq!(patiently(|| source.client.state()), MigState::Running);
    migrate(&device, &target.device, small()).unwrap();
    assert_eq!(source.bank.status().digest, target.bank().status().digest);
    assert_eq!(target.bank().status().loaded, Verdict::Good);
}

#[test]
fn save_that_follows_one_that_nobody_ended_begins_anew() {
    for stopped in [false, true] {
        let (source, target) = (served(None), served(None));
        source.device.begin_save().unwrap();
        if stopped {
            source.device.stop().unwrap();
        }
        assert!(source.device.read(&mut [0; 5000]).unwrap() > 0);

        migrate(&source.device, &target.device, Plan::plain()).unwrap();

        assert_eq!(source.bank().status().digest, target.bank().status().digest);
        assert_eq!(target.bank().status().loaded, Verdict::Good);
    }
}

#[test]
fn run_in_the_middle_of_a_save_is_told_to_who_reads_and_the_device_runs_on() {
    for stopped in [false, true] {
        let (source, target) = (served(None), served(None));
        source.device.begin_save().unwrap();
        assert!(source.device.read(&mut [0; 5000]).unwrap() > 0);
        if stopped {
            source.device.quiesce().unwrap();
            source.device.stop().unwrap();
        }

        source.device.run().unwrap();

        let errors = [
            source.device.remaining().map(drop).unwrap_err(),
            source.device.read(&mut [0; 5000]).map(drop).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().contains("interrupted the save"), "{error}");
        }
        assert_eq!(source.bank().status().state, MigState::Running);
        source.device.end_save().unwrap();
        assert_eq!(source.bank().status().state, MigState::Running);
        migrate(&source.device, &target.device, Plan::plain()).unwrap();
        assert_eq!(target.bank().status().loaded, Verdict::Good);
    }
}

#[test]
fn logging_whose_start_was_not_answered_can_be_started_later() {
    let slow = slow(Stall::StartLogging, 0, config(None));
    let ram = GuestRam::new(vec![RamBlock::new("ram", 64 << 12, Backing::Memfd).unwrap()]).unwrap();
    let whole = LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: 64 };
    let log = DmaLog::new(Arc::clone(&slow.client), ram.clone(), vec![whole]).unwrap();

    let error = log.start().unwrap_err();
    slow.wake();
    patiently(|| slow.client.state());

    assert!(error.to_string().contains("no answer within"), "{error}");
    log.start().unwrap();
    log.sync(&mut DirtyBitmaps::new(&ram)).unwrap();
    log.stop().unwrap();
}

#[test]
fn load_undone_after_a_device_ran_forgets_it_and_the_next_one_works() {
    let (source, ran) = (served(None), serve(StateBankConfig { seed: 8, ..config(None) }));
    let refuses = served(Some(Fault::entering(FaultKind::Fail, MigState::Running)));
    let fresh = ran.bank().status().digest;
    migrate(&source.device, &ran.device, Plan::plain()).unwrap();
    assert_eq!(ran.bank().status().loaded, Verdict::Good);
    source.device.run().unwrap();
    migrate(&source.device, &refuses.device, Plan::plain()).unwrap_err();

    // The engine undoes the migration in this way if one device ran and the other did not.
    for device in [&ran.device, &refuses.device] {
        device.quiesce().unwrap();
        device.stop().unwrap();
    }
    for device in [&ran.device, &refuses.device] {
        device.end_load().unwrap();
    }

    let forgotten = ran.bank().status();
    assert_eq!((forgotten.loaded, forgotten.digest), (Verdict::None, fresh));
    migrate(&source.device, &ran.device, Plan::plain()).unwrap();
    assert_eq!(ran.bank().status().digest, source.bank().status().digest);
}
