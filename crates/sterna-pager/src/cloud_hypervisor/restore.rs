//! Restores a machine: the sending side of a local migration (specs/ch-offload.md §4, §5).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::time::Timespec;
use sterna_ram::threads::{NewThread, ThreadRole};
use sterna_transport::UnixPath;

use super::ahead::Ahead;
use super::channel::Channel;
use super::error::SessionError;
use super::image::SavedMachine;
use super::memory::GuestMemory;
use super::message::{Command, FAULT_ROLE};
use super::placement::Placement;
use super::stop::{Stop, Woken};
use super::{faults, huge_memfds};
use crate::error::GuestError;
use crate::options::FillRate;
use crate::peer::Peer;
use crate::source::PAGE_BYTES;
use crate::statistics::{GuestEnd, GuestStage, GuestStatistics};

/// Interval between two attempts to connect.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// How long a VMM that has closed its connection may take to end.
const ENDING: Duration = Duration::from_secs(1);

/// How one guest is restored.
#[derive(Debug, Clone)]
pub struct RestorePlan {
    /// Socket at which the VMM waits (`receive-migration`).
    pub socket: PathBuf,
    /// Hand over empty memory, and answer the VMM's page requests. The VMM must wait with memory_mode=postcopy.
    pub is_lazy: bool,
    /// Leave the guest paused.
    pub stays_paused: bool,
    /// How fast memory is filled that the VMM does not need next. Only for lazy restores.
    pub fill: FillRate,
    /// How long it is tried to connect.
    pub connect_limit: Duration,
    /// Threads that fill memory (default: one for each processor, 1 to 8).
    pub threads: usize,
}

/// One restore, which runs in threads of its own until it is dropped.
pub struct Restore {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    machine: Arc<SavedMachine>,
    plan: RestorePlan,
    stop: Stop,
    /// The operator has ended the restore.
    is_stopped: AtomicBool,
    placement: OnceLock<Placement>,
    pid: OnceLock<i32>,
    /// The guest may run, and lacks pages.
    is_handed_over: AtomicBool,
    answered: AtomicU64,
    began: Instant,
    end: Mutex<Option<(GuestEnd, Duration)>>,
}

impl RestorePlan {
    /// A plan with the default settings: eager, and the guest runs.
    pub fn new(socket: PathBuf) -> Self {
        let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get).clamp(1, 8);
        let (fill, connect_limit) = (FillRate::default(), Duration::from_secs(60));
        Self { socket, is_lazy: false, stays_paused: false, fill, connect_limit, threads }
    }
}

impl Restore {
    /// Starts to restore a guest.
    ///
    /// # Errors
    /// [`SessionError::System`] if the system refuses a thread or a descriptor, [`SessionError::HugeShmem`].
    pub fn start(machine: Arc<SavedMachine>, plan: RestorePlan) -> Result<Self, SessionError> {
        if plan.is_lazy {
            huge_memfds::check()?;
        }
        let stop = Stop::new().map_err(SessionError::system("eventfd"))?;
        let shared = Arc::new(Shared {
            machine,
            plan,
            stop,
            is_stopped: AtomicBool::new(false),
            placement: OnceLock::new(),
            pid: OnceLock::new(),
            is_handed_over: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            began: Instant::now(),
            end: Mutex::new(None),
        });
        let working = Arc::clone(&shared);
        let thread = NewThread::from(ThreadRole::Serve).spawn(move || working.work());
        let thread = thread.map_err(SessionError::system("clone"))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The figures of the guest. [`GuestStatistics::faults`] counts page requests.
    pub fn statistics(&self) -> GuestStatistics {
        self.shared.statistics()
    }

    /// Whether the guest may run and needs this process: it would wait for its pages without end.
    pub fn needs_image(&self) -> bool {
        self.shared.is_handed_over.load(Ordering::Acquire) && self.shared.end.lock().is_none()
    }

    /// Ends the restore.
    pub fn stop(&self) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.shared.stop.set();
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was already reported.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let end = match self.restore() {
            Ok(end) => end,
            Err(why) => {
                tracing::error!("{}: {why}", self.name());
                GuestEnd::GivenUp { why: GuestError::Session(Arc::new(why)), is_killed: false }
            }
        };
        *self.end.lock() = Some((end, self.began.elapsed()));
    }

