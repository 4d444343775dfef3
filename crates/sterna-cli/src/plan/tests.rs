use std::time::Duration;

use sterna::forecast::{DirtyModel, Fixed, Inputs, Point, PostcopyInputs};

use super::*;

fn published(sync_ms: u64, ram_bytes: u64) -> Plan {
    let inputs = Inputs {
        ram_bytes,
        first_round_bytes: ram_bytes,
        bandwidth_bytes: 15_000_000_000,
        switchover_bandwidth_bytes: None,
        avail_switchover_bandwidth_bytes: None,
        dirty: DirtyModel::Rate(10_000_000_000),
        sync: Duration::from_millis(sync_ms),
        downtime_limit: Duration::from_millis(150),
        fixed: Fixed::default(),
        postcopy: PostcopyInputs::default(),
        uncertainty: 0.1,
    };
    Plan::new(inputs, Vec::new(), None)
}

#[test]
fn plan_of_the_published_case_shows_both_rules() {
    let slow = table(&published(73, 0));

    for part in ["219 ms", "7.70 GB/s", "5.35 GB/s", "122 ms", "168 ms", "It will not converge"] {
        assert!(slow.contains(part), "{part} is missing in\n{slow}");
    }
    let fast = table(&published(12, 0));
    for part in ["27.3 ms", "13.8 GB/s", "13.8 GB/s", "20.0 ms"] {
        assert!(fast.contains(part), "{part} is missing in\n{fast}");
    }
}

#[test]
fn plan_as_json_explains_itself_and_is_read_again() {
    let plan = published(73, 256 << 30);

    let value: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    let again: Plan = serde_json::from_str(&plan.to_json()).unwrap();

    assert_eq!(value["schema"], "sterna-plan");
    let near = |value: &serde_json::Value, expected: f64| {
        (value.as_f64().unwrap() - expected).abs() < expected * 1e-3
    };
    assert!(near(&value["rules"]["qemu"]["downtime_needed"], 0.219), "{value}");
    assert!(near(&value["rules"]["qemu"]["largest_dirty_bytes"], 7.7e9), "{value}");
    assert_eq!(value["inputs"]["sync"], 0.073);
    // This includes the margin, and a sync that begins in the middle of a round.
    assert!(near(&value["rules"]["engine"]["downtime_needed"], 0.168), "{value}");
    assert_eq!(value["forecast"]["convergent"], false);
    assert_eq!(again.converges(), plan.converges());
}

#[test]
fn plan_that_will_not_converge_says_what_to_change() {
    let mut inputs = published(12, 256 << 30).inputs;
    inputs.dirty = DirtyModel::Rate(20_000_000_000);

    let plan = Plan::new(inputs, Vec::new(), None);
    let text = table(&plan);

    assert!(!plan.converges());
    for part in ["NOT converge", "does not end", "no limit suffices", "auto-converge", "max-bandwidth"] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}

#[test]
fn plan_of_a_guest_that_precopy_cannot_move_proposes_postcopy_unless_it_cannot_be_used() {
    let mut inputs = published(12, 256 << 30).inputs;
    inputs.dirty = DirtyModel::Rate(20_000_000_000);
    let plan = Plan::new(inputs.clone(), Vec::new(), None);
    let text = table(&plan);
    for part in
        ["x-sterna-non-convergence", "postcopy-ram", "degraded", "page faults", "assumptions about postcopy"]
    {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let value: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    assert!(value["forecast"]["postcopy"]["degraded_time"]["expected"].as_f64().unwrap() > 1.0, "{value}");
    assert_eq!(value["forecast"]["postcopy"]["switch"], "not-converging");

    inputs.postcopy.excluded = Some("the capability xbzrle is on".into());
    let text = table(&Plan::new(inputs, Vec::new(), None));

    assert!(text.contains("Postcopy cannot be used: the capability xbzrle is on."), "{text}");
    assert!(!text.contains("x-sterna-non-convergence") && !text.contains("degraded"), "{text}");
}

#[test]
fn picture_of_any_plan_is_whole_and_needs_nothing_else() {
    let mut measured = published(12, 4 << 30).inputs;
    let point = |ms, distinct_bytes| Point { interval: Duration::from_millis(ms), distinct_bytes };
    measured.dirty = DirtyModel::Curve(vec![point(100, 1 << 28), point(1000, 1 << 29)]);
    let mut endless = measured.clone();
    endless.dirty = DirtyModel::Rate(u64::MAX);
    let plans = [
        published(73, 0),
        published(0, 256 << 30),
        Plan::new(measured, Vec::new(), None),
        Plan::new(endless, Vec::new(), None),
    ];
    for plan in plans {
        let text = picture(&plan);

        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        assert!(!text.contains("NaN") && !text.contains("inf\"") && !text.contains("inf "), "{text}");
        for element in ["rect", "path", "text", "title", "style"] {
            let opened =
                text.matches(&format!("<{element} ")).count() + text.matches(&format!("<{element}>")).count();
            assert_eq!(opened, text.matches(&format!("</{element}>")).count(), "{element}");
        }
    }
}
