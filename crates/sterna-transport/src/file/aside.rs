//! Where a file lies until it is complete, and how it gets into its place.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, FlockOperation, RenameFlags, flock, linkat, renameat_with};
use rustix::io::Errno;

use super::system::{retry, system};
use crate::TransportError;

const ENDING: &str = ".partial";
/// Longest name that file systems take.
const NAME_MAX: usize = 255;

/// A file under a hidden name beside its place, removed when dropped unless it was published.
///
/// It is locked while somebody writes it, so that another run can tell it from one that was left behind.
#[derive(Debug)]
pub(super) struct Aside {
    path: PathBuf,
    place: PathBuf,
    /// What lies in the place may be replaced.
    replace: bool,
    published: bool,
}

impl Aside {
    /// Makes an empty file aside of `place`.
    pub fn create(place: &Path, replace: bool) -> Result<(Aside, File), TransportError> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let place = check_place(place, replace)?;
        loop {
            let number = COUNTER.fetch_add(1, Ordering::Relaxed);
            let path =
                place.with_file_name(format!("{}{}-{number}{ENDING}", prefix(&place), std::process::id()));
            // Guest RAM is nobody else's business: as QEMU does.
            let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
            match made {
                Ok(file) => {
                    // Only tells others that somebody works here: where locks cannot be had, they see the process id.
                    let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
                    return Ok((Aside { path, place, replace, published: false }, file));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(system(&path, "open", error)),
            }
        }
    }

    /// Where it lies now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it will lie.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Moves `file` into its place and puts the directory on the disk. Failed, the file is where it was.
    pub fn publish(&mut self, file: &File) -> Result<(), TransportError> {
        if let Err(error) = self.rename() {
            // A network file system may have done it and lost the answer.
            if !is_at(file, &self.place) {
                return Err(self.explain(error));
            }
        }
        self.published = true;
        let directory = directory_of(&self.place);
        File::open(directory)
            .and_then(|directory| directory.sync_all())
            .map_err(|error| system(directory, "fsync of the directory", error))
    }

    /// Takes a published file out of its place again.
    pub fn withdraw(&self, file: &File) {
        if is_at(file, &self.place) {
            let _ = std::fs::remove_file(&self.place);
        }
    }

    fn rename(&self) -> io::Result<()> {
        if self.replace {
            return std::fs::rename(&self.path, &self.place);
        }
        let renamed = || renameat_with(CWD, &self.path, CWD, &self.place, RenameFlags::NOREPLACE);
        match retry(renamed) {
            // The file system or the kernel does not know the flag; a link never replaces.
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::INVAL | Errno::NOSYS)) => {
                retry(|| linkat(CWD, &self.path, CWD, &self.place, AtFlags::empty()))?;
                std::fs::remove_file(&self.path)
            }
            result => result,
        }
    }

    fn explain(&self, error: io::Error) -> TransportError {
        if error.kind() == io::ErrorKind::AlreadyExists {
            return TransportError::FileExists { file: self.place.display().to_string() };
        }
        system(&self.place, "rename", error)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if !self.published {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Files aside of `place` that nobody writes any more: a run was killed.
pub(super) fn left_behind(place: &Path) -> Vec<PathBuf> {
    let prefix = prefix(place);
    let Ok(entries) = std::fs::read_dir(directory_of(place)) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let Some(middle) = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(ENDING)) else {
                return false;
            };
            middle.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
        })
        .map(|entry| entry.path())
        .filter(|path| {
            let Ok(file) = File::open(path) else { return false };
            flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        })
        .collect();
    found.sort();
    found
}

/// How names aside of `place` begin. Long names are cut, so that what is added fits.
fn prefix(place: &Path) -> String {
    let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Room for a process id, a counter and the ending.
    let mut end = name.len().min(NAME_MAX - 48);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!(".{}.", &name[..end])
}

/// The place that is meant (behind links), if a file may be put there.
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
        return Err(TransportError::NotAFile {
            file: place.display().to_string(),
            what: format!("{} is there, which is never replaced", kind_name(kind)),
        });
    }
    if !replace {
        return Err(TransportError::FileExists { file: place.display().to_string() });
    }
    Ok(place)
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

/// Whether `path` names this very file.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}
