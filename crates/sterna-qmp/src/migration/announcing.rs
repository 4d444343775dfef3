//! The settings for announcing a guest to the network, of the parameters and of `announce-self`.

use std::time::Duration;

/// Number and intervals of a guest's announcements to the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcing {
    /// Time between the first and the second announcement.
    pub initial: Duration,
    /// Maximum time between two announcements.
    pub max: Duration,
    /// Number of announcements.
    pub rounds: u32,
    /// Increase of the time from each announcement to the next.
    pub step: Duration,
}

impl Default for Announcing {
    /// QEMU's defaults: 50 ms, 550 ms, 5 announcements, 100 ms.
    fn default() -> Self {
        let milliseconds = Duration::from_millis;
        Self { initial: milliseconds(50), max: milliseconds(550), rounds: 5, step: milliseconds(100) }
    }
}
