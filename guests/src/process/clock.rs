//! The guest's clock: CLOCK_MONOTONIC, which all processes of a machine share until the machine reboots.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since an arbitrary moment before the machine's boot; never 0.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64).max(1)
}

/// The kernel's id of this boot, zero if it has none. Readings with equal ids are from one clock.
pub(super) fn boot_id() -> [u8; 16] {
    let mut id = [0; 16];
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    id
}
