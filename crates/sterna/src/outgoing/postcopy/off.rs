//! A source without postcopy, because the feature `postcopy` is off: no page follows the guest.

#[path = "interface.rs"]
pub(super) mod interface;

use std::sync::Arc;

use super::shared::Shared;
use interface::{Off, Postcopy};

pub(super) fn of(_: &Arc<Shared>) -> Box<dyn Postcopy> {
    Box::new(Off)
}

pub(super) mod background_lanes {
    use super::shared::SharedPostcopy;
    use crate::error::MigrationError;
    use crate::outgoing::lanes::Lane;
    use crate::pages::PageWriter;

    /// Lanes end with the rounds.
    pub(in crate::outgoing) fn follow(
        _: &Lane<'_>,
        _: &SharedPostcopy,
        _: &mut dyn PageWriter,
    ) -> Result<(), MigrationError> {
        Ok(())
    }
}

pub(super) mod shared {
    use std::time::{Duration, Instant};

    use sterna_ram::GuestRam;

    use crate::error::{BadAnswer, MigrationError};
    use crate::stats::PostcopyStatistics;

    pub(in crate::outgoing) struct SharedPostcopy;

    impl SharedPostcopy {
        pub(in crate::outgoing) fn new(_: u64) -> Self {
            Self
        }

        pub(in crate::outgoing) fn limit(&self, _: u64) {}

        pub(in crate::outgoing) fn want(&self) {}

        pub(in crate::outgoing) fn has_ended(&self) -> bool {
            false
        }

        pub(in crate::outgoing) fn requests(&self) -> u64 {
            0
        }

        pub(in crate::outgoing) fn request(
            &self,
            _: &GuestRam,
            _: Option<&str>,
            _: u64,
            _: u64,
        ) -> Result<(), MigrationError> {
            Err(BadAnswer::RequestWithoutPostcopy.into())
        }

        pub(in crate::outgoing) fn report(
            &self,
            statistics: PostcopyStatistics,
            _: impl Fn(Instant) -> Duration,
        ) -> PostcopyStatistics {
            statistics
        }

        pub(in crate::outgoing) fn stop(&self) {}
    }
}

pub(super) mod recovery {
    use parking_lot::Mutex;
    use sterna_transport::Address;
    use sterna_wire::received_pages::ReceivedPages;
    use sterna_wire::return_path::ReturnMessage;

    use crate::error::{BadAnswer, MigrationError};

    /// The address of the destination, and the number of the session. Nothing is recovered after the commit.
    pub(in crate::outgoing) struct Recovery {
        to: Mutex<Address>,
        #[cfg(feature = "reconnect")]
        session: Mutex<u32>,
    }

    impl Recovery {
        pub(in crate::outgoing) fn new(to: Address) -> Self {
            Self {
                to: Mutex::new(to),
                #[cfg(feature = "reconnect")]
                session: Mutex::default(),
            }
        }

        pub(in crate::outgoing) fn to(&self) -> Address {
            self.to.lock().clone()
        }

        pub(in crate::outgoing) fn go_to(&self, to: Address) -> Address {
            std::mem::replace(&mut *self.to.lock(), to)
        }

        #[cfg(feature = "reconnect")]
        pub(in crate::outgoing) fn begin_session(&self) -> u32 {
            let mut session = self.session.lock();
            *session += 1;
            *session
        }

        pub(in crate::outgoing) fn is_under_way(&self) -> bool {
            false
        }

        pub(in crate::outgoing) fn take(
            &self,
            message: ReturnMessage,
        ) -> Result<Option<usize>, MigrationError> {
            Err(BadAnswer::NoRecovery(Box::new(message)).into())
        }

        pub(in crate::outgoing) fn received(&self, _: usize, _: ReceivedPages) {}

        pub(in crate::outgoing) fn is_done(&self) {}
    }
}
