//! A QEMU with the boot sector as its guest. The guest's pace is set from outside.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::content::Load;
use super::super::{BLOCK, MEMORY_MIB, MIB};
use super::guest::sweep;
use super::{LIMIT, Words};
use crate::lab::rdma::blocks::address_of;
use crate::qemu::PATIENCE;
use crate::{
    Accelerator, Builder, Failure, Guest, LAST_STEP_ADDRESS, MOST_LATE_ADDRESS, PACE_ADDRESS, Qemu, Ram, Root,
};

pub(super) fn machine() -> Result<Builder, Failure> {
    let root = Root::qemu().ok_or("there is no QEMU in the tree")?;
    let builder = Qemu::builder(&root).memory_mib(MEMORY_MIB).ram(Ram::Object).guest(Guest::Scattered);
    Ok(builder.accelerator(Accelerator::Tcg))
}

/// Starts a QEMU whose guest has finished its first pass and runs at this pace. The rest of its memory is
/// noise.
pub(super) fn boot(pace: Duration) -> Result<(Qemu, Words), Failure> {
    let mut qemu = machine()?.spawn()?;
    qemu.wait_for_ticks(1)?;
    let words = Words::of(qemu.pid(), address_of(&mut qemu, BLOCK)?)?;
    for at in (sweep().end()..MEMORY_MIB * MIB).step_by(MIB as usize) {
        if let Some(bytes) = Load::Random.piece(at, MEMORY_MIB * MIB) {
            words.write(at, &bytes)?;
        }
    }
    let ticks = pace.as_secs_f64() * ticks_per_second(&words)?;
    for address in [MOST_LATE_ADDRESS, PACE_ADDRESS] {
        words.write(address, &(ticks as u32).to_le_bytes())?;
    }
    Ok((qemu, words))
}

/// Ticks per second of the guest's time-stamp counter. With a pace, the guest stores the time of each step.
/// The word wraps after more than a second.
fn ticks_per_second(words: &Words) -> Result<f64, Failure> {
    const AT_ONCE: u32 = 1;
    words.write(PACE_ADDRESS, &AT_ONCE.to_le_bytes())?;
    std::thread::sleep(Duration::from_millis(100));
    let (began, first) = (Instant::now(), words.word(LAST_STEP_ADDRESS)?);
    std::thread::sleep(Duration::from_millis(500));
    let last = words.word(LAST_STEP_ADDRESS)?;
    Ok(f64::from(last.wrapping_sub(first)) / began.elapsed().as_secs_f64())
}

/// Waits until the source has completed. Returns its rounds and its downtime in ms. A migration that exceeds
/// the limit is cancelled.
pub(super) fn sent(qemu: &mut Qemu) -> Result<(u64, f64), Failure> {
    let begin = Instant::now();
    loop {
        let left = LIMIT.saturating_sub(begin.elapsed());
        let event =
            qemu.qmp().next_event(left).map_err(|error| format!("{error}; QEMU said: {}", qemu.log()))?;
        let Some(event) = event else {
            let told = qemu.execute("query-migrate", Value::Null)?;
            qemu.execute("migrate_cancel", json!({}))?;
            return Err(format!("it did not converge, {} rounds", told["ram"]["dirty-sync-count"]));
        };
        match event.data["status"].as_str().filter(|_| event.name == "MIGRATION") {
            Some("completed") => break,
            Some("failed" | "cancelled") => return Err(format!("{event:?}; QEMU said: {}", qemu.log())),
            _ => {}
        }
    }
    let told = qemu.execute("query-migrate", Value::Null)?;
    let rounds = told["ram"]["dirty-sync-count"].as_u64();
    let pause = told["downtime"].as_f64();
    Ok((rounds.ok_or("no rounds")?, pause.ok_or("no downtime")?))
}

/// Waits until the destination has completed.
pub(super) fn arrived(qemu: &mut Qemu) -> Result<(), Failure> {
    let begin = Instant::now();
    while qemu.execute("query-migrate", Value::Null)?["status"] != "completed" {
        if begin.elapsed() > PATIENCE {
            return Err(format!("it does not arrive; QEMU said: {}", qemu.log()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
