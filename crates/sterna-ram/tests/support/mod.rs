//! Functions that several test programs share: running a test in a separate process, and reporting a skipped
//! test.
#![allow(dead_code, reason = "each test binary uses its own part")]

/// Runs the calling test in a separate process.
///
/// Returns `true` in that process. Returns `false` in the caller, after the process has succeeded.
#[must_use]
pub fn is_alone() -> bool {
    const ALONE: &str = "STERNA_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = std::thread::current().name().unwrap().to_owned();
    let alone = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    say(&String::from_utf8_lossy(&alone.stderr));
    assert!(alone.status.success(), "{}: {}", alone.status, String::from_utf8_lossy(&alone.stdout));
    false
}

/// Reports that a test was skipped, with the reason.
pub fn skipped(test: &str, reason: impl std::fmt::Display) {
    say(&format!("SKIPPED {test}: {reason}"));
}

pub fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{line}");
}
