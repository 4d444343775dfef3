//! A private directory for the sockets between QEMU and this program.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A directory that only this user enters. It goes when this is dropped.
pub(super) struct SocketDirectory(PathBuf);

impl SocketDirectory {
    /// Makes one in `parent`, or where temporary files are.
    ///
    /// # Errors
    /// The host refuses it.
    pub(super) fn new(parent: Option<&Path>) -> io::Result<Self> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        for attempt in 0..1000 {
            let path = parent.join(format!("sterna-protect-{}-{attempt}", std::process::id()));
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
