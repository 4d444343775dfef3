//! What the tests share: a process of its own, and saying that a test cannot run here.
#![allow(dead_code, reason = "each test binary uses its own part")]

/// Runs the calling test in a process of its own, which does nothing else. True in that process; false, once it has ended
/// well, in the one that called.
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

/// Says that a test did not run, and why.
pub fn skipped(test: &str, reason: impl std::fmt::Display) {
    say(&format!("SKIPPED {test}: {reason}"));
}

pub fn say(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{line}");
}
