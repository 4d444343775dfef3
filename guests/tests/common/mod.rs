//! Helpers that several test modules use.
#![allow(dead_code)]

#[allow(clippy::print_stderr)]
pub fn report(line: &str) {
    eprintln!("{line}");
}

/// Reports that a test could not run here. All tests use this function, so that the form is the same.
pub fn skipped(test: &str, reason: &str) {
    report(&format!("SKIPPED {test}: {reason}"));
}

/// CPU time of this process, for measurements on a machine with other load.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
