//! Cuts while the guest stands: it runs on at the source, and the switchover is tried again.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use sterna::{Hook, VmError};

use super::*;
use crate::common::{multifd, parameters};
use crate::support::small;

/// Cuts all connections where *prepare* or its answer passes, once: behind it, or before its last byte.
fn at_prepare(way: Way, including: bool) -> Filter {
    at_words(way, including, &[PREPARE])
}

fn survives(settings: (Parameters, Capabilities), filter: Filter) {
    // Small: filters look at all that passes.
    let bench = Bench::new(&small(), settings, filter);
    assert_eq!(bench.arrives(), 1);
    let again = bench.migration.statistics().reconnections.remove(0);
    let stood = again.stood.expect("the guest stood");
    assert!(stood < Duration::from_secs(5), "{again:?}");
    let resumed = |event: &&Event| matches!(event, Event::Resumed);
    assert_eq!(bench.told.events().iter().filter(resumed).count(), 1, "at the source, once");
    assert_eq!(*bench.source.resumes.lock().unwrap(), 1);
    assert_eq!(*bench.target.starts.lock().unwrap(), 1);
    // What was measured of the switchover that failed is not counted.
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

/// Cannot be acquired at first: tells that, and waits for what is done about it.
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
            // All that was opened until then, in both directions.
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
