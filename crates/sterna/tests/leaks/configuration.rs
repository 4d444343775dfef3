//! A destination that makes its VM from the source's configuration leaves nothing behind, however that ends.

use std::sync::{Arc, Mutex};

use crate::common;
use crate::support::{TestVm, case, vm, vms};
use sterna::{
    Capabilities, Incoming, MigrationError, Outcome, SettingLimits, SharedSettings, TargetVm, VmError,
};

/// A destination whose callback returns what `answer` says for its VM.
fn listen(answer: impl FnOnce() -> Result<Arc<dyn TargetVm>, VmError> + Send + 'static) -> Incoming {
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let shared = SharedSettings::AsSource(SettingLimits::default());
    let (params, capabilities) = (common::parameters(), Capabilities::default());
    Incoming::listen_with(&at, params, capabilities, shared, Arc::new(()), move |_| answer()).unwrap()
}

fn configured() -> (Arc<TestVm>, Arc<TestVm>) {
    let (source, target) = vms();
    *source.configuration.lock().unwrap() = Some(b"a configuration".to_vec());
    (source, target)
}

#[test]
fn destination_that_is_dropped_without_a_source_ends_its_threads() {
    case("no source", || drop(listen(|| unreachable!("no source comes"))));
}

#[test]
fn guest_arrives_and_the_waiting_part_is_gone() {
    case("arrives", || {
        let (source, target) = configured();
        let made: Arc<dyn TargetVm> = target.clone();
        let incoming = listen(move || Ok(made));
        let (params, capabilities) = common::multifd(3);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        common::assert_arrived(&migration.wait(), &incoming.wait(), &target.guest);
    });
}

#[test]
fn callback_that_fails_or_panics_leaves_nothing() {
    for panics in [false, true] {
        case("a callback without a VM", || {
            let (source, _) = configured();
            let incoming = listen(move || match panics {
                true => panic!("told to"),
                false => Err(VmError::new("make the VM", "told to fail")),
            });
            let (params, capabilities) = common::multifd(3);
            let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
            let outcome = migration.wait();
            let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
            assert!(matches!(error, MigrationError::NotConfigured { .. }), "{error}");
            incoming.wait();
            common::assert_lives_on(&source.guest);
        });
    }
}

#[test]
fn handle_that_is_dropped_while_the_callback_runs_leaves_nothing_when_it_returns() {
    case("dropped", || {
        let (source, target) = configured();
        let ((begun, has_begun), (go, gone)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
        let (made, gone): (Arc<dyn TargetVm>, _) = (target.clone(), Mutex::new(gone));
        let incoming = listen(move || {
            begun.send(()).unwrap();
            let _ = gone.lock().unwrap().recv();
            Ok(made)
        });
        let (params, capabilities) = common::multifd(3);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        has_begun.recv().unwrap();
        drop(incoming);
        drop(go);
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        common::assert_lives_on(&source.guest);
        assert!(!target.guest.has_guest());
    });
}