    fn restore(&self) -> Result<GuestEnd, SessionError> {
        let control = Channel::new(self.connect()?, &self.stop);
        let peer = Peer::of(control.socket());
        if let Some(pid) = peer.pid() {
            let _ = self.pid.set(pid);
        }
        control.request(Command::Start, &[], None)?;
        let memory = GuestMemory::new(&self.machine.layout);
        let memory =
            memory.map_err(SessionError::system("making the guest's memory (memfd_create, ftruncate)"))?;
        let placement = Placement::new(Arc::clone(&self.machine), memory, self.plan.is_lazy);
        let placement = self.placement.get_or_init(|| placement);
        let ready = if self.plan.is_lazy { Ok(()) } else { self.fill_all(placement) };
        if let Err(why) = ready {
            abandon(control);
            return Err(why);
        }
        for (index, slot) in self.machine.layout.slots().iter().enumerate() {
            let file = placement.memory.file(index).as_fd();
            control.request(Command::MemoryFd, &slot.number.to_le_bytes(), Some(file))?;
        }
        control.request(Command::Config, &self.machine.config, None)?;
        if self.plan.is_lazy {
            return self.serve(&control, placement, &peer);
        }
        self.hand_over(&control)?;
        Ok(GuestEnd::Completed)
    }

    /// Sends the state, after which the guest may run.
    fn hand_over(&self, control: &Channel<'_>) -> Result<(), SessionError> {
        control.request(Command::State, &self.machine.state, None)?;
        let end = if self.plan.stays_paused { Command::CompletePaused } else { Command::Complete };
        control.request(end, &[], None)?;
        tracing::info!("{}: the VMM has the machine", self.name());
        Ok(())
    }

    /// Hands the machine over while its memory is empty, and serves page requests until none is missing.
    fn serve(
        &self,
        control: &Channel<'_>,
        placement: &Placement,
        peer: &Peer,
    ) -> Result<GuestEnd, SessionError> {
        let pages =
            Channel::new(connect(&self.plan.socket).map_err(|error| self.unreachable(error))?, &self.stop);
        pages.write(&FAULT_ROLE, None)?;
        // Loading the state touches memory already.
        self.is_handed_over.store(true, Ordering::Release);
        let ahead = Ahead::new(placement);
        std::thread::scope(|scope| {
            let _closed = Closing(&ahead);
            let is_off = self.plan.fill == FillRate::Off;
            let fillers = if is_off { 0 } else { self.plan.threads.saturating_sub(1).max(1) };
            for number in 0..fillers {
                let (ahead, rate) = (&ahead, (number == 0).then_some(self.plan.fill));
                let thread = ThreadRole::Fill.of(number);
                thread
                    .spawn_scoped(scope, move || ahead.work(placement, rate))
                    .map_err(SessionError::system("clone"))?;
            }
            let serving = NewThread::from(ThreadRole::ServeFaults).spawn_scoped(scope, || {
                let served = faults::serve(&pages, placement, &ahead, &self.answered);
                if served.is_err() {
                    // The VMM does not answer any more on the other connection, either.
                    self.stop.set();
                }
                served
            });
            let serving = serving.map_err(SessionError::system("clone"))?;
            let handed = self.hand_over(control);
            if handed.is_err() {
                self.stop.set();
            }
            let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match (handed, served) {
                // One of both may have stopped the other.
                (Err(why), Ok(()) | Err(SessionError::Stopped)) | (_, Err(why)) => Err(why),
                (Ok(()), Ok(())) => self.served(placement, peer),
            }
        })
    }

