//! Relays QEMU's stream to the standby: the main channel, and the multifd channels.
//!
//! QEMU migrates to a Unix socket of this program. For each of QEMU's connections the relay opens one to the standby.
//! A thread for each direction copies the bytes, one buffer at a time. So a silent standby cannot block QEMU for
//! longer than this side allows. The relay then closes the socket, which releases even a QEMU that writes RAM with
//! its main lock held.
//!
//! The relay decodes the standby's messages on the main channel ([`Answers`]). This is enough to know the state of
//! every checkpoint, because QEMU advances only with these answers. QEMU's own messages are decoded only as far as
//! needed to find the end of a checkpoint ([`keeping`]).
//!
//! * **REPLY *n*** waits here until the contact's machine has learned that checkpoint *n* is taken. The standby's
//!   checkpoint *n* begins after REPLY *n*, so it cannot be held before that. No answer therefore names a checkpoint
//!   that this side does not know. The guest runs meanwhile, so a REPLY that waits costs no pause.
//! * **RECEIVED *n*** and LOADED are sent by this side as soon as the whole checkpoint is here ([`keeping`]). The
//!   standby's own messages then only confirm it. Both wait until the gates have ended the epoch. QEMU's guest is
//!   paused from before VMSTATE_SEND until QEMU reads LOADED, and LOADED follows RECEIVED. So all packets in the
//!   gates' sockets at this moment were sent before the checkpoint, and none belongs to the next epoch. The contact's
//!   answer may be read before RECEIVED *n*. Then the gates release packets of the epoch that has not ended yet,
//!   which were also sent before the checkpoint.
//! * **SHUT 0 and READY** are forwarded together, after the gates were closed: between the two, QEMU's guest is
//!   paused.
//!
//! Only the contact's machine releases output. RECEIVED releases nothing here.

mod disk;
mod heads;
mod keeping;
mod kept;
mod outlet;
mod packets;
mod pair;
mod progress;
mod words;

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_transport::{Address, CancelFlag, Channel, Piece, Tls};

use super::answers::{Answer, Answers};
use kept::Kept;
use outlet::Outlet;
use pair::DiskPair;
use progress::{Progress, Received};

/// Maximum number of bytes that are copied in one step.
const PIECE_BYTES: usize = 256 << 10;
/// How long connecting to the standby may take, and QEMU until its first bytes on a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Interval between two checks for a new connection.
const LOOK: Duration = Duration::from_millis(20);
/// The first bytes of a main channel ("QEVM").
const MAIN: [u8; 4] = *b"QEVM";

/// Actions at the standby's answers, called one after the other.
pub(super) trait Steps: Send + Sync {
    /// The seeding is held. QEMU's guest is paused until this returns.
    fn ready(&self);
    /// The standby has room for checkpoint `number`. Returns when the checkpoint may be taken.
    ///
    /// # Errors
    /// The checkpoint may not be taken.
    fn reply(&self, number: u64) -> Result<(), String>;
    /// Whether QEMU may get the answer to checkpoint `number` as soon as the checkpoint is here.
    fn may_answer(&self, number: u64) -> bool;
    /// Checkpoint `number` is held, or all of it is here. QEMU's guest is paused until this returns. False: QEMU gets
    /// no answer and its guest stays paused, because this was the last checkpoint or the guest may not run any more.
    fn received(&self, number: u64) -> bool;
    /// Checks that QEMU still writes each of its disks at the standby, too. Called while the guest is paused for a
    /// checkpoint. The standby does not get the whole checkpoint before this returns.
    ///
    /// # Errors
    /// QEMU does not write a disk there any more, or does not answer.
    fn check_disks(&self) -> Result<(), String>;
    /// QEMU's side of the stream has ended. No channel is closed yet, so that the standby can be informed first.
    fn qemu_ended(&self);
    /// The stream has ended without a request of this side.
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
    /// The owner of this relay, therefore a weak reference.
    steps: Weak<dyn Steps>,
    state: Mutex<State>,
    cancel: CancelFlag,
    bytes: AtomicU64,
    /// A REPLY is being forwarded. QEMU's next bytes are a checkpoint's, so QEMU must be asked about its disks.
    is_check_due: AtomicBool,
    /// Answers are not forwarded to QEMU any more.
    is_deaf: AtomicBool,
    kept: Kept,
    progress: Progress,
}

