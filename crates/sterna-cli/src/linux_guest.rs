//! The init process of the guest of `sterna demo --linux`.
//! This executable writes memory, checks it, and counts its steps.

use std::path::Path;
use std::time::Duration;

/// The environment variable that marks the guest's init. The kernel passes it from its command line.
const VARIABLE: &str = "STERNA_DEMO_GUEST";
/// The word before a step's number and the number of wrong words of memory so far.
const TICK: &str = "STERNA-TICK";
/// Pause between two steps.
const REST: Duration = Duration::from_millis(20);
/// Memory that the guest writes repeatedly: 32 MiB, an eighth per step.
const WORDS: usize = 4 << 20;
const PARTS: usize = 8;

/// Whether this process is the guest's init.
pub fn is_init() -> bool {
    std::process::id() == 1 && std::env::var_os(VARIABLE).is_some()
}

/// The kernel command line that starts this executable as the guest's init.
pub fn command_line() -> String {
    // `LD_LIBRARY_PATH` makes the loader find all shared libraries in one directory, independent of the
    // distribution.
    format!("console=ttyS0 quiet panic=-1 {VARIABLE}=1 LD_LIBRARY_PATH={LIBRARIES}")
}

/// Directory of the shared libraries in the initrd.
pub const LIBRARIES: &str = "/lib64";

/// Writes and checks memory until the machine stops.
pub fn run() -> ! {
    let mut memory = vec![0u64; WORDS];
    let value = |step: u64, index: usize| (step << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut written = [0u64; PARTS];
    let mut wrong = 0;
    for number in 1u64.. {
        let part = number as usize % PARTS;
        let (begin, before) = (part * (WORDS / PARTS), written[part]);
        for (index, word) in memory[begin..begin + WORDS / PARTS].iter_mut().enumerate() {
            wrong += usize::from(before > 0 && *word != value(before, index));
            *word = value(number, index);
        }
        written[part] = number;
        crate::terminal::print(&format!("{TICK} {number} {wrong}"));
        std::thread::sleep(REST);
    }
    unreachable!("it would have counted for ages")
}

/// Numbers of steps and of wrong words, from the complete lines of a console.
pub fn ticks(console: &Path) -> Vec<(u64, u64)> {
    let bytes = std::fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let tick = |line: &str| {
        let (number, wrong) = line.trim_end().strip_prefix(TICK)?.trim_start().split_once(' ')?;
        Some((number.parse().ok()?, wrong.parse().ok()?))
    };
    whole.lines().filter_map(tick).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_read_from_whole_lines_only() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "[ 1.0] hello\r\nSTERNA-TICK 1 0\r\nSTERNA-TICK 2 5\r\nSTERNA-TICK 3 ")
            .unwrap();

        assert_eq!(ticks(file.path()), [(1, 0), (2, 5)]);
    }
}
