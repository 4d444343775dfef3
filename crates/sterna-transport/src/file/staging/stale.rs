//! Finds staging files that a killed run left. A lock distinguishes them from files that are being written.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::names::prefix;
use super::names::{ENDING, directory_of};
use crate::file::system::{Links, open_regular};

/// Number of attempts, 1 ms apart, to lock a new file.
const LOCK_TRIES: usize = 100;

/// Locks a new file. The lock only shows other processes that the file is in use; without lock support the file
/// stays unlocked.
pub(super) fn lock(file: &File) {
    for _ in 0..LOCK_TRIES {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            // Another process briefly holds a shared lock while it searches for stale files.
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Finds the staging files for `place` that no process writes any more.
pub(in crate::file) fn stale_staging_files(place: &Path) -> Vec<PathBuf> {
    let prefix = prefix(place);
    let Ok(entries) = std::fs::read_dir(directory_of(place)) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let middle = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(ENDING));
            let Some((process, number)) = middle.and_then(|middle| middle.split_once('-')) else {
                return false;
            };
            let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number(process) && is_number(number) && is_left(&entry.path(), process)
        })
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

/// Whether no process writes the file at `path` any more. `process` is the id of its creator.
fn is_left(path: &Path, process: &str) -> bool {
    // Every user who may write to the directory can create objects with such a name.
    let Ok(file) = open_regular(path, path, Links::Refuse) else { return false };
    if flock(&file, FlockOperation::NonBlockingLockShared).is_err() {
        return false;
    }
    // An empty file may be so new that it is not locked yet.
    let is_new = file.metadata().is_ok_and(|file| file.len() == 0);
    !(is_new && may_live(process))
}

/// Whether the process may exist. Without `/proc` every process may.
fn may_live(process: &str) -> bool {
    !Path::new("/proc/self").exists() || Path::new("/proc").join(process).exists()
}

#[cfg(test)]
mod tests {
    use super::super::staging_name;
    use super::*;

    #[test]
    fn stale_staging_files_does_not_take_a_file_for_dead_that_is_about_to_be_locked() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("image");
        let new = staging_name(&place);
        File::create(&new).unwrap();

        assert_eq!(stale_staging_files(&place), [] as [PathBuf; 0]);

        std::fs::write(&new, "something").unwrap();
        assert_eq!(stale_staging_files(&place), [new]);
    }

    #[test]
    fn stale_staging_files_neither_waits_for_a_pipe_nor_follows_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("image");
        let names: Vec<PathBuf> =
            (1..4).map(|n| directory.path().join(format!(".image.1-{n}.partial"))).collect();
        let made = std::process::Command::new("mkfifo").arg(&names[0]).status().unwrap();
        assert!(made.success());
        let elsewhere = directory.path().join("elsewhere");
        std::fs::write(&elsewhere, "something").unwrap();
        std::os::unix::fs::symlink(&elsewhere, &names[1]).unwrap();
        std::fs::write(&names[2], "left").unwrap();
        let (tell, told) = std::sync::mpsc::channel();

        std::thread::spawn(move || tell.send(stale_staging_files(&place)));

        let found = told.recv_timeout(Duration::from_secs(60)).expect("it waits for whoever writes the pipe");
        assert_eq!(found, names[2..]);
    }

    #[test]
    fn create_while_somebody_looks_is_locked_in_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        let looker = File::open(&path).unwrap();
        flock(&looker, FlockOperation::NonBlockingLockShared).unwrap();
        let looking = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            drop(looker);
        });

        lock(&file);

        looking.join().unwrap();
        assert!(flock(File::open(&path).unwrap(), FlockOperation::NonBlockingLockShared).is_err());
    }
}
