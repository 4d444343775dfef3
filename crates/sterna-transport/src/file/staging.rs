//! Staging files. A new file is written under a hidden name, and renamed to its place when it is complete.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::iter;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::system::system;
use crate::error::TransportError;
use parking_lot::{Mutex, MutexGuard};

mod names;
mod publish;
mod stale;

use super::system::kind_name;
use names::{directory_of, staging_name};
pub(super) use stale::stale_staging_files;

/// The extension of a file that is to be kept. It is no longer than `ENDING`.
const KEPT: &str = "kept";
/// Maximum path length in bytes for which rustix does not allocate.
const LONGEST_ON_STACK: usize = 255;
/// Number of new names that are tried when a name is already taken.
const NAME_TRIES: usize = 10_000;

/// A file under a hidden name in the directory of its place. Drop removes it unless it was published or kept.
///
/// It is locked while a process writes it, so that another process can distinguish it from a stale one.
#[derive(Debug)]
pub(super) struct StagingFile {
    path: PathBuf,
    place: PathBuf,
    /// Whether a file at the place may be replaced.
    replace: bool,
    /// Directory of the place. It is opened before anything is written, so that an unusable directory fails early.
    directory: File,
    /// Whether the file is at its place.
    published: bool,
    /// Whether the staging file stays when this value is dropped.
    kept: bool,
    /// Id of the process that created the file. A forked child must not remove a file that its parent still writes.
    owner: u32,
}

impl StagingFile {
    /// Creates an empty staging file for `place`.
    pub(crate) fn create(place: &Path, replace: bool) -> Result<(StagingFile, File), TransportError> {
        let place = check_place(place, replace)?;
        let directory = directory_of(&place);
        let directory = File::open(directory).map_err(|error| system(directory, "open", error))?;
        loop {
            let path = staging_name(&place);
            // Guest RAM may contain secrets, so only the owner may read the file. QEMU uses the same mode.
            let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
            match made {
                Ok(file) => {
                    stale::lock(&file);
                    let owner = std::process::id();
                    every_staging_file().insert((owner, path.clone()));
                    let staging =
                        StagingFile { path, place, replace, directory, published: false, kept: false, owner };
                    return Ok((staging, file));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(system(&path, "open", error)),
            }
        }
    }

    /// Current path of the file.
    pub(crate) fn path(&self) -> &Path {
        if self.published { &self.place } else { &self.path }
    }

    /// Path at which the file will be published.
    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// Whether the file is at its place.
    pub(crate) fn is_published(&self) -> bool {
        self.published
    }

    /// Removes the file from the list of files that [`remove_all`] removes.
    fn forget(&self) {
        every_staging_file().remove(&(self.owner, self.path.clone()));
    }

    /// Keeps the file whatever happens. Its new name is not mistaken for a killed run's staging file.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
        self.forget();
        if self.published {
            return;
        }
        // A process with the same id (in a container always 1) may have kept another only copy under this name.
        let kept = self.path.with_extension(KEPT);
        let names =
            iter::once(kept).chain(iter::repeat_with(|| staging_name(&self.place).with_extension(KEPT)));
        for kept in names.take(NAME_TRIES) {
            match publish::rename_to_nothing(&self.path, &kept) {
                Ok(()) => {
                    self.path = kept;
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                // The file is safe under its present name too.
                Err(_) => return,
            }
        }
    }
}

impl Drop for StagingFile {
    fn drop(&mut self) {
        if !self.published && !self.kept && self.owner == std::process::id() {
            self.forget();
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// All staging files that Drop removes, each with the id of its process. A forked child inherits its parent's entries.
fn every_staging_file() -> MutexGuard<'static, BTreeSet<(u32, PathBuf)>> {
    EVERY.lock()
}

static EVERY: Mutex<BTreeSet<(u32, PathBuf)>> = Mutex::new(BTreeSet::new());

/// Removes the staging files of this process.
pub(super) fn remove_all() {
    let ours = std::process::id();
    for (owner, path) in std::mem::take(&mut *every_staging_file()) {
        if owner == ours {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// As [`remove_all`], for a signal handler: takes no blocking lock and allocates nothing.
///
/// A thread that was interrupted anywhere, or has no memory, may therefore call it. If the list is locked at that
/// moment, the files stay.
pub(super) fn remove_all_in_handler() {
    let ours = std::process::id();
    let Some(every) = EVERY.try_lock() else { return };
    for (_, path) in every.iter().filter(|(owner, _)| *owner == ours) {
        // A longer path would need an allocation, which may be what failed in this process.
        if path.as_os_str().len() < LONGEST_ON_STACK {
            let _ = rustix::fs::unlink(path);
        }
    }
}

/// Creates a file without a name in `directory`.
pub(super) fn temporary(directory: &Path) -> Result<File, TransportError> {
    let open = |flags: i32, path: &Path| {
        OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(path)
    };
    match open(libc::O_TMPFILE, directory) {
        // The file system or the kernel does not support O_TMPFILE. A named file is created and unlinked immediately.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT | libc::EINVAL)
            ) => {}
        made => return made.map_err(|error| system(directory, "open(O_TMPFILE)", error)),
    }
    loop {
        let path = staging_name(&directory.join("temporary"));
        match open(libc::O_CREAT | libc::O_EXCL, &path) {
            Ok(file) => {
                std::fs::remove_file(&path).map_err(|error| system(&path, "unlink", error))?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(system(&path, "open", error)),
        }
    }
}

/// The place with symbolic links followed, if a file may be published there.
fn check_place(place: &Path, replace: bool) -> Result<PathBuf, TransportError> {
    if place.file_name().is_none() {
        let what = "the path must end with the name of a file".to_owned();
        return Err(TransportError::NotAFile { file: place.display().to_string(), what });
    }
    let there = match std::fs::symlink_metadata(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(place.to_owned()),
        Err(error) => return Err(system(place, "stat", error)),
        Ok(there) => there,
    };
    let place = if there.is_symlink() {
        std::fs::canonicalize(place).map_err(|error| system(place, "readlink", error))?
    } else {
        place.to_owned()
    };
    let kind = std::fs::metadata(&place).map_err(|error| system(&place, "stat", error))?.file_type();
    if !kind.is_file() {
        return Err(not_replaced(&place, kind));
    }
    if !replace {
        return Err(TransportError::FileExists { file: place.display().to_string() });
    }
    Ok(place)
}

fn not_replaced(place: &Path, kind: std::fs::FileType) -> TransportError {
    TransportError::NotAFile {
        file: place.display().to_string(),
        what: format!("{} exists there and is never replaced", kind_name(kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_that_another_process_made_stays_when_it_is_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let (mut staging, _file) = StagingFile::create(&directory.path().join("image"), false).unwrap();
        let path = staging.path().to_owned();
        staging.forget();
        // The state in a forked child whose parent created the file.
        staging.owner = std::process::id() + 1;

        drop(staging);

        assert!(path.exists());
    }
}
