//! The arbiter `file:DIR`: one file per generation in a directory that both sides share.
//!
//! A claim is written to a temporary file, synced, and hard-linked to its final name. The file system creates
//! the link only if the name is free. The content under that name decides, not the result of the link call,
//! because a network file system may lose that result. Before a ruling is returned, the file and the directory
//! are synced, so that a crash of the storage cannot undo the claim.
//!
//! If the process is killed, the claim is either complete or absent. A temporary file (`.*.tmp`) may remain; it
//! has no effect and can be deleted. A token (`*.token`) that was not removed after both sides had read it can
//! be deleted, too.

mod exclusive;

use std::io;
use std::path::{Path, PathBuf};

use crate::arbiter::{Arbiter, Identity, Ruling};
use crate::claim::{Claim, Generation, GuestName};
use crate::error::ClaimError;
use crate::names::{encoded, is_token, quoted, token};
use crate::record;
use exclusive::Obstacle;

/// First bytes of a token file.
const TOKEN_PREFIX: &str = "sterna-arbiter 1 ";

/// An arbiter that stores each claim as a file in a directory.
#[derive(Debug)]
pub(crate) struct FileArbiter {
    directory: PathBuf,
}

impl FileArbiter {
    pub(crate) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    fn path(&self, guest: &GuestName, generation: Generation) -> PathBuf {
        self.directory.join(format!("{}.{generation}.claim", encoded(guest.as_str())))
    }

    fn token_path(&self, guest: &GuestName, generation: Generation) -> PathBuf {
        self.directory.join(format!("{}.{generation}.token", encoded(guest.as_str())))
    }

    fn name(&self) -> String {
        format!("the arbiter file:{}", self.directory.display())
    }

    fn ruling(&self, bytes: &[u8], claim: &Claim, path: &Path) -> Result<Ruling, ClaimError> {
        match record::decode(bytes, &claim.guest, claim.generation) {
            Ok(winner) if winner == claim.claimant => Ok(Ruling::Won),
            Ok(winner) => Ok(Ruling::Lost { winner: Some(winner) }),
            Err(problem) => Err(self.foreign(path, &problem)),
        }
    }

    fn foreign(&self, path: &Path, problem: &str) -> ClaimError {
        ClaimError::contradictory(
            self.name(),
            format!("{}: {problem}", path.display()),
            "find out yourself which side runs the guest, and which program wrote that file. Do not delete it until \
             it is clear which side has the guest",
        )
    }

    fn wrong(&self, obstacle: Obstacle, path: &Path) -> ClaimError {
        match obstacle {
            Obstacle::Foreign(problem) => self.foreign(path, &problem),
            Obstacle::Io { doing, error } => ClaimError::unreachable(
                self.name(),
                format!("cannot {doing} {}: {error}", path.display()),
                remedy(&error),
            ),
        }
    }
}

impl Arbiter for FileArbiter {
    fn claim(&self, claim: &Claim) -> Result<Ruling, ClaimError> {
        let path = self.path(&claim.guest, claim.generation);
        let found = exclusive::create(&path, record::encode(claim).as_bytes(), record::MOST_BYTES);
        let bytes = found.map_err(|obstacle| self.wrong(obstacle, &path))?;
        self.ruling(&bytes, claim, &path)
    }

    /// Returns a random token of the guest's generation.
    ///
    /// Two directories with the same name on two hosts have different tokens, and so has a copy of a directory.
    fn identity(&self, guest: &GuestName, generation: Generation) -> Result<Identity, ClaimError> {
        let path = self.token_path(guest, generation);
        let wanted = format!("{TOKEN_PREFIX}{}\n", token());
        let found = exclusive::create(&path, wanted.as_bytes(), record::MOST_BYTES);
        let bytes = found.map_err(|obstacle| self.wrong(obstacle, &path))?;
        let text = String::from_utf8_lossy(&bytes);
        let number = text.strip_prefix(TOKEN_PREFIX).and_then(|rest| rest.strip_suffix('\n'));
        match number.filter(|number| is_token(number)) {
            Some(number) => Ok(Identity::Is(number.to_owned())),
            None => Err(self.foreign(&path, &format!("it is not a token of an arbiter: {}", quoted(&bytes)))),
        }
    }

    fn forget_identity(&self, guest: &GuestName, generation: Generation) {
        // A token that remains has no effect on claims.
        let _ = std::fs::remove_file(self.token_path(guest, generation));
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            "mount the storage or create the directory, on both sides"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "let this process create files in the directory"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space in the file system",
        io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput => {
            "use a directory of a file system with hard links, or renaming without replacement, and fsync of directories"
        }
        _ => "check whether the storage can be reached, then ask again",
    }
}

#[cfg(test)]
mod tests;
