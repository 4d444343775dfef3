//! Tests a published case: 64 vCPUs, 256 GiB, B = 15 GB/s, D = 10 GB/s. A sync took 73 ms before dirty bitmaps were
//! merged by words, and 12 ms after that.

use super::super::rules::qemu::Regime;
use super::super::rules::{Comparison, Load, qemu, sterna};
use super::ms;

const B: f64 = 15e9;
const D: f64 = 10e9;

fn near(value: f64, expected: f64) {
    assert!((value - expected).abs() < expected * 1e-3, "{value} is not {expected}");
}

fn load(sync_ms: u64) -> Load {
    Load { bandwidth_bytes: B, dirty_bytes: D, sync: ms(sync_ms), downtime_limit: ms(150), fixed: ms(0) }
}

#[test]
fn qemus_rule_needs_the_published_downtime_limits() {
    near(qemu::downtime_needed(B, D, ms(73)).unwrap(), 0.219);
    near(qemu::downtime_needed(B, D, ms(12)).unwrap(), 0.02727);
    assert_eq!(qemu::downtime_needed(B, B, ms(12)), None);
}

#[test]
fn qemus_two_formulas_give_the_published_rates() {
    let slow = qemu::Regimes::of(B, D, ms(73), ms(150));
    near(slow.largest_by_long, 7.7e9);
    near(slow.largest_by_short.unwrap(), 5.352e9);
    let fast = qemu::Regimes::of(B, D, ms(12), ms(150));
    near(fast.largest_by_long, 13.8e9);
    near(fast.largest_by_short.unwrap(), 13.75e9);
}

#[test]
fn qemus_formulas_count_only_inside_their_regimes() {
    let slow = Comparison::new(&load(73));
    near(slow.qemu.largest_dirty_bytes, 7.7e9);
    assert_eq!((slow.qemu_regimes.needed, slow.qemu_regimes.largest), (Some(Regime::Long), Regime::Long));
    assert!(!slow.qemu.converges);
    let fast = Comparison::new(&load(12));
    near(fast.qemu.largest_dirty_bytes, 13.8e9);
    assert_eq!((fast.qemu_regimes.needed, fast.qemu_regimes.largest), (Some(Regime::Short), Regime::Long));
    assert!(fast.qemu.converges);
}

#[test]
fn qemus_regimes_meet_at_the_window_without_a_gap() {
    for sync_us in (0..150_000).step_by(1_250) {
        let x = std::time::Duration::from_micros(sync_us);
        let mut before = 0.0;
        for step in 1..2000 {
            let d = B * f64::from(step) / 2000.0;
            let needed = qemu::downtime_needed(B, d, x).unwrap();
            assert!(needed >= before, "x = {x:?}, D = {d}: {needed} after {before}");
            before = needed;
            // Both questions must have the same answer.
            let back = qemu::largest_dirty_rate(B, x, std::time::Duration::from_secs_f64(needed));
            assert!(x.is_zero() || (back - d).abs() < B * 1e-5, "x = {x:?}, D = {d}, back {back}");
        }
    }
}

#[test]
fn sternas_rule_needs_one_sync_and_what_was_dirtied_in_it() {
    near(sterna::downtime_needed(B, D, ms(73), ms(0)).unwrap(), 0.073 * (1.0 + 10.0 / 15.0));
    near(sterna::downtime_needed(B, D, ms(12), ms(5)).unwrap(), 0.025);
    assert_eq!(sterna::downtime_needed(B, B, ms(12), ms(0)), None);
    // 150 ms minus one sync of 73 ms leaves 77 ms: enough for one sync's pages at any rate below the bandwidth.
    near(sterna::largest_dirty_rate(B, ms(73), ms(150), ms(0)), B);
    near(sterna::largest_dirty_rate(B, ms(100), ms(150), ms(0)), B / 2.0);
    assert_eq!(sterna::largest_dirty_rate(B, ms(100), ms(150), ms(60)), 0.0);
}

#[test]
fn what_fits_is_the_rule_with_its_margin_and_both_of_its_questions_have_one_answer() {
    let needed = sterna::limit_that_fits(B, D, ms(12), ms(5)).unwrap();
    // A round lasts as long as a sync and half of the time to send the pages written in it.
    let remaining = D / B * 0.012 / (1.0 - D / B / 2.0) + super::super::simulate::QUEUED_BYTES / B;
    near(needed, 0.005 + (0.012 + remaining) * 1.15);
    near(sterna::largest_that_fits(B, ms(12), std::time::Duration::from_secs_f64(needed), ms(5)), D);
    assert_eq!(sterna::limit_that_fits(B, B, ms(12), ms(5)), None);
    // The limit minus the fixed costs is not enough. In the second case, a quarter of the limit is.
    assert_eq!(sterna::largest_that_fits(B, ms(12), ms(30), ms(20)), 0.0);
    assert!(sterna::largest_that_fits(B, ms(12), ms(60), ms(59)) > 0.0);
}

#[test]
fn sterna_is_never_behind_qemu_and_never_ahead_of_physics() {
    for sync_ms in [0, 1, 12, 50, 73, 99, 100, 101, 149, 150, 400] {
        for limit_ms in [1, 30, 99, 100, 101, 150, 300, 2000] {
            for gigabytes in [0.0, 1.0, 5.0, 10.0, 14.9] {
                let load =
                    Load { dirty_bytes: gigabytes * 1e9, downtime_limit: ms(limit_ms), ..load(sync_ms) };
                let all = Comparison::new(&load);
                assert!(all.physics.largest_dirty_bytes >= all.sterna.largest_dirty_bytes);
                assert!(all.physics.downtime_needed <= all.sterna.downtime_needed);
                assert!(all.sterna.largest_dirty_bytes >= all.engine.largest_dirty_bytes);
                // QEMU's rule does not include the last sync, so its result can be lower without being better.
                // Compare the downtime that the guest has.
                let seen = all.qemu.downtime_needed.unwrap() + load.sync.as_secs_f64();
                assert!(seen + 1e-9 >= all.sterna.downtime_needed.unwrap(), "{load:?}: {all:?}");
            }
        }
    }
}
