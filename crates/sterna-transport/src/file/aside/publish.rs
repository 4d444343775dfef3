//! Into the place, and out of it again if the directory cannot be put on the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, RenameFlags, linkat, renameat_with};

use super::{Aside, directory_of, every_aside, name_aside, not_replaced};
use crate::TransportError;
use crate::file::system::{retry, system};

/// System calls whose failures matter here; the tests bring their own.
struct Calls {
    exchange: fn(&Path, &Path) -> io::Result<()>,
    sync: fn(&File) -> io::Result<()>,
}

const CALLS: Calls = Calls {
    exchange: |a, b| retry(|| renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)),
    sync: File::sync_all,
};

/// What became of the file that lay in the place.
enum Old {
    /// None did.
    Absent,
    /// It has changed places with ours.
    Exchanged,
    /// It has another name now.
    Linked(PathBuf),
    /// The file system can neither exchange nor link: nobody can bring it back.
    Gone,
}

impl Aside {
    /// Moves `file` into its place and puts the directory on the disk. Failed, the file is aside again, and the
    /// place holds what it held; only where a file system can neither exchange nor link two files, a replaced
    /// file cannot come back: then the new one stays.
    pub fn publish(&mut self, file: &File) -> Result<(), TransportError> {
        self.publish_by(file, &CALLS)
    }

    fn publish_by(&mut self, file: &File, calls: &Calls) -> Result<(), TransportError> {
        // What has its name meanwhile is not for a signal to remove.
        every_aside().remove(&self.path);
        let published = self.publish_unseen(file, calls);
        if published.is_err() && !is_at(file, &self.path) {
            // Whose it is that has our name now, nobody knows: it may be what lay in the place.
            self.kept = true;
        }
        if !self.published && !self.kept {
            every_aside().insert(self.path.clone());
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
                // That it stays is no harm: the next run tells of it.
                let _ = match old {
                    Old::Exchanged => std::fs::remove_file(&self.path),
                    Old::Linked(name) => std::fs::remove_file(name),
                    Old::Absent | Old::Gone => Ok(()),
                };
                Ok(())
            }
        }
    }

    /// Moves `file` into its place. A file that lay there is still to be had.
    fn take_place(&self, file: &File, calls: &Calls) -> Result<Old, TransportError> {
        // A network file system may have done it and lost the answer.
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
            match self.rename_to_nothing() {
                Ok(()) => return Ok(Old::Absent),
                Err(_) if is_done() => return Ok(Old::Absent),
                // A file has come there meanwhile.
                Err(error) if self.replace && error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(self.explain(error)),
            }
        }
    }

    /// Only files are replaced, also if something else has come into the place meanwhile.
    fn check_exchanged(&self, calls: &Calls) -> Result<Old, TransportError> {
        match std::fs::symlink_metadata(&self.path) {
            Ok(old) if !old.is_file() && !old.is_symlink() => {
                (calls.exchange)(&self.path, &self.place).map_err(|error| self.explain(error))?;
                Err(not_replaced(&self.place, old.file_type()))
            }
            _ => Ok(Old::Exchanged),
        }
    }

    fn rename_to_nothing(&self) -> io::Result<()> {
        let renamed = || renameat_with(CWD, &self.path, CWD, &self.place, RenameFlags::NOREPLACE);
        match retry(renamed) {
            // A link never replaces.
            Err(error) if is_unknown_flag(&error) => {
                retry(|| linkat(CWD, &self.path, CWD, &self.place, AtFlags::empty()))?;
                std::fs::remove_file(&self.path)
            }
            result => result,
        }
    }

    /// Replaces what lies in the place where nothing can be exchanged; it gets a second name before.
    fn rename_over(&self, file: &File) -> Result<Old, TransportError> {
        let second = name_aside(&self.place);
        let old = match retry(|| linkat(CWD, &self.place, CWD, &second, AtFlags::empty())) {
            Ok(()) => Old::Linked(second),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Old::Absent,
            Err(error) if has_no_links(&error) => Old::Gone,
            Err(error) => return Err(system(&self.place, "link", error)),
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

    /// Takes the file out of its place again, so that the place holds what it held.
    fn withdraw(&mut self, file: &File, old: &Old, calls: &Calls) {
        if !is_at(file, &self.place) {
            return;
        }
        let back = match old {
            Old::Absent => std::fs::rename(&self.place, &self.path).and_then(|()| {
                // Two names of one file stay both.
                if is_at(file, &self.place) { std::fs::remove_file(&self.place) } else { Ok(()) }
            }),
            Old::Exchanged => (calls.exchange)(&self.path, &self.place),
            Old::Linked(second) => retry(|| linkat(CWD, &self.place, CWD, &self.path, AtFlags::empty()))
                .and_then(|()| std::fs::rename(second, &self.place)),
            Old::Gone => Err(io::ErrorKind::Unsupported.into()),
        };
        if back.is_err() {
            // Whatever lies where now: no copy of anything is removed.
            self.published = true;
            self.kept = true;
        }
        let _ = (calls.sync)(&self.directory);
    }

    fn explain(&self, error: io::Error) -> TransportError {
        if error.kind() == io::ErrorKind::AlreadyExists {
            return TransportError::FileExists { file: self.place.display().to_string() };
        }
        system(&self.place, "rename", error)
    }
}

/// The kernel or the file system does not know a flag of `renameat2`.
fn is_unknown_flag(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS))
}

