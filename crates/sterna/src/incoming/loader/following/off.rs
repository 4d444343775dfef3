//! The main channel without postcopy, because the feature `postcopy` is off. The decoder refuses its commands.

use sterna_wire::main::Command;

use super::Loader;
use crate::error::{Difference, MigrationError};
use crate::incoming::postcopy::unfit;

impl Loader<'_> {
    pub(super) fn keep_reading(self) {}

    pub(super) fn postcopy_command(&mut self, command: Command) -> Result<(), MigrationError> {
        Err(Difference::Command(Box::new(command)).into())
    }

    pub(super) fn following_page(&mut self, _: usize, _: u64) -> Result<(), MigrationError> {
        Err(unfit())
    }

    pub(super) fn following_zero(&self, _: usize, _: u64) -> Result<(), MigrationError> {
        Err(unfit())
    }
}
