//! Checks that both sides of a move to another process of the same host share.

use sterna_transport::{Channel, PeerCredentials};

use crate::error::{MemoryDifference, MigrationError};
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
    let (pid, theirs, peer) = (peer.pid, peer.uid, channel.peer().to_owned());
    Err(MemoryDifference::OtherUser { pid, peer, theirs, ours, is_roots }.into())
}
