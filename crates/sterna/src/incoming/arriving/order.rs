//! The order in which the source may send postcopy commands (specs/postcopy.md §2). Pure.

use crate::error::MigrationError;

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
            return Err(untimely("POSTCOPY_ADVISE", "comes once, and before RAM"));
        }
        *self = Self::Advised;
        Ok(())
    }

    /// Checks that DISCARD is allowed now.
    pub(crate) fn discards(self) -> Result<(), MigrationError> {
        self.must_be(Self::Advised, "POSTCOPY_RAM_DISCARD", "comes between ADVISE and LISTEN")
    }

    /// Checks that PACKAGED is allowed now.
    pub(crate) fn packaged(self) -> Result<(), MigrationError> {
        self.must_be(Self::Advised, "PACKAGED", "comes once, behind ADVISE")
    }

    /// Records LISTEN, which is part of a package.
    pub(crate) fn listens(&mut self) -> Result<(), MigrationError> {
        self.must_be(Self::Advised, "POSTCOPY_LISTEN", "comes once, first in the package")?;
        *self = Self::Listening;
        Ok(())
    }

    /// Records RUN, which must follow LISTEN.
    pub(crate) fn runs(&mut self) -> Result<(), MigrationError> {
        self.must_be(Self::Listening, "POSTCOPY_RUN", "comes once, behind LISTEN")?;
        *self = Self::Running;
        Ok(())
    }

    /// Checks that EOF is allowed now.
    pub(crate) fn ends(self) -> Result<(), MigrationError> {
        match self {
            Self::Listening => Err(untimely("EOF", "comes behind POSTCOPY_RUN, or without LISTEN")),
            _ => Ok(()),
        }
    }

    fn must_be(self, state: Self, what: &str, rule: &str) -> Result<(), MigrationError> {
        if self == state { Ok(()) } else { Err(untimely(what, rule)) }
    }
}

fn untimely(what: &str, rule: &str) -> MigrationError {
    MigrationError::PeerMisbehaved {
        what: format!("the source sent {what} at a wrong time: it {rule} (specs/postcopy.md §2)"),
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