    /// The VMM has closed the connection for page requests.
    fn served(&self, placement: &Placement, peer: &Peer) -> Result<GuestEnd, SessionError> {
        let missing_pages = placement.missing_pages();
        if missing_pages == 0 {
            return Ok(GuestEnd::Completed);
        }
        if peer.ends_within(ENDING) {
            return Ok(GuestEnd::PeerEnded);
        }
        Err(SessionError::Incomplete { missing_pages })
    }

    /// Fills all memory in parallel.
    fn fill_all(&self, placement: &Placement) -> Result<(), SessionError> {
        let next = AtomicU64::new(0);
        let work = || {
            let mut buffer = placement.buffer();
            loop {
                let frame = next.fetch_add(1, Ordering::Relaxed);
                if frame >= placement.frames() {
                    return Ok(());
                }
                let filled = match self.stop.is_set() {
                    true => Err(SessionError::Stopped),
                    false => placement.fill(frame, &mut buffer),
                };
                if filled.is_err() {
                    next.store(placement.frames(), Ordering::Relaxed);
                    return filled;
                }
            }
        };
        std::thread::scope(|scope| {
            let spawn = |number| ThreadRole::Fill.of(number).spawn_scoped(scope, work).ok();
            let others: Vec<_> = (1..self.plan.threads).map_while(spawn).collect();
            let done = work();
            others.into_iter().fold(done, |done, other| {
                let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                done.and(other)
            })
        })
    }

    fn connect(&self) -> Result<OwnedFd, SessionError> {
        loop {
            let error = match connect(&self.plan.socket) {
                Ok(socket) => return Ok(socket),
                Err(error) => error,
            };
            if self.began.elapsed() >= self.plan.connect_limit {
                return Err(self.unreachable(error));
            }
            let waited = self.stop.wait_alone(RETRY).map_err(SessionError::system("poll"))?;
            if waited == Woken::Stopped {
                return Err(SessionError::Stopped);
            }
        }
    }

    fn unreachable(&self, source: std::io::Error) -> SessionError {
        let (path, seconds) = (self.plan.socket.display().to_string(), self.plan.connect_limit.as_secs());
        SessionError::Connect { path, seconds, source }
    }

    fn name(&self) -> String {
        let socket = self.plan.socket.display();
        self.pid.get().map_or_else(|| socket.to_string(), |pid| format!("{socket} (pid {pid})"))
    }

    fn statistics(&self) -> GuestStatistics {
        let end = self.end.lock().clone();
        let total_pages = self.machine.memory_bytes() / PAGE_BYTES;
        let placement = self.placement.get();
        let count = |of: fn(&Placement) -> &AtomicU64| {
            placement.map_or(0, |placement| of(placement).load(Ordering::Relaxed))
        };
        GuestStatistics {
            socket: self.plan.socket.display().to_string(),
            pid: self.pid.get().copied(),
            total_pages,
            missing_pages: placement.map_or(total_pages, Placement::missing_pages),
            page_bytes: PAGE_BYTES,
            faults: self.answered.load(Ordering::Relaxed),
            content_pages: count(|placement| &placement.content_pages),
            zero_pages: count(|placement| &placement.zero_pages),
            removed_pages: 0,
            time: end.as_ref().map_or_else(|| self.began.elapsed(), |(_, time)| *time),
            stage: end.map_or(GuestStage::Active, |(end, _)| GuestStage::Ended(end)),
        }
    }
}

/// Ends the threads that fill, also after an error.
struct Closing<'a>(&'a Ahead);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn connect(path: &Path) -> std::io::Result<OwnedFd> {
    let short = UnixPath::new(path)?;
    let stream = UnixStream::connect(short.as_path())?;
    stream.set_nonblocking(true)?;
    Ok(stream.into())
}

/// Tells the VMM that its machine will not come. It learns that from the end of the connection, too.
fn abandon(mut control: Channel<'_>) {
    control.take_leave();
    if let Err(why) = control.request(Command::Abandon, &[], None) {
        tracing::debug!("the VMM did not acknowledge the end: {why}");
    }
}
