//! Publishes a staging file at its place. If the directory cannot be synced, publishing is undone.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, RenameFlags, linkat, renameat_with};

use super::names::{directory_of, staging_name};
use super::{StagingFile, every_staging_file, not_replaced};
use crate::TransportError;
use crate::file::system::{retry, system};

/// System calls that the tests replace to make them fail.
struct Calls {
    exchange: fn(&Path, &Path) -> io::Result<()>,
    sync: fn(&File) -> io::Result<()>,
}

const CALLS: Calls = Calls {
    exchange: |a, b| retry(|| renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)),
    sync: File::sync_all,
};

/// State of the file that was at the place before.
enum Old {
    /// There was no file at the place.
    Absent,
    /// The old file was exchanged with the new one.
    Exchanged,
    /// The old file has this second name.
    Linked(PathBuf),
    /// The file system can neither exchange nor link, so the old file cannot be restored.
    Gone,
}

impl StagingFile {
    /// Moves `file` to its place and syncs the directory.
    ///
    /// After a failure the file is a staging file again, and the place has its previous content. Exception: if the
    /// file system can neither exchange nor link files, a replaced file cannot be restored, and the new file
    /// stays.
    pub(crate) fn publish(&mut self, file: &File) -> Result<(), TransportError> {
        self.publish_by(file, &CALLS)
    }

    fn publish_by(&mut self, file: &File, calls: &Calls) -> Result<(), TransportError> {
        // During publishing, the staging name can belong to the old file, which a signal handler must not remove.
        self.forget();
        let published = self.publish_unseen(file, calls);
        if published.is_err() && !is_at(file, &self.path) {
            // Another file has the staging name now. It may be the old file of the place, so it is not removed.
            self.kept = true;
        }
        if !self.published && !self.kept {
            every_staging_file().insert((self.owner, self.path.clone()));
        }
        published
    }

    fn publish_unseen(&mut self, file: &File, calls: &Calls) -> Result<(), TransportError> {
        let old = self.take_place(file, calls)?;
        match (calls.sync)(&self.directory) {
            Err(error) if !is_unsupported(&error) => {
                self.withdraw(file, &old, calls);
                Err(system(directory_of(&self.place), "fsync of the directory", error))
            }
            _ => {
                self.published = true;
                // If the removal fails, the file stays, and the next run reports it as stale.
                let _ = match old {
                    Old::Exchanged => std::fs::remove_file(&self.path),
                    Old::Linked(name) => std::fs::remove_file(name),
                    Old::Absent | Old::Gone => Ok(()),
                };
                Ok(())
            }
        }
    }

    /// Moves `file` to its place. An old file at the place can still be restored.
    fn take_place(&self, file: &File, calls: &Calls) -> Result<Old, TransportError> {
        // A network file system may have performed the rename and lost the answer.
        let is_done = || is_at(file, &self.place);
        loop {
            if self.replace {
                match (calls.exchange)(&self.path, &self.place) {
                    Ok(()) => return self.check_exchanged(calls),
                    Err(_) if is_done() => return self.check_exchanged(calls),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) if is_unknown_flag(&error) => return self.rename_over(file),
                    Err(error) => return Err(self.explain(error)),
                }
            }
            match rename_to_nothing(&self.path, &self.place) {
                Ok(()) => return Ok(Old::Absent),
                Err(_) if is_done() => return Ok(Old::Absent),
                // Another process has created a file at the place meanwhile.
                Err(error) if self.replace && error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(self.explain(error)),
            }
        }
    }

    /// Undoes an exchange if the old object is not a file: only files are replaced.
    fn check_exchanged(&self, calls: &Calls) -> Result<Old, TransportError> {
        match std::fs::symlink_metadata(&self.path) {
            Ok(old) if !old.is_file() && !old.is_symlink() => {
                (calls.exchange)(&self.path, &self.place).map_err(|error| self.explain(error))?;
                Err(not_replaced(&self.place, old.file_type()))
            }
            _ => Ok(Old::Exchanged),
        }
    }

    /// Replaces the file at the place on a file system without exchange. The old file first gets a second name.
    fn rename_over(&self, file: &File) -> Result<Old, TransportError> {
        let old = loop {
            let second = staging_name(&self.place);
            match retry(|| linkat(CWD, &self.place, CWD, &second, AtFlags::empty())) {
                Ok(()) => break Old::Linked(second),
                // The name of another process's file: try the next.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => break Old::Absent,
                Err(error) if has_no_links(&error) => break Old::Gone,
                Err(error) => return Err(system(&self.place, "link", error)),
            }
        };
        match std::fs::rename(&self.path, &self.place) {
            Err(error) if !is_at(file, &self.place) => {
                if let Old::Linked(second) = old {
                    let _ = std::fs::remove_file(second);
                }
                Err(self.explain(error))
            }
            _ => Ok(old),
        }
    }

    /// Removes the file from its place and restores the previous content.
    fn withdraw(&mut self, file: &File, old: &Old, calls: &Calls) {
        if !is_at(file, &self.place) {
            return;
        }
        let back = match old {
            // The file already has both names.
            Old::Absent if is_at(file, &self.path) => std::fs::remove_file(&self.place),
            Old::Absent => self.move_back(rename_to_nothing),
            Old::Exchanged => (calls.exchange)(&self.path, &self.place),
            Old::Linked(second) => self
                .move_back(|place, path| retry(|| linkat(CWD, place, CWD, path, AtFlags::empty())))
                .and_then(|()| std::fs::rename(second, &self.place)),
            Old::Gone => Err(io::ErrorKind::Unsupported.into()),
        };
        if back.is_err() {
            // The two names are in an unknown state, so nothing is removed.
            self.published = true;
            self.kept = true;
        }
        let _ = (calls.sync)(&self.directory);
    }

    /// Restores the staging name of the file at the place, by the function `name`. If another file has taken the
    /// name, it uses a new one.
    fn move_back(&mut self, name: impl Fn(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
        loop {
            match name(&self.place, &self.path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    self.path = staging_name(&self.place);
                }
                result => return result,
            }
        }
    }

    fn explain(&self, error: io::Error) -> TransportError {
        if error.kind() == io::ErrorKind::AlreadyExists {
            return TransportError::FileExists { file: self.place.display().to_string() };
        }
        system(&self.place, "rename", error)
    }
}

