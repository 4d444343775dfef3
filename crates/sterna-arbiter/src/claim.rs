//! A claim and its parts: guest, generation and claimant. Both sides and every kind of arbiter use these types.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::OnceLock;

/// A request for the exclusive right to run a guest in one generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The name of the guest or of its protection. Both sides must use the same name.
    pub guest: GuestName,
    /// The generation of the protection. A new protection of the same guest needs a new generation.
    pub generation: Generation,
    /// The side and the process that request the claim.
    pub claimant: Claimant,
}

/// The name of a guest or of its protection.
///
/// It has 1 to 64 bytes without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GuestName(String);

/// The number of a protection. Two protections with the same guest name have different generations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(u64);

/// The side and the process that request a claim.
///
/// Equal values are the same claimant, which may repeat its claim.
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

/// A text that cannot be a [`GuestName`] or the process of a [`Claimant`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be {text:?}: use 1 to {most} bytes without control characters")]
pub struct NameError {
    what: &'static str,
    text: String,
    most: usize,
}

impl GuestName {
    /// Checks the length and the characters of a guest's name.
    ///
    /// # Errors
    /// The text is empty, longer than 64 bytes, or contains control characters.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        checked("a guest's name", name.into(), 64).map(Self)
    }

    /// Makes a name from the 32 hexadecimal digits of a 16-byte id, such as a UUID.
    pub fn of_id(id: [u8; 16]) -> Self {
        Self(format!("{:032x}", u128::from_be_bytes(id)))
    }

    /// Returns the name as text, as it appears in stored claims and variables.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Generation {
    /// Makes a generation from its number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of the generation.
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl Claimant {
    /// Makes a claimant from its side and the name of its process.
    ///
    /// A restarted process is another claimant unless it uses the same `process` name.
    ///
    /// # Errors
    /// `process` is empty, longer than 128 bytes, or contains control characters.
    pub fn new(role: Role, process: impl Into<String>) -> Result<Self, NameError> {
        Ok(Self { role, process: checked("a process's name", process.into(), 128)? })
    }

    /// Makes a claimant that names this process.
    ///
    /// The name consists of the host, the process id, and a random number that is drawn once per process.
    pub fn of_this_process(role: Role) -> Self {
        static NAME: OnceLock<String> = OnceLock::new();
        let name = NAME.get_or_init(|| {
            let host: String = rustix::system::uname().nodename().to_string_lossy().into_owned();
            let host: String = host.chars().filter(|c| c.is_ascii_graphic()).take(64).collect();
            format!("{host}:{}:{:016x}", std::process::id(), random_number())
        });
        Self { role, process: name.clone() }
    }

    /// Returns the side that claims: primary or standby.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the name of the process that claims.
    pub fn process(&self) -> &str {
        &self.process
    }
}

impl Role {
    /// Returns the word for the role in stored claims and variables: `primary` or `standby`.
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

/// Returns a random 64-bit number. The standard library seeds the keys of its hash tables from the kernel.
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
