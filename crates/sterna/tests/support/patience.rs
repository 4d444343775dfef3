//! Waiting for another thread.

use std::time::{Duration, Instant};

/// Longer than any machine needs.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}
