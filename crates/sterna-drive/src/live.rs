//! Saves a guest that continues to run, as an image in Sterna's own format.
//!
//! Sterna's VMM pauses its guest for milliseconds, and sends the memory of that moment through a socket. This program
//! compresses it. No setting of the VM is changed. Whatever fails, the guest runs and there is no image: the VM gives the save
//! up when the socket is closed, also if this program is killed.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_image::convert::FrameOptions;
use sterna_image::{Format, ImageError};
use sterna_transport::Direct;

use super::save::frames::Frames;
use super::save::stream::{Stream, is_broken_off};
use super::save::{BACK_LIMIT, NAME, SaveRequest, end_migration};
use crate::{DriveError, Progress, Trace, Vm, Watch, watch};

/// What to do with a QEMU, which cannot save in this way.
const QEMU: &str = "--live is for Sterna's own VMs. A QEMU makes such images itself: switch its capability \
                    `background-snapshot` on, and `migrate` to `file:PATH`; `sterna convert` reads the result";

/// The options of a live save.
#[derive(Debug, Clone)]
pub struct LiveRequest {
    /// Path of the image, or its name in a store.
    pub path: PathBuf,
    /// How the image is written. [`FrameOptions::base`] and [`FrameOptions::only_changes`] belong to `since`.
    pub frames: FrameOptions,
    /// Whether an existing image is replaced.
    pub replace: bool,
    /// Whether the VM records the guest's writes, so that a later save may hold only changes.
    pub track: bool,
    /// Only pages that changed since the save with this number.
    pub since: Option<u64>,
}

/// The result of a live save.
#[derive(Debug, Clone)]
pub struct LiveImage {
    /// How long the guest was paused.
    pub pause: Duration,
    /// The number for a later `since`.
    pub number: Option<u64>,
    /// Pages of the stream, zero pages included.
    pub pages: u64,
    /// Writes of the guest that waited until their page was copied.
    pub held_writes: u64,
    /// Length of the image in bytes; in a store, of what was new.
    pub file_bytes: u64,
    /// Time from the command until the image is in its place.
    pub total: Duration,
    /// The observed progress of the save, in the form of a migration's.
    pub trace: Trace,
}

/// Saves the guest of `vm`, a Sterna VM, while it runs.
///
/// # Errors
/// [`DriveError`]: the guest runs, and there is no image.
pub fn save(vm: &mut Vm, request: &LiveRequest, watcher: &mut dyn Watch) -> Result<LiveImage, DriveError> {
    if !vm.is_sterna() {
        return Err(DriveError::Unfit(QEMU.to_owned()));
    }
    let began = Instant::now();
    let (mut saving, theirs) = Saving::begin(request)?;
    vm.send_fd(NAME, theirs.as_fd())?;
    // The stream ends when the VM closes its own descriptor.
    drop(theirs);
    let mut arguments = json!({ "uri": format!("fd:{NAME}"), "track": request.track });
    if let Some(since) = request.since {
        arguments["since"] = since.into();
    }
    if let Err(error) = vm.execute("x-sterna-live-save", arguments) {
        let _ = vm.try_execute("closefd", json!({ "fdname": NAME }));
        return Err(error);
    }
    let trace = match watch(vm, watcher, Duration::MAX) {
        Ok(trace) => trace,
        Err(error) => {
            // The VM may still write.
            let _ = end_migration(vm, Instant::now() + BACK_LIMIT);
            return Err(error);
        }
    };
    let told = vm.execute("x-sterna-query-live-save", Value::Null)?;
    let Progress { status, error, .. } = trace.last();
    if status != "completed" {
        let guest = "the guest runs, and there is no image";
        if trace.was_cancelled || status == "cancelled" {
            return Err(DriveError::Cancelled(format!("cancelled; {guest}")));
        }
        let reason = saving.failure().or_else(|| error.clone());
        let reason = reason.unwrap_or_else(|| format!("the save ended as `{status}`"));
        return Err(DriveError::Failed(format!("{} was not saved: {reason}; {guest}", vm.at())));
    }
    let file_bytes = saving.settle()?;
    Ok(LiveImage {
        pause: Duration::from_micros(told["pause"].as_u64().unwrap_or(0)),
        number: told["number"].as_u64(),
        pages: told["pages"].as_u64().unwrap_or(0),
        held_writes: told["held-writes"].as_u64().unwrap_or(0),
        file_bytes,
        total: began.elapsed(),
        trace,
    })
}

/// The thread that makes the image. Dropping it ends the thread, and removes what is not complete.
struct Saving {
    frames: Frames,
    making: Option<JoinHandle<Result<(), ImageError>>>,
    is_ended: Arc<AtomicBool>,
}

impl Saving {
    fn begin(request: &LiveRequest) -> Result<(Self, OwnedFd), DriveError> {
        let (ours, theirs) = UnixStream::pair()
            .map_err(|error| DriveError::Failed(format!("cannot create a pair of sockets: {error}")))?;
        let save = SaveRequest {
            path: request.path.clone(),
            format: Format::Sterna,
            channels: None,
            direct: Direct::Off,
            domain: None,
            replace: request.replace,
            frames: request.frames.clone(),
            resume_after: false,
        };
        let frames = Frames::new(&save);
        let work = frames.work();
        let is_ended = Arc::new(AtomicBool::new(false));
        let stream = Stream {
            pipe: OwnedFd::from(ours).into(),
            is_ended: Arc::clone(&is_ended),
            path: request.path.display().to_string(),
            // The stream has the run state of the pause already.
            state: None,
        };
        let thread = std::thread::Builder::new().name("live image".into());
        let making = thread.spawn(move || work(stream));
        let making = making.map_err(|error| DriveError::Failed(format!("cannot start a thread: {error}")))?;
        Ok((Self { frames, making: Some(making), is_ended }, theirs.into()))
    }

    /// The error of the thread, if it is the cause of a failed save.
    fn failure(&mut self) -> Option<String> {
        self.is_ended.store(true, Ordering::Release);
        let made = self.making.take()?.join();
        match made {
            Ok(Err(error)) => (!is_broken_off(&error)).then(|| error.to_string()),
            Ok(Ok(())) => None,
            Err(_) => Some("the thread that makes the image has panicked".to_owned()),
        }
    }

    /// Waits for the last byte, and gives the image its name. Returns its length.
    fn settle(&mut self) -> Result<u64, DriveError> {
        if let Some(making) = self.making.take() {
            let panicked = |_| DriveError::Failed("the thread that makes the image has panicked".into());
            making.join().map_err(panicked)??;
        }
        Ok(self.frames.settle()?.file_bytes)
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        let _ = self.failure();
    }
}
