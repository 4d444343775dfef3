//! Tests the postcopy forecast. It must meet bounds that hold for all guests, and agree with a guest that is
//! simulated page by page.

use super::super::simulate;
use super::*;

#[test]
fn postcopy_is_proposed_where_precopy_cannot_end_and_never_where_it_is_excluded() {
    let inputs = steady(12 * GB);

    let forecast = Forecast::new(&inputs);

    assert_eq!(forecast.advice.last(), Some(&Advice::Postcopy));
    let postcopy = forecast.postcopy.unwrap();
    assert_eq!(postcopy.switch, SwitchReason::NotConverging);
    let excluded = PostcopyInputs { excluded: Some("it is a file".into()), ..PostcopyInputs::default() };
    let without = Forecast::new(&Inputs { postcopy: excluded, ..inputs });
    assert!(without.postcopy.is_none() && !without.advice.contains(&Advice::Postcopy));
    assert_eq!(without.advice.len() + 1, forecast.advice.len());
}

#[test]
fn postcopy_sends_what_is_missing_once_at_the_links_rate_or_its_limit() {
    for dirty in [0, GB, 12 * GB, 100 * GB] {
        for limit_bytes in [None, Some(0), Some(GB)] {
            let postcopy = PostcopyInputs { limit_bytes, ..PostcopyInputs::default() };
            let inputs = Inputs { postcopy, uncertainty: 0.0, ..steady(dirty) };
            let postcopy = Forecast::new(&inputs).postcopy.unwrap();
            let rate = if limit_bytes == Some(GB) { 1e9 } else { 10e9 };
            let missing = postcopy.missing_bytes.expected.unwrap();
            let degraded = postcopy.degraded_time.expected.unwrap();
            assert!((degraded - missing / rate).abs() < 1e-6, "{postcopy:?}");
            assert!(missing <= (64u64 << 30) as f64 * 1.000_001, "{postcopy:?}");
            assert!(postcopy.faults.high.unwrap() <= postcopy.most_faults, "{postcopy:?}");
            assert!(postcopy.faults.low.unwrap() >= 0.0, "{postcopy:?}");
            // The downtime does not depend on the write rate: a sync, the data in sockets, and one range for one walk.
            assert!(postcopy.downtime.expected.unwrap() < 0.011, "{postcopy:?}");
        }
    }
}

/// Counts the pages that a guest waits for. It writes randomly to a part of RAM, and background pages are in address
/// order.
#[test]
fn faults_meet_those_of_a_guest_that_is_played_out() {
    const PAGES: usize = 20_000;
    let pages_per_second = 10_000.0;
    for writes_per_second in [20_000.0, 40_000.0, 100_000.0] {
        let class = Class { pages: PAGES as f64, writes_per_second, order: Order::Random };
        let inputs = Inputs {
            ram_bytes: PAGES as u64 * 4096,
            first_round_bytes: PAGES as u64 * 4096,
            bandwidth_bytes: (pages_per_second * 4096.0) as u64,
            dirty: DirtyModel::WorkingSet(vec![class]),
            sync: ms(1),
            downtime_limit: ms(1),
            uncertainty: 0.0,
            ..steady(0)
        };
        let postcopy = Forecast::new(&inputs).postcopy.unwrap();
        let missing = (postcopy.missing_bytes.expected.unwrap() / 4096.0) as usize;
        assert!(missing > 0 && missing <= PAGES, "{postcopy:?}");

        let mut dice = fastrand::Rng::with_seed(17);
        let mut is_missing: Vec<bool> = (0..PAGES).map(|page| page < missing).collect();
        dice.shuffle(&mut is_missing);
        let (mut faults, mut owed, mut sent) = (0u32, 0.0, 0usize);
        for page in 0..PAGES {
            // A page that the guest has waited for is not missing any more, so the background skips it.
            if !std::mem::take(&mut is_missing[page]) {
                continue;
            }
            sent += 1;
            owed += writes_per_second / pages_per_second;
            while owed >= 1.0 {
                owed -= 1.0;
                let written = dice.usize(..PAGES);
                if std::mem::take(&mut is_missing[written]) {
                    faults += 1;
                }
            }
        }
        assert!(sent <= missing);
        let expected = postcopy.faults.expected.unwrap();
        // Here the requested pages use no time of the background, so it ends sooner and there are fewer faults.
        assert!(f64::from(faults) <= expected * 1.1, "{faults} for {expected} of {missing}");
        assert!(f64::from(faults) >= expected * 0.4, "{faults} for {expected} of {missing}");
    }
}

