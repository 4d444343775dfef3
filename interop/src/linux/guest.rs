//! The guest's only program, which is its init: it counts, reads its clocks, and writes memory that it
//! checks.
#![allow(clippy::print_stdout)]

pub(super) mod disk;
pub(super) mod job;
pub(super) mod network;
mod root;
pub(super) mod share;

use std::io::{BufRead, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::system::{RebootCommand, reboot};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

/// Value on the kernel's command line that selects this role of the program.
pub const NAME: &str = "guest";
/// Variable of init's environment with the number of ticks.
pub const TICKS: &str = "GUEST_TICKS";
/// Value of [`TICKS`]: the guest ticks until [`END`] is typed into its console.
pub const UNTIL_TOLD: u64 = 0;
/// Line that ends the guest's ticks.
pub const END: &str = "end\n";
/// Variable that selects how the guest ends: [`RESETS`], or by switching the machine off.
pub const ENDS: &str = "GUEST_ENDS";
/// Variable that names the disk with the guest's root of Debian packages.
pub const ROOT: &str = "GUEST_ROOT";
/// Variable that names the guest's other disk. With one of both disks, the guest has a source of random
/// bytes.
pub const DISK: &str = "GUEST_DISK";
/// Variable that is [`YES`] if the guest has a network card with a peer.
pub const NETWORK: &str = "GUEST_NETWORK";
/// Variable that is [`YES`] if the guest sees a directory of the host.
pub const SHARE: &str = "GUEST_SHARE";
/// Variable that is [`YES`] if the guest reports its free memory to the machine.
pub const REPORTS: &str = "GUEST_REPORTS";
/// Variable that is [`YES`] if the guest works less at each step.
pub const BRIEF: &str = "GUEST_BRIEF";
pub const YES: &str = "yes";
/// Variable with the interval in ms at which the guest sends numbers; it then does nothing else.
const PACE: &str = "GUEST_PACE";
const BENCH_PACE: Duration = Duration::from_millis(5);
/// Variable with the number of bytes of memory that the guest uses. It uses three times as much before.
const USES: &str = "GUEST_USES";
/// Variable that makes the guest do nothing.
const WAITS: &str = "GUEST_WAITS";
/// Variable that names the console for [`END`], if it is not the output console.
pub const CONSOLE: &str = "GUEST_CONSOLE";
/// Prefix of a line that the guest has read from that console and writes back.
pub const HEARD: &str = "GUEST-HEARD";
/// Line after the guest has written much memory and freed it.
pub const FREED: &str = "GUEST-FREED";
/// Value of [`ENDS`]: the guest resets the machine.
pub const RESETS: &str = "reset";

/// Word of a line: number of CPUs.
pub const CPUS: &str = "GUEST-CPUS";
/// Word of a line: number of the tick, real time and monotonic time in ms.
pub const TICK: &str = "GUEST-TICK";
/// Word of a line: number of words of memory with wrong content.
pub const WRONG: &str = "GUEST-WRONG";
/// Word of a line: number of wrong blocks of the disk.
pub const BLOCKS: &str = "GUEST-BLOCKS";
/// Word of a line: number of wrong files of the root.
pub const FILES: &str = "GUEST-FILES";
/// Word of a line: number of errors in the directory of the host.
pub const SHARED: &str = "GUEST-SHARED";
/// Word of a line: number of bytes from the machine's source of random bytes.
pub const RANDOM: &str = "GUEST-RANDOM";
/// Word of a line: numbers that were sent over the network, and steps in which one was not returned.
pub const SENT: &str = "GUEST-SENT";
/// Word of a line: bytes of unused memory.
pub const UNUSED: &str = "GUEST-UNUSED";
/// Number of random bytes that the guest requests.
pub const RANDOM_BYTES: usize = 32;
/// Word of a line for a step that took longer than [`LONG`]: number of the tick, ms, and name.
pub const SLOW: &str = "GUEST-SLOW";
const LONG: Duration = Duration::from_secs(3);
/// Word of a line with a complaint of the kernel's log.
pub const COMPLAINT: &str = "GUEST-COMPLAINT";

const INTERVAL: Duration = Duration::from_millis(50);
/// 8 MiB that change, an eighth of them at each tick. One round over all parts writes numbers, the next
/// writes zeros, the third replaces the memory with fresh zeros.
const WORDS: usize = 1 << 20;
const PARTS: usize = 8;
pub(super) const FREED_BYTES: usize = 128 << 20;
/// Words in the kernel's log that mean a fault of its machine.
const SIGNS: [&str; 5] = ["WARNING:", "BUG:", "stall", "lockup", "Oops"];
/// Words in the kernel's log that mean a fault of its clocks.
pub const OF_CLOCKS: [&str; 2] = ["unstable", "timekeeping watchdog"];

/// Runs the guest's work, and ends the machine.
pub fn run() -> ! {
    be_alone_on_the_console();
    println!("{CPUS} {}", std::thread::available_parallelism().map_or(0, usize::from));
    let ticks = std::env::var(TICKS).ok().and_then(|ticks| ticks.parse().ok()).unwrap_or(1);
    let value = |what: &str| std::env::var(what).ok();
    if let Some(never) = of_the_bench(&value) {
        match never {}
    }
    let is_brief = value(BRIEF).is_some();
    let numbers = if is_brief { network::FEW } else { network::AT_ONCE };
    let mut disk = value(DISK).map(|device| disk::Disk::open(&device));
    let mut root = value(ROOT).map(|device| root::Root::begin(&device, is_brief));
    let mut share = value(SHARE).map(|_| share::Share::open());
    let mut network = value(NETWORK).map(|_| network::Connection::open());
    if value(REPORTS).is_some() {
        drop(std::hint::black_box(vec![1u8; FREED_BYTES]));
        println!("{FREED}");
    }
    let wrong = tick(ticks, |number| {
        timed(number, "disk", || disk.iter_mut().for_each(|disk| disk.step(number)));
        timed(number, "root", || root.iter_mut().for_each(|root| root.step(number)));
        timed(number, "share", || share.iter_mut().for_each(|share| share.step(number)));
        timed(number, "network", || network.iter_mut().for_each(|network| network.step(numbers)));
    });
    println!("{WRONG} {wrong}");
    if value(REPORTS).is_some() {
        println!("{UNUSED} {}", unused_bytes());
    }
    if disk.is_some() || root.is_some() {
        println!("{RANDOM} {}", random_bytes());
    }
    if let Some(disk) = disk {
        println!("{BLOCKS} {}", disk.finish());
    }
    if let Some(root) = root {
        let (wrong, complaint) = root.finish();
        println!("{FILES} {wrong}");
        complaint.into_iter().for_each(|complaint| println!("{COMPLAINT} {complaint}"));
    }
    if let Some(share) = share {
        println!("{SHARED} {}", share.finish());
    }
    if let Some(network) = network {
        let (sent, wrong) = network.finish();
        println!("{SENT} {sent} {wrong}");
    }
    for line in
        kernel_log().lines().filter(|line| SIGNS.iter().chain(&OF_CLOCKS).any(|sign| line.contains(sign)))
    {
        println!("{COMPLAINT} {line}");
    }
    let how = match std::env::var(ENDS).as_deref() {
        Ok(RESETS) => RebootCommand::Restart,
        _ => RebootCommand::PowerOff,
    };
    // No mounted file system needs a sync.
    if let Err(error) = reboot(how) {
        println!("{COMPLAINT} reboot: {error}");
    }
    loop {
        std::thread::park();
    }
}

/// Command-line part of a guest that does nothing.
pub(super) fn waits() -> String {
    format!("{WAITS}={YES}")
}

/// Command-line part of a guest that sends numbers at a steady pace.
pub(super) fn paced() -> String {
    format!("{PACE}={}", BENCH_PACE.as_millis())
}

/// Command-line part of a guest that uses this much memory.
pub(super) fn uses_memory(bytes: u64) -> String {
    format!("{USES}={bytes}")
}

/// Runs the work of a bench's guest until the VMM ends. `None` for other guests.
fn of_the_bench(value: &impl Fn(&str) -> Option<String>) -> Option<std::convert::Infallible> {
    let number = |what: &str| value(what).and_then(|text| text.parse::<u64>().ok());
    if let Some(job) = value(job::JOB) {
        if let Some(device) = value(ROOT) {
            root::open(&device);
        }
        if job == job::IPERF {
            network::set_up();
        }
        job::run(&job);
    } else if let Some(pace) = number(PACE) {
        let mut connection = network::Connection::open();
        loop {
            connection.step(1);
            std::thread::sleep(Duration::from_millis(pace));
        }
    } else if let Some(bytes) = number(USES) {
        let kept = std::hint::black_box(vec![1u8; bytes as usize]);
        drop(std::hint::black_box(vec![2u8; 3 * bytes as usize]));
        println!("{UNUSED} {}", unused_bytes());
        wait_forever(&kept);
    } else if value(WAITS).is_none() {
        return None;
    }
    wait_forever(&[])
}

fn wait_forever(_kept: &[u8]) -> ! {
    loop {
        std::thread::park();
    }
}

fn unused_bytes() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemFree:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or_default() << 10
}