/// The file system knows no second name, or not for this file.
fn has_no_links(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS | libc::EMLINK))
}

/// Directories are not synced on this file system; it keeps its names safe in its own way, or not at all.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EBADF | libc::EOPNOTSUPP))
}

/// Whether `path` names this very file.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail<T>(code: i32) -> io::Result<T> {
        Err(io::Error::from_raw_os_error(code))
    }

    const NO_SYNC: Calls = Calls { sync: |_| fail(libc::EIO), ..CALLS };
    const NO_SYNC_NO_EXCHANGE: Calls = Calls { exchange: |_, _| fail(libc::EINVAL), ..NO_SYNC };

    /// A directory with a place, an old file in it if there is to be one, and a new one aside.
    fn scene(old: Option<&str>) -> (tempfile::TempDir, PathBuf, Aside, File) {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("image");
        if let Some(old) = old {
            std::fs::write(&place, old).unwrap();
        }
        let (aside, file) = Aside::create(&place, old.is_some()).unwrap();
        std::fs::write(aside.path(), "new").unwrap();
        (directory, place, aside, file)
    }

    fn files(directory: &Path) -> usize {
        std::fs::read_dir(directory).unwrap().count()
    }

    #[test]
    fn publish_whose_directory_cannot_be_synced_leaves_the_place_as_it_was() {
        for calls in [NO_SYNC, NO_SYNC_NO_EXCHANGE] {
            for old in [None, Some("old")] {
                let (directory, place, mut aside, file) = scene(old);

                let failed = aside.publish_by(&file, &calls);

                assert!(matches!(failed, Err(TransportError::System { .. })), "{old:?}: {failed:?}");
                assert_eq!(std::fs::read_to_string(&place).ok().as_deref(), old);
                assert_eq!(std::fs::read_to_string(aside.path()).unwrap(), "new", "{old:?}");
                aside.publish(&file).unwrap();
                assert_eq!(std::fs::read_to_string(&place).unwrap(), "new");
                assert_eq!(files(directory.path()), 1, "{old:?}");
            }
        }
    }

    #[test]
    fn publish_that_failed_keeps_the_file_if_that_is_asked_for() {
        for (kept, count) in [(true, 2), (false, 1)] {
            let (directory, place, mut aside, file) = scene(Some("old"));
            aside.publish_by(&file, &NO_SYNC).unwrap_err();
            if kept {
                aside.keep();
            }

            drop(aside);

            assert_eq!(std::fs::read_to_string(&place).unwrap(), "old");
            assert_eq!(files(directory.path()), count);
        }
    }

    #[test]
    fn publish_of_a_file_whose_name_another_took_removes_neither() {
        let (directory, place, mut aside, file) = scene(Some("old"));
        // As a VM does that writes its own file aside and renames it.
        let theirs = directory.path().join("theirs");
        std::fs::write(&theirs, "theirs").unwrap();
        std::fs::rename(&theirs, aside.path()).unwrap();

        aside.publish_by(&file, &NO_SYNC).unwrap_err();
        let aside_now = aside.path().to_owned();
        drop(aside);

        let mut left = [place, aside_now].map(|path| std::fs::read_to_string(path).unwrap());
        left.sort();
        assert_eq!(left, ["old", "theirs"]);
    }

    #[test]
    fn publish_where_directories_are_never_synced_is_done() {
        for sync in [|_: &File| fail(libc::EINVAL), |_: &File| fail(libc::EBADF)] {
            let (directory, place, mut aside, file) = scene(Some("old"));

            aside.publish_by(&file, &Calls { sync, ..CALLS }).unwrap();

            assert_eq!(std::fs::read_to_string(&place).unwrap(), "new");
            assert_eq!(files(directory.path()), 1);
        }
    }

    #[test]
    fn publish_where_nothing_can_be_exchanged_replaces_all_the_same() {
        let (directory, place, mut aside, file) = scene(Some("old"));

        aside.publish_by(&file, &Calls { exchange: NO_SYNC_NO_EXCHANGE.exchange, ..CALLS }).unwrap();

        assert_eq!(std::fs::read_to_string(&place).unwrap(), "new");
        assert_eq!(files(directory.path()), 1);
    }

    #[test]
    fn publish_over_a_directory_that_came_meanwhile_leaves_it() {
        let (_directory, place, mut aside, file) = scene(Some("old"));
        std::fs::remove_file(&place).unwrap();
        std::fs::create_dir(&place).unwrap();

        let refused = aside.publish(&file);

        assert!(matches!(refused, Err(TransportError::NotAFile { .. })), "{refused:?}");
        assert!(place.is_dir());
        assert_eq!(std::fs::read_to_string(aside.path()).unwrap(), "new");
    }
}
