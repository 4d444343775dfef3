//! A private directory for the sockets between QEMU and this program.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Directories of this process so far. No name comes twice: the QEMU of a protection that has ended may still know the old one.
static MADE: AtomicU64 = AtomicU64::new(0);

/// A directory that only this user enters. It goes when this is dropped.
pub(super) struct SocketDirectory(PathBuf);

impl SocketDirectory {
    /// Makes one in `parent`, or where temporary files are.
    ///
    /// # Errors
    /// The host refuses it.
    pub(super) fn new(parent: Option<&Path>) -> io::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        // Another process that had the same id may have left some.
        for _ in 0..1000 {
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("sterna-protect-{}-{number}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        // What is left in it is of no use to anybody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_directory_has_the_name_of_one_before() {
        let parent = tempfile::tempdir().unwrap();
        let first = SocketDirectory::new(Some(parent.path())).unwrap();
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
        let second = SocketDirectory::new(Some(parent.path())).unwrap();
        assert_ne!(second.path(), path);
    }
}
