//! The example that `docs/embedding.md` shows migrates.

#[allow(dead_code, reason = "its main is for a terminal")]
#[path = "../../examples/first-vmm.rs"]
mod example;

use std::sync::Arc;

use example::Machine;
use sterna::{Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, RunState, SourceVm, Vm};

#[test]
fn guest_of_the_first_vmm_counts_on_at_the_destination_in_the_same_memory() {
    let (source, target) = (Arc::new(Machine::new().unwrap()), Arc::new(Machine::new().unwrap()));
    let (parameters, capabilities) = (Parameters::default(), Capabilities::default());
    let any = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming =
        Incoming::listen(target.clone(), &any, parameters.clone(), capabilities, Arc::new(())).unwrap();
    source.start_guest();
    while source.register() < 100 {
        std::thread::yield_now();
    }

    let to = incoming.address();
    let migration = Migration::start(source.clone(), &to, parameters, capabilities, Arc::new(())).unwrap();
    assert!(matches!(migration.wait(), Outcome::Completed));
    assert!(matches!(incoming.wait(), Arrival::Completed(RunState::Running)));

    let left = source.register();
    assert_eq!(source.run_state(), RunState::Paused);
    while target.register() < left + 10 {
        std::thread::yield_now();
    }
    target.stop().unwrap();
    let (was, is) = (source.ram(), target.ram());
    for word in 0..left.min(was.block(0).pages()) {
        let at = word * sterna::ram::PAGE_BYTES;
        let (before, now) = (was.block(0).read_u64(at).unwrap(), is.block(0).read_u64(at).unwrap());
        assert!(now == before || now >= left, "page {word}: {before} became {now}");
    }
}
