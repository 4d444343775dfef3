//! Who may use a disk's file, and how that is handed over.

use std::fs::File;
use std::io;

use rustix::fs::Advice;

use crate::files::set_lock;
use crate::image::Image;
use crate::qcow2::Qcow2;

impl Image {
    /// No other program may write it from now on, or read it if this one writes. Other programs have to ask, as QEMU does.
    ///
    /// # Errors
    /// Another program has it; of a qcow2 file also, its tables cannot be read.
    pub fn lock(&self) -> io::Result<()> {
        self.take(false)
    }

    /// The same of a disk that another host may have written.
    ///
    /// # Errors
    /// As [`Image::lock`].
    pub fn acquire(&self) -> io::Result<()> {
        self.take(true)
    }

    fn take(&self, forgets: bool) -> io::Result<()> {
        let kind = if self.is_read_only() { libc::F_RDLCK } else { libc::F_WRLCK };
        if self.is_loaded() {
            // A release has failed. What it could not write is in these tables alone, and nobody else had the lock.
            return self.files().try_for_each(|file| set_lock(file, kind));
        }
        let taken = self.files().try_for_each(|file| set_lock(file, kind)).and_then(|()| {
            if forgets {
                // What this host has read of it before may be older than what another host has written. It is advice: a kernel that
                // does not take it reads on.
                for file in self.files() {
                    let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
                }
            }
            self.qcow2.as_ref().map_or(Ok(()), |qcow2| qcow2.load())
        });
        // It may have one of two files.
        taken.inspect_err(|_| drop(self.let_go()))
    }

    /// Everything that was written is on the disk, and other programs may use it.
    ///
    /// # Errors
    /// It could not be written. Then the lock stays.
    pub fn release(&self) -> io::Result<()> {
        // Without its tables a qcow2 file has nothing to be written.
        if !self.is_read_only() && (self.qcow2.is_none() || self.is_loaded()) {
            self.sync()?;
        }
        if let Some(qcow2) = &self.qcow2 {
            qcow2.unload();
        }
        self.let_go()
    }

    /// Whether it is a qcow2 file whose tables are here.
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

        // As after a release that has failed.
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
