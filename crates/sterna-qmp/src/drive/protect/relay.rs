//! QEMU's stream on its way to the standby: the main channel, and multifd channels if there are some.
//!
//! QEMU migrates to a Unix socket of ours. Each of its connections gets one to the standby, and bytes are copied both ways by a thread
//! for each direction, a buffer at a time. So a standby that is silent does not hold QEMU up for longer than this side wants: the
//! socket is closed here, which frees even a QEMU that writes RAM with its main lock held.
//!
//! Only one direction of one channel is understood: what the standby says on the main channel ([`Answers`]). That is enough to know
//! where every checkpoint stands, for QEMU moves by these answers alone:
//!
//! * **REPLY *n*** is held back until the contact's machine was told that checkpoint *n* is taken. The standby's checkpoint *n* begins
//!   behind REPLY *n*, so it cannot be held before that, and no answer names a checkpoint that this side does not know. The guest runs
//!   meanwhile: a REPLY that waits costs no pause.
//! * **RECEIVED *n*** is held back until the gates have ended the epoch. QEMU's guest stands from before VMSTATE_SEND until QEMU reads
//!   LOADED, and LOADED goes behind RECEIVED. So whatever lies in the gates' sockets at this moment was said before the checkpoint, and
//!   nothing of the next epoch can be among it. The contact's answer may be read before RECEIVED *n* is; then the gates release what
//!   belongs to the epoch that has not ended yet, of which the same holds: all of it was said before the checkpoint.
//! * **SHUT 0 and READY** are handed on together, and the gates close before: between the two QEMU's guest stands.
//!
//! What is released is decided by the contact's machine alone. RECEIVED releases nothing here.

mod disk;
mod outlet;
mod pair;

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::{Address, CancelFlag, Channel, Piece, Tls};

use super::answers::{Answer, Answers};
use outlet::Outlet;
use pair::DiskPair;

/// What is copied at once.
const PIECE_BYTES: usize = 256 << 10;
/// How long connecting to the standby may take, and QEMU's first word on a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks for a connection.
const LOOK: Duration = Duration::from_millis(20);
/// The first bytes of a main channel ("QEVM").
const MAIN: [u8; 4] = *b"QEVM";

/// What happens at the standby's answers. Called by one thread.
pub(super) trait Steps: Send + Sync {
    /// The seeding is held, and QEMU's guest stands until this returns.
    fn ready(&self);
    /// The standby has room for checkpoint `number`. Returns when it may be taken.
    ///
    /// # Errors
    /// It may not.
    fn reply(&self, number: u64) -> Result<(), String>;
    /// Checkpoint `number` is held, and QEMU's guest stands until this returns. False: QEMU does not hear of it, and stands on.
    fn received(&self, number: u64) -> bool;
    /// Whether QEMU still writes each of its disks at the standby, too. Asked while its guest stands for a checkpoint, which the standby
    /// does not get whole before this returns.
    ///
    /// # Errors
    /// It does not, or cannot be asked.
    fn check_disks(&self) -> Result<(), String>;
    /// The stream has ended, and nobody here has closed it.
    fn ended(&self, why: String, is_standbys_fault: bool);
}

/// Relays one protection's stream.
pub(super) struct Relay {
    shared: Arc<Shared>,
    path: PathBuf,
}

struct Shared {
    standby: Address,
    tls: Option<Tls>,
    most_connections: usize,
    /// It has this relay.
    steps: Weak<dyn Steps>,
    state: Mutex<State>,
    cancel: CancelFlag,
    bytes: AtomicU64,
    /// QEMU is about to be told that it may take a checkpoint: what it says next it says while its guest stands.
    is_check_due: AtomicBool,
}

#[derive(Default)]
struct State {
    qemu: Vec<Arc<Channel>>,
    standby: Vec<Arc<Channel>>,
    /// Since when each direction to the standby waits for it.
    waits: Vec<Arc<Mutex<Option<Instant>>>>,
    disks: Vec<DiskPair>,
    has_main: bool,
    is_qemu_closed: bool,
    is_closed: bool,
    /// Why it was closed here. Whatever else ends with the connections follows from that.
    ended_because: Option<String>,
}

