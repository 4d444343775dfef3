//! Directories for the sockets and the log of a VM that a restore starts.
//! The next restore removes old ones.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::geteuid;
use sterna_transport::is_abandoned;
use tempfile::TempDir;

const PREFIX: &str = "sterna-restore-";
/// Leaves room for the directory's and the socket's name: a Unix socket's path has at most 107 bytes.
const LONGEST_BASE: usize = 60;
/// How long the log of a VM that has exited is kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// A directory for the sockets of one restore; dropping it removes it.
/// Directories of VMs that exited more than a day ago are removed first. A VM outlives the command that
/// started it, so only a later restore can remove its directory.
pub(in crate::commands) fn directory() -> io::Result<TempDir> {
    let base = base(std::env::temp_dir());
    // The next restore tries again to remove a directory that cannot be removed now.
    let _ = remove_old(&base, KEPT);
    tempfile::Builder::new().prefix(PREFIX).tempdir_in(base)
}

/// The directory for temporary files, or `/tmp` if sockets in that directory would have too long paths.
fn base(temporary: PathBuf) -> PathBuf {
    if temporary.as_os_str().len() > LONGEST_BASE { "/tmp".into() } else { temporary }
}

fn remove_old(base: &Path, kept: Duration) -> io::Result<()> {
    for entry in std::fs::read_dir(base)? {
        let entry = entry?;
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if is_ours && is_over(&entry.path(), kept).unwrap_or(false) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// Whether the VM of this directory has exited and the directory is unchanged for at least `kept`.
fn is_over(directory: &Path, kept: Duration) -> io::Result<bool> {
    let metadata = std::fs::symlink_metadata(directory)?;
    if !metadata.is_dir() || metadata.uid() != geteuid().as_raw() {
        return Ok(false);
    }
    // Only directories of restores contain a log.
    if !directory.join("log").is_file() || metadata.modified()?.elapsed().is_ok_and(|age| age < kept) {
        return Ok(false);
    }
    match is_abandoned(&directory.join("qmp")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        found => found,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn directories_of_vms_that_have_ended_are_removed_and_others_stay() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        for name in ["sterna-restore-ended", "sterna-restore-killed", "sterna-restore-runs", "elsewhere"] {
            std::fs::create_dir(at(name)).unwrap();
            std::fs::write(at(name).join("log"), "").unwrap();
        }
        std::fs::create_dir(at("sterna-restore-lazy")).unwrap();
        drop(UnixListener::bind(at("sterna-restore-killed/qmp")).unwrap());
        let _runs = UnixListener::bind(at("sterna-restore-runs/qmp")).unwrap();
        let left = || {
            let entries = std::fs::read_dir(base.path()).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };

        remove_old(base.path(), KEPT).unwrap();
        assert_eq!(left().len(), 5, "their messages are kept for a day");
        remove_old(base.path(), Duration::ZERO).unwrap();

        assert_eq!(left(), ["elsewhere", "sterna-restore-lazy", "sterna-restore-runs"]);
    }

    #[test]
    fn base_leaves_room_for_a_socket() {
        assert_eq!(base("/var/tmp".into()), Path::new("/var/tmp"));
        assert_eq!(base(format!("/{}", "x".repeat(90)).into()), Path::new("/tmp"));
    }
}
