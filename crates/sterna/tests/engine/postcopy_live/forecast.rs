//! Compares a forecast of a postcopy with the statistics of the postcopy that follows.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sterna::forecast::{
    Class, DirtyModel, Fixed, Forecast, Inputs, Order, PostcopyInputs, SwitchReason, UNCERTAINTY,
};
use sterna::ram::PAGE_SIZE;
use sterna::{Event, Migration, Observer, Parameters, Vm};
use sterna_guests::model::{Fill, Pattern};
use sterna_guests::process::ProcessConfig;

use super::capabilities;
use crate::common;

const RAM: u64 = 16 << 20;
const BANDWIDTH: u64 = 32 << 20;
const POSTCOPY_BANDWIDTH: u64 = 2 << 20;
const WRITES_PER_SECOND: u64 = 1600;
/// Allowed factor in both directions. On a busy machine the writers' share may be smaller, and a waiting guest causes
/// fewer faults.
const OFF: f64 = 4.0;

/// Switches to postcopy after the first round, as the forecast assumes.
#[derive(Default)]
struct SwitchAfterFirstRound(OnceLock<Arc<Migration>>);

impl Observer for SwitchAfterFirstRound {
    fn event(&self, event: &Event) {
        if matches!(event, Event::Round(2)) {
            // The handle is set long before, because the round lasts half a second.
            self.0.wait().start_postcopy().unwrap();
        }
    }
}

/// Both links and the writers are limited to rates far below the capacity of any machine.
#[test]
fn forecast_of_a_paced_postcopy_is_of_the_same_order_as_what_comes() {
    let Some(on) = capabilities(true) else { return };
    let class = Class {
        pages: (RAM / PAGE_SIZE as u64) as f64,
        writes_per_second: WRITES_PER_SECOND as f64,
        order: Order::Random,
    };
    let forecast = Forecast::new(&Inputs {
        ram_bytes: RAM,
        first_round_bytes: RAM,
        bandwidth_bytes: BANDWIDTH,
        switchover_bandwidth_bytes: None,
        avail_switchover_bandwidth_bytes: None,
        dirty: DirtyModel::WorkingSet(vec![class]),
        sync: Duration::from_millis(1),
        downtime_limit: Duration::from_millis(300),
        fixed: Fixed::default(),
        postcopy: PostcopyInputs { limit_bytes: Some(POSTCOPY_BANDWIDTH), ..PostcopyInputs::default() },
        uncertainty: UNCERTAINTY,
    });
    let said = forecast.postcopy.expect("nothing excludes it");
    assert_eq!(said.switch, SwitchReason::AfterFirstRound);

    let config = ProcessConfig {
        blocks: vec![("ram.low".into(), RAM / 4 * 3), ("ram.high".into(), RAM / 4)],
        fill: Fill::Random(7),
        workers: 4,
        rate: WRITES_PER_SECOND / 4,
        pattern: Pattern::Random,
        ..common::config()
    };
    let params = Parameters {
        max_bandwidth_bytes: BANDWIDTH,
        max_postcopy_bandwidth_bytes: POSTCOPY_BANDWIDTH,
        // Prevents the end of precopy.
        downtime_limit: Duration::ZERO,
        ..common::parameters()
    };
    let (source, target) = common::pair(&config);
    assert_eq!(source.ram().blocks().iter().map(|block| block.len_bytes()).sum::<u64>(), RAM);
    let incoming = common::listen(&target, &params, on);
    let observer = Arc::new(SwitchAfterFirstRound::default());
    let migration = common::start(&source, &incoming.address(), &params, on, Arc::clone(&observer) as _);
    let migration = Arc::new(migration);
    assert!(observer.0.set(Arc::clone(&migration)).is_ok());
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    common::assert_arrived(&outcome, &arrival, &target);

    let ours = migration.statistics();
    let theirs = incoming.statistics().postcopy.expect("it ran early");
    let postcopy = ours.postcopy.expect("the guest went on");
    let degraded = theirs.complete.unwrap() - theirs.started.unwrap();
    for (what, expected, was) in [
        ("switch", said.switch_at.expected, postcopy.at.as_secs_f64()),
        ("missing bytes", said.missing_bytes.expected, postcopy.missing_bytes as f64),
        ("degraded time", said.degraded_time.expected, degraded.as_secs_f64()),
    ] {
        let expected = expected.expect("it was forecast");
        assert!(
            was > expected / OFF && was < expected * OFF,
            "{what}: {was}, and {expected} was expected of {said:?}"
        );
    }
    // Each missing page is waited for at most once, and some missing pages were not dirtied.
    assert!(ours.postcopy_requests as f64 <= said.most_faults * OFF, "{}: {said:?}", ours.postcopy_requests);
    assert!(ours.postcopy_requests * PAGE_SIZE as u64 <= postcopy.missing_bytes, "{postcopy:?}");
}
