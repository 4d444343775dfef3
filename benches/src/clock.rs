//! CPU time of processes, in nanoseconds if the kernel counts that precisely.

use std::time::Duration;

use crate::Failure;

/// Clock of one process's CPU time: all its threads, including threads that have ended.
pub struct CpuClock(libc::clockid_t);

impl CpuClock {
    /// The clock of process `pid`, which must be running.
    pub fn of(pid: u32) -> Result<Self, Failure> {
        let mut clock = 0;
        // SAFETY: the pointer is to a local that lives through the call.
        let failed = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) };
        if failed == 0 { Ok(Self(clock)) } else { Err(format!("process {pid} has no CPU clock")) }
    }

    /// The CPU clock of this process.
    pub fn own() -> Self {
        Self(libc::CLOCK_PROCESS_CPUTIME_ID)
    }

    /// User and system time so far. Zero if the process has ended.
    pub fn read(&self) -> Duration {
        // SAFETY: all zero is a valid `timespec`.
        let mut time: libc::timespec = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer is to a local that lives through the call.
        if unsafe { libc::clock_gettime(self.0, &raw mut time) } == 0 {
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        } else {
            Duration::ZERO
        }
    }
}

/// CPU time of all children that have ended and were waited for.
pub fn ended_children() -> Duration {
    // SAFETY: all zero is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a local that lives through the call.
    let failed = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    assert_eq!(failed, 0, "RUSAGE_CHILDREN is known to every Linux");
    let duration = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    duration(usage.ru_utime) + duration(usage.ru_stime)
}

/// Ticks per second of this machine's time-stamp counter, measured once. The guest's counter runs at the same
/// speed.
pub fn ticks_per_second() -> u64 {
    static TICKS: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *TICKS.get_or_init(|| {
        let (began, first) = (std::time::Instant::now(), ticks());
        std::thread::sleep(Duration::from_millis(200));
        let ticks = ticks() - first;
        (ticks as f64 / began.elapsed().as_secs_f64()) as u64
    })
}

fn ticks() -> u64 {
    // SAFETY: the instruction exists on every x86-64.
    unsafe { std::arch::x86_64::_rdtsc() }
}
