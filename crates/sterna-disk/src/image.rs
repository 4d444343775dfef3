//! The content and the length of a disk, in any supported format.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::files::open_file;
use crate::options::{Format, ImageOptions, SECTOR};
use crate::qcow2::Qcow2;

/// An open disk: its file or block device, its length, and its format.
pub struct Image {
    file: File,
    path: String,
    len_bytes: AtomicU64,
    is_read_only: bool,
    is_direct: bool,
    /// The qcow2 format; `None` for a raw disk.
    pub(crate) qcow2: Option<Qcow2>,
}

impl Image {
    /// Opens the disk without locking it.
    ///
    /// # Errors
    /// The file or the options cannot be used. The text gives the reason without the path.
    pub fn open(options: &ImageOptions) -> Result<Self, String> {
        let file = open_file(&options.path, options, !options.is_read_only)?;
        let qcow2 = match options.format {
            Format::Qcow2 => Some(Qcow2::new(&file, options)?),
            Format::Raw if options.backing.is_some() || options.data_file.is_some() => {
                return Err(
                    "a raw disk has no backing file and no data file: add `format=qcow2`, or leave them out"
                        .to_owned(),
                );
            }
            Format::Raw => None,
        };
        let path = options.path.display().to_string();
        let is_read_only = options.is_read_only;
        let is_direct = options.is_direct;
        let image = Self { file, path, len_bytes: AtomicU64::new(0), is_read_only, is_direct, qcow2 };
        image.find_length()?;
        if options.is_direct && image.qcow2.is_none() && !takes_sectors(&image.file) {
            return Err(format!(
                "its direct I/O does not support blocks of {SECTOR} bytes: leave `direct=on` out"
            ));
        }
        Ok(image)
    }

    /// Updates the length: another program may have extended the disk.
    ///
    /// # Errors
    /// The length cannot be read or is no multiple of [`SECTOR`]. The text does not contain the path.
    pub fn find_length(&self) -> Result<(), String> {
        let length = match &self.qcow2 {
            Some(qcow2) => qcow2.find_length()?,
            // `seek` also returns the length of a block device.
            None => {
                io::Seek::seek(&mut &self.file, io::SeekFrom::End(0)).map_err(|error| error.to_string())?
            }
        };
        if length < SECTOR || !length.is_multiple_of(SECTOR) {
            return Err(format!("{length} bytes are not a whole number of sectors of {SECTOR} bytes"));
        }
        self.len_bytes.store(length, Ordering::SeqCst);
        Ok(())
    }

    /// Extends the disk to `len_bytes` while it is in use. A block device must have been extended before.
    ///
    /// # Errors
    /// The disk is read-only, would become shorter, or the host refuses. The text does not contain the path.
    pub fn grow(&self, len_bytes: u64) -> Result<(), String> {
        let text = |error: io::Error| error.to_string();
        if self.is_read_only {
            return Err("it is read-only".to_owned());
        }
        if !len_bytes.is_multiple_of(SECTOR) {
            return Err(format!("{len_bytes} bytes are not a whole number of sectors of {SECTOR} bytes"));
        }
        let before = self.len_bytes();
        self.find_length()?;
        let now = self.len_bytes();
        if len_bytes < now {
            self.len_bytes.store(before, Ordering::SeqCst);
            return Err(format!(
                "it has {now} bytes and cannot become shorter, because the guest may use the data at its end"
            ));
        }
        let grown = match &self.qcow2 {
            _ if len_bytes == now => Ok(()),
            Some(qcow2) => qcow2.grow(len_bytes),
            None if self.file.metadata().map_err(text)?.is_file() => self.file.set_len(len_bytes),
            None => {
                Err(io::Error::other(format!("the device has {now} bytes: enlarge it on the host first")))
            }
        };
        // The new length is synced first, because the guest must not see a length that a crash undoes.
        let grown = grown.and_then(|()| if len_bytes == now { Ok(()) } else { self.sync() });
        self.len_bytes.store(if grown.is_ok() { len_bytes } else { before }, Ordering::SeqCst);
        grown.map_err(text)
    }

