//! Saves through a pipe: the VM writes a stream into it, and this process compresses the stream.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use serde_json::json;
use sterna_image::compression::Compressor;
use sterna_image::{Format, ImageError};
use sterna_transport::{CreateOptions, IoPart, PageFile, PageQueue, QueueOptions};

use super::head::Head;
use super::stream::Stream;
use super::{NAME, RUNNING, SaveRequest, Settled, frames};
use crate::pipe::pipe;
use crate::{DriveError, Vm};

/// What the thread does with the VM's stream.
type Work = Box<dyn FnOnce(Stream) -> Result<(), ImageError> + Send>;

/// The file that is written.
enum Target {
    /// A compressed stream.
    Stream(Arc<PageFile>),
    /// An image in Sterna's own format.
    Frames(Box<frames::Frames>),
}

/// A pipe from the VM, and the thread that compresses its data.
pub(super) struct Piped {
    file: Target,
    head: Option<Head>,
    compressing: Option<JoinHandle<Result<(), ImageError>>>,
    /// The save was given up, so that the rest of the stream is not needed.
    is_ended: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<String>>>,
}

impl Piped {
    /// Creates the file and the pipe, and passes the pipe's write end to the VM.
    /// `state`: the run state of the guest before it is stopped.
    pub(super) fn begin(vm: &mut Vm, request: &SaveRequest, state: &str) -> Result<Self, DriveError> {
        if vm.is_sterna() && request.domain.is_some() {
            return Err(DriveError::Unfit("libvirt cannot run Sterna's own VMM: leave --xml out".into()));
        }
        let head = match &request.domain {
            None => None,
            Some(domain) => Some(Head::new(request.format, domain, state == RUNNING)?),
        };
        let (file, work) = match request.format {
            Format::Sterna => {
                let frames = frames::Frames::new(request);
                let work = frames.work();
                (Target::Frames(Box::new(frames)), work)
            }
            _ => Self::stream(request, head.as_ref())?,
        };
        let (ours, theirs) = pipe()?;
        vm.send_fd(NAME, theirs.as_fd())?;
        let failure = Arc::new(Mutex::new(None));
        let (tell, path) = (failure.clone(), request.path.display().to_string());
        let compressing = std::thread::Builder::new().name("compression".into());
        let is_ended = Arc::new(AtomicBool::new(false));
        let stream = Stream {
            pipe: File::from(ours),
            is_ended: is_ended.clone(),
            path: path.clone(),
            // libvirt's header contains the run state, so the stream in it is not changed.
            state: (head.is_none() && state == RUNNING).then(|| state.to_owned()),
        };
        let compressing = compressing.spawn(move || {
            // If the thread fails, it closes the pipe, so the VM's migration fails.
            let compressed = work(stream);
            if let Err(error) = &compressed {
                *tell.lock() = Some(error.to_string());
            }
            compressed
        });
        let thread_failed = |error| DriveError::Failed(format!("cannot start a thread: {error}"));
        Ok(Self { file, head, compressing: Some(compressing.map_err(thread_failed)?), is_ended, failure })
    }

    /// Creates the file of a compressed stream, and the work of its thread.
    fn stream(request: &SaveRequest, head: Option<&Head>) -> Result<(Target, Work), DriveError> {
        let options =
            CreateOptions { direct: request.direct, replace: request.replace, ..CreateOptions::default() };
        let file = Arc::new(PageFile::create(&request.path, options)?);
        let mut position = 0;
        if let Some(head) = head {
            file.write_at(0, &[IoPart::Bytes(&head.bytes(false))])?;
            position = head.stream_offset();
        }
        let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
        let sink = Sink { queue: PageQueue::new(&file, QueueOptions::default()), position };
        let compressor = Compressor::new(sink, request.format.compression(), threads);
        let work = move |stream: Stream| compress(stream, compressor);
        Ok((Target::Stream(file), Box::new(work)))
    }

    /// The address for `migrate`.
    pub(super) fn uri(&self) -> String {
        format!("fd:{NAME}")
    }

    /// The error of the compressing thread, if it has failed.
    pub(super) fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    /// Waits for the last byte, flushes the file to the disk and renames it to its place.
    pub(super) fn settle(&mut self) -> Result<Settled, DriveError> {
        let compressed = self.compressing.take().map(JoinHandle::join);
        compressed
            .unwrap_or(Ok(Ok(())))
            .map_err(|_| DriveError::Failed("the compressing thread has panicked".into()))??;
        let file = match &mut self.file {
            Target::Stream(file) => file,
            Target::Frames(frames) => return frames.settle(),
        };
        file.sync()?;
        if let Some(head) = &self.head {
            file.write_at(0, &[IoPart::Bytes(&head.bytes(true))])?;
            file.sync()?;
        }
        let settled = Settled {
            file_bytes: file.len_bytes()?,
            allocated_bytes: file.allocated_bytes()?,
            is_direct: file.is_direct(),
        };
        file.publish()?;
        Ok(settled)
    }

    /// Ends the thread, which uses the file. Without the thread, dropping this removes the staging file.
    pub(super) fn give_up(&mut self) {
        self.is_ended.store(true, Ordering::Release);
        if let Some(compressing) = self.compressing.take() {
            // The error of the thread was reported already.
            let _ = compressing.join();
        }
    }

    /// Removes the descriptor from the VM, if the VM has not used it.
    pub(super) fn clean(&mut self, vm: &mut Vm) {
        // A migration removes the descriptor from the VM's list. Then the refusal is no error.
        let _ = vm.try_execute("closefd", json!({ "fdname": NAME }));
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Writes the compressed stream into the file.
struct Sink {
    queue: PageQueue,
    position: u64,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.queue.write_bytes(self.position, bytes).map_err(io::Error::other)?;
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.queue.drain().map_err(io::Error::other)
    }
}

/// Compresses the whole stream.
fn compress(mut stream: Stream, mut compressor: Compressor<Sink>) -> Result<(), ImageError> {
    stream.pass(&mut |bytes| compressor.write_all(bytes))?;
    let mut sink = compressor.finish().map_err(|error| stream.io("write", error))?;
    sink.flush().map_err(|error| stream.io("write", error))
}
