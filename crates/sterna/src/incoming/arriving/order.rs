//! The order in which the source may send postcopy commands (specs/postcopy.md §2). Pure.

use crate::error::{MigrationError, Untimely, UntimelyCommand};

/// The latest command that the source has sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Commands {
    /// No command was received.
    #[default]
    None,
    /// ADVISE was received: postcopy is possible.
    Advised,
    /// LISTEN was received: pages can be requested.
    Listening,
    /// RUN was received: the guest runs.
    Running,
}

impl Commands {
    /// Records ADVISE. `ram_has_begun`: RAM's START section came before it.
    pub(crate) fn advised(&mut self, ram_has_begun: bool) -> Result<(), MigrationError> {
        if *self != Self::None || ram_has_begun {
            return Err(Untimely::Postcopy(UntimelyCommand::Advise).into());
        }
        *self = Self::Advised;
        Ok(())
    }

    /// Checks that DISCARD is allowed now.
    pub(crate) fn discards(self) -> Result<(), MigrationError> {
        self.must_be(Self::Advised, UntimelyCommand::Discard)
    }

    /// Checks that PACKAGED is allowed now.
    pub(crate) fn packaged(self) -> Result<(), MigrationError> {
        self.must_be(Self::Advised, UntimelyCommand::Packaged)
    }

    /// Records LISTEN, which is part of a package.
    pub(crate) fn listens(&mut self) -> Result<(), MigrationError> {
        self.must_be(Self::Advised, UntimelyCommand::Listen)?;
        *self = Self::Listening;
        Ok(())
    }

    /// Records RUN, which must follow LISTEN.
    pub(crate) fn runs(&mut self) -> Result<(), MigrationError> {
        self.must_be(Self::Listening, UntimelyCommand::Run)?;
        *self = Self::Running;
        Ok(())
    }

    /// Checks that EOF is allowed now.
    pub(crate) fn ends(self) -> Result<(), MigrationError> {
        match self {
            Self::Listening => Err(Untimely::Postcopy(UntimelyCommand::Eof).into()),
            _ => Ok(()),
        }
    }

    fn must_be(self, state: Self, command: UntimelyCommand) -> Result<(), MigrationError> {
        if self == state { Ok(()) } else { Err(Untimely::Postcopy(command).into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_follow_each_other_and_none_comes_twice() {
        let mut commands = Commands::default();
        assert!(commands.discards().is_err() && commands.packaged().is_err() && commands.listens().is_err());
        commands.advised(false).unwrap();
        assert!(commands.advised(false).is_err() && commands.runs().is_err());
        commands.discards().unwrap();
        commands.packaged().unwrap();
        commands.listens().unwrap();
        assert!(commands.discards().is_err() && commands.packaged().is_err() && commands.ends().is_err());
        commands.runs().unwrap();
        assert!(commands.runs().is_err());
        commands.ends().unwrap();
    }

    #[test]
    fn advise_comes_before_ram() {
        assert!(Commands::default().advised(true).is_err());
    }
}
