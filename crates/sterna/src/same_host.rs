//! Checks that both sides of a move to another process of the same host share.

use sterna_transport::{Channel, PeerCredentials};

use crate::error::MigrationError;
use crate::params::Parameters;

/// Whether the process at the other end may receive this process's guest, or give it one.
///
/// Both processes must belong to the same user. If `x-sterna-cpr-allow-root` is set, one of them may be root's.
pub(crate) fn check_peer(channel: &Channel, params: &Parameters) -> Result<(), MigrationError> {
    let peer = channel.peer_credentials()?;
    let ours = PeerCredentials::own_uid();
    let is_roots = peer.uid == 0 || ours == 0;
    if peer.uid == ours || is_roots && params.cpr_allow_root {
        return Ok(());
    }
    let root = if is_roots { ", unless x-sterna-cpr-allow-root is set on both sides" } else { "" };
    let what = format!(
        "process {} at the other end of {} is of user {}, and this one of user {ours}: descriptors of a guest's memory go \
         between processes of the same user{root}",
        peer.pid,
        channel.peer(),
        peer.uid
    );
    Err(MigrationError::PeerIncompatible { what })
}
