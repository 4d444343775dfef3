//! What an operator does to a guest and to a destination while a migration runs.

mod common;
mod support;

use std::sync::Arc;
use std::time::Duration;

use sterna::{RunState, SourceVm};
use support::{case, vm, vms};

#[test]
fn cont_that_began_before_the_switchover_ends_before_it() {
    case("slow cont", || {
        let (source, target) = vms();
        let (params, capabilities) = common::multifd(2);
        let incoming = vm::listen(&target, &params, capabilities);
        let migration = vm::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
        let ran = migration.while_guest_is_free(|| {
            // Time enough for the whole migration, if it did not wait.
            std::thread::sleep(Duration::from_millis(500));
            let before = source.run_state();
            source.guest.cont().expect("it can run");
            before
        });
        assert_eq!(ran, Some(RunState::Running), "the guest was taken away in the middle of it");
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        common::assert_arrived(&outcome, &arrival, &target.guest);
        assert_eq!(source.run_state(), RunState::Paused, "it runs twice");
        assert_eq!(migration.while_guest_is_free(|| source.guest.cont()).map(drop), None);
        assert_eq!(source.run_state(), RunState::Paused);
    });
}
