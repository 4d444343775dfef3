//! What guests say of themselves: `tick N checksum OK`, one line after another, on the serial port.
//!
//! N counts lines, from 1, in the guest's memory. A guest that was moved or restored goes on with the next
//! number, and says BAD for ever from the first time that its memory was not what it had written.

use crate::{Failure, Qemu};

/// One whole line of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tick {
    /// Its number.
    pub number: u64,
    /// Whether all that the guest has read was what it had written.
    pub ok: bool,
}

/// The whole lines in `serial`, which may hold anything else besides.
pub fn ticks(serial: &str) -> Vec<Tick> {
    serial.split_inclusive('\n').filter(|line| line.ends_with('\n')).filter_map(tick).collect()
}

fn tick(line: &str) -> Option<Tick> {
    let mut words = line[line.find("tick ")?..].split_whitespace().skip(1);
    let number = words.next()?.parse().ok()?;
    let verdict = (words.next()? == "checksum").then(|| words.next()).flatten()?;
    matches!(verdict, "OK" | "BAD").then_some(Tick { number, ok: verdict == "OK" })
}

/// Checks that one guest ran in these machines, one after the other, and lost nothing: every checksum OK, no
/// number missing or twice, and each machine but the first had a tick of its own. Gives back the last number.
///
/// # Errors
/// What is wrong.
pub fn unbroken(machines: &[&Qemu]) -> Result<u64, Failure> {
    let serials: Vec<String> = machines.iter().map(|machine| machine.serial()).collect();
    unbroken_serials(&serials.iter().map(String::as_str).collect::<Vec<_>>())
}

/// [`unbroken`], of what came over the machines' serial ports.
///
/// # Errors
/// What is wrong.
pub fn unbroken_serials(serials: &[&str]) -> Result<u64, Failure> {
    if let Some(silent) = serials.iter().position(|serial| ticks(serial).is_empty()) {
        return Err(format!("the guest did not tick in machine {silent}"));
    }
    // A line may have begun in one machine and ended in the next.
    let all = ticks(&serials.concat());
    for pair in all.windows(2) {
        if pair[1].number != pair[0].number + 1 {
            return Err(format!("tick {} came after tick {}", pair[1].number, pair[0].number));
        }
    }
    match (all.iter().find(|tick| !tick.ok), all.last()) {
        (Some(bad), _) => Err(format!("the guest's memory changed: tick {} is BAD", bad.number)),
        (None, Some(last)) => Ok(last.number),
        (None, None) => Err("the guest did not tick".into()),
    }
}
