//! Cuts while the guest is stopped: it resumes at the source, and the switchover is repeated.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use sterna::{Hook, RunState, VmError};
use sterna_proto::source::Refusal;

use super::*;
use crate::common::{multifd, parameters};
use crate::support::small;

/// Cuts all connections where *prepare* or its answer passes, once: after it, or before its last byte.
fn at_prepare(way: Way, including: bool) -> Filter {
    at_words(way, including, &[PREPARE])
}

fn survives(settings: (Parameters, Capabilities), filter: Filter) {
    // A small guest, because filters search all forwarded bytes.
    let bench = Bench::new(&small(), settings, filter);
    assert_eq!(bench.arrives(), 1);
    let again = bench.migration.statistics().reconnections.remove(0);
    let stood = again.stood.expect("the guest stood");
    assert!(stood < Duration::from_secs(5), "{again:?}");
    let resumed = |event: &&Event| matches!(event, Event::Resumed);
    assert_eq!(bench.told.events().iter().filter(resumed).count(), 1, "at the source, once");
    assert_eq!(*bench.source.resumes.lock().unwrap(), 1);
    assert_eq!(*bench.target.starts.lock().unwrap(), 1);
    // The failed switchover's times are not counted.
    let steps = bench.migration.statistics().switchover;
    let stops = steps.iter().filter(|(step, _)| *step == sterna::SwitchoverStep::Stop).count();
    assert_eq!(stops, 1, "{steps:?}");
}

#[test]
fn guest_survives_a_cut_before_the_destination_is_asked_to_prepare() {
    for settings in [multifd(2), (parameters(), Capabilities::default())] {
        let filter = at_prepare(Way::Forward, false);
        survives(surviving(settings), filter);
    }
}

#[test]
fn guest_survives_a_cut_while_the_destination_prepares() {
    let filter = at_prepare(Way::Forward, true);
    survives(surviving(multifd(2)), filter);
}

#[test]
fn guest_survives_the_loss_of_the_answer_to_prepare() {
    for settings in [multifd(2), (parameters(), Capabilities::default())] {
        let filter = at_prepare(Way::Back, false);
        survives(surviving(settings), filter);
    }
}

/// A hook that cannot be acquired at first. It reports that, and waits for the test.
struct TakenBack(Mutex<Option<(Sender<()>, Receiver<()>)>>);

