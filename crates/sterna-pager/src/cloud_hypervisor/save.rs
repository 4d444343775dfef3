//! Saves a machine: the receiving side of a local migration (specs/ch-offload.md §3).

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use sterna_image::convert::{ConvertOptions, ConvertedDirectory, MemoryPart, Snapshot, store_snapshot};
use sterna_ram::threads::{NewThread, ThreadRole};

use super::channel::Channel;
use super::error::SessionError;
use super::image::{CONFIG, KIND, MEMORY, MIGRATION_CONFIG, STATE};
use super::machine::vm_config;
use super::message::{Command, HEADER_BYTES, Request, Response};
use super::order::Order;
use super::received::Received;
use super::stop::{Stop, Woken};
use crate::descriptors::Descriptors;
use crate::peer::Peer;
use crate::reception::bind;

/// Where a machine comes from, and the image that it becomes.
#[derive(Debug, Clone)]
pub struct SavePlan {
    /// Socket at which this side listens, for the VMM's `send-migration` with local=on.
    pub socket: PathBuf,
    /// The image: a file, or `store:DIRECTORY#NAME`.
    pub image: PathBuf,
    /// How the image is written.
    pub options: ConvertOptions,
}

/// How far a save is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SaveStage {
    /// No VMM has connected.
    Waiting,
    /// The machine arrives. Its guest runs, except at the end.
    Receiving,
    /// The guest is paused, and its memory is stored.
    Storing,
}

/// The figures of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveProgress {
    /// How far the save is.
    pub stage: SaveStage,
    /// Bytes of memory; 0 until they are known.
    pub memory_bytes: u64,
    /// Bytes of memory that were stored.
    pub stored_bytes: u64,
}

/// A machine that was saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedGuest {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of the image; in a store, of what was added.
    pub image_bytes: u64,
    /// Number of memory slots.
    pub slots: usize,
    /// Whether the guest was paused before the save. A VMM that continues its guest after the save is told so by its operator.
    pub was_paused: bool,
    /// Process id of the VMM; `None` if it is not visible in this process's pid namespace.
    pub pid: Option<i32>,
    /// Whether the VMM got the answer. Without it, its guest may have run on after the save.
    pub is_acknowledged: bool,
}

/// One save, which runs in a thread of its own until it is dropped.
pub struct Save {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    plan: SavePlan,
    stop: Stop,
    stage: AtomicU8,
    memory_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    result: Mutex<Option<Result<SavedGuest, SessionError>>>,
}

/// A listening socket, whose file is removed when it is dropped.
struct Listener<'a> {
    socket: OwnedFd,
    path: &'a Path,
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path);
    }
}

impl Save {
    /// Listens at the socket, and saves the machine of the first VMM that sends one.
    ///
    /// # Errors
    /// [`SessionError::Listen`], [`SessionError::System`]; no socket is left behind then.
    pub fn start(plan: SavePlan) -> Result<Self, SessionError> {
        let socket = bind(&plan.socket)
            .map_err(|source| SessionError::Listen { path: plan.socket.display().to_string(), source })?;
        let stop = Stop::new().map_err(SessionError::system("eventfd"))?;
        let shared = Arc::new(Shared {
            plan,
            stop,
            stage: AtomicU8::new(0),
            memory_bytes: AtomicU64::new(0),
            stored_bytes: AtomicU64::new(0),
            result: Mutex::new(None),
        });
        let working = Arc::clone(&shared);
        let thread = NewThread::from(ThreadRole::Reception).spawn(move || {
            let listener = Listener { socket, path: &working.plan.socket };
            let saved = working.work(&listener);
            drop(listener);
            *working.result.lock() = Some(saved);
        });
        match thread {
            Ok(thread) => Ok(Self { shared, thread: Some(thread) }),
            Err(error) => {
                let _ = std::fs::remove_file(&shared.plan.socket);
                Err(SessionError::system("clone")(error))
            }
        }
    }

    /// How far the save is.
    pub fn progress(&self) -> SaveProgress {
        let shared = &self.shared;
        let stage = match shared.stage.load(Ordering::Relaxed) {
            0 => SaveStage::Waiting,
            1 => SaveStage::Receiving,
            _ => SaveStage::Storing,
        };
        SaveProgress {
            stage,
            memory_bytes: shared.memory_bytes.load(Ordering::Relaxed),
            stored_bytes: shared.stored_bytes.load(Ordering::Relaxed),
        }
    }

    /// The result, once. `None`: the save is not over, or the result was taken.
    ///
    /// # Errors
    /// [`SessionError`]: there is no image, and an existing one is unchanged. The VMM's guest continues.
    pub fn result(&self) -> Option<Result<SavedGuest, SessionError>> {
        self.shared.result.lock().take()
    }

    /// Ends the save; its result follows. The VMM gets an error, so that its guest continues.
    pub fn stop(&self) {
        self.shared.stop.set();
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was already reported.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self, listener: &Listener<'_>) -> Result<SavedGuest, SessionError> {
        loop {
            let mut session = Session {
                shared: self,
                channel: Channel::new(self.accept(listener)?, &self.stop),
                order: Order::new(),
                is_pending: false,
            };
            match session.receive() {
                // A connection without a word is no VMM.
                Ok(None) => self.stage.store(0, Ordering::Relaxed),
                Ok(Some(saved)) => return Ok(saved),
                Err(why) => {
                    session.refuse(&why);
                    return Err(why);
                }
            }
        }
    }

