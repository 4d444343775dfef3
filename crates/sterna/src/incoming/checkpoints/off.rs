//! A destination that is no standby, because the feature `standby` is off.

use super::follower::Follower;
use super::greeting::Greeting;
use super::loader::Loader;
use super::shared::Shared;
use crate::error::MigrationError;
use crate::interruption::Break;

pub(super) static SECTIONS: &[(&str, usize)] = &[];

pub(super) fn section(_: &str) -> Option<&'static (&'static str, usize)> {
    None
}

pub(super) fn contact_of(_: &[u8]) -> Option<fn(&Shared, &Greeting<'_>) -> Result<(), Break>> {
    None
}

pub(super) fn begin(_: &Shared, follower: &dyn Follower) {
    follower.lost(off());
}

impl Loader<'_> {
    pub(super) fn follow(&mut self, _: &dyn Follower) -> Result<(), MigrationError> {
        Err(off())
    }
}

fn off() -> MigrationError {
    MigrationError::Internal("a standby without the Cargo feature standby".to_owned())
}
