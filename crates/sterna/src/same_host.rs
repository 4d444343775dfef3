//! What both sides of a move to another process of the same host have in common.

use sterna_transport::{Channel, PeerCredentials};

use crate::error::MigrationError;
use crate::params::Parameters;

/// Whether the process at the other end may have this one's guest, or give it one: it is the same user's, or root's where that is
/// permitted.
pub(crate) fn check_peer(channel: &Channel, params: &Parameters) -> Result<(), MigrationError> {
    let peer = channel.peer_credentials()?;
    let ours = PeerCredentials::own_uid();
    if peer.uid == ours || peer.uid == 0 && params.cpr_accept_root {
        return Ok(());
    }
    let root = if peer.uid == 0 { ", or permit root's process with x-sterna-cpr-accept-root" } else { "" };
    let what = format!(
        "the process {} at the other end of {} is of user {}, and this one of user {ours}: descriptors of a guest's memory go \
         between processes of one user{root}",
        peer.pid,
        channel.peer(),
        peer.uid
    );
    Err(MigrationError::PeerIncompatible { what })
}
