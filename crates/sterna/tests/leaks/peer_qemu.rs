//! A source like QEMU does not send *prepare*, and its guest may continue to run. The arrived guest is held or
//! started.

use crate::common;

use std::sync::Arc;

use crate::support;
use crate::support::hook::{Call, Journal, LeaseHook, Side};
use crate::support::recording::Recording;
use crate::support::{assert_reset, case, eventually, vm, waiting};
use sterna::{Arrival, Capabilities, Parameters, RunState, SourceVm, Status};

/// The stream of a guest that ran at a source without extensions.
fn running(return_path: bool) -> Recording {
    let mut recording = Recording::take("sterna-process", 2);
    let name = recording.find(b"\0\0\0\x07paused\0");
    recording.main[name..name + 12].copy_from_slice(b"\0\0\0\x08running\0");
    if return_path { recording.with_return_path() } else { recording }
}

fn settings(managed: bool) -> (Parameters, Capabilities) {
    let (mut params, mut capabilities) = common::multifd(2);
    params.limits = support::short_limits();
    capabilities.unmanaged = !managed;
    (params, capabilities)
}

const SHUT_0: &[u8] = &[0, 1, 0, 4, 0, 0, 0, 0];
const SHUT_1: &[u8] = &[0, 1, 0, 4, 0, 0, 0, 1];

#[test]
fn unmanaged_destination_starts_the_guest_and_says_so() {
    case("unmanaged", || {
        let (params, capabilities) = settings(false);
        let (target, incoming) = waiting(&params, capabilities);
        let mut sent = running(true).send(&incoming.address(), true);
        assert_eq!(sent.returned(), SHUT_0);
        assert!(matches!(incoming.wait(), Arrival::Completed(RunState::Running)));
        common::assert_lives_on(&target.guest);
        assert_eq!(incoming.statistics().error, None);
    });
}

#[test]
fn managed_destination_holds_the_guest_until_it_is_released() {
    for return_path in [true, false] {
        case("held", || {
            let (params, capabilities) = settings(true);
            let (target, incoming) = waiting(&params, capabilities);
            let mut sent = running(return_path).send(&incoming.address(), return_path);
            eventually("held", || incoming.status() == Status::Held);
            assert_eq!(sent.returned(), if return_path { SHUT_0 } else { &[] });
            // The source has closed the connection and the limits have passed. The guest must still be held.
            drop(sent);
            std::thread::sleep(params.limits.prepare * 2);
            assert_eq!(incoming.status(), Status::Held);
            assert_eq!(*target.starts.lock().unwrap(), 0);
            incoming.release().expect("held");
            assert!(matches!(incoming.wait(), Arrival::Completed(RunState::Running)));
            assert_eq!(target.run_state(), RunState::Running);
            common::assert_lives_on(&target.guest);
            incoming.release().expect_err("released already");
        });
    }
}

#[test]
fn held_guest_is_given_up_by_force_only() {
    case("given up", || {
        let (params, capabilities) = settings(true);
        let (target, incoming) = waiting(&params, capabilities);
        let sent = running(true).send(&incoming.address(), true);
        eventually("held", || incoming.status() == Status::Held);
        let refused = incoming.cancel().expect_err("it may be the only copy").to_string();
        for words in ["only copy", "Check the source", "cont", "x-sterna-force", "sterna cancel --force"] {
            assert!(refused.contains(words), "{words:?} is not in: {refused}");
        }
        assert_eq!(incoming.status(), Status::Held);
        incoming.discard().expect("held");
        assert!(matches!(incoming.wait(), Arrival::Failed(_)));
        drop(sent);
        assert_reset(&target);
        assert_eq!(*target.starts.lock().unwrap(), 0);
    });
}

#[test]
fn start_that_fails_is_told_to_a_source_that_listens() {
    case("SHUT 1", || {
        let (params, capabilities) = settings(false);
        let (target, incoming) = waiting(&params, capabilities);
        vm::order(&target.fail_start_late, true);
        let mut sent = running(true).send(&incoming.address(), true);
        assert_eq!(sent.returned(), SHUT_1);
        let Arrival::Failed(why) = incoming.wait() else { panic!("started") };
        assert_eq!(why.to_string(), "start: told to fail");
        assert_reset(&target);
    });
}

#[test]
fn only_copy_that_cannot_start_is_kept_until_it_can() {
    case("only copy", || {
        let (params, capabilities) = settings(false);
        let (target, incoming) = waiting(&params, capabilities);
        vm::order(&target.fail_start_late, true);
        // A source without a return path has completed and discarded its guest.
        let sent = running(false).send(&incoming.address(), false);
        eventually("held", || incoming.status() == Status::Held);
        drop(sent);
        incoming.release().expect("held");
        eventually("held again", || incoming.status() == Status::Held);
        vm::order(&target.fail_start_late, false);
        eventually("released", || incoming.release().is_ok() || incoming.status() == Status::Completed);
        assert!(matches!(incoming.wait(), Arrival::Completed(RunState::Running)));
        common::assert_lives_on(&target.guest);
    });
}

#[test]
fn only_copy_without_its_disk_is_kept_until_it_has_it() {
    case("no disk", || {
        let (params, capabilities) = settings(false);
        let (target, incoming) = waiting(&params, capabilities);
        let journal = Arc::new(Journal::default());
        // The lease is not released yet.
        let (ours, theirs, lease) = LeaseHook::pair("disk", &journal);
        target.guest.add_hook(theirs);
        let sent = running(false).send(&incoming.address(), false);
        eventually("held", || incoming.status() == Status::Held);
        drop(sent);
        // A held guest has no typed error: the statistics have the sentence for the operator.
        assert!(incoming.statistics().error.is_some_and(|why| why.contains("disk")));
        sterna::Hook::release(ours.as_ref()).unwrap();
        incoming.release().expect("held");
        assert!(matches!(incoming.wait(), Arrival::Completed(RunState::Running)));
        assert_eq!(lease.holder(), Some(Side::Destination));
        assert!(journal.of(Call::GiveBack).is_empty());
        common::assert_lives_on(&target.guest);
    });
}

#[test]
fn source_that_asks_and_never_listens_is_given_up() {
    case("flood of pings", || {
        let (params, capabilities) = settings(false);
        let (target, incoming) = waiting(&params, capabilities);
        let mut flood = running(true);
        let at = flood.find(&[8, 0, 1, 0, 0]) + 5;
        // More answers than the sockets' buffers can hold.
        flood.insert(at, &[8, 0, 2, 0, 4, 0, 0, 0, 9].repeat(2_000_000));
        let sent = flood.send(&incoming.address(), true);
        eventually("the end", || incoming.status().is_terminal());
        assert!(matches!(incoming.wait(), Arrival::Failed(_)));
        drop(sent);
        assert_reset(&target);
    });
}
