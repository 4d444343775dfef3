//! Paths of Unix sockets that are longer than an address can hold, reached through `/proc/self/fd`.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Maximum length of a Unix socket's path in bytes. `sockaddr_un` also needs a terminating zero.
pub const LONGEST_UNIX_PATH: usize = 107;

/// A path that fits into the address of a Unix socket.
///
/// It is the path itself, or a shorter name of the same file.
///
/// Only this process can use the shorter name, and only while this value lives.
#[derive(Debug)]
pub struct UnixPath {
    path: PathBuf,
    /// The open directory that the shorter name refers to.
    _directory: Option<OwnedFd>,
}

impl UnixPath {
    /// Finds a name of `path` that fits. If `path` is too long for an address, opens its directory, and the name
    /// begins with `/proc/self/fd`.
    ///
    /// # Errors
    /// The directory cannot be opened, or the file name alone is too long.
    pub fn new(path: &Path) -> io::Result<Self> {
        if path.as_os_str().len() <= LONGEST_UNIX_PATH {
            return Ok(Self { path: path.to_owned(), _directory: None });
        }
        let too_long = || {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "the path has {} bytes, but the path of a Unix socket has at most {LONGEST_UNIX_PATH}: give the \
                     socket a shorter name",
                    path.as_os_str().len()
                ),
            )
        };
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return Err(too_long()) };
        let directory =
            rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string());
        if let Err(error) = rustix::fs::stat(&short) {
            return Err(io::Error::new(
                io::Error::from(error).kind(),
                format!(
                    "the path has {} bytes; one of more than {LONGEST_UNIX_PATH} is reached through {}, which fails \
                     ({error}): give the socket a shorter path, or make /proc visible",
                    path.as_os_str().len(),
                    short.display()
                ),
            ));
        }
        let short = short.join(name);
        if short.as_os_str().len() > LONGEST_UNIX_PATH {
            return Err(too_long());
        }
        Ok(Self { path: short, _directory: Some(directory) })
    }

    /// The path to use in the address.
    pub fn as_path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_that_fits_is_itself_and_a_name_that_cannot_fit_is_refused_with_the_limit() {
        let fits = format!("/{}", "x".repeat(LONGEST_UNIX_PATH - 1));
        assert_eq!(UnixPath::new(Path::new(&fits)).unwrap().as_path(), Path::new(&fits));

        let directory = tempfile::tempdir().unwrap();
        let refused = UnixPath::new(&directory.path().join("x".repeat(LONGEST_UNIX_PATH))).unwrap_err();

        assert!(refused.to_string().contains("at most 107"), "{refused}");
    }
}