impl Hook for TakenBack {
    fn name(&self) -> String {
        "lease".to_owned()
    }
    fn release(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn take_back(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn acquire(&self) -> Result<(), VmError> {
        match self.0.lock().unwrap().take() {
            Some((tell, done)) => {
                tell.send(()).unwrap();
                done.recv_timeout(WINDOW).unwrap();
                Err(VmError::new("acquire the lease", "the source holds it"))
            }
            None => Ok(()),
        }
    }
    fn give_back(&self) {}
}

#[test]
fn guest_survives_a_hook_that_the_source_took_back_before_its_loss_was_heard() {
    let (source, target) = common::pair(&small());
    let ((tell, told), (done, is_done)) = (channel(), channel());
    target.add_hook(Arc::new(TakenBack(Mutex::new(Some((tell, is_done))))));
    let (params, capabilities) = surviving(multifd(2));
    let vms = (TestVm::new(source), TestVm::new(target));
    let bench = Bench::between(vms, (&params, &params), capabilities, Box::new(|_, _, _, _| Verdict::Pass));
    told.recv_timeout(WINDOW).unwrap();
    bench.proxy.cut();
    done.send(()).unwrap();
    assert_eq!(bench.arrives(), 1);
}

/// A hook that cannot be released once, and fails after the connection is lost.
struct Unreleased(Mutex<Option<(Sender<()>, Receiver<()>)>>);

impl Hook for Unreleased {
    fn name(&self) -> String {
        "disk".to_owned()
    }
    fn release(&self) -> Result<(), VmError> {
        let Some((tell, done)) = self.0.lock().unwrap().take() else { return Ok(()) };
        tell.send(()).unwrap();
        done.recv_timeout(WINDOW).unwrap();
        Err(VmError::new("release the disk", "it is busy"))
    }
}

/// The hook is undone with the rest of the switchover, and the next switchover releases it.
#[test]
fn hook_that_fails_after_the_loss_is_not_the_reason_of_anything_later() {
    let (source, target) = common::pair(&small());
    let ((tell, told), (done, is_done)) = (channel(), channel());
    source.add_hook(Arc::new(Unreleased(Mutex::new(Some((tell, is_done))))));
    let (params, capabilities) = surviving(multifd(2));
    let vms = (TestVm::new(source), TestVm::new(target));
    let bench = Bench::between(vms, (&params, &params), capabilities, Box::new(|_, _, _, _| Verdict::Pass));
    told.recv_timeout(WINDOW).unwrap();
    bench.proxy.refuse(true);
    bench.proxy.cut();
    // The thread that reports the loss waits for the hook. The refusal of an operator's call contains the migration's
    // status.
    let is_lost = || {
        let refused = bench.migration.continue_switchover().unwrap_err();
        matches!(refused, Refusal::NotPreSwitchover { state } if state.qemu_status() == "active")
    };
    crate::support::eventually("the loss", is_lost);
    done.send(()).unwrap();
    crate::support::eventually("the outage", || bench.migration.statistics().disconnected.is_some());
    assert_eq!(bench.migration.statistics().error, None);
    bench.proxy.refuse(false);
    assert_eq!(bench.arrives(), 1);
}

/// Cuts the connection, and accepts no new one while `is_blocked` is set.
fn lost_answer(is_blocked: &Arc<AtomicBool>) -> Filter {
    let (is_blocked, mut at_answer, mut has_cut) =
        (Arc::clone(is_blocked), at_prepare(Way::Back, false), false);
    Box::new(move |line, way, offset, piece| {
        if is_blocked.load(Ordering::SeqCst) {
            piece.clear();
            return Verdict::Cut;
        }
        let verdict = at_answer(line, way, offset, piece);
        if verdict == Verdict::Cut && !std::mem::replace(&mut has_cut, true) {
            is_blocked.store(true, Ordering::SeqCst);
        }
        verdict
    })
}

/// The guest runs at the source again, and its migration continues.
#[test]
fn operator_may_decide_whether_the_guest_starts_after_a_lost_answer_to_prepare() {
    for decisions in [&[false][..], &[false, true]] {
        let is_blocked = Arc::new(AtomicBool::new(false));
        let bench = Bench::new(&small(), surviving(multifd(2)), lost_answer(&is_blocked));
        crate::support::eventually("the loss", || is_blocked.load(Ordering::SeqCst));
        crate::support::eventually("it runs on", || *bench.source.resumes.lock().unwrap() == 1);

        for &on in decisions {
            crate::support::eventually("the decision", || bench.incoming.set_autostart(on));
        }
        is_blocked.store(false, Ordering::SeqCst);

        let (outcome, arrival) = (bench.migration.wait(), bench.incoming.wait());
        assert!(matches!(outcome, sterna::Outcome::Completed), "{outcome:?}");
        let starts = decisions.last() == Some(&true);
        let state = if starts { RunState::Running } else { RunState::Paused };
        assert!(matches!(&arrival, sterna::Arrival::Completed(is) if *is == state), "{arrival:?}");
        assert_eq!(*bench.target.starts.lock().unwrap(), u32::from(starts));
        assert!(!bench.incoming.set_autostart(!starts), "too late");
    }
}

#[test]
fn guest_that_stands_while_the_network_falls_silent_runs_on() {
    for settings in [multifd(2), (parameters(), Capabilities::default())] {
        let (params, capabilities) = surviving(settings);
        let (mut last, mut is_silent, mut mains) = (Vec::new(), false, 0);
        let filter: Filter = Box::new(move |line, way, offset, piece| {
            if line == Line::Main && way == Way::Forward {
                mains += usize::from(offset == 0);
                last.extend_from_slice(piece);
                is_silent |= last.windows(PREPARE.len()).any(|window| window == PREPARE);
                last.drain(..last.len().saturating_sub(PREPARE.len() - 1));
            }
            // All connections that were opened until then, in both directions.
            if is_silent && mains == 1 {
                piece.clear();
                return Verdict::Hold;
            }
            Verdict::Pass
        });
        let mut params = impatient(params);
        params.limits.prepare = Duration::from_secs(120);
        let bench = Bench::new(&small(), (params, capabilities), filter);
        assert_eq!(bench.arrives(), 1);
        let again = bench.migration.statistics().reconnections.remove(0);
        let stood = again.stood.expect("the guest stood");
        assert!(stood < Duration::from_secs(60), "it has waited for *prepare*: {again:?}");
        assert_eq!(*bench.source.resumes.lock().unwrap(), 1);
    }
}
