//! A file system that is full soon.

use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// A tmpfs of its own. It is unmounted when it is dropped.
pub struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts one of so many bytes. Without the right to mount, reports `test` as skipped.
    ///
    /// # Panics
    /// No temporary directory can be made.
    #[allow(clippy::print_stderr, reason = "reports that the test was skipped")]
    pub fn mount_for(test: &str, bytes: u64) -> Option<Self> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(directory.path());
        if mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            return Some(Self(directory));
        }
        eprintln!("SKIPPED {test}: no right to mount");
        None
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily, because files of it may still be mapped.
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}
