//! The guest's only program, as its init: counts, looks at its clocks, and writes memory that it checks.
#![allow(clippy::print_stdout)]

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant, SystemTime};

use rustix::system::{RebootCommand, reboot};

/// Names this program's role on the kernel's command line.
pub const NAME: &str = "guest";
/// The variable of init's environment that says how often it ticks.
pub const TICKS: &str = "GUEST_TICKS";
/// The variable that says how it ends: [`RESETS`], or by switching the machine off.
pub const ENDS: &str = "GUEST_ENDS";
/// It resets the machine.
pub const RESETS: &str = "reset";

/// Number of CPUs.
pub const CPUS: &str = "GUEST-CPUS";
/// Number, real time and monotonic time in ms.
pub const TICK: &str = "GUEST-TICK";
/// Words of memory that are not what was written.
pub const WRONG: &str = "GUEST-WRONG";
/// A line of the kernel's log.
pub const COMPLAINT: &str = "GUEST-COMPLAINT";

const INTERVAL: Duration = Duration::from_millis(50);
/// 32 MiB that are rewritten at each tick, an eighth of them at a time.
const WORDS: usize = 4 << 20;
const PARTS: usize = 8;
/// What a kernel says when something is wrong with its machine or its clocks.
const SIGNS: [&str; 7] =
    ["WARNING:", "BUG:", "stall", "unstable", "lockup", "Oops", "clocksource: timekeeping watchdog"];

/// Does all of it, and ends the machine.
pub fn run() -> ! {
    println!("{CPUS} {}", std::thread::available_parallelism().map_or(0, usize::from));
    let ticks = std::env::var(TICKS).ok().and_then(|ticks| ticks.parse().ok()).unwrap_or(1);
    let wrong = tick(ticks);
    println!("{WRONG} {wrong}");
    for line in kernel_log().lines().filter(|line| SIGNS.iter().any(|sign| line.contains(sign))) {
        println!("{COMPLAINT} {line}");
    }
    let how = match std::env::var(ENDS).as_deref() {
        Ok(RESETS) => RebootCommand::Restart,
        _ => RebootCommand::PowerOff,
    };
    // Nothing is mounted that must be synced.
    if let Err(error) = reboot(how) {
        println!("{COMPLAINT} reboot: {error}");
    }
    loop {
        std::thread::park();
    }
}

/// The number of wrong words.
fn tick(ticks: u64) -> usize {
    let began = Instant::now();
    let mut memory = vec![0u64; WORDS];
    let value = |number: u64, index: usize| (number << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut written = [0; PARTS];
    let mut wrong = 0;
    for number in 1..=ticks {
        let part = number as usize % PARTS;
        let begin = part * (WORDS / PARTS);
        let before = written[part];
        for (index, word) in memory[begin..begin + WORDS / PARTS].iter_mut().enumerate() {
            wrong += usize::from(before > 0 && *word != value(before, index));
            *word = value(number, index);
        }
        written[part] = number;
        let real = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        println!("{TICK} {number} {} {}", real.as_millis(), began.elapsed().as_millis());
        std::thread::sleep(INTERVAL);
    }
    wrong
}

fn kernel_log() -> String {
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg");
    let Ok(mut file) = file else { return format!("WARNING: no /dev/kmsg: {file:?}") };
    let (mut log, mut record) = (String::new(), vec![0; 8192]);
    // Each read gives a record; without any more it fails.
    while let Ok(length) = file.read(&mut record) {
        log.push_str(&String::from_utf8_lossy(&record[..length]));
    }
    log
}
