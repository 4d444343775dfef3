//! Acquires and releases the locks of a disk's files when a guest changes hands.

use std::fs::File;
use std::io;

use rustix::fs::Advice;

use crate::files::set_lock;
use crate::image::Image;
use crate::qcow2::Qcow2;

impl Image {
    /// Locks the disk: exclusively for a writable disk, shared for a read-only one.
    ///
    /// The lock is advisory. Other programs must request it too, as QEMU does.
    ///
    /// # Errors
    /// Another program has the lock. For a qcow2 file also: its tables cannot be read.
    pub fn lock(&self) -> io::Result<()> {
        self.take(false)
    }

    /// Locks a disk that another host may have written, and drops this host's cached pages.
    ///
    /// # Errors
    /// The errors of [`Image::lock`].
    pub fn acquire(&self) -> io::Result<()> {
        self.take(true)
    }

    fn take(&self, forgets: bool) -> io::Result<()> {
        let kind = if self.is_read_only() { libc::F_RDLCK } else { libc::F_WRLCK };
        if self.is_loaded() {
            // A release failed before. The tables in memory contain unwritten changes, and the lock was kept,
            // so they are still valid.
            return self.files().try_for_each(|file| set_lock(file, kind));
        }
        let taken = self.files().try_for_each(|file| set_lock(file, kind)).and_then(|()| {
            if forgets {
                // Pages that this host cached may be older than the data that another host wrote. A kernel that
                // ignores this advice keeps using its cache.
                for file in self.files() {
                    let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
                }
            }
            self.qcow2.as_ref().map_or(Ok(()), |qcow2| qcow2.load())
        });
        // With two files, the first may be locked although the second failed.
        taken.inspect_err(|_| drop(self.let_go()))
    }

    /// Makes all writes durable and releases the lock for other programs.
    ///
    /// # Errors
    /// The writes could not be made durable. The lock is kept then.
    pub fn release(&self) -> io::Result<()> {
        // A qcow2 file without loaded tables has no unwritten data.
        if !self.is_read_only() && (self.qcow2.is_none() || self.is_loaded()) {
            self.sync()?;
        }
        if let Some(qcow2) = &self.qcow2 {
            qcow2.unload();
        }
        self.let_go()
    }

    /// Whether the disk is a qcow2 file whose tables are loaded.
    fn is_loaded(&self) -> bool {
        self.qcow2.as_ref().is_some_and(Qcow2::is_loaded)
    }

    fn let_go(&self) -> io::Result<()> {
        self.files().try_for_each(|file| set_lock(file, libc::F_UNLCK))
    }

    fn files(&self) -> impl Iterator<Item = &File> {
        std::iter::once(self.file()).chain(self.qcow2.as_ref().and_then(|qcow2| qcow2.data_file()))
    }
}

#[cfg(test)]
mod tests {
    use imago::FormatCreateBuilder;
    use imago::file::File as Storage;

    use super::*;
    use crate::options::{Format, ImageOptions};

    fn qcow2() -> (tempfile::NamedTempFile, ImageOptions) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let storage = Storage::try_from(file.reopen().unwrap()).unwrap();
        imago::qcow2::Qcow2::<Storage>::create_builder(storage).size(1 << 20).create().unwrap();
        let options = ImageOptions { format: Format::Qcow2, ..ImageOptions::new(file.path()) };
        (file, options)
    }

    #[test]
    fn disk_that_is_taken_back_before_it_was_written_keeps_what_the_guest_wrote() {
        let (_file, options) = qcow2();
        let image = Image::open(&options).unwrap();
        image.lock().unwrap();
        image.write_at(&[7; 512], 4096).unwrap();

        // The same state as after a release that failed.
        image.lock().unwrap();

        let mut bytes = [0; 512];
        image.read_at(&mut bytes, 4096).unwrap();
        assert_eq!(bytes, [7; 512]);
        image.release().unwrap();
        let other = Image::open(&options).unwrap();
        other.acquire().unwrap();
        other.read_at(&mut bytes, 4096).unwrap();
        assert_eq!(bytes, [7; 512]);
    }

    #[test]
    fn disk_without_its_tables_can_be_given_back() {
        let (_file, options) = qcow2();
        let image = Image::open(&options).unwrap();

        image.release().unwrap();
    }

    #[test]
    fn image_that_is_in_use_is_refused_until_it_is_handed_over() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let open = || Image::open(&ImageOptions::new(file.path())).unwrap();
        let (source, destination) = (open(), open());
        source.lock().unwrap();

        let refused = destination.acquire().unwrap_err().to_string();
        assert!(refused.contains("is locked"), "{refused}");

        source.release().unwrap();
        destination.acquire().unwrap();
        assert!(source.lock().is_err());
        destination.release().unwrap();
        source.lock().unwrap();
    }
}
