//! How a network of the double behaves.

use std::time::Duration;

/// Settings of a [`super::Network`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Draws delays and orders, and what lies in private data beyond what was sent. `None`: requests are executed in the
    /// order in which they were posted, and the rest of private data is zero.
    pub seed: Option<u64>,
    /// With a seed: the longest delay before a request or a completion. Most are not delayed.
    pub longest_delay: Duration,
    /// How long a request goes unanswered before it fails with "retry counter exceeded".
    pub retry_limit: Duration,
    /// How long a sender waits between two tries when the peer has no receive posted.
    pub rnr_timer: Duration,
    /// The longest message of every port.
    pub max_message_bytes: u32,
    /// Whether the adapters of all hosts can use memory that is not pinned: see [`super::Network::set_on_demand_paging`].
    pub on_demand_paging: bool,
    /// The locked-memory limit of every host.
    pub locked_memory_bytes: Option<u64>,
    /// What things cost, in virtual time.
    pub costs: Costs,
    /// Whether bytes are copied. Without, memory is neither read, written nor populated: for guests that are larger than
    /// this machine, in virtual time. Sends are copied nevertheless.
    pub copies_writes: bool,
}

impl Settings {
    /// In order, without delays.
    pub fn new() -> Self {
        Self {
            seed: None,
            longest_delay: Duration::from_micros(300),
            retry_limit: Duration::from_millis(150),
            rnr_timer: Duration::from_millis(10),
            max_message_bytes: 1 << 30,
            on_demand_paging: false,
            locked_memory_bytes: None,
            costs: Costs::default(),
            copies_writes: true,
        }
    }

    /// With delays and reordering that follow from a seed.
    pub fn seeded(seed: u64) -> Self {
        Self { seed: Some(seed), ..Self::new() }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::new()
    }
}

/// What things cost in virtual time.
///
/// Each thread has a clock. Registering moves it on. A request starts when it was posted and the adapter has sent what was
/// posted before; polling its completion moves the poller's clock to the time of the completion. So the time of a program
/// is the same on a slow machine and on a fast one: [`super::Network::elapsed`].
///
/// The default is a fast adapter under which a program that registers, waits and writes 8 GiB chunk by chunk takes 37.9 s
/// with chunks of 1 MiB and 4.4 s with chunks of 1 GiB, as was published for ConnectX-7.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Costs {
    /// What the link carries.
    pub bytes_per_second: u64,
    /// From a request's last byte until its completion. A message reaches the peer after half of it.
    pub round_trip: Duration,
    /// Each request, beside its bytes: the adapter's work.
    pub request: Duration,
    /// Registering, whatever the length.
    pub register_call: Duration,
    /// Registering, for each MiB.
    pub register_mib: Duration,
}

impl Default for Costs {
    fn default() -> Self {
        // For chunk c MiB of 8192 MiB: 8192 / c · (2 calls + 3 round trips) + 8192 · (2 registrations + transfer) of a MiB.
        // Two equations: 4.093 ms for each chunk, 0.533 ms for each MiB.
        Self {
            bytes_per_second: 12_500_000_000,
            round_trip: Duration::from_micros(20),
            request: Duration::from_nanos(200),
            register_call: Duration::from_nanos(2_021_500),
            register_mib: Duration::from_nanos(224_600),
        }
    }
}

impl Costs {
    /// How long the link carries a message.
    pub(super) fn transfer(&self, bytes: u64) -> Duration {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.max(1));
        self.request + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// How long registering takes. What is not pinned costs the call alone.
    pub(super) fn registration(&self, bytes: u64) -> Duration {
        let nanoseconds = (self.register_mib.as_nanos() * u128::from(bytes)) >> 20;
        self.register_call + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}
