//! Migrations between two processes over a wire, with disturbances drawn from a seed. The checks: which side
//! may run the guest afterwards, which resources are left, and whether the next migration works.
//!
//! The guest writes its memory all the time and checks it ([`sterna_guests`]). A second running guest, a lost
//! write and a stale page are therefore all detected. The same guest migrates to and fro as long as it lives.
#![allow(clippy::print_stdout)]

mod case;
mod disturbance;
mod left;
mod place;

use std::ops::Range;
use std::time::{Duration, Instant};

pub(super) use place::Place;
pub(in crate::lab) use place::serve;

use super::wire::Wire;
use crate::Failure;
use case::{Case, Guest, Places};

/// Runs the migrations of a seed with these numbers. Returns how many of them violated a property.
pub(in crate::lab) fn run(seed: u64, numbers: Range<u64>) -> i32 {
    match played(seed, numbers) {
        Ok(failures) => failures,
        Err(why) => {
            println!("LAB reliability: {why}");
            -1
        }
    }
}

fn played(seed: u64, numbers: Range<u64>) -> Result<i32, Failure> {
    let count = numbers.end - numbers.start;
    println!("LAB reliability: {count} migrations, seed {seed}, from {}", numbers.start);
    let began = Instant::now();
    let wire = Wire::with("pfifo")?;
    let mut places = Places::default();
    let (mut failures, mut completed) = (0, 0);
    for number in numbers {
        let case = Case::of(seed, number);
        let begin = Instant::now();
        let verdict = match case.play(&mut places, &wire) {
            Ok(end) => {
                completed += i32::from(end.guest == Guest::Arrived);
                format!("{} ok", end.said)
            }
            Err(why) => {
                failures += 1;
                // New processes, so that a failure does not affect the next migration.
                places = Places::default();
                wire.restore()?;
                wire.renew()?;
                format!("FAILED: {why}")
            }
        };
        println!("LAB {number} of seed {seed}: {}: {verdict} ({})", case.name(), in_seconds(begin.elapsed()));
    }
    let took = in_seconds(began.elapsed());
    println!("LAB reliability: {count} migrations in {took}: {completed} arrived, {failures} went wrong");
    Ok(failures)
}

fn in_seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
