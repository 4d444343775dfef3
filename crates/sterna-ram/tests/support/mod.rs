//! What the tests share: seeded randomness and saying that a test cannot run here.
#![allow(dead_code, reason = "each test binary uses its own part")]

/// A small generator (SplitMix64); the seed is printed and can be set by STERNA_SEED.
pub struct Random(u64);

impl Random {
    pub fn new(test: &str) -> Self {
        let seed = match std::env::var("STERNA_SEED") {
            Ok(text) => text.parse().expect("STERNA_SEED is a number"),
            Err(_) => std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(1, |time| time.as_nanos() as u64),
        };
        say(&format!("{test}: STERNA_SEED={seed}"));
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

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
