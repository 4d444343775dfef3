//! Staging files: where a file lies until it is complete, and how it gets into its place.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::iter;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::system::system;
use crate::TransportError;
use parking_lot::{Mutex, MutexGuard};

mod publish;
mod stale;

pub(super) use stale::stale_staging_files;

const ENDING: &str = ".partial";
/// Longest name that file systems take.
const NAME_MAX: usize = 255;
/// The extension of a file that is to be kept; no longer than that of [`ENDING`].
const KEPT: &str = "kept";
/// Names that are tried, one after the other, for a file that has one already.
const NAME_TRIES: usize = 10_000;

/// A file under a hidden name beside its place, removed when dropped unless it was published or is to be kept.
///
/// It is locked while somebody writes it, so that another run can tell it from a stale one.
#[derive(Debug)]
pub(super) struct StagingFile {
    path: PathBuf,
    place: PathBuf,
    /// What lies in the place may be replaced.
    replace: bool,
    /// The place's directory: opened before anything is written, so that one that cannot be synced shows at once.
    directory: File,
    /// It is in its place.
    published: bool,
    /// The staging file stays when this is dropped.
    kept: bool,
    /// The process that made it. A process that was forked since must not remove what this one still writes.
    owner: u32,
}

impl StagingFile {
    /// Makes an empty staging file for `place`.
    pub(crate) fn create(place: &Path, replace: bool) -> Result<(StagingFile, File), TransportError> {
        let place = check_place(place, replace)?;
        let directory = directory_of(&place);
        let directory = File::open(directory).map_err(|error| system(directory, "open", error))?;
        loop {
            let path = staging_name(&place);
            // Guest RAM is nobody else's business: as QEMU does.
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

    /// Where it lies now.
    pub(crate) fn path(&self) -> &Path {
        if self.published { &self.place } else { &self.path }
    }

    /// Where it will lie.
    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// Whether it is in its place.
    pub(crate) fn is_published(&self) -> bool {
        self.published
    }

    /// It is no longer removed with all staging files.
    fn forget(&self) {
        every_staging_file().remove(&(self.owner, self.path.clone()));
    }

    /// From now on it stays, whatever happens, under a name that nobody takes for what a killed run has left.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
        self.forget();
        if self.published {
            return;
        }
        // A process of the same number, in a container always 1, may have kept another only copy under this name.
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
                // It is safe under the name that it has, too.
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

/// All staging files that are removed when they are dropped, each with the process that made it: after a fork the
/// child has its parent's entries too.
fn every_staging_file() -> MutexGuard<'static, BTreeSet<(u32, PathBuf)>> {
    static EVERY: Mutex<BTreeSet<(u32, PathBuf)>> = Mutex::new(BTreeSet::new());
    EVERY.lock()
}

/// Removes those of this process.
pub(super) fn remove_all() {
    let ours = std::process::id();
    for (owner, path) in std::mem::take(&mut *every_staging_file()) {
        if owner == ours {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A file in `directory` that has no name.
pub(super) fn temporary(directory: &Path) -> Result<File, TransportError> {
    let open = |flags: i32, path: &Path| {
        OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(path)
    };
    match open(libc::O_TMPFILE, directory) {
        // The file system, or the kernel, does not know them: then its name is taken away at once.
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

/// A staging file's name for `place` that this process has not given before.
fn staging_name(place: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    place.with_file_name(format!("{}{}-{number}{ENDING}", prefix(place), std::process::id()))
}

/// How staging files' names for `place` begin. Long names are cut, so that what is added fits.
fn prefix(place: &Path) -> String {
    let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Room for a process id, a counter and the ending.
    let mut end = name.len().min(NAME_MAX - 48);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!(".{}.", &name[..end])
}

/// The place that is meant (links followed), if a file may be put there.
fn check_place(place: &Path, replace: bool) -> Result<PathBuf, TransportError> {
    if place.file_name().is_none() {
        let what = "a file's name must follow".to_owned();
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
        what: format!("{} exists there, which is never replaced", kind_name(kind)),
    }
}

pub(super) fn kind_name(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

fn directory_of(place: &Path) -> &Path {
    match place.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
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
        // As a child sees what its parent made before the fork.
        staging.owner = std::process::id() + 1;

        drop(staging);

        assert!(path.exists());
    }
}