impl Relay {
    /// Listens at `path` for QEMU's main channel and `channels` more.
    ///
    /// # Errors
    /// The host refuses the socket or a thread.
    pub(super) fn listen(
        path: &Path,
        standby: Address,
        tls: Option<Tls>,
        channels: u8,
        steps: Weak<dyn Steps>,
    ) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            standby,
            tls,
            most_connections: usize::from(channels) + 1,
            steps,
            state: Mutex::default(),
            cancel: CancelFlag::new(),
            bytes: AtomicU64::new(0),
            is_check_due: AtomicBool::new(false),
        });
        let this = Self { shared: Arc::clone(&shared), path: path.to_owned() };
        spawn("relay", move || shared.accept(&listener))?;
        Ok(this)
    }

    /// What QEMU is told to migrate to.
    pub(super) fn uri(&self) -> String {
        format!("unix:{}", self.path.display())
    }

    /// Bytes that were handed to the standby.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// What it has ended for by itself, if it has.
    pub(super) fn ended_because(&self) -> Option<String> {
        self.shared.state.lock().ended_because.clone()
    }

    /// How long the standby has taken nothing of what there is for it.
    pub(super) fn stalled(&self) -> Duration {
        let state = self.shared.state.lock();
        state
            .waits
            .iter()
            .filter_map(|wait| *wait.lock())
            .map(|since| since.elapsed())
            .max()
            .unwrap_or_default()
    }

    /// Closes QEMU's side. The standby's stays.
    pub(super) fn close_qemu(&self) {
        self.shared.close_qemu();
    }

    /// Closes everything.
    pub(super) fn close(&self) {
        self.shared.close();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The socket goes with its directory.
        self.close();
    }
}

/// Why copying ended.
struct Ended {
    why: String,
    is_standbys_fault: bool,
}

