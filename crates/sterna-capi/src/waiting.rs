//! Waits for the end of a migration, with a time-out.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Longest time between two looks at a migration. Events wake a waiting call earlier.
const LOOK: Duration = Duration::from_millis(50);

/// Rings at each event of a migration.
#[derive(Default)]
pub(crate) struct Bell {
    rung: Mutex<u64>,
    changed: Condvar,
}

impl Bell {
    pub(crate) fn ring(&self) {
        *self.rung.lock() += 1;
        self.changed.notify_all();
    }

    /// Waits until `look` returns a value; `None` after `time_out`, which is in milliseconds; negative: no limit.
    pub(crate) fn wait<T>(&self, time_out: i64, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let until = u64::try_from(time_out)
            .ok()
            .and_then(|limit| Instant::now().checked_add(Duration::from_millis(limit)));
        loop {
            let before = *self.rung.lock();
            if let Some(seen) = look() {
                return Some(seen);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return None;
            }
            let mut rung = self.rung.lock();
            if *rung == before {
                self.changed.wait_for(&mut rung, left.unwrap_or(LOOK).min(LOOK));
            }
        }
    }
}
