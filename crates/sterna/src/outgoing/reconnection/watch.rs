//! How soon a silent network is noticed.

use sterna_proto::source::Source;
use sterna_transport::Channel;

use crate::outgoing::transfer::Transfer;
use crate::params::Parameters;
use crate::reconnect::SILENCE;

/// A connection of the first session is open.
pub(in crate::outgoing) fn connected(channel: &Channel, params: &Parameters) {
    if !params.reconnect_window.is_zero() {
        // The probe detects a network failure also while no data are sent.
        channel.probe_peer(params.limits.stall);
    }
}

/// Detects a silent network sooner while the guest is paused.
///
/// The guest can then resume.
pub(in crate::outgoing) fn closely(transfer: &Transfer, on: bool) {
    let shared = &transfer.shared;
    if !shared.driver.inspect(Source::would_reconnect) && on {
        return;
    }
    let params = shared.params();
    if !params.reconnect_window.is_zero() {
        let limit = if on { params.downtime_limit } else { SILENCE }.min(params.limits.stall);
        transfer.channels().iter().for_each(|channel| channel.probe_peer(limit));
    }
}