    /// Returns the disk's length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::SeqCst)
    }

    /// Whether writes to the disk are refused.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Whether reads and writes bypass the host's page cache (`O_DIRECT`).
    ///
    /// Aligned buffers are fastest then, and a raw file refuses others.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Whether the bytes of the file are the bytes of the disk.
    pub fn is_raw(&self) -> bool {
        self.qcow2.is_none()
    }

    /// Returns the path, for messages.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the file. Its bytes are the disk's only if [`Image::is_raw`].
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Fills `to` from byte `at` on.
    ///
    /// # Errors
    /// The host's error. For a qcow2 file also: this machine does not have the lock, or a table of the file is
    /// invalid.
    pub fn read_at(&self, to: &mut [u8], at: u64) -> io::Result<()> {
        match &self.qcow2 {
            Some(qcow2) => qcow2.with(|content| content.read(to, at)),
            None => self.file.read_exact_at(to, at),
        }
    }

    /// Writes `from` at byte `at`.
    ///
    /// # Errors
    /// The errors of [`Image::read_at`].
    pub fn write_at(&self, from: &[u8], at: u64) -> io::Result<()> {
        match &self.qcow2 {
            Some(qcow2) => qcow2.with(|content| content.write(from, at)),
            None => self.file.write_all_at(from, at),
        }
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// The errors of [`Image::read_at`].
    pub fn sync(&self) -> io::Result<()> {
        match &self.qcow2 {
            Some(qcow2) => qcow2.with(|content| content.flush().and_then(|()| content.sync())),
            None => self.file.sync_data(),
        }
    }

    /// Makes all completed writes visible to other programs, possibly only in the host's page cache.
    ///
    /// # Errors
    /// The errors of [`Image::read_at`].
    pub fn write_back(&self) -> io::Result<()> {
        self.qcow2.as_ref().map_or(Ok(()), Qcow2::write_back)
    }

    /// Discards bytes, which may read as zero afterwards.
    ///
    /// # Errors
    /// The errors of [`Image::read_at`]; `Unsupported` if the file does not support it.
    pub fn discard(&self, start: u64, length: u64) -> io::Result<()> {
        match &self.qcow2 {
            Some(qcow2) => qcow2.discard(start, length),
            None => self.make_hole(start, length),
        }
    }

    /// Makes bytes read as zero, by a hole if possible.
    ///
    /// # Errors
    /// The errors of [`Image::read_at`].
    pub fn make_zero(&self, start: u64, length: u64) -> io::Result<()> {
        let made = match &self.qcow2 {
            Some(qcow2) => qcow2.make_zero(start, length),
            None => self.make_hole(start, length),
        };
        made.or_else(|_| self.write_zeros(start, length))
    }

    fn make_hole(&self, start: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, start, length)?)
    }

    /// Writes zeros, for files that support no holes.
    fn write_zeros(&self, start: u64, length: u64) -> io::Result<()> {
        /// Aligned to a page for direct I/O, and large enough for long writes.
        #[repr(align(4096))]
        struct Zeros([u8; 64 << 10]);
        static ZEROS: Zeros = Zeros([0; 64 << 10]);
        let end = start + length;
        let mut at = start;
        while at < end {
            let piece = ZEROS.0.len().min((end - at) as usize);
            self.write_at(&ZEROS.0[..piece], at)?;
            at += piece as u64;
        }
        Ok(())
    }

    /// Finds the ranges that may contain non-zero data.
    ///
    /// `found` gets the start and the length of each range, in bytes.
    ///
    /// # Errors
    /// The errors of [`Image::read_at`].
    pub fn find_data(&self, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
        let end = self.len_bytes();
        if let Some(qcow2) = &self.qcow2 {
            return qcow2.find_data(0, end, found);
        }
        let mut at = 0;
        while at < end {
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data,
                // From here on the file has only a hole.
                Err(Errno::NXIO) => return Ok(()),
                // A block device does not support SEEK_DATA.
                Err(Errno::INVAL) => {
                    found(at, end - at);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            };
            let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(data)).unwrap_or(end);
            found(data, hole - data);
            at = hole;
        }
        Ok(())
    }
}

/// Whether the file permits a read of one sector. Direct I/O may need larger reads.
fn takes_sectors(file: &File) -> bool {
    let mut buffer = vec![0; 4096 + SECTOR as usize];
    let from = buffer.as_ptr().align_offset(4096);
    file.read_exact_at(&mut buffer[from..from + SECTOR as usize], 0).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_one_of_whole_sectors() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (length, is_one) in [(0, false), (511, false), (512, true), (1000, false), (4096, true)] {
            file.as_file().set_len(length).unwrap();
            assert_eq!(Image::open(&ImageOptions::new(file.path())).is_ok(), is_one, "{length}");
        }
        let directory = tempfile::tempdir().unwrap();
        let mut read_only = ImageOptions::new(directory.path());
        read_only.is_read_only = true;
        let why = Image::open(&read_only).map(|_| ()).unwrap_err();
        assert!(why.contains("neither a file"), "{why}");
    }
}
