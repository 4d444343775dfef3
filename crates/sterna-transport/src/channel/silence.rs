//! Stall limits: how long a channel may be silent before a blocked call fails.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::sockopt;

use super::Channel;
use crate::group::ChannelGroup;
use crate::socket;

impl Channel {
    /// Sets the time after which a blocked call without progress fails as [`crate::TransportError::Stalled`].
    ///
    /// A call that is already blocked keeps its old limit. A channel in a group stalls in reading only if no
    /// channel of the group received a byte for this time. The stall is noticed after at most twice the limit.
    pub fn set_stall_limit(&self, limit: Option<Duration>) {
        self.set_limit(limit, false);
    }

    /// As [`Channel::set_stall_limit`], for this channel alone. Traffic on other channels of its group does not count.
    pub fn set_own_stall_limit(&self, limit: Option<Duration>) {
        self.set_limit(limit, true);
    }

    /// Joins a group, permanently; joining a second group has no effect. Call [`Channel::set_stall_limit`] afterwards.
    pub fn join(&self, group: &Arc<ChannelGroup>) {
        let _ = self.group.set(Arc::clone(group));
    }

    /// Makes the kernel probe the peer's machine while no bytes arrive.
    ///
    /// If the machine answers nothing for about `limit`, reading fails as [`crate::TransportError::Reset`]. The peer's
    /// program need not do anything. Over a Unix socket no probe is needed: the kernel knows both ends.
    pub fn probe_peer(&self, limit: Duration) {
        // An RDMA adapter needs no probe: each of its requests is acknowledged.
        if let Some(socket) = self.socket() {
            socket::probe_peer(socket, limit);
        }
    }

    /// Whether the peer has closed the connection, or its writing direction.
    ///
    /// No further bytes will arrive; some that arrived earlier may still be unread.
    pub fn peer_has_closed(&self) -> bool {
        self.medium.peer_has_closed()
    }

    fn set_limit(&self, limit: Option<Duration>, alone: bool) {
        // Below one microsecond the kernel would round to 0, which means no limit.
        let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
        let nanos = limit.map_or(0, |limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        self.is_alone.store(alone, Ordering::Relaxed);
        self.stall_limit.store(nanos, Ordering::Relaxed);
        let look = self.look();
        for (direction, limit) in [(sockopt::Timeout::Recv, look), (sockopt::Timeout::Send, limit)] {
            // On a connected socket this fails only for values outside the kernel's range. They then mean no limit.
            if let Some(socket) = self.socket() {
                let _ = sockopt::set_socket_timeout(socket, direction, limit);
            }
        }
    }

    /// The group whose traffic counts when this channel is silent.
    pub(super) fn company(&self) -> Option<&Arc<ChannelGroup>> {
        self.group.get().filter(|_| !self.is_alone.load(Ordering::Relaxed))
    }

    /// Maximum time of one wait in the kernel. Then the channel checks whether others of its group have received
    /// bytes.
    ///
    /// It is half the limit in a group. A slow channel, whose calls last as long, therefore reports progress in
    /// between.
    pub(super) fn look(&self) -> Option<Duration> {
        let parts = if self.company().is_some() { 2 } else { 1 };
        self.stall_limit().map(|limit| (limit / parts).max(Duration::from_millis(1)))
    }

    pub(crate) fn stall_limit(&self) -> Option<Duration> {
        let nanos = self.stall_limit.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }
}
