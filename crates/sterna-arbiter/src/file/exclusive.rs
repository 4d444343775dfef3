//! Creates a file with its complete content, or reads the file that exists.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::claim::random_number;

/// The reason why the content under a name is unknown.
#[derive(Debug)]
pub(super) enum Obstacle {
    /// A call of the file system failed.
    Io { doing: &'static str, error: io::Error },
    /// The name is used by something that Sterna cannot have written.
    Foreign(String),
}

/// Creates the file with these bytes if its name is free.
///
/// Returns the durable content under the name: these bytes or those of an earlier claim.
pub(super) fn create(path: &Path, bytes: &[u8], most: usize) -> Result<Vec<u8>, Obstacle> {
    if let Some(found) = look(path, most)? {
        return Ok(found);
    }
    let temporary = Temporary::write(path, bytes)?;
    let published = temporary.publish(path);
    drop(temporary);
    // A network file system that repeats a request may return a wrong result, so only the content counts.
    match (look(path, most)?, published) {
        (Some(found), _) => Ok(found),
        (None, Err(error)) => Err(Obstacle::Io { doing: "create", error }),
        (None, Ok(())) => {
            let error = io::Error::other("the file was created but does not exist");
            Err(Obstacle::Io { doing: "find", error })
        }
    }
}

/// Reads the content under the name, if the name exists, and makes it durable.
pub(super) fn look(path: &Path, most: usize) -> Result<Option<Vec<u8>>, Obstacle> {
    // A symbolic link could lead elsewhere on the other side. Opening a pipe would block until it has a writer.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::LOOP) => {
            return Err(Obstacle::Foreign("it is a symbolic link".to_owned()));
        }
        Err(error) => return Err(Obstacle::Io { doing: "open", error }),
    };
    let reading = |error| Obstacle::Io { doing: "read", error };
    if !file.metadata().map_err(reading)?.is_file() {
        return Err(Obstacle::Foreign("it is not a regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    (&file).take(most as u64 + 1).read_to_end(&mut bytes).map_err(reading)?;
    if bytes.len() > most {
        return Err(Obstacle::Foreign(format!("it is longer than {most} bytes")));
    }
    file.sync_all().map_err(|error| Obstacle::Io { doing: "sync", error })?;
    sync_directory(path)?;
    Ok(Some(bytes))
}

fn sync_directory(path: &Path) -> Result<(), Obstacle> {
    let directory = File::open(parent(path)).and_then(|directory| directory.sync_all());
    directory.map_err(|error| Obstacle::Io { doing: "sync the directory of", error })
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// A complete, synced file in the directory of the final file. It is removed when dropped.
#[derive(Debug)]
pub(super) struct Temporary(PathBuf);

impl Temporary {
    pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<Self, Obstacle> {
        let writing = |error| Obstacle::Io { doing: "write a file next to", error };
        let (mut file, temporary) = loop {
            let name = format!(".{:016x}{:016x}.tmp", random_number(), random_number());
            let place = parent(path).join(name);
            match OpenOptions::new().write(true).create_new(true).open(&place) {
                Ok(file) => break (file, Self(place)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(writing(error)),
            }
        };
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(writing)?;
        Ok(temporary)
    }

    /// Gives the file its final name, unless that name exists.
    pub(super) fn publish(&self, path: &Path) -> io::Result<()> {
        match std::fs::hard_link(&self.0, path) {
            Err(error) if has_no_links(&error) => self.rename(path),
            result => result,
        }
    }

    /// Does the same as [`Temporary::publish`] on a file system without hard links.
    pub(super) fn rename(&self, path: &Path) -> io::Result<()> {
        Ok(renameat_with(CWD, &self.0, CWD, path, RenameFlags::NOREPLACE)?)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // The file may have been renamed. If it remains, it has no effect on claims.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Whether the error means that the file system has no hard links.
fn has_no_links(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS].contains(&errno))
}