#[test]
fn postcopy_that_an_operator_starts_is_forecast_for_then() {
    let after = |seconds| PostcopyInputs {
        after: Some(Duration::from_secs_f64(seconds)),
        ..PostcopyInputs::default()
    };
    // The first round of 20 GB takes two seconds.
    for dirty in [GB, 12 * GB] {
        for seconds in [0.0, 1.0] {
            let inputs = Inputs {
                postcopy: after(seconds),
                first_round_bytes: 20 * GB,
                uncertainty: 0.0,
                ..steady(dirty)
            };

            let postcopy = Forecast::new(&inputs).postcopy.unwrap();

            assert_eq!(postcopy.switch, SwitchReason::Operator);
            let at = postcopy.switch_at.expected.unwrap();
            assert!((seconds..seconds + 0.3).contains(&at), "{at} for {seconds}");
            let missing = postcopy.missing_bytes.expected.unwrap();
            assert!(missing >= 20e9 - at * 10e9 - 1e6, "{missing} at {at}");
            let read: Inputs = serde_json::from_str(&serde_json::to_string(&inputs).unwrap()).unwrap();
            assert_eq!(read.postcopy, inputs.postcopy);
        }
    }
    // Precopy has moved the guest before that time.
    let late = Inputs { postcopy: after(60.0), first_round_bytes: 20 * GB, ..steady(GB) };
    assert_eq!(Forecast::new(&late).postcopy.unwrap().switch, SwitchReason::AfterFirstRound);
}

#[test]
fn precopy_that_stands_still_goes_on_until_an_operator_starts_postcopy() {
    let stuck = Inputs { first_round_bytes: 20 * GB, uncertainty: 0.0, ..steady(12 * GB) };
    let postcopy = PostcopyInputs { after: Some(Duration::from_secs(300)), ..PostcopyInputs::default() };

    let postcopy = Forecast::new(&Inputs { postcopy, ..stuck.clone() }).postcopy.unwrap();

    assert_eq!(postcopy.switch, SwitchReason::Operator);
    let at = postcopy.switch_at.expected.unwrap();
    assert!((299.0..305.0).contains(&at), "{at}");
}

#[test]
fn postcopy_after_rounds_is_forecast_for_the_end_of_the_last_of_them() {
    for dirty in [8 * GB, 12 * GB] {
        let mut before = 0.0;
        for rounds in [1, 2, 40] {
            let postcopy = PostcopyInputs { after_rounds: Some(rounds), ..PostcopyInputs::default() };
            let inputs = Inputs { postcopy, first_round_bytes: 20 * GB, uncertainty: 0.0, ..steady(dirty) };

            let postcopy = Forecast::new(&inputs).postcopy.unwrap();

            // Precopy that converges has ended before that round.
            let is_over = dirty == 8 * GB && rounds == 40;
            let expected = if is_over { SwitchReason::AfterFirstRound } else { SwitchReason::AfterRounds };
            assert_eq!(postcopy.switch, expected, "{rounds} of {dirty}");
            let at = postcopy.switch_at.expected.unwrap();
            assert!(is_over || at > before, "{at} for {rounds} of {dirty}");
            before = at;
            let read: Inputs = serde_json::from_str(&serde_json::to_string(&inputs).unwrap()).unwrap();
            assert_eq!(read.postcopy, inputs.postcopy);
        }
    }
}

#[test]
fn postcopy_of_a_guest_that_converges_is_looked_at_after_the_first_round() {
    let inputs = Inputs { first_round_bytes: 20 * GB, ..steady(GB) };

    let postcopy = Forecast::new(&inputs).postcopy.unwrap();

    assert_eq!(postcopy.switch, SwitchReason::AfterFirstRound);
    let first = simulate::run(&inputs, Luck::EXPECTED).curve[0];
    assert!(postcopy.switch_at.expected.unwrap() >= first.took * 0.99, "{postcopy:?} {first:?}");
    assert!(postcopy.missing_bytes.expected.unwrap() < 4e9, "{postcopy:?}");
}