/// Silences the kernel and the echo. The kernel writes to the same port, even into the middle of a line; its
/// log keeps the messages. Typed input is echoed there.
fn be_alone_on_the_console() {
    if let Err(error) = std::fs::write("/proc/sys/kernel/printk", "1") {
        println!("{COMPLAINT} /proc/sys/kernel/printk: {error}");
    }
    let console = std::io::stdin();
    let silent = tcgetattr(&console).and_then(|mut settings| {
        settings.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&console, OptionalActions::Now, &settings)
    });
    if let Err(error) = silent {
        println!("{COMPLAINT} the console echoes: {error}");
    }
}

/// Reads random bytes and returns their number. All zeros count as a broken source.
fn random_bytes() -> usize {
    let mut bytes = [0; RANDOM_BYTES];
    let read = std::fs::File::open("/dev/hwrng").and_then(|mut source| source.read_exact(&mut bytes));
    if read.is_ok() && bytes != [0; RANDOM_BYTES] { RANDOM_BYTES } else { 0 }
}

/// Runs the ticks and returns the number of wrong words.
fn tick(ticks: u64, mut also: impl FnMut(u64)) -> usize {
    let began = Instant::now();
    let fresh = || vec![0u64; WORDS / PARTS];
    let mut memory: Vec<_> = (0..PARTS).map(|_| fresh()).collect();
    let round = |number: u64| number / PARTS as u64 % 3;
    let value = |number: u64, index: usize| match round(number) {
        0 => (number << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        _ => 0,
    };
    let mut written = [0; PARTS];
    let mut wrong = 0;
    let is_told = (ticks == UNTIL_TOLD).then(told);
    for number in 1.. {
        let is_over = is_told.as_ref().map_or(number > ticks, |told| told.load(Ordering::Relaxed));
        if is_over {
            break;
        }
        let part = number as usize % PARTS;
        let before = written[part];
        timed(number, "memory", || {
            for (index, word) in memory[part].iter_mut().enumerate() {
                wrong += usize::from(before > 0 && *word != value(before, index));
                *word = value(number, index);
            }
            if round(number) == 2 {
                // At first, the allocator returns the old part to the kernel. Later it may keep the part and
                // store zeros.
                memory[part] = fresh();
            }
        });
        written[part] = number;
        also(number);
        let real = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        println!("{TICK} {number} {} {}", real.as_millis(), began.elapsed().as_millis());
        timed(number, "sleep", || std::thread::sleep(INTERVAL));
    }
    wrong
}

/// Runs a step, and prints a line if it takes long.
fn timed(number: u64, what: &str, step: impl FnOnce()) {
    let begin = Instant::now();
    step();
    if begin.elapsed() > LONG {
        println!("{SLOW} {number} {} {what}", begin.elapsed().as_millis());
    }
}

/// Bytes that depend only on a number.
fn content(number: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length);
    // Word by word: an iterator over bytes takes most of a guest's time, because the tests' guests run without optimisation.
    for index in 0..length as u64 / 8 {
        let word = (number << 32 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// A flag that becomes true when [`END`] is read.
fn told() -> Arc<AtomicBool> {
    let is_told = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&is_told);
    std::thread::spawn(move || {
        let other = std::env::var(CONSOLE).ok();
        let open = |path: &String| {
            let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
            file.unwrap_or_else(|error| panic!("{path}: {error}"))
        };
        let mut console = other.as_ref().map(open);
        let input: Box<dyn std::io::BufRead> = match &other {
            Some(path) => Box::new(std::io::BufReader::new(open(path))),
            None => Box::new(std::io::stdin().lock()),
        };
        for line in input.lines().map_while(Result::ok) {
            if let Some(console) = &mut console {
                // A missing line is detected by the test, so the error is ignored.
                let _ = console.write_all(format!("{HEARD} {line}\n").as_bytes());
            }
            if line == END.trim_end() {
                theirs.store(true, Ordering::Relaxed);
            }
        }
    });
    is_told
}

fn kernel_log() -> String {
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg");
    let Ok(mut file) = file else { return format!("WARNING: no /dev/kmsg: {file:?}") };
    let (mut log, mut record) = (String::new(), vec![0; 8192]);
    // Each read returns a record. It fails when there are no more.
    while let Ok(length) = file.read(&mut record) {
        log.push_str(&String::from_utf8_lossy(&record[..length]));
    }
    log
}