/// Renames `from` to `to`; [`io::ErrorKind::AlreadyExists`] if `to` exists.
pub(super) fn rename_to_nothing(from: &Path, to: &Path) -> io::Result<()> {
    match retry(|| renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)) {
        // `link` never replaces an existing file.
        Err(error) if is_unknown_flag(&error) => {
            retry(|| linkat(CWD, from, CWD, to, AtFlags::empty()))?;
            std::fs::remove_file(from)
        }
        result => result,
    }
}

/// Whether the kernel or the file system does not support a flag of `renameat2`.
fn is_unknown_flag(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS))
}

/// Whether the file system does not support links, or not for this file.
fn has_no_links(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS | libc::EMLINK))
}

/// Whether the file system does not sync directories. Its names are then safe by other means, or not at all.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EBADF | libc::EOPNOTSUPP))
}

/// Whether `path` names the same file as `file`.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn fail<T>(code: i32) -> io::Result<T> {
        Err(io::Error::from_raw_os_error(code))
    }

    const NO_SYNC: Calls = Calls { sync: |_| fail(libc::EIO), ..CALLS };
    const NO_SYNC_NO_EXCHANGE: Calls = Calls { exchange: |_, _| fail(libc::EINVAL), ..NO_SYNC };

    /// A directory, a place in it, and a new staging file. An old file is at the place if `old` is given.
    fn scene(old: Option<&str>) -> (tempfile::TempDir, PathBuf, StagingFile, File) {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("image");
        if let Some(old) = old {
            std::fs::write(&place, old).unwrap();
        }
        let (staging, file) = StagingFile::create(&place, old.is_some()).unwrap();
        std::fs::write(staging.path(), "new").unwrap();
        (directory, place, staging, file)
    }

    /// The staging name that this process will use `ahead` names after `path`.
    fn name_ahead(path: &Path, ahead: u64) -> PathBuf {
        let name = path.file_name().unwrap().to_str().unwrap();
        let (process, number) =
            name.strip_suffix(super::super::names::ENDING).unwrap().rsplit_once('-').unwrap();
        let number = number.parse::<u64>().unwrap() + 1 + ahead;
        path.with_file_name(format!("{process}-{number}{}", super::super::names::ENDING))
    }

    fn files(directory: &Path) -> usize {
        std::fs::read_dir(directory).unwrap().count()
    }

    #[test]
    fn publish_whose_directory_cannot_be_synced_leaves_the_place_as_it_was() {
        for calls in [NO_SYNC, NO_SYNC_NO_EXCHANGE] {
            for old in [None, Some("old")] {
                let (directory, place, mut staging, file) = scene(old);

                let failed = staging.publish_by(&file, &calls);

                assert!(matches!(failed, Err(TransportError::System { .. })), "{old:?}: {failed:?}");
                assert_eq!(std::fs::read_to_string(&place).ok().as_deref(), old);
                assert_eq!(std::fs::read_to_string(staging.path()).unwrap(), "new", "{old:?}");
                staging.publish(&file).unwrap();
                assert_eq!(std::fs::read_to_string(&place).unwrap(), "new");
                assert_eq!(files(directory.path()), 1, "{old:?}");
            }
        }
    }

    #[test]
    fn publish_that_failed_keeps_the_file_if_that_is_asked_for() {
        for (kept, count) in [(true, 2), (false, 1)] {
            let (directory, place, mut staging, file) = scene(Some("old"));
            staging.publish_by(&file, &NO_SYNC).unwrap_err();
            if kept {
                staging.keep();
            }

            drop(staging);

            assert_eq!(std::fs::read_to_string(&place).unwrap(), "old");
            assert_eq!(files(directory.path()), count);
        }
    }

    #[test]
    fn keep_where_a_run_of_the_same_number_kept_another_keeps_both() {
        let (directory, _place, mut staging, _file) = scene(None);
        // As in a container, where every run has process id 1 and counts from 0.
        let earlier = staging.path().with_extension("kept");
        std::fs::write(&earlier, "another only copy").unwrap();

        staging.keep();

        assert_eq!(std::fs::read_to_string(&earlier).unwrap(), "another only copy");
        assert_ne!(staging.path(), earlier);
        assert!(staging.path().to_string_lossy().ends_with(".kept"), "{:?}", staging.path());
        assert_eq!(std::fs::read_to_string(staging.path()).unwrap(), "new");
        assert_eq!(files(directory.path()), 2);
    }

    #[test]
    fn publish_whose_next_staging_names_are_taken_replaces_and_withdraws_anyway() {
        let no_exchange = Calls { exchange: NO_SYNC_NO_EXCHANGE.exchange, ..CALLS };
        for (calls, there, more) in [(NO_SYNC_NO_EXCHANGE, "old", 2), (no_exchange, "new", 1)] {
            let (directory, place, mut staging, file) = scene(Some("old"));
            // Names that a killed run with the same process id has left, and that this run uses next.
            let taken: Vec<PathBuf> = (0..200).map(|ahead| name_ahead(staging.path(), ahead)).collect();
            taken.iter().for_each(|path| std::fs::write(path, "left").unwrap());

            let published = staging.publish_by(&file, &calls);

            assert_eq!(published.is_ok(), there == "new", "{published:?}");
            assert_eq!(std::fs::read_to_string(&place).unwrap(), there, "{published:?}");
            assert!(taken.iter().all(|path| std::fs::read_to_string(path).unwrap() == "left"));
            assert_eq!(files(directory.path()), taken.len() + more);
        }
    }

    #[test]
    fn publish_withdrawn_where_another_has_the_staging_name_takes_the_next() {
        fn fail_and_take_the_name(directory: &File) -> io::Result<()> {
            let path = std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd()))?;
            let name = path.join("name");
            std::fs::write(std::fs::read_to_string(name)?, "theirs")?;
            fail(libc::EIO)
        }
        let (directory, place, mut staging, file) = scene(None);
        let first = staging.path().to_owned();
        std::fs::write(directory.path().join("name"), first.to_str().unwrap()).unwrap();

        staging.publish_by(&file, &Calls { sync: fail_and_take_the_name, ..CALLS }).unwrap_err();

        assert!(!place.exists());
        assert_eq!(std::fs::read_to_string(&first).unwrap(), "theirs");
        assert_ne!(staging.path(), first);
        assert_eq!(std::fs::read_to_string(staging.path()).unwrap(), "new");
        staging.publish(&file).unwrap();
        assert_eq!(std::fs::read_to_string(&place).unwrap(), "new");
    }

    #[test]
    fn publish_of_a_file_whose_name_another_took_removes_neither() {
        let (directory, place, mut staging, file) = scene(Some("old"));
        // Some VMMs write their own file and rename it to the name of the staging file.
        let theirs = directory.path().join("theirs");
        std::fs::write(&theirs, "theirs").unwrap();
        std::fs::rename(&theirs, staging.path()).unwrap();

        staging.publish_by(&file, &NO_SYNC).unwrap_err();
        let staging_now = staging.path().to_owned();
        drop(staging);

        let mut left = [place, staging_now].map(|path| std::fs::read_to_string(path).unwrap());
        left.sort();
        assert_eq!(left, ["old", "theirs"]);
    }

    #[test]
    fn publish_where_directories_are_never_synced_is_done() {
        for sync in [|_: &File| fail(libc::EINVAL), |_: &File| fail(libc::EBADF)] {
            let (directory, place, mut staging, file) = scene(Some("old"));

            staging.publish_by(&file, &Calls { sync, ..CALLS }).unwrap();

            assert_eq!(std::fs::read_to_string(&place).unwrap(), "new");
            assert_eq!(files(directory.path()), 1);
        }
    }

    #[test]
    fn publish_where_nothing_can_be_exchanged_replaces_all_the_same() {
        let (directory, place, mut staging, file) = scene(Some("old"));

        staging.publish_by(&file, &Calls { exchange: NO_SYNC_NO_EXCHANGE.exchange, ..CALLS }).unwrap();

        assert_eq!(std::fs::read_to_string(&place).unwrap(), "new");
        assert_eq!(files(directory.path()), 1);
    }

    #[test]
    fn publish_over_a_directory_that_came_meanwhile_leaves_it() {
        let (_directory, place, mut staging, file) = scene(Some("old"));
        std::fs::remove_file(&place).unwrap();
        std::fs::create_dir(&place).unwrap();

        let refused = staging.publish(&file);

        assert!(matches!(refused, Err(TransportError::NotAFile { .. })), "{refused:?}");
        assert!(place.is_dir());
        assert_eq!(std::fs::read_to_string(staging.path()).unwrap(), "new");
    }
}