    fn accept(&self, listener: &Listener<'_>) -> Result<OwnedFd, SessionError> {
        loop {
            let woken = self.stop.wait(listener.socket.as_fd(), PollFlags::IN, None);
            if woken.map_err(SessionError::system("poll"))? == Woken::Stopped {
                return Err(SessionError::Stopped);
            }
            match accept_with(&listener.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(socket),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(SessionError::system("accept")(error.into())),
            }
        }
    }
}

/// The migration of one VMM.
struct Session<'a> {
    shared: &'a Shared,
    channel: Channel<'a>,
    order: Order,
    /// The VMM waits for an answer.
    is_pending: bool,
}

impl Session<'_> {
    /// Receives a machine, and saves it. `None`: the VMM has closed the connection without a word.
    fn receive(&mut self) -> Result<Option<SavedGuest>, SessionError> {
        let mut received = Received::default();
        loop {
            let mut descriptors = Descriptors::default();
            let Some(header) = self.channel.header(&mut descriptors)? else {
                if self.order.is_begin() {
                    return Ok(None);
                }
                let during = "before the end of the migration, so that there is no snapshot".to_owned();
                return Err(SessionError::Closed { during });
            };
            self.is_pending = true;
            self.shared.stage.fetch_max(1, Ordering::Relaxed);
            let command = self.take(&header, descriptors, &mut received)?;
            match command {
                Command::Abandon => {
                    self.answer(Response::DONE)?;
                    return Err(SessionError::Abandoned);
                }
                Command::Complete | Command::CompletePaused => {
                    return self.save(&received, command == Command::CompletePaused).map(Some);
                }
                _ => self.answer(Response::DONE)?,
            }
        }
    }

    /// Receives the rest of a request.
    fn take(
        &mut self,
        header: &[u8; HEADER_BYTES],
        mut descriptors: Descriptors,
        received: &mut Received,
    ) -> Result<Command, SessionError> {
        let request = Request::decode(header)?;
        self.order.check(&request)?;
        let payload = self.channel.payload(&request, &mut descriptors)?;
        let slot = match request.command {
            Command::MemoryFd => <[u8; 4]>::try_from(&payload[..]).ok().map(u32::from_le_bytes),
            _ => None,
        };
        self.order.arrived(request.command, slot, descriptors.count())?;
        match (request.command, slot, descriptors.pop()) {
            (Command::MemoryFd, Some(slot), Some(memory)) => received.add_memory(slot, memory)?,
            (Command::Config, ..) => received.config = payload,
            (Command::State, ..) => received.state = payload,
            _ => {}
        }
        Ok(request.command)
    }

    /// Stores the machine. The VMM gets its answer when the image is on the disk.
    fn save(&mut self, received: &Received, was_paused: bool) -> Result<SavedGuest, SessionError> {
        let layout = received.layout()?;
        self.shared.memory_bytes.store(layout.len_bytes(), Ordering::Relaxed);
        self.shared.stage.store(2, Ordering::Relaxed);
        let pid = Peer::of(self.channel.socket()).pid();
        let sources = received.parts(&layout)?;
        let memory: Vec<MemoryPart<'_>> = sources
            .iter()
            .map(|source| MemoryPart {
                file: source.file,
                name: &source.name,
                offset: source.offset,
                length_bytes: source.bytes,
            })
            .collect();
        let snapshot = Snapshot {
            kind: KIND,
            memory_name: MEMORY,
            memory: &memory,
            files: &[
                (CONFIG, vm_config(&received.config)?),
                (MIGRATION_CONFIG, &received.config),
                (STATE, &received.state),
            ],
        };
        let SavePlan { image, options, .. } = &self.shared.plan;
        // A VMM that has closed its connection may have continued its guest, so that the memory changes.
        let goes_on = |bytes| {
            self.shared.stored_bytes.fetch_add(bytes, Ordering::Relaxed);
            !self.shared.stop.is_set() && !self.channel.is_closed()
        };
        let Some(ConvertedDirectory { ram_bytes, bytes, .. }) =
            store_snapshot(&snapshot, image, options, &goes_on)?
        else {
            if self.shared.stop.is_set() {
                return Err(SessionError::Stopped);
            }
            let during = "while its memory was stored, so that there is no snapshot".to_owned();
            return Err(SessionError::Closed { during });
        };
        let answered = self.answer(Response::DONE);
        if let Err(why) = &answered {
            tracing::warn!(
                "{}: the image is complete, but the VMM did not get the answer: {why}",
                image.display()
            );
        }
        Ok(SavedGuest {
            memory_bytes: ram_bytes,
            image_bytes: bytes,
            slots: layout.slots().len(),
            was_paused,
            pid,
            is_acknowledged: answered.is_ok(),
        })
    }

    fn answer(&mut self, response: Response) -> Result<(), SessionError> {
        self.is_pending = false;
        self.channel.respond(response)
    }

    /// Answers the VMM's request with an error, or its next one, so that its guest continues.
    fn refuse(&mut self, why: &SessionError) {
        if matches!(why, SessionError::Closed { .. } | SessionError::Abandoned) {
            return;
        }
        self.channel.take_leave();
        let pending =
            self.is_pending || matches!(self.channel.header(&mut Descriptors::default()), Ok(Some(_)));
        if pending && let Err(error) = self.answer(Response::FAILED) {
            tracing::warn!("the VMM did not get the answer that its machine is not saved: {error}");
        }
    }
}
