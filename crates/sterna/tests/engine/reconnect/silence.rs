//! A network that delivers nothing, without closing a connection. The source notices this within seconds and uses
//! another connection. The lost time counts from the beginning of the silence.

use std::time::Duration;

use sterna_link::{Link, Shape};

use super::*;
use crate::support::eventually;

/// Longer than the limit after which another connection is tried, and shorter than the general stall limit.
const OUTAGE: Duration = Duration::from_secs(6);

/// Prints why a test cannot run here, in the form that the test command repeats.
#[allow(clippy::print_stderr, reason = "says what was skipped")]
fn skip(test: &str, why: &str) {
    eprintln!("SKIPPED {test}: {why}");
}

#[test]
fn silent_network_is_left_for_another_connection_and_its_whole_silence_is_reported() {
    let shape = Shape { bytes_per_second: 10_000_000, delay: Duration::from_millis(1), ..Shape::default() };
    let link = match Link::new(shape, sterna_testing::seed("silent_network")) {
        Ok(link) => link,
        Err(why) => return skip("silent_network", &why),
    };
    let (params, capabilities) = surviving(common::multifd(2));
    let (source, target) = common::pair(&config());
    let (source, target) = (TestVm::new(source), TestVm::new(target));
    let address = format!("tcp:{}:0", link.far().address()).parse().unwrap();
    let incoming = link.far().run(|| {
        Incoming::listen(Arc::clone(&target) as _, &address, params.clone(), capabilities, Arc::new(()))
            .unwrap()
    });
    let to = incoming.address();
    let migration = link.near().run(|| vm::start(&source, &to, &params, capabilities, Arc::new(())));
    eventually("some pages to be sent", || migration.statistics().transferred_bytes > 1 << 20);

    link.set_both(Shape { is_cut: true, ..shape });
    std::thread::sleep(OUTAGE);
    link.set_both(shape);

    let (outcome, arrival) = (migration.wait(), incoming.wait());
    common::assert_arrived(&outcome, &arrival, &target.guest);
    let reconnections = migration.statistics().reconnections;
    assert_eq!(reconnections.len(), 1, "{reconnections:?}");
    // The last acknowledgement may have arrived shortly before the cut, but not later.
    assert!(reconnections[0].took + Duration::from_millis(500) >= OUTAGE, "{reconnections:?}");
}
