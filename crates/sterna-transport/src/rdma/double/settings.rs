//! Settings of a network: order, delays, limits and virtual costs.

use std::time::Duration;

/// Behaviour of a [`super::Network`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Seed for delays, orders and the bytes after the sender's private data.
    ///
    /// With `None`, requests are executed in the order of posting, and those bytes are zero.
    pub seed: Option<u64>,
    /// With a seed: the longest delay before a request or a completion. Most are not delayed.
    pub longest_delay: Duration,
    /// Time without an answer after which a request fails with "retry counter exceeded".
    pub retry_limit: Duration,
    /// Pause of a sender between two tries if the peer has no receive posted.
    pub rnr_timer: Duration,
    /// Maximum bytes of a message, for every port.
    pub max_message_bytes: u32,
    /// Whether the adapters of all hosts support on-demand paging: see [`super::Network::set_on_demand_paging`].
    pub on_demand_paging: bool,
    /// Locked-memory limit of every host in bytes; `None` is without limit.
    pub locked_memory_bytes: Option<u64>,
    /// Whether posting to a queue pair in the error state fails with EINVAL. Some drivers do so. Otherwise the
    /// request is flushed.
    pub refuses_posts_in_error: bool,
    /// Whether a queue pair in the error state refuses every change with EIO. A device that does not respond
    /// behaves so.
    pub refuses_changes_in_error: bool,
    /// Costs of operations in virtual time.
    pub costs: Costs,
    /// Whether bytes of writes are copied. If false, memory is neither read, written nor populated, but sends are
    /// still copied.
    ///
    /// This allows tests in virtual time with guests that are larger than the machine's memory.
    pub copies_writes: bool,
}

impl Settings {
    /// Settings without a seed: requests are executed in order, without delays.
    pub fn new() -> Self {
        Self {
            seed: None,
            longest_delay: Duration::from_micros(300),
            retry_limit: Duration::from_millis(150),
            rnr_timer: Duration::from_millis(10),
            max_message_bytes: 1 << 30,
            on_demand_paging: false,
            locked_memory_bytes: None,
            refuses_posts_in_error: false,
            refuses_changes_in_error: false,
            costs: Costs::default(),
            copies_writes: true,
        }
    }

    /// Settings with delays and reordering that the seed determines.
    pub fn seeded(seed: u64) -> Self {
        Self { seed: Some(seed), ..Self::new() }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::new()
    }
}

/// Costs of operations in virtual time.
///
/// Each thread has a clock. Registering advances the clock of the caller. A request starts when it was posted and
/// the adapter has sent all earlier ones. Polling its completion advances the poller's clock to the time of the
/// completion. The virtual time of a program is therefore independent of the machine's speed: see
/// [`super::Network::elapsed`].
///
/// The defaults describe a fast adapter. On it a program that registers, waits and writes chunk by chunk needs
/// 37.9 s for 8 GiB in chunks of 1 MiB. It needs 4.4 s in chunks of 1 GiB. These times were published for
/// ConnectX-7.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Costs {
    /// Bandwidth of the link in bytes per second.
    pub bytes_per_second: u64,
    /// Time from a request's last byte to its completion. A message reaches the peer after half of it.
    pub round_trip: Duration,
    /// Fixed cost of the adapter per request, in addition to its bytes.
    pub request: Duration,
    /// Fixed cost of a registration.
    pub register_call: Duration,
    /// Cost of a registration per MiB.
    pub register_mib: Duration,
}

impl Default for Costs {
    fn default() -> Self {
        // For chunks of c MiB of 8192 MiB: 8192 / c · (2 calls + 3 round trips) + 8192 · (2 registrations +
        // transfer) of a MiB. The two published times give two equations: 4.093 ms per chunk and 0.533 ms per MiB.
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
    /// Time that the link needs for a message.
    pub(super) fn transfer(&self, bytes: u64) -> Duration {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.max(1));
        self.request + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Time of a registration of `bytes`. Memory that is not pinned costs only the call.
    pub(super) fn registration(&self, bytes: u64) -> Duration {
        let nanoseconds = (self.register_mib.as_nanos() * u128::from(bytes)) >> 20;
        self.register_call + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}
