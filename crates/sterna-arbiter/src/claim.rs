//! What is claimed, and by whom.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::OnceLock;

/// One side asks for the right to run a guest, exclusively, in one generation of its protection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The guest, or its protection, by a name that both sides use.
    pub guest: GuestName,
    /// The generation. A new protection of the same guest needs a new one.
    pub generation: Generation,
    /// Who asks.
    pub claimant: Claimant,
}

/// The name of a guest or of its protection: 1 to 64 bytes without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GuestName(String);

/// The number of a protection: no other protection of the guest, by that name, has the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(u64);

/// Who asks. Equal claimants are the same one, who may ask again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Claimant {
    role: Role,
    process: String,
}

/// A side of a protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The side that runs the guest.
    Primary,
    /// The side that holds its checkpoints.
    Standby,
}

/// A text that cannot be a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be {text:?}: use 1 to {most} bytes without control characters")]
pub struct NameError {
    what: &'static str,
    text: String,
    most: usize,
}

impl GuestName {
    /// # Errors
    /// The text is empty, too long, or has control characters.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        checked("a guest's name", name.into(), 64).map(Self)
    }

    /// The 32 hexadecimal digits of an id of 16 bytes.
    pub fn of_id(id: [u8; 16]) -> Self {
        Self(format!("{:032x}", u128::from_be_bytes(id)))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Generation {
    /// The generation of that number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl Claimant {
    /// `process` names the process that asks: a process that is started again is another one, unless it keeps the name.
    ///
    /// # Errors
    /// `process` is empty, longer than 128 bytes, or has control characters.
    pub fn new(role: Role, process: impl Into<String>) -> Result<Self, NameError> {
        Ok(Self { role, process: checked("a process's name", process.into(), 128)? })
    }

    /// This process: host, process id, and a random number that stays while the process lives.
    pub fn of_this_process(role: Role) -> Self {
        static NAME: OnceLock<String> = OnceLock::new();
        let name = NAME.get_or_init(|| {
            let host: String = rustix::system::uname().nodename().to_string_lossy().into_owned();
            let host: String = host.chars().filter(|c| c.is_ascii_graphic()).take(64).collect();
            format!("{host}:{}:{:016x}", std::process::id(), random_number())
        });
        Self { role, process: name.clone() }
    }

    /// The side.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The process.
    pub fn process(&self) -> &str {
        &self.process
    }
}

impl Role {
    /// `primary` or `standby`.
    pub fn word(self) -> &'static str {
        match self {
            Role::Primary => "primary",
            Role::Standby => "standby",
        }
    }

    pub(crate) fn of_word(word: &str) -> Option<Self> {
        [Role::Primary, Role::Standby].into_iter().find(|role| role.word() == word)
    }
}

/// A number that is most likely no other's: the standard library draws keys of its hash tables from the kernel.
pub(crate) fn random_number() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

fn checked(what: &'static str, text: String, most: usize) -> Result<String, NameError> {
    if text.is_empty() || text.len() > most || text.chars().any(char::is_control) {
        return Err(NameError { what, text, most });
    }
    Ok(text)
}

impl fmt::Display for GuestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl fmt::Display for Claimant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(GuestName::new("web-1 (old)/ä").is_ok());
        for wrong in ["", "a\nb", "a\0b", &"x".repeat(65)] {
            let error = GuestName::new(wrong).expect_err("refused");
            assert!(error.to_string().contains("1 to 64 bytes"), "{error}");
        }
        assert!(Claimant::new(Role::Primary, "").is_err());
        let id = [0, 1, 0x2f, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff];
        assert_eq!(GuestName::of_id(id).as_str(), "00012f030405060708090a0b0c0d0eff");
    }

    #[test]
    fn this_process_is_always_the_same_claimant() {
        let one = Claimant::of_this_process(Role::Standby);

        assert_eq!(one, Claimant::of_this_process(Role::Standby));
        assert_ne!(one, Claimant::of_this_process(Role::Primary));
        assert!(Claimant::new(Role::Standby, one.process()).is_ok());
    }
}
