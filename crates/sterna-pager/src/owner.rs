//! Whose memory a guest's is: that of a VMM that connected, or of this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::GuestError;
use crate::peer::Peer;

/// What the process does that runs its guest itself.
///
/// The methods are called on threads of the pager. They must not touch the guest's memory, and must not wait for a thread
/// that does.
pub trait OwnEvents: Send + Sync {
    /// All of the guest's memory is there, and no access waits any more.
    fn completed(&self) {}

    /// Pages cannot be served any more: a thread that touches one waits without end. Stop the guest.
    fn given_up(&self, why: &GuestError);
}

/// Who runs the guest.
pub(crate) enum Owner {
    /// The VMM at the other end of the socket.
    Peer {
        /// Its end shows that the VMM has ended.
        socket: OwnedFd,
        peer: Peer,
    },
    /// This process.
    Own(Arc<dyn OwnEvents>),
}

impl Owner {
    pub(crate) fn pid(&self) -> Option<i32> {
        match self {
            Self::Peer { peer, .. } => peer.pid(),
            Self::Own(_) => i32::try_from(std::process::id()).ok(),
        }
    }

    /// Ends or stops a guest that cannot be served any more. The error says why that is not possible.
    pub(crate) fn end(&self, why: &GuestError) -> Result<(), String> {
        match self {
            Self::Peer { peer, .. } => peer.kill(),
            Self::Own(events) => {
                events.given_up(why);
                Ok(())
            }
        }
    }
}
