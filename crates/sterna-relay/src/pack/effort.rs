//! Whether the link or the processor is the limit: the second half of `auto`.

use std::time::Duration;

/// Shortest time, and least plain bytes, over which a rate is measured.
const MEASURED: Duration = Duration::from_millis(50);
const MEASURED_BYTES: u64 = 4 << 20;
/// How long a decision holds: at first, and at most.
const FIRST_HOLD: Duration = Duration::from_secs(2);
const LONGEST_HOLD: Duration = Duration::from_secs(60);

/// The state of one carrier.
///
/// While the time of compressing is small against all time, the link or the VMM is the limit. If compressing takes
/// nearly all time, a part of the bytes is sent plain, and the faster way is kept for a time.
#[derive(Debug)]
pub struct Effort {
    state: State,
    since: Duration,
    spent: Duration,
    bytes: u64,
    hold: Duration,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Packs,
    /// The processor is the limit of this rate; the plain rate is measured.
    Compares {
        packed: u64,
    },
    /// The way is chosen until this time.
    Holds {
        packs: bool,
        until: Duration,
    },
}

impl Default for Effort {
    fn default() -> Self {
        Self { state: State::Packs, since: Duration::ZERO, spent: Duration::ZERO, bytes: 0, hold: FIRST_HOLD }
    }
}

impl Effort {
    /// Whether the next frame is packed.
    pub fn packs(&self) -> bool {
        match self.state {
            State::Packs => true,
            State::Compares { .. } => false,
            State::Holds { packs, .. } => packs,
        }
    }

    /// A frame of so many plain bytes was made ready, which took `spent` until `now`.
    pub fn sent(&mut self, now: Duration, bytes: usize, spent: Duration) {
        // A carrier without bytes for a time measures nothing.
        if self.bytes == 0 {
            self.since = now.saturating_sub(spent);
        }
        self.bytes += bytes as u64;
        self.spent += spent;
        let took = now.saturating_sub(self.since);
        if let State::Holds { until, .. } = self.state {
            if now < until {
                self.bytes = 0;
                self.spent = Duration::ZERO;
                return;
            }
            self.begin(State::Packs);
            return;
        }
        if took < MEASURED || self.bytes < MEASURED_BYTES {
            return;
        }
        let rate = (u128::from(self.bytes) * 1_000_000_000 / took.as_nanos().max(1)) as u64;
        let is_busy = self.spent * 100 >= took * 85;
        match self.state {
            State::Packs if is_busy => self.begin(State::Compares { packed: rate }),
            State::Packs => {
                self.hold = FIRST_HOLD;
                self.begin(State::Packs);
            }
            State::Compares { packed } => {
                // A small gain is not worth the processor of the guests on this host, nor is it one of measurement.
                let packs = rate <= packed + packed / 20;
                self.begin(State::Holds { packs, until: now + self.hold });
                self.hold = (self.hold * 2).min(LONGEST_HOLD);
            }
            State::Holds { .. } => {}
        }
    }

    fn begin(&mut self, state: State) {
        (self.state, self.bytes, self.spent) = (state, 0, Duration::ZERO);
    }
}