#[derive(Default)]
struct State {
    qemu: Vec<Arc<Channel>>,
    standby: Vec<Arc<Channel>>,
    /// For each direction to the standby: the time since which it waits for the standby to read.
    waits: Vec<Arc<Mutex<Option<Instant>>>>,
    disks: Vec<DiskPair>,
    has_main: bool,
    /// QEMU's main channel.
    main: Option<Arc<Channel>>,
    /// Number of QEMU's other channels so far.
    others: usize,
    is_qemu_closed: bool,
    is_closed: bool,
    /// The reason why this side closed the relay. Every later error is a consequence.
    ended_because: Option<String>,
}

impl Relay {
    /// Listens at `path` for QEMU's main channel and `channels` more. At most `most_kept_bytes` of checkpoints are
    /// kept in memory. With 0, QEMU waits for the standby.
    ///
    /// # Errors
    /// The host refuses the socket or a thread.
    pub(super) fn listen(
        path: &Path,
        standby: Address,
        tls: Option<Tls>,
        channels: u8,
        most_kept_bytes: u64,
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
            is_deaf: AtomicBool::new(false),
            kept: Kept::new(most_kept_bytes),
            progress: Progress::default(),
        });
        let this = Self { shared: Arc::clone(&shared), path: path.to_owned() };
        spawn("relay", move || shared.accept(&listener))?;
        Ok(this)
    }

    /// The URI for QEMU's `migrate`.
    pub(super) fn uri(&self) -> String {
        format!("unix:{}", self.path.display())
    }

    /// Bytes that were written to the standby.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of a checkpoint that are kept here and not written to the standby yet.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.shared.kept.bytes()
    }

    /// The reason why QEMU waits for the standby in each checkpoint although checkpoints should be kept.
    pub(super) fn waits_because(&self) -> Option<String> {
        self.shared.progress.lost_because()
    }

    /// The reason why the relay has ended by itself, if it has.
    pub(super) fn ended_because(&self) -> Option<String> {
        self.shared.state.lock().ended_because.clone()
    }

    /// How long the standby has read nothing although data waits for it.
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

    /// Closes QEMU's side. The connections to the standby stay open.
    pub(super) fn close_qemu(&self) {
        self.shared.close_qemu();
    }

    /// Closes all connections and stops listening.
    pub(super) fn close(&self) {
        self.shared.close();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The socket file is removed together with its directory.
        self.close();
    }
}

/// The end of a connection's copying, with its reason.
struct Ended {
    why: String,
    is_standbys_fault: bool,
    /// QEMU has closed its side, or QEMU's connection broke.
    is_of_qemu: bool,
}

