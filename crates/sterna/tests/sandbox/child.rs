//! Runs a test in a child process, which can be locked in without an effect on other tests.
#![allow(clippy::print_stderr, reason = "says that a test was skipped")]

const CHILD: &str = "STERNA_TEST_SANDBOX_CHILD";

/// Runs the calling test in a child process. Returns `true` in the child, and `false` in the caller after success.
#[must_use]
pub fn is_child() -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let (succeeded, text) = run();
    for line in text.lines().filter(|line| line.starts_with("SKIPPED")) {
        eprintln!("{line}");
    }
    assert!(succeeded, "{text}");
    false
}

/// Runs the calling test in a child process. Returns whether it succeeded, and its output.
fn run() -> (bool, String) {
    let name = std::thread::current().name().unwrap().to_owned();
    let done = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (done.status.success(), format!("{}\n{text}", done.status))
}

pub fn skipped(test: &str, reason: impl std::fmt::Display) {
    eprintln!("SKIPPED {test}: {reason}");
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
