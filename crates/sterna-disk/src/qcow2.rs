//! A disk in a qcow2 file, which the crate `imago` reads and writes.
//!
//! Requests run one after the other, in the caller's thread. The tables are loaded only while this machine has
//! the disk's lock. They are written back before the lock is released, and read again after it is acquired,
//! because the other side may have changed them.

use std::fs::File;
use std::io;

use imago::file::File as Storage;
use imago::format::PreallocateMode;
use imago::format::drivers::FormatDriverInstance;
use imago::{FormatAccess, Mapping, Storage as _, StorageExt, StorageOpenOptions, raw};
use parking_lot::RwLock;

use crate::files::{open_file, set_lock};
use crate::options::{Format, ImageOptions};

type Content = FormatAccess<Storage>;
type Tables = imago::qcow2::Qcow2<Storage>;

/// The first four bytes of a qcow2 file. `imago` refuses other files with an error.
const MAGIC: &[u8] = b"QFI\xfb";
/// Limit for the entries of the refcount table.
const COUNTS_MAX: u64 = 4 << 20;

/// The qcow2 file and the additional files that the command line names.
pub(crate) struct Qcow2 {
    file: File,
    data_file: Option<File>,
    backing: Option<(File, Format)>,
    is_read_only: bool,
    is_direct: bool,
    content: RwLock<Option<Content>>,
}

impl Qcow2 {
    /// Opens the files without reading the tables, and locks the backing file against writes.
    ///
    /// The error text does not contain the path.
    pub(crate) fn new(file: &File, options: &ImageOptions) -> Result<Self, String> {
        let open = |what, path, is_written| {
            open_file(path, options, is_written).map_err(|why| format!("its {what}: {why}"))
        };
        let data_file = options.data_file.as_ref();
        let backing = options.backing.as_ref();
        let backing =
            backing.map(|(path, format)| Ok::<_, String>((open("backing file", path, false)?, *format)));
        let qcow2 = Self {
            file: file.try_clone().map_err(|error| error.to_string())?,
            data_file: data_file.map(|path| open("data file", path, !options.is_read_only)).transpose()?,
            backing: backing.transpose()?,
            is_read_only: options.is_read_only,
            is_direct: options.is_direct,
            content: RwLock::new(None),
        };
        if let Some((file, _)) = &qcow2.backing {
            set_lock(file, libc::F_RDLCK).map_err(|error| format!("its backing file: {error}"))?;
        }
        Ok(qcow2)
    }

    /// Returns the disk's length in bytes from the header.
    pub(crate) fn find_length(&self) -> Result<u64, String> {
        match &*self.content.read() {
            Some(content) => Ok(content.size()),
            None => self.open(false).map(|content| content.size()).map_err(|error| error.to_string()),
        }
    }

    pub(crate) fn data_file(&self) -> Option<&File> {
        self.data_file.as_ref()
    }

    /// Reads the tables. This machine must have the lock.
    pub(crate) fn load(&self) -> io::Result<()> {
        let content = self.open(!self.is_read_only)?;
        *self.content.write() = Some(content);
        Ok(())
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.content.read().is_some()
    }

    /// Drops the tables, which must have been written before.
    pub(crate) fn unload(&self) {
        *self.content.write() = None;
    }

    /// Writes all cached changes to the file, possibly only into the host's page cache.
    pub(crate) fn write_back(&self) -> io::Result<()> {
        self.content.read().as_ref().map_or(Ok(()), Content::flush)
    }