impl Ended {
    fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), is_standbys_fault: false, is_of_qemu: false }
    }

    fn closed_by_qemu() -> Self {
        Self { is_of_qemu: true, ..Self::new("QEMU has closed the stream") }
    }

    fn of_qemu(error: impl std::fmt::Display) -> Self {
        Self { is_of_qemu: true, ..Self::new(format!("QEMU's side of the stream: {error}")) }
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
                        return self.over(Ended::new(format!("cannot start a thread: {error}")));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(LOOK),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.over(Ended::of_qemu(error)),
            }
        }
    }

    /// Connects one connection of QEMU's with one to the standby, and copies until either ends.
    fn pair(self: &Arc<Self>, socket: std::os::fd::OwnedFd) -> Result<(), Ended> {
        let qemu = Arc::new(Channel::from_fd(socket).map_err(Ended::of_qemu)?);
        self.keep(|state| state.qemu.push(Arc::clone(&qemu)), &qemu);
        qemu.set_stall_limit(Some(CONNECT_LIMIT));
        let is_main = qemu.peek(MAIN.len()).map_err(Ended::of_qemu)? == MAIN;
        qemu.set_stall_limit(None);
        let index = self.number(&qemu, is_main)?;
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
                let ended = shared.forward(&qemu, standby, index);
                shared.over(ended);
            }
        };
        spawn("relay out", out).map_err(|error| Ended::new(format!("cannot start a thread: {error}")))?;
        Err(if is_main { self.follow(&qemu, &standby) } else { self.back(&qemu, &standby) })
    }

    /// The index of a channel among those other than the main one. None for the main channel.
    fn number(&self, qemu: &Arc<Channel>, is_main: bool) -> Result<Option<usize>, Ended> {
        let mut state = self.state.lock();
        if !is_main {
            state.others += 1;
            return Ok(Some(state.others - 1));
        }
        if std::mem::replace(&mut state.has_main, true) {
            return Err(Ended::new("QEMU has opened two main channels"));
        }
        state.main = Some(Arc::clone(qemu));
        Ok(None)
    }

    /// Records a channel so that it can be closed. Closes it immediately if the relay is closed already.
    fn keep(&self, push: impl FnOnce(&mut State), channel: &Channel) {
        let mut state = self.state.lock();
        push(&mut state);
        if state.is_qemu_closed {
            channel.shutdown();
        }
    }

    /// Copies from QEMU to the standby.
    fn forward(self: &Arc<Self>, qemu: &Channel, standby: Arc<Channel>, index: Option<usize>) -> Ended {
        let mut piece = Piece::between(qemu, &standby, PIECE_BYTES);
        let outlet = Arc::new(Outlet::new(qemu, Arc::clone(&standby), PIECE_BYTES));
        self.state.lock().waits.push(outlet.waits());
        // The peeked bytes are already in the buffer, and the socket may have no more, so do not wait for it.
        let mut is_first = true;
        loop {
            if !std::mem::take(&mut is_first) && self.is_kept_next(qemu) {
                return self.keep_on(qemu, standby, index, outlet.waits());
            }
            let length = match qemu.read_piece(&mut piece) {
                Ok(0) => return Ended::closed_by_qemu(),
                Ok(length) => length,
                Err(error) => return Ended::of_qemu(error),
            };
            if let Err(ended) = self.check_disks() {
                return ended;
            }
            if index.is_none()
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

    /// Copies from the standby to QEMU, on a channel whose messages from the standby need no decoding.
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

    /// Copies from the standby to QEMU on the main channel, and acts on the decoded messages.
    fn follow(&self, qemu: &Channel, standby: &Channel) -> Ended {
        let (mut piece, mut answers) = ([0; 4096], Answers::new());
        loop {
            match standby.read_some(&mut piece) {
                Ok(0) => return Ended::new("the standby has closed the stream"),
                Ok(length) => answers.push(&piece[..length]),
                Err(error) => return Ended::of_standby(error),
            }
            // RECEIVED and LOADED arrive in one write and are forwarded in one write.
            let mut on = Vec::new();
            loop {
                let (answer, bytes) = match answers.next() {
                    Ok(Some(next)) => next,
                    Ok(None) => break,
                    Err(error) => return Ended { is_standbys_fault: true, ..Ended::new(error.to_string()) },
                };
                let Some(steps) = self.steps.upgrade() else {
                    return Ended::new("the protection was ended");
                };
                match answer {
                    Answer::ReturnPath(_) => {}
                    Answer::Ready => {
                        steps.ready();
                        if self.may_keep() {
                            self.progress.follow(self.most_connections - 1);
                        }
                    }
                    Answer::Reply(number) => {
                        if let Err(error) = flush(qemu, &mut on) {
                            return error;
                        }
                        if let Err(why) = steps.reply(number) {
                            return Ended::new(why);
                        }
                        self.progress.replied(number);
                        self.is_check_due.store(true, Ordering::Release);
                    }
                    Answer::Received(number) => match self.progress.received() {
                        Received::HandOn if steps.received(number) => {}
                        Received::HandOn => self.is_deaf.store(true, Ordering::Release),
                        Received::Known => continue,
                        Received::TooEarly => {
                            let why = format!(
                                "the standby acknowledges checkpoint {number}, which it has not received"
                            );
                            return Ended { is_standbys_fault: true, ..Ended::new(why) };
                        }
                    },
                    Answer::Loaded(number) if self.progress.loaded(number) => continue,
                    Answer::Loaded(_) => {}
                }
                if !self.is_deaf.load(Ordering::Acquire) {
                    on.extend_from_slice(&bytes);
                }
            }
            if let Err(error) = flush(qemu, &mut on) {
                return error;
            }
        }
    }

    /// Ends the relay with the first end. An end that this side requested does not count.
    fn over(&self, ended: Ended) {
        {
            let mut state = self.state.lock();
            if state.is_closed || state.is_qemu_closed {
                return;
            }
            // Set before the channels are closed, so that every thread that sees the end also sees the reason.
            state.ended_because.get_or_insert_with(|| ended.why.clone());
        }
        let steps = self.steps.upgrade();
        if let Some(steps) = steps.as_ref().filter(|_| ended.is_of_qemu) {
            steps.qemu_ended();
        }
        self.close();
        if let Some(steps) = steps {
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
        self.progress.close();
        self.kept.close();
        let mut state = self.state.lock();
        (state.is_closed, state.is_qemu_closed) = (true, true);
        // The standby's channels first: the stream of a QEMU that has lost a disk must not reach the standby any more.
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
