//! What several tests need.
#![allow(dead_code)]

#[allow(clippy::print_stderr)]
pub fn report(line: &str) {
    eprintln!("{line}");
}

/// The one place that says that a test could not run here.
pub fn skipped(test: &str, reason: &str) {
    report(&format!("SKIPPED {test}: {reason}"));
}

/// CPU time of this process, to measure on a machine that others use too.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
