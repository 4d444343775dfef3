//! Connecting again.

use std::time::Duration;

use sterna_transport::CancelFlag;

use crate::outgoing::shared::Shared;
use crate::params::Parameters;
use crate::reconnect::Dialling;

/// The limit of one attempt. If a handshake's first packet was lost, a new attempt is sooner than the kernel's
/// retry.
pub(super) const ATTEMPT: Duration = Duration::from_secs(5);
/// The limit of the attempt to tell the destination that this side gives up.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// The connections of session `session`: blocks of so many pages, at most for `limit`, until `cancel`.
pub(super) fn dialling<'a>(
    shared: &'a Shared,
    session: u32,
    params: &'a Parameters,
    (pages, limit, cancel): (&'a [u64], Duration, &'a CancelFlag),
) -> Dialling<'a> {
    Dialling {
        to: &shared.session.to,
        tls: params.tls.as_ref(),
        identity: &shared.handover.identity,
        session,
        lanes: if shared.capabilities.multifd { params.multifd_channels } else { 0 },
        block_pages: pages,
        limit,
        cancel,
    }
}