impl Ended {
    fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), is_standbys_fault: false }
    }

    fn of_qemu(error: impl std::fmt::Display) -> Self {
        Self::new(format!("QEMU's side of the stream: {error}"))
    }

    fn of_disk(side: &str, error: impl std::fmt::Display) -> Self {
        Self::new(format!("the connection for a disk, {side}: {error}"))
    }

    fn of_standby(error: impl std::fmt::Display) -> Self {
        Self::new(format!("the standby's side of the stream: {error}"))
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        let mut count = 0;
        while count < self.most_connections && !self.state.lock().is_qemu_closed {
            match listener.accept() {
                Ok((socket, _)) => {
                    count += 1;
                    let shared = Arc::clone(self);
                    let pair = move || {
                        if let Err(ended) = shared.pair(socket.into()) {
                            shared.over(ended);
                        }
                    };
                    if let Err(error) = spawn("relay back", pair) {
                        return self.over(Ended::new(format!("the host refuses a thread: {error}")));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(LOOK),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.over(Ended::of_qemu(error)),
            }
        }
    }

    /// Joins one connection of QEMU's with one to the standby, until either ends.
    fn pair(self: &Arc<Self>, socket: std::os::fd::OwnedFd) -> Result<(), Ended> {
        let qemu = Arc::new(Channel::from_fd(socket).map_err(Ended::of_qemu)?);
        self.keep(|state| state.qemu.push(Arc::clone(&qemu)), &qemu);
        qemu.set_stall_limit(Some(CONNECT_LIMIT));
        let is_main = qemu.peek(MAIN.len()).map_err(Ended::of_qemu)? == MAIN;
        qemu.set_stall_limit(None);
        if is_main && std::mem::replace(&mut self.state.lock().has_main, true) {
            return Err(Ended::new("QEMU has opened two main channels"));
        }
        let adopt = |channel| {
            let channel = Arc::new(channel);
            self.keep(|state| state.standby.push(Arc::clone(&channel)), &channel);
            channel
        };
        let standby =
            Channel::connect_with(&self.standby, self.tls.as_ref(), CONNECT_LIMIT, &self.cancel, adopt)
                .map_err(Ended::of_standby)?;
        let out = {
            let (shared, qemu, standby) = (Arc::clone(self), Arc::clone(&qemu), Arc::clone(&standby));
            move || {
                let ended = shared.forward(&qemu, standby, is_main);
                shared.over(ended);
            }
        };
        spawn("relay out", out).map_err(|error| Ended::new(format!("the host refuses a thread: {error}")))?;
        Err(if is_main { self.follow(&qemu, &standby) } else { self.back(&qemu, &standby) })
    }

    /// Keeps a channel so that it can be closed; closes it if that is due already.
    fn keep(&self, push: impl FnOnce(&mut State), channel: &Channel) {
        let mut state = self.state.lock();
        push(&mut state);
        if state.is_qemu_closed {
            channel.shutdown();
        }
    }

    /// QEMU to the standby.
    fn forward(self: &Arc<Self>, qemu: &Channel, standby: Arc<Channel>, is_main: bool) -> Ended {
        let mut piece = Piece::between(qemu, &standby, PIECE_BYTES);
        let outlet = Arc::new(Outlet::new(qemu, standby, PIECE_BYTES));
        self.state.lock().waits.push(outlet.waits());
        loop {
            let length = match qemu.read_piece(&mut piece) {
                Ok(0) => return Ended::new("QEMU has closed the stream"),
                Ok(length) => length,
                Err(error) => return Ended::of_qemu(error),
            };
            if let Err(ended) = self.check_disks() {
                return ended;
            }
            if is_main
                && self.is_check_due.swap(false, Ordering::AcqRel)
                && let Err(ended) = self.ask_about_disks(&outlet)
            {
                return ended;
            }
            if let Err(error) = outlet.put(&mut piece) {
                return Ended::of_standby(error);
            }
            self.bytes.fetch_add(length as u64, Ordering::Relaxed);
        }
    }

    /// The standby to QEMU, on a channel on which it has nothing to say that matters here.
    fn back(&self, qemu: &Channel, standby: &Channel) -> Ended {
        let mut piece = [0; 4096];
        loop {
            match standby.read_some(&mut piece) {
                Ok(0) => return Ended::new("the standby has closed a channel of the stream"),
                Ok(length) => {
                    if let Err(error) = qemu.write_all(&piece[..length]) {
                        return Ended::of_qemu(error);
                    }
                }
                Err(error) => return Ended::of_standby(error),
            }
        }
    }

    /// The standby to QEMU on the main channel.
    fn follow(&self, qemu: &Channel, standby: &Channel) -> Ended {
        let (mut piece, mut answers) = ([0; 4096], Answers::new());
        let mut is_deaf = false;
        loop {
            match standby.read_some(&mut piece) {
                Ok(0) => return Ended::new("the standby has closed the stream"),
                Ok(length) => answers.push(&piece[..length]),
                Err(error) => return Ended::of_standby(error),
            }
            // RECEIVED and LOADED come in one write and go on in one.
            let mut on = Vec::new();
            loop {
                let (answer, bytes) = match answers.next() {
                    Ok(Some(next)) => next,
                    Ok(None) => break,
                    Err(error) => return Ended { why: error.to_string(), is_standbys_fault: true },
                };
                let Some(steps) = self.steps.upgrade() else {
                    return Ended::new("the protection was given up");
                };
                match answer {
                    Answer::ReturnPath(_) | Answer::Loaded(_) => {}
                    Answer::Ready => steps.ready(),
                    Answer::Reply(number) => {
                        if let Err(error) = flush(qemu, &mut on) {
                            return error;
                        }
                        if let Err(why) = steps.reply(number) {
                            return Ended::new(why);
                        }
                        self.is_check_due.store(true, Ordering::Release);
                    }
                    Answer::Received(number) => is_deaf |= !steps.received(number),
                }
                if !is_deaf {
                    on.extend_from_slice(&bytes);
                }
            }
            if let Err(error) = flush(qemu, &mut on) {
                return error;
            }
        }
    }

    /// The first end counts; an end that was wanted is none.
    fn over(&self, ended: Ended) {
        {
            let mut state = self.state.lock();
            if state.is_closed || state.is_qemu_closed {
                return;
            }
            // Before anybody can see an end.
            state.ended_because.get_or_insert_with(|| ended.why.clone());
        }
        self.close();
        if let Some(steps) = self.steps.upgrade() {
            steps.ended(ended.why, ended.is_standbys_fault);
        }
    }

    fn close_qemu(&self) {
        let mut state = self.state.lock();
        state.is_qemu_closed = true;
        state.qemu.iter().for_each(|channel| channel.shutdown());
    }

    fn close(&self) {
        self.cancel.cancel();
        let mut state = self.state.lock();
        (state.is_closed, state.is_qemu_closed) = (true, true);
        // The standby's first: a QEMU that has lost a disk must not get on with its stream.
        state.standby.iter().chain(&state.qemu).for_each(|channel| channel.shutdown());
    }
}

fn flush(qemu: &Channel, on: &mut Vec<u8>) -> Result<(), Ended> {
    if on.is_empty() {
        return Ok(());
    }
    let bytes = std::mem::take(on);
    qemu.write_all(&bytes).map_err(Ended::of_qemu)
}

fn spawn(name: &str, act: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(act).map(drop)
}

#[cfg(test)]
mod tests;
