//! A destination without postcopy, because the feature `postcopy` is off.

use std::sync::Arc;

use sterna_ram::missing_pages::MissingPagesError;

use super::shared::Shared;
use super::target::Target;
use crate::error::{MigrationError, Untimely};
use crate::params::Capabilities;
use crate::start_error::StartError;

/// The rules have refused the capability already.
pub(super) fn check(_: &dyn Target, _: &Capabilities) -> Result<(), StartError> {
    Ok(())
}

/// The rules refuse the capability, so no system call is needed.
pub(super) fn probe() -> Result<(), Arc<MissingPagesError>> {
    Ok(())
}

pub(super) fn check_target(_: &dyn Target, _: &Capabilities) -> Result<(), StartError> {
    Ok(())
}

pub(super) fn asked_for_start(_: &Shared) -> Result<(), MigrationError> {
    Err(Untimely::StartQuestion.into())
}

pub(super) fn unfit() -> MigrationError {
    off()
}

pub(super) fn name_vcpus(_: &Shared) {}

fn off() -> MigrationError {
    MigrationError::Internal("postcopy without the Cargo feature postcopy".to_owned())
}

pub(super) mod preempt {
    use crate::error::{BadConnection, MigrationError, Misbehaviour};
    use crate::incoming::greeting::Greeting;
    use crate::incoming::shared::Shared;

    pub(in crate::incoming) fn takes_any(_: &Shared) -> bool {
        false
    }

    pub(in crate::incoming) fn take(
        _: &Shared,
        greeting: &Greeting<'_>,
        _: bool,
    ) -> Result<(), MigrationError> {
        let (peer, why) = (greeting.channel.peer().to_owned(), BadConnection::PreemptIsOff);
        Err(Misbehaviour::Connection { peer, why }.into())
    }
}

pub(super) mod recovery {
    use std::sync::Arc;

    use sterna_proto::MigrationId;
    use sterna_transport::Channel;
    use sterna_wire::extension::{MigrationSecret, ReconnectHello};

    use crate::error::{BadComeback, MigrationError, Misbehaviour};
    use crate::incoming::greeting::Greeting;
    use crate::incoming::shared::Shared;

    impl Shared {
        pub(in crate::incoming) fn is_asked_while_starting(&self, _: MigrationId) {}
    }

    pub(in crate::incoming) fn is_unproven(_: &Shared, _: &[u8]) -> bool {
        false
    }

    pub(in crate::incoming) fn take_unproven(
        _: &Shared,
        greeting: &Greeting<'_>,
    ) -> Result<(), MigrationError> {
        Err(refused(greeting.channel))
    }

    pub(in crate::incoming) fn take(
        _: &Shared,
        channel: &Arc<Channel>,
        _: &ReconnectHello,
        _: &MigrationSecret,
    ) -> Result<(), MigrationError> {
        Err(refused(channel))
    }

    fn refused(channel: &Channel) -> MigrationError {
        Misbehaviour::Comeback { peer: channel.peer().to_owned(), why: BadComeback::LacksNoPages }.into()
    }
}
