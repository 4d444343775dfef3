//! The system calls of `rdma:`. The lab VM (`cargo xtask lab rdma`) has an adapter, and runs these cases.

use sterna::RdmaParameters;
use sterna::sandbox::Feature;

use crate::calls::{Case, Fault, check};
use crate::child::{is_child, skipped};
use crate::scenes::{Place, Scene, rdma_address};

fn cases() -> Vec<Case> {
    let scene = |name| Scene::new(name, Place::Rdma);
    let slow = |name| scene(name).multifd().limited();
    vec![
        Case::plain(scene("rdma")),
        Case::plain(scene("rdma-multifd").multifd()),
        Case::plain(scene("rdma-pinned").pinned()),
        Case { fault: Fault::Cancel, ..Case::plain(scene("rdma-cancel").limited()) },
        Case { fault: Fault::DestinationEnds, ..Case::plain(slow("rdma-destination-ends")) },
        Case { fault: Fault::StartFails, ..Case::plain(scene("rdma-start-fails")) },
        Case { fault: Fault::NoListener, ..Case::plain(scene("rdma-no-listener")) },
        // The last one: no packet arrives after it.
        Case { fault: Fault::Cut, ..Case::plain(slow("rdma-cut")) },
    ]
}

#[test]
fn rdma_makes_exactly_the_calls_of_the_table() {
    run("rdma_makes_exactly_the_calls_of_the_table", || {
        check(&cases(), |call| call.feature == Feature::Rdma);
    });
}

/// The library makes some calls once in a process: in the other test for the destination, which begins first.
#[test]
fn source_without_a_destination_in_its_process_makes_only_calls_of_the_table() {
    run("source_without_a_destination_in_its_process_makes_only_calls_of_the_table", || {
        let scene = Scene::new("rdma-alone", Place::Rdma);
        check(&[Case { fault: Fault::Alone, ..Case::plain(scene) }], |_| false);
    });
}

/// Runs a test in a child process, if the lab has an adapter for it.
fn run(name: &str, test: impl FnOnce()) {
    if rdma_address().is_none() {
        return skipped(name, "the lab VM sets STERNA_TEST_RDMA_ADDRESS");
    }
    if is_child() {
        RdmaParameters::load_libraries().unwrap();
        test();
    }
}
