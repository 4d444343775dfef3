//! The host clock that measures how far guest time advances during a migration ([`super`], *Time*).

use std::time::{SystemTime, UNIX_EPOCH};

/// Time of the host's clock, nanoseconds since 1970.
pub(crate) fn realtime_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Attempts of [`at_once`]. An attempt shorter than [`CLOSE_NS`] is the last one.
const TRIES: usize = 9;
const CLOSE_NS: u64 = 3000;

/// Runs `act` between two readings of the clock. Returns its result with the time in the middle. The shortest
/// of several attempts counts. A guest compares its clocks every half second and marks a clock unstable that
/// is off by half a millisecond. This thread can be preempted for longer than that.
pub(crate) fn at_once<T, E>(mut act: impl FnMut() -> Result<T, E>) -> Result<(T, u64), E> {
    let mut best: Option<(u64, T, u64)> = None;
    for _ in 0..TRIES {
        let before = realtime_ns();
        let done = act()?;
        let width = realtime_ns().saturating_sub(before);
        if best.as_ref().is_none_or(|(least, ..)| width < *least) {
            best = Some((width, done, before + width / 2));
        }
        if width < CLOSE_NS {
            break;
        }
    }
    match best {
        Some((_, done, middle)) => Ok((done, middle)),
        None => act().map(|done| (done, realtime_ns())),
    }
}

/// Nanoseconds since `then`; 0 if this host's clock is earlier than `then`.
pub(crate) fn passed_ns(then: u64) -> u64 {
    realtime_ns().saturating_sub(then)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn try_in_which_the_thread_was_preempted_does_not_count() {
        let mut number = 0;
        let before = realtime_ns();
        let (chosen, at) = at_once(|| {
            number += 1;
            if number == 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok::<_, ()>(number)
        })
        .unwrap();
        assert!(chosen > 1 && at >= before + 20_000_000, "{chosen}, {}", at - before);
        assert_eq!(at_once(|| Err::<(), _>("no")), Err("no"));
    }
}