    /// Calls `work` with the content; fails if the tables are not loaded.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&Content) -> io::Result<T>) -> io::Result<T> {
        work(self.content.read().as_ref().ok_or_else(not_here)?)
    }

    /// Extends the disk with zeros.
    pub(crate) fn grow(&self, len_bytes: u64) -> io::Result<()> {
        // A backing file may be longer than the disk was. Its data must not appear in the new part.
        let zeros = if self.backing.is_some() { PreallocateMode::Zero } else { PreallocateMode::None };
        self.with(|content| content.resize_grow(len_bytes, zeros))
    }

    /// Discards bytes, which may read as zero afterwards.
    pub(crate) fn discard(&self, start: u64, length: u64) -> io::Result<()> {
        self.content.write().as_mut().ok_or_else(not_here)?.discard_to_any(start, length)
    }

    /// Makes bytes read as zero and frees their clusters. Ranges that are already zero are skipped.
    pub(crate) fn make_zero(&self, start: u64, length: u64) -> io::Result<()> {
        let mut pieces = Vec::new();
        self.find_data(start, start + length, |start, length| pieces.push((start, length)))?;
        let mut content = self.content.write();
        let content = content.as_mut().ok_or_else(not_here)?;
        pieces.into_iter().try_for_each(|(start, length)| content.discard_to_zero(start, length))
    }

    /// Finds the ranges that may contain non-zero data, and passes start and length to `found`.
    pub(crate) fn find_data(&self, mut at: u64, end: u64, mut found: impl FnMut(u64, u64)) -> io::Result<()> {
        while at < end {
            let step = self.with(|content| {
                let (mapping, length) = content.get_mapping(at, end - at)?;
                if !matches!(mapping, Mapping::Zero { .. } | Mapping::Eof { .. }) {
                    found(at, length);
                }
                Ok(length)
            })?;
            if step == 0 {
                return Ok(());
            }
            at += step;
        }
        Ok(())
    }

    fn open(&self, is_written: bool) -> io::Result<Content> {
        let mut format = open_checked(self.storage(&self.file, is_written)?, is_written)?;
        let says = |what: &str| Err(io::Error::other(what));
        match (format.implicit_backing_file(), &self.backing) {
            (Some(name), None) => {
                return says(&format!(
                    "its backing file is {name:?}: give it with `backing=FILE,backing-format=raw|qcow2`"
                ));
            }
            (None, Some(_)) => return says("it has no backing file: leave `backing` out"),
            _ => {}
        }
        match (format.requires_external_data_file(), &self.data_file) {
            (true, None) => {
                let name = format.implicit_external_data_file().map_or("", String::as_str);
                return says(&format!(
                    "its content is in another file, {name:?}: give it with `data-file=FILE`"
                ));
            }
            (false, Some(_)) => return says("it has no data file: leave `data-file` out"),
            _ => {}
        }
        let data_file = self.data_file.as_ref();
        format.set_data_file(data_file.map(|file| self.storage(file, is_written)).transpose()?);
        format.set_backing(self.backing.as_ref().map(|backing| self.open_backing(backing)).transpose()?);
        Ok(Content::new(format))
    }

    fn open_backing(&self, (file, format): &(File, Format)) -> io::Result<Content> {
        let storage = self.storage(file, false)?;
        if *format == Format::Raw {
            return Ok(Content::new(raw::Raw::open_image(storage, false)?));
        }
        let mut format = open_checked(storage, false)?;
        if format.implicit_backing_file().is_some() || format.requires_external_data_file() {
            let why = "its backing file has a backing file or a data file itself: merge them into one file first, for \
                       example with `qemu-img convert`";
            return Err(io::Error::other(why));
        }
        format.set_data_file(None);
        format.set_backing(None);
        Ok(Content::new(format))
    }

    fn storage(&self, file: &File, is_written: bool) -> io::Result<Storage> {
        let options = StorageOpenOptions::new().write(is_written).direct(self.is_direct);
        Storage::from_open_file(file.try_clone()?, options)
    }
}

/// Opens a file and checks two assumptions of `imago`.
///
/// - The L1 table covers the whole disk. Otherwise `imago` would walk the rest for an unacceptably long time.
/// - In a file that is written, every cluster has a refcount. Otherwise `imago` would search without end.
fn open_checked(storage: Storage, is_written: bool) -> io::Result<Tables> {
    let mut header = [0; 104];
    storage.read(&mut header[..], 0)?;
    let words: Vec<u32> = header.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word)).collect();
    let (version, cluster_bits, entries) = (words[1], words[5], words[9]);
    let (counts_at, counts_clusters) = (u64::from(words[12]) << 32 | u64::from(words[13]), words[14]);
    let count_order = if version == 2 { 4 } else { words[24] };
    if header.starts_with(MAGIC) && (!(9..=21).contains(&cluster_bits) || count_order > 6) {
        let why = format!(
            "its header has clusters of 2^{cluster_bits} bytes and refcounts of 2^{count_order} bits"
        );
        return Err(io::Error::other(why));
    }
    let clusters = storage.size()?.div_ceil(1 << cluster_bits.min(32));
    let uncounted = || {
        io::Error::other("its refcounts do not cover the whole file: repair it with `qemu-img check -r all`")
    };
    let mut counts = Vec::new();
    if is_written && header.starts_with(MAGIC) {
        // Each refcount table entry has 8 bytes and refers to one cluster of refcounts.
        let entry_clusters = (1_u64 << (cluster_bits + 3).min(32)) >> count_order.min(6);
        let needed = clusters.div_ceil(entry_clusters);
        if needed > u64::from(counts_clusters) << cluster_bits.min(21) >> 3 || needed > COUNTS_MAX {
            return Err(uncounted());
        }
        counts = vec![0; needed as usize * 8];
        storage.read(&mut counts[..], counts_at)?;
    }
    let format = Tables::open_image(storage, is_written)?;
    if counts.as_chunks().0.contains(&[0; 8]) {
        return Err(uncounted());
    }
    // Each L2 table entry has 8 bytes.
    let reach = u128::from(entries) << (2 * cluster_bits - 3);
    if u128::from(format.size()) > reach {
        let why = format!(
            "its header has a disk size of {} bytes, but its tables cover only {reach}",
            format.size()
        );
        return Err(io::Error::other(why));
    }
    Ok(format)
}

fn not_here() -> io::Error {
    io::Error::other("another machine uses the disk")
}
