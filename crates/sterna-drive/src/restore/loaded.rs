//! Passes the image to the VM, as a file or through a pipe.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::fs::OFlags;
use serde_json::json;
use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{Access, Form, Format, ImageError};
use sterna_transport::{Direct, OpenOptions as PageOptions, PageFile, QueueOptions, RangeReader};

use super::cached::is_cached;
use super::examine::Subject;
use super::request::RestoreRequest;
use crate::pipe::{pipe, sockets};
use crate::{DriveError, Progress, Settings, Vm};

/// Name of the pipe's descriptor in the VM.
const NAME: &str = "sterna-restore";

/// The way in which the VM gets the image.
pub(super) enum Feed {
    /// The VM reads the file itself, from descriptors, or by its name (Sterna's own VMM).
    File {
        /// Number of the descriptor set.
        set: Option<u64>,
        /// The address for `migrate-incoming`.
        uri: String,
        /// Whether the VM reads pages past the page cache.
        is_direct: bool,
    },
    /// A thread writes the stream into a pipe.
    Pipe {
        /// The thread. It returns the damage that it found and passed on unchanged, or the error.
        feeding: Option<JoinHandle<Result<Vec<String>, ImageError>>>,
        /// The damage that the thread returned.
        damage: Vec<String>,
        /// The thread's error, if it has failed.
        failure: Arc<Mutex<Option<String>>>,
        /// Number of bytes written to the pipe so far.
        fed: Arc<AtomicU64>,
        /// Whether the file is read past the page cache.
        is_direct: bool,
    },
}

impl Feed {
    /// Opens the image and passes it, or one end of a pipe, to the VM.
    pub(super) fn begin(
        vm: &mut Vm,
        settings: &Settings,
        subject: &Subject,
        request: &RestoreRequest,
    ) -> Result<Self, DriveError> {
        // Frames are decompressed here, and the VM gets the stream.
        if subject.format() == Format::Sterna {
            return Self::pipe(vm, subject, request, None);
        }
        let (is_mapped, is_plain) = (subject.form() == Form::Mapped, !subject.format().is_compressed());
        let mut direct = request.direct;
        if direct == Direct::Wanted {
            let file = PageFile::open(&request.path, PageOptions::default())?.reopened()?;
            if is_cached(&file) {
                direct = Direct::Off;
            }
        }
        let file = Arc::new(PageFile::open(&request.path, PageOptions { direct })?);
        // QEMU reads streams only through the page cache. Past the page cache, a pipe is faster. A QEMU without
        // mapped-ram may not know `file:`.
        let knows_files = settings.capability("mapped-ram").is_some();
        if is_mapped || is_plain && (vm.is_sterna() || knows_files && !file.is_direct()) {
            return Self::file(vm, subject, request, is_mapped && file.is_direct());
        }
        Self::pipe(vm, subject, request, Some(file))
    }

    /// The address for `migrate-incoming`.
    pub(super) fn uri(&self) -> String {
        match self {
            Self::File { uri, .. } => uri.clone(),
            Self::Pipe { .. } => format!("fd:{NAME}"),
        }
    }

    /// Whether the VM reads pages past the page cache itself.
    pub(super) fn is_direct_in_vm(&self) -> bool {
        matches!(self, Self::File { is_direct: true, .. })
    }

