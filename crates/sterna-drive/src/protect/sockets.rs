//! A private directory for the sockets between QEMU and this program.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of directories so far. No name is used twice, because the QEMU of an ended protection may know the old one.
static MADE: AtomicU64 = AtomicU64::new(0);

/// A directory with mode 0700, which is removed when this is dropped.
pub(super) struct SocketDirectory(PathBuf);

impl SocketDirectory {
    /// Creates one in `parent`. None: in the directory of temporary files.
    ///
    /// # Errors
    /// The host refuses to create the directory.
    pub(super) fn new(parent: Option<&Path>) -> io::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        // Try further names: an earlier process with the same id may have left directories.
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
        // A directory that cannot be removed does no harm.
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
