//! One protection with very many checkpoints, to find growth.

use std::time::{Duration, Instant};

use sterna::Compression;
use sterna_guests::process::ProcessConfig;
use sterna_guests::{Fill, ProcessGuest};
use sterna_standby::CheckpointMode;

use super::LONGEST;
use super::case::Case;
use super::play::Play;
use crate::judge::whole;
use crate::leaks::{Belongings, resident_bytes};

/// Number of checkpoints after which memory, descriptors and threads are stable.
const SETTLED: u64 = 200;
/// Allowed growth of the process in bytes: the allocator's free pieces, and the small output of the guest.
const MOST_BYTES: u64 = 4 << 20;
/// Number of rounds; growth in all of them is an error. On a busy host, checkpoints and their buffers can
/// become larger at any time, up to the guest's memory on each side. A leak of each checkpoint grows in every
/// round.
const ROUNDS: u64 = 6;

/// Takes `count` checkpoints in each round, then hands the guest over. The process must not grow.
///
/// # Errors
/// The growth, or the step that failed.
pub fn long(seed: u64, count: u64) -> Result<String, String> {
    let drawn = Case::new(seed, 0).undisturbed();
    let case = Case {
        // Random content makes all memory resident from the beginning.
        guest: ProcessConfig { fill: Fill::Random(seed), workers: 1, ..drawn.guest.clone() },
        compression: Compression::None,
        delay: Duration::from_millis(1),
        mode: CheckpointMode::Interval,
        ..drawn
    };
    let here = ProcessGuest::boot(case.guest.clone()).map_err(|error| error.to_string())?;
    here.cont().map_err(|error| error.to_string())?;
    let there = ProcessGuest::waiting(case.guest.clone()).map_err(|error| error.to_string())?;
    let play = case.protect(&here, &there)?;
    wait_for_held(&play, SETTLED)?;
    let (before, mut grown) = (Belongings::now().and_any_mappings(), Vec::new());
    for round in 1..=ROUNDS {
        let bytes_before = resident_bytes();
        wait_for_held(&play, SETTLED + round * count)?;
        before.wait_restored(LONGEST / 4)?;
        grown.push(resident_bytes().saturating_sub(bytes_before));
        if grown.last().is_some_and(|last| *last <= MOST_BYTES) {
            break;
        }
    }
    if grown.iter().all(|grown| *grown > MOST_BYTES) {
        return Err(format!(
            "bytes more that are resident after {count} checkpoints each: {grown:?}; it was {case:?}"
        ));
    }
    let statistics = play.primary.statistics();
    play.hand_over()?;
    whole(&there)?;
    Ok(format!(
        "{} checkpoints, {} pages; pauses {:?} (median) and {:?} (99 of 100); bytes more that are resident after {count} each: {grown:?}",
        statistics.taken, statistics.pages, statistics.pause_p50, statistics.pause_p99
    ))
}

/// Waits until the standby holds checkpoint `number`. Only a lack of progress counts against the limit.
fn wait_for_held(play: &Play, number: u64) -> Result<(), String> {
    let (mut last, mut since) = (0, Instant::now());
    loop {
        let (held, state) = (play.primary.statistics().held, play.primary.state());
        if held >= number {
            return Ok(());
        }
        if held > last {
            (last, since) = (held, Instant::now());
        }
        if state.outcome.is_some() || since.elapsed() > LONGEST {
            return Err(format!("checkpoint {number} does not come; {held} are held: {state:?}"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