    /// Whether the file is read past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        matches!(self, Self::File { is_direct: true, .. } | Self::Pipe { is_direct: true, .. })
    }

    /// The error of the feeding thread, if it has failed.
    pub(super) fn failure(&self) -> Option<String> {
        match self {
            Self::File { .. } => None,
            Self::Pipe { failure, .. } => failure.lock().clone(),
        }
    }

    /// The damage that was found in the image. Complete after [`finish`](Self::finish).
    pub(super) fn damage(&self) -> &[String] {
        match self {
            Self::File { .. } => &[],
            Self::Pipe { damage, .. } => damage,
        }
    }

    /// Adds the progress of the pipe to the VM's own progress.
    pub(super) fn progress(&self, mut progress: Progress) -> Progress {
        if let Self::Pipe { fed, .. } = self {
            progress.transferred_bytes = fed.load(Ordering::Relaxed);
        }
        progress
    }

    /// Called after the VM has loaded everything. Checks that the whole image was valid.
    pub(super) fn finish(&mut self) -> Result<(), DriveError> {
        if let Self::Pipe { feeding, damage, .. } = self
            && let Some(feeding) = feeding.take()
        {
            let fed = feeding
                .join()
                .map_err(|_| DriveError::Failed("the thread that reads the image has panicked".into()))?;
            match fed {
                // The image has bytes after the end of the stream, which the VM does not read.
                Err(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {}
                other => *damage = other?,
            }
        }
        Ok(())
    }

    /// Removes the descriptors from the VM.
    pub(super) fn clean(&mut self, vm: &mut Vm) {
        // The VM refuses this if it has used or closed the descriptor already. That is no error.
        let _ = match self {
            Self::File { set: Some(set), .. } => vm.try_execute("remove-fd", json!({ "fdset-id": *set })),
            Self::File { .. } => return,
            Self::Pipe { .. } => vm.try_execute("closefd", json!({ "fdname": NAME })),
        };
    }

    fn file(
        vm: &mut Vm,
        subject: &Subject,
        request: &RestoreRequest,
        is_direct: bool,
    ) -> Result<Self, DriveError> {
        let path = &request.path;
        let offset = match subject.stream_offset() {
            0 => String::new(),
            offset => format!(",offset={offset:#x}"),
        };
        if vm.is_sterna() {
            let path = std::path::absolute(path).map_err(|error| DriveError::file("find", path, error))?;
            return Ok(Self::File { set: None, uri: format!("file:{}{offset}", path.display()), is_direct });
        }
        let open = |flags: OFlags| -> Result<File, DriveError> {
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(flags.bits() as i32);
            options.open(path).map_err(|error| DriveError::file("open", path, error))
        };
        let set = vm.add_fd(None, open(OFlags::empty())?.as_fd(), "sterna restore")?;
        if is_direct {
            vm.add_fd(Some(set), open(OFlags::DIRECT)?.as_fd(), "sterna restore, direct")?;
        }
        Ok(Self::File { set: Some(set), uri: format!("file:/dev/fdset/{set}{offset}"), is_direct })
    }

    fn pipe(
        vm: &mut Vm,
        subject: &Subject,
        request: &RestoreRequest,
        file: Option<Arc<PageFile>>,
    ) -> Result<Self, DriveError> {
        let (theirs, ours) = if vm.is_sterna() { sockets()? } else { pipe()? };
        vm.send_fd(NAME, theirs.as_fd())?;
        drop(theirs);
        let failure = Arc::new(Mutex::new(None));
        let fed = Arc::new(AtomicU64::new(0));
        let out = Counted { pipe: File::from(ours), count: fed.clone() };
        let is_direct = file.as_ref().is_some_and(|file| file.is_direct());
        let (tell, path, direct) = (failure.clone(), request.path.clone(), request.direct);
        let access = request.access.clone();
        let is_compressed = subject.format().is_compressed();
        let offset = subject.stream_offset();
        let feeding = std::thread::Builder::new().name("feeding".into()).spawn(move || {
            // If the thread fails, it closes the pipe before the end of the stream, so the VM's load fails.
            let fed = match file.filter(|_| !is_compressed) {
                None => decompress(path, access, direct, out),
                Some(file) => pass(&file, offset, out).map(|()| Vec::new()),
            };
            if let Err(error) = &fed {
                *tell.lock() = Some(error.to_string());
            }
            fed
        });
        let feeding =
            feeding.map_err(|error| DriveError::Failed(format!("cannot start a thread: {error}")))?;
        Ok(Self::Pipe { feeding: Some(feeding), damage: Vec::new(), failure, fed, is_direct })
    }
}

/// Writes the stream of a compressed image to `out`, and checks it meanwhile.
fn decompress(
    path: PathBuf,
    access: Access,
    direct: Direct,
    out: Counted,
) -> Result<Vec<String>, ImageError> {
    let options = ConvertOptions {
        target: Some(Format::Legacy),
        direct,
        force_damaged: true,
        access,
        ..ConvertOptions::default()
    };
    let passed = convert(Input::File(path), Output::Pipe(Box::new(out)), &options)?;
    Ok(passed.damage.iter().map(ToString::to_string).collect())
}

/// Writes a plain image from `offset` on to `out`. Its head and end were examined. QEMU checks the rest.
fn pass(file: &Arc<PageFile>, offset: u64, mut out: Counted) -> Result<(), ImageError> {
    let range = offset..file.len_bytes()?;
    RangeReader::new(file, QueueOptions::default()).read([range], |_, bytes| {
        out.write_all(bytes).map_err(|source| ImageError::Io {
            file: file.path().display().to_string(),
            call: "write to the VM's pipe",
            source,
        })
    })
}

/// A pipe that counts the bytes written to it.
struct Counted {
    pipe: File,
    count: Arc<AtomicU64>,
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.pipe.write(bytes)?;
        self.count.fetch_add(written as u64, Ordering::Relaxed);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
