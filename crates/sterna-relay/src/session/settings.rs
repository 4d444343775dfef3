//! Limits of a session.

use std::time::Duration;

/// Most flows of a session that are open at the same time.
pub const MOST_FLOWS: usize = 1024;

/// Credit of a flow that has not delivered anything, in bytes.
pub(super) const FIRST_WINDOW: u64 = 16 << 10;
/// First credit of all flows, in bytes.
pub(super) const RESERVED: u64 = MOST_FLOWS as u64 * FIRST_WINDOW;
/// Largest credit of one flow, in bytes (`specs/relay.md §6`).
pub(super) const LARGEST_WINDOW: u64 = 64 << 20;
/// Bytes in flight of a flow with priority.
pub(super) const PRIORITY_BYTES: u64 = 1 << 20;
/// Silence of a carrier before it is probed.
pub(super) const PROBE_AFTER: Duration = Duration::from_secs(1);
/// Silence after a probe before the carrier is given up.
pub(super) const GIVE_UP_AFTER: Duration = Duration::from_secs(5);

/// Settings of a session at one relay.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Most bytes that wait to be sent or acknowledged, and most that were received and are not delivered.
    ///
    /// At least 32 MiB, so that every flow has its first credit.
    pub buffer_bytes: u64,
    /// The bug that this session has.
    #[cfg(feature = "sim")]
    pub planted: Option<Planted>,
}

impl Settings {
    /// Smallest buffer, in bytes: twice the first credit of all flows.
    pub const LEAST_BUFFER: u64 = 2 * RESERVED;

    /// Buffer that suits most links, in bytes.
    pub const USUAL_BUFFER: u64 = 64 << 20;

    /// Settings with a buffer of so many bytes, at least [`LEAST_BUFFER`](Self::LEAST_BUFFER).
    pub fn new(buffer_bytes: u64) -> Self {
        Self {
            buffer_bytes: buffer_bytes.max(Self::LEAST_BUFFER),
            #[cfg(feature = "sim")]
            planted: None,
        }
    }
}

/// Bugs that the simulator must find.
#[cfg(feature = "sim")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planted {
    /// After a loss a direction continues where it was, instead of where the peer is.
    ContinuesAfterLoss,
    /// A repeated byte is delivered again.
    DeliversTwice,
    /// An end is not sent again after a loss.
    ForgetsEnd,
    /// OPEN is not sent again after a loss.
    ForgetsOpen,
    /// A flow changes its carrier while frames are on the way.
    ChangesCarrierAtOnce,
    /// The acknowledgement of an end is forgotten with its flow.
    ForgetsLastAcknowledgement,
    /// Credit is granted without a limit.
    GrantsWithoutLimit,
    /// MISS is not sent again after a loss.
    ForgetsMiss,
}

#[cfg(feature = "sim")]
impl Planted {
    /// Every bug.
    pub const ALL: [Planted; 8] = [
        Planted::ContinuesAfterLoss,
        Planted::DeliversTwice,
        Planted::ForgetsEnd,
        Planted::ForgetsOpen,
        Planted::ChangesCarrierAtOnce,
        Planted::ForgetsLastAcknowledgement,
        Planted::GrantsWithoutLimit,
        Planted::ForgetsMiss,
    ];
}

/// Whether the session has this bug. Always false without the feature `sim`.
macro_rules! has_bug {
    ($settings:expr, $bug:ident) => {{
        #[cfg(feature = "sim")]
        let has = $settings.planted == Some($crate::session::Planted::$bug);
        #[cfg(not(feature = "sim"))]
        let has = false;
        has
    }};
}
pub(super) use has_bug;
