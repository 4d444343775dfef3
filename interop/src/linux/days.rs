//! A guest that stays in an image for days.
#![allow(clippy::print_stdout)]

use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use sterna_vmm::EndReason;

use super::machine::{Setup, booted, machine};
use super::ways::{Way, move_with_rest};
use super::{LONGEST_GAP, guest, over, said};
use crate::scenarios::{Failure, ensure};

const DAYS: Duration = Duration::from_secs(3 * 24 * 60 * 60);
/// Allowed difference of the guest's and the lab's clock. They are read one after the other while other work
/// runs.
const NEAR: Duration = Duration::from_secs(20);

/// The guest continues as if its machine had slept: its clocks are right, its timers fire, and its kernel has
/// no complaint.
pub(super) fn sleeps_for_days() -> Result<(), Failure> {
    const TICKS: u64 = 20;
    let setup = Setup { vcpus: 2, ..Setup::default() };
    let (here, console) = booted(&setup, None, guest::UNTIL_TOLD)?;
    console.wait_for_tick(&here, TICKS)?;
    let there = machine(&setup, None, None, None, &console)?;
    let mut later = None;
    move_with_rest(&here, &there, Way::MappedRam, || {
        later = Some(DaysLater::begin()?);
        Ok(())
    })?;
    let before = console.ticks();
    console.wait_for_tick(&there, before + TICKS)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(said)?;
    let last = console.of(guest::TICK).last().and_then(|tick| tick.get(1).copied()).unwrap_or(0);
    let behind = now.abs_diff(Duration::from_millis(last));
    println!("LAB after {} days the guest's clock is {behind:?} off", DAYS.as_secs() / 86400);
    // A kernel that detects a stall reports it after 21 s.
    console.wait_for_tick(&there, before + TICKS * 25)?;
    ensure(there.type_in(guest::END.as_bytes()) == guest::END.len(), || {
        "the console takes nothing".to_owned()
    })?;
    over(&there, &console, &EndReason::PoweredOff)?;
    ensure(behind < NEAR, || format!("the guest's clock is {behind:?} off"))?;
    console.check(&setup, None, DAYS + LONGEST_GAP).map(drop)
}

/// While this exists, the lab's clock is days ahead.
struct DaysLater;

impl DaysLater {
    fn begin() -> Result<Self, Failure> {
        shift(DAYS.as_secs().cast_signed()).map(|()| Self)
    }
}

impl Drop for DaysLater {
    fn drop(&mut self) {
        if let Err(why) = shift(-DAYS.as_secs().cast_signed()) {
            println!("LAB the clock stays days ahead: {why}");
        }
    }
}

fn shift(seconds: i64) -> Result<(), Failure> {
    let now = clock_gettime(ClockId::Realtime);
    let then = Timespec { tv_sec: now.tv_sec + seconds, ..now };
    clock_settime(ClockId::Realtime, then).map_err(said)
}
