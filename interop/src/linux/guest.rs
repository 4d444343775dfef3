//! The guest's only program, as its init: counts, looks at its clocks, and writes memory that it checks.
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

/// Names this program's role on the kernel's command line.
pub const NAME: &str = "guest";
/// The variable of init's environment that says how often it ticks.
pub const TICKS: &str = "GUEST_TICKS";
/// So many ticks: until [`END`] is typed into its console.
pub const UNTIL_TOLD: u64 = 0;
/// A line.
pub const END: &str = "end\n";
/// The variable that says how it ends: [`RESETS`], or by switching the machine off.
pub const ENDS: &str = "GUEST_ENDS";
/// The variable that names the disk with its root of Debian packages.
pub const ROOT: &str = "GUEST_ROOT";
/// The variable that names its other disk; with one of both it has a source of random bytes.
pub const DISK: &str = "GUEST_DISK";
/// The variable that says [`YES`] if it has a network card, and a peer behind it.
pub const NETWORK: &str = "GUEST_NETWORK";
/// The variable that says [`YES`] if it sees a directory of the host.
pub const SHARE: &str = "GUEST_SHARE";
/// The variable that says [`YES`] if it tells the machine which memory it does not use.
pub const REPORTS: &str = "GUEST_REPORTS";
pub const YES: &str = "yes";
/// The variable that says after how many ms it sends a number each time, and does nothing else.
const PACE: &str = "GUEST_PACE";
const BENCH_PACE: Duration = Duration::from_millis(5);
/// The variable that says how many bytes of memory it uses, after it has used three times as many.
const USES: &str = "GUEST_USES";
/// The variable that says that it does nothing.
const WAITS: &str = "GUEST_WAITS";
/// The variable that names the console where it is told to end, if that is not the one that it writes to.
pub const CONSOLE: &str = "GUEST_CONSOLE";
/// A line that it has read there, written there.
pub const HEARD: &str = "GUEST-HEARD";
/// It has written much memory, and freed it.
pub const FREED: &str = "GUEST-FREED";
/// It resets the machine.
pub const RESETS: &str = "reset";

/// Number of CPUs.
pub const CPUS: &str = "GUEST-CPUS";
/// Number, real time and monotonic time in ms.
pub const TICK: &str = "GUEST-TICK";
/// Words of memory that are not what was written.
pub const WRONG: &str = "GUEST-WRONG";
/// Wrong blocks of the disk.
pub const BLOCKS: &str = "GUEST-BLOCKS";
/// Wrong files of the root.
pub const FILES: &str = "GUEST-FILES";
/// What was wrong in the directory of the host.
pub const SHARED: &str = "GUEST-SHARED";
/// Bytes that the machine's source of random bytes has given.
pub const RANDOM: &str = "GUEST-RANDOM";
/// Numbers that were sent over the network, and steps in which one did not come back.
pub const SENT: &str = "GUEST-SENT";
/// Bytes of memory that nothing uses.
pub const UNUSED: &str = "GUEST-UNUSED";
/// As many are asked for.
pub const RANDOM_BYTES: usize = 32;
/// A step that took longer than [`LONG`]: number of the tick, ms, and what it was.
pub const SLOW: &str = "GUEST-SLOW";
const LONG: Duration = Duration::from_secs(3);
/// A line of the kernel's log.
pub const COMPLAINT: &str = "GUEST-COMPLAINT";

const INTERVAL: Duration = Duration::from_millis(50);
/// 8 MiB that are rewritten, an eighth of them at each tick.
const WORDS: usize = 1 << 20;
const PARTS: usize = 8;
pub(super) const FREED_BYTES: usize = 128 << 20;
/// What a kernel says when something is wrong with its machine.
const SIGNS: [&str; 5] = ["WARNING:", "BUG:", "stall", "lockup", "Oops"];
/// And with its clocks.
pub const OF_CLOCKS: [&str; 2] = ["unstable", "timekeeping watchdog"];

/// Does all of it, and ends the machine.
pub fn run() -> ! {
    be_alone_on_the_console();
    println!("{CPUS} {}", std::thread::available_parallelism().map_or(0, usize::from));
    let ticks = std::env::var(TICKS).ok().and_then(|ticks| ticks.parse().ok()).unwrap_or(1);
    let value = |what: &str| std::env::var(what).ok();
    if let Some(never) = of_the_bench(&value) {
        match never {}
    }
    let mut disk = value(DISK).map(|device| disk::Disk::open(&device));
    let mut root = value(ROOT).map(|device| root::Root::begin(&device));
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
        timed(number, "network", || network.iter_mut().for_each(|network| network.step(network::AT_ONCE)));
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
    // Nothing is mounted that must be synced.
    if let Err(error) = reboot(how) {
        println!("{COMPLAINT} reboot: {error}");
    }
    loop {
        std::thread::park();
    }
}

/// What a guest reads that does nothing.
pub(super) fn waits() -> String {
    format!("{WAITS}={YES}")
}

/// What a guest reads that sends numbers at a steady pace.
pub(super) fn paced() -> String {
    format!("{PACE}={}", BENCH_PACE.as_millis())
}

/// What a guest reads that uses so much memory.
pub(super) fn uses_memory(bytes: u64) -> String {
    format!("{USES}={bytes}")
}

/// What guests of the bench do until the VMM ends.
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

/// The kernel writes to the same port: into the middle of a line, if it has something to say then. Its log has that too. And what is
/// typed comes back there.
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

/// Bytes that the machine has given; a source that is broken gives zeros.
fn random_bytes() -> usize {
    let mut bytes = [0; RANDOM_BYTES];
    let read = std::fs::File::open("/dev/hwrng").and_then(|mut source| source.read_exact(&mut bytes));
    if read.is_ok() && bytes != [0; RANDOM_BYTES] { RANDOM_BYTES } else { 0 }
}

/// The number of wrong words.
fn tick(ticks: u64, mut also: impl FnMut(u64)) -> usize {
    let began = Instant::now();
    let mut memory = vec![0u64; WORDS];
    let value = |number: u64, index: usize| (number << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut written = [0; PARTS];
    let mut wrong = 0;
    let is_told = (ticks == UNTIL_TOLD).then(told);
    for number in 1.. {
        let is_over = is_told.as_ref().map_or(number > ticks, |told| told.load(Ordering::Relaxed));
        if is_over {
            break;
        }
        let part = number as usize % PARTS;
        let begin = part * (WORDS / PARTS);
        let before = written[part];
        timed(number, "memory", || {
            for (index, word) in memory[begin..begin + WORDS / PARTS].iter_mut().enumerate() {
                wrong += usize::from(before > 0 && *word != value(before, index));
                *word = value(number, index);
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

/// Says so if it takes long.
fn timed(number: u64, what: &str, step: impl FnOnce()) {
    let begin = Instant::now();
    step();
    if begin.elapsed() > LONG {
        println!("{SLOW} {number} {} {what}", begin.elapsed().as_millis());
    }
}

/// Bytes that follow from a number.
fn content(number: u64, length: usize) -> Vec<u8> {
    let words =
        (0..length as u64 / 8).map(|index| (number << 32 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

/// Becomes true when [`END`] is read.
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
                // It shows if it does not come.
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
    // Each read gives a record; without any more it fails.
    while let Ok(length) = file.read(&mut record) {
        log.push_str(&String::from_utf8_lossy(&record[..length]));
    }
    log
}
