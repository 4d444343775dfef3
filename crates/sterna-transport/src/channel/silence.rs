//! How long a channel may be silent.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::sockopt;

use super::Channel;
use crate::group::ChannelGroup;
use crate::socket;

impl Channel {
    /// From now on a call that is blocked while no byte moves for this long ends as
    /// [`crate::TransportError::Stalled`]. A call that is blocked already keeps the limit it began with.
    ///
    /// A channel that has joined a group stalls in reading only when no byte came on any channel of the group for
    /// this long; it is noticed within another such time.
    pub fn set_stall_limit(&self, limit: Option<Duration>) {
        self.set_limit(limit, false);
    }

    /// As [`Channel::set_stall_limit`], for this channel alone: what comes on others of its group does not count.
    pub fn set_own_stall_limit(&self, limit: Option<Duration>) {
        self.set_limit(limit, true);
    }

    /// Joins a group, once and permanently; a second group is ignored. To be followed by
    /// [`Channel::set_stall_limit`].
    pub fn join(&self, group: &Arc<ChannelGroup>) {
        let _ = self.group.set(Arc::clone(group));
    }

    /// From now on finds out by itself whether the peer's machine is still there while nothing comes: if it answers
    /// nothing for about `limit`, reading ends as [`crate::TransportError::Reset`]. The peer's program need not do
    /// anything for that. Over a Unix socket the kernel knows without asking.
    pub fn probe_peer(&self, limit: Duration) {
        // An adapter asks by itself, with each request.
        if let Some(socket) = self.socket() {
            socket::probe_peer(socket, limit);
        }
    }

    /// Whether the peer has closed the connection, or its direction of it: nothing more comes than what has come, some
    /// of which may be unread.
    pub fn peer_has_closed(&self) -> bool {
        self.medium.peer_has_closed()
    }

    fn set_limit(&self, limit: Option<Duration>, alone: bool) {
        // Below a microsecond the kernel would round to "for ever".
        let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
        let nanos = limit.map_or(0, |limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        self.is_alone.store(alone, Ordering::Relaxed);
        self.stall_limit.store(nanos, Ordering::Relaxed);
        let look = self.look();
        for (direction, limit) in [(sockopt::Timeout::Recv, look), (sockopt::Timeout::Send, limit)] {
            // On a connected socket this fails only for values out of the kernel's range, which then
            // means no limit.
            if let Some(socket) = self.socket() {
                let _ = sockopt::set_socket_timeout(socket, direction, limit);
            }
        }
    }

    /// The channels that count when this one is silent.
    pub(super) fn company(&self) -> Option<&Arc<ChannelGroup>> {
        self.group.get().filter(|_| !self.is_alone.load(Ordering::Relaxed))
    }

    /// How long the kernel may wait for bytes before it is looked whether others have any: twice within the limit, so
    /// that a slow channel, whose calls last as long, shows in between that it moves.
    pub(super) fn look(&self) -> Option<Duration> {
        let parts = if self.company().is_some() { 2 } else { 1 };
        self.stall_limit().map(|limit| (limit / parts).max(Duration::from_millis(1)))
    }

    pub(super) fn stall_limit(&self) -> Option<Duration> {
        let nanos = self.stall_limit.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }
}
