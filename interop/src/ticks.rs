//! The output of guests on the serial port: lines `tick N checksum OK`.
//!
//! N counts lines from 1, in the guest's memory. A guest that was moved or restored continues with the next
//! number. After its memory once had wrong content, it prints BAD in every line.

use crate::{Failure, Qemu};

/// One complete line of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tick {
    /// Number of the line, from 1.
    pub number: u64,
    /// Whether all memory that the guest has read had the content that it had written.
    pub ok: bool,
}

/// The complete lines in `serial`. Other text is ignored.
pub fn ticks(serial: &str) -> Vec<Tick> {
    serial.split_inclusive('\n').filter(|line| line.ends_with('\n')).filter_map(tick).collect()
}

fn tick(line: &str) -> Option<Tick> {
    let mut words = line[line.find("tick ")?..].split_whitespace().skip(1);
    let number = words.next()?.parse().ok()?;
    let verdict = (words.next()? == "checksum").then(|| words.next()).flatten()?;
    matches!(verdict, "OK" | "BAD").then_some(Tick { number, ok: verdict == "OK" })
}

/// Checks that one guest ran in these machines in order and lost nothing: every checksum is OK, and no number
/// is missing or repeated. Each machine but the first must have a tick of its own. Returns the last number.
///
/// # Errors
/// A description of the fault.
pub fn unbroken(machines: &[&Qemu]) -> Result<u64, Failure> {
    let serials: Vec<String> = machines.iter().map(|machine| machine.serial()).collect();
    unbroken_serials(&serials.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Like [`unbroken`], for the output of the machines' serial ports.
///
/// # Errors
/// A description of the fault.
pub fn unbroken_serials(serials: &[&str]) -> Result<u64, Failure> {
    if let Some(silent) = serials.iter().position(|serial| ticks(serial).is_empty()) {
        return Err(format!("the guest did not tick in machine {silent}"));
    }
    // A line may begin in one machine and end in the next.
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
