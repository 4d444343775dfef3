//! Limits for the silence of a migration's channels.

use std::time::Duration;

use sterna_proto::destination::Destination;
use sterna_transport::Channel;

use super::shared::Shared;
use crate::reconnect::SILENCE;

impl Shared {
    /// Adds a channel to the migration: silence is measured over all channels together. The kernel probes
    /// whether the source's host is alive, because a source may be silent for a long time.
    pub(super) fn begin_waiting_for(&self, channel: &Channel) {
        let limit = self.params.limits.stall;
        channel.join(&self.group);
        channel.set_stall_limit(Some(limit));
        let comes_back = self.driver().is_some_and(|driver| driver.inspect(Destination::would_suspend));
        channel.probe_peer(if comes_back { SILENCE.min(limit) } else { limit });
    }

    /// The source reconnects after a loss, so a dead network must be detected early on every channel.
    pub(super) fn watch_for_silence(&self) {
        let limit = SILENCE.min(self.params.limits.stall);
        let channels = self.places.taken_lanes().into_iter().chain(self.places.main());
        channels.for_each(|channel| channel.probe_peer(limit));
    }

    /// Lets reads of the main channel time out after `limit`, whether or not other channels receive data.
    pub(super) fn look_up_from_main_after(&self, limit: Duration) {
        if let Some(main) = self.places.main() {
            main.set_own_stall_limit(Some(limit));
        }
    }

    /// Lets reads of the main channel time out only when the whole migration is silent.
    pub(super) fn wait_for_main(&self) {
        if let Some(main) = self.places.main() {
            main.set_stall_limit(Some(self.params.limits.stall));
        }
    }
}
