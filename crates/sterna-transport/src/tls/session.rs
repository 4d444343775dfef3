//! A TLS session after its handshake: reading and writing in parallel.
//!
//! A reader waits for the socket without the state's lock. It then opens the received records under the lock,
//! directly into their destination. A writer copies one record's bytes out of guest RAM (whole records in a buffer
//! of this process stay there), seals the record under the lock, and sends without it. Neither direction therefore
//! waits for the peer of the other.
//!
//! Lock order: `sending`, then `state`.

use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncryptError, UnbufferedStatus};
use rustls::{CommonState, Error};

use super::problem::TlsProblem;
use super::underlying::Underlying;
use crate::error::{Direction, TransportError};
use crate::group::Wait;
use crate::parts::{Part, Remaining};

/// Maximum plain bytes of a record.
const RECORD: usize = 16 * 1024;
/// Number of records that are sealed and then sent with one call.
const RECORDS: usize = 16;
/// Upper bound of the bytes that any TLS version adds to a record.
const OVERHEAD: usize = 64;
/// Bytes for a few TLS messages between records.
const SPARE: usize = 8 * 1024;
/// Maximum ciphertext bytes that one receive takes.
const INBOX: usize = 256 * 1024;
/// Time that a writer whose connection broke waits for the reader to find the reason.
const EXPLANATION: Duration = Duration::from_millis(200);

pub(crate) struct Session {
    state: Mutex<SessionState>,
    sending: Mutex<Outbox>,
    /// The reason why the session broke, once it has.
    problem: OnceLock<TlsProblem>,
    peer_name: Option<String>,
    binding: Option<[u8; 32]>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("peer_name", &self.peer_name).finish_non_exhaustive()
    }
}

/// State that writers share: a record's plain bytes, and the sealed records to send.
struct Outbox {
    plain: Box<[u8]>,
    sealed: Sealed,
    said_goodbye: bool,
}

/// Ciphertext to send, in a buffer of fixed size.
struct Sealed {
    bytes: Box<[u8]>,
    len: usize,
}

impl Session {
    pub(super) fn new(state: SessionState, peer_name: Option<String>, binding: Option<[u8; 32]>) -> Self {
        let sealed = Sealed { bytes: zeros(RECORDS * (RECORD + OVERHEAD) + SPARE), len: 0 };
        Session {
            state: Mutex::new(state),
            sending: Mutex::new(Outbox { plain: zeros(RECORD), sealed, said_goodbye: false }),
            problem: OnceLock::new(),
            peer_name,
            binding,
        }
    }

    /// The channel binding: equal at both ends, and different for every session.
    pub(crate) fn binding(&self) -> Option<[u8; 32]> {
        self.binding
    }

    /// The distinguished name in the peer's certificate, if it sent one.
    pub(crate) fn peer_name(&self) -> Option<&str> {
        self.peer_name.as_deref()
    }

    /// Fills `left` with the bytes that have arrived, at least one. Returns 0 at the end.
    pub(crate) fn read<P: Part>(
        &self,
        channel: &impl Underlying,
        left: &Remaining<'_, P>,
    ) -> Result<usize, TransportError> {
        let mut places = left.clone();
        loop {
            if channel.is_shut_down() {
                return Err(channel.cancelled());
            }
            if let Some(problem) = self.problem.get() {
                return Err(channel.tls_error(problem.clone()));
            }
            let mut state = self.state.lock();
            let opened = state.open_into(&mut places);
            let answers = !state.out.is_empty();
            if let Err(error) = opened {
                drop(state);
                return Err(self.broken(channel, error));
            }
            if let Some(fault) = places.fault() {
                return Err(channel.failed_memory(fault));
            }
            let moved = (left.bytes() - places.bytes()) as usize;
            if moved > 0 || state.is_closed {
                drop(state);
                self.send_answers(channel, answers);
                return Ok(moved);
            }
            let received = state.receive(channel);
            drop(state);
            self.send_answers(channel, answers);
            match received {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => channel.wait_readable()?,
                Err(error) => {
                    let judged = channel.judge(Direction::Read, error, &mut Wait::default());
                    if matches!(judged, Err(TransportError::Reset { .. })) && channel.bytes_read() == 0 {
                        return Err(self.fail(channel, TlsProblem::Dismissed));
                    }
                    judged?;
                }
            }
        }
    }

    /// Sends the first bytes of `left` and returns their count.
    pub(crate) fn write<P: Part>(
        &self,
        channel: &impl Underlying,
        left: &Remaining<'_, P>,
    ) -> Result<usize, TransportError> {
        let mut places = left.clone();
        let mut outbox = self.sending.lock();
        let Outbox { plain, sealed, said_goodbye } = &mut *outbox;
        if let Some(problem) = self.problem.get() {
            return Err(channel.tls_error(problem.clone()));
        }
        if *said_goodbye {
            let problem = TlsProblem::Broken("this side has already closed its writing direction".to_owned());
            return Err(channel.tls_error(problem));
        }
        sealed.len = 0;
        for _ in 0..RECORDS {
            let in_place = places.in_place(RECORD);
            let record = match in_place {
                Some(record) => {
                    places.advance(RECORD);
                    record
                }
                None => {
                    let count = places.take_bytes(plain);
                    &plain[..count]
                }
            };
            if record.is_empty() {
                break;
            }
            if let Some(fault) = places.fault() {
                return Err(channel.failed_memory(fault));
            }
            let result = self.state.lock().seal(record, sealed);
            if let Err(problem) = result {
                drop(outbox);
                return Err(self.fail(channel, problem));
            }
        }
        self.send(channel, sealed)?;
        Ok((left.bytes() - places.bytes()) as usize)
    }

    /// Sends the closing alert of TLS, once.
    pub(crate) fn say_goodbye(&self, channel: &impl Underlying) -> Result<(), TransportError> {
        let mut outbox = self.sending.lock();
        if outbox.said_goodbye || self.problem.get().is_some() {
            return Ok(());
        }
        outbox.said_goodbye = true;
        let sealed = &mut outbox.sealed;
        sealed.len = 0;
        let result = self.state.lock().goodbye(sealed);
        if let Err(problem) = result {
            return Err(self.fail(channel, problem));
        }
        self.send(channel, sealed)
    }

    /// Reads bytes that came after the last read, at most 256 KiB, and drops them.
    pub(crate) fn discard_unread(&self, channel: &impl Underlying) {
        let mut scratch = [0; 4096];
        for _ in 0..64 {
            if !matches!(channel.receive_now(&mut scratch), Ok(1..)) {
                break;
            }
        }
    }

    /// Sends the TLS messages that reading produced. If a writer holds the lock, it sends them with its next records.
    fn send_answers(&self, channel: &impl Underlying, are_there: bool) {
        if !are_there {
            return;
        }
        let Some(mut outbox) = self.sending.try_lock() else { return };
        let sealed = &mut outbox.sealed;
        sealed.len = 0;
        let taken = sealed.append(&mut self.state.lock().out);
        if taken.is_ok() {
            // Ignored, because the next read or write finds the same error.
            let _ = channel.send_raw(sealed.bytes());
        }
    }

    fn send(&self, channel: &impl Underlying, sealed: &Sealed) -> Result<(), TransportError> {
        let Err(error) = channel.send_raw(sealed.bytes()) else { return Ok(()) };
        if channel.is_shut_down() {
            return Err(error);
        }
        if matches!(error, TransportError::Reset { .. })
            && let Some(problem) = self.explanation(channel)
        {
            return Err(channel.tls_error(problem));
        }
        // Part of a record may have been sent, so no other record can follow.
        let _ = self.problem.set(TlsProblem::Torn(error.to_string()));
        Err(error)
    }

    /// Looks for an alert that the peer sent before it closed. A writer calls it after a reset.
    fn explanation(&self, channel: &impl Underlying) -> Option<TlsProblem> {
        let until = Instant::now() + EXPLANATION;
        while self.problem.get().is_none() && Instant::now() < until {
            let mut state = self.state.lock();
            let received = state.receive(channel);
            let opened = state.hoard();
            drop(state);
            if let Err(error) = opened {
                let _ = self.problem.set(TlsProblem::from_rustls(error));
            } else if !matches!(received, Ok(1..)) {
                // No bytes are available; a concurrent reader may be about to record the reason.
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        self.problem.get().cloned()
    }

    fn broken(&self, channel: &impl Underlying, error: Error) -> TransportError {
        let problem = TlsProblem::from_rustls(error);
        // Sends the alert, if rustls has prepared one.
        let answers = {
            let mut state = self.state.lock();
            state.prepare_alert();
            !state.out.is_empty()
        };
        self.send_answers(channel, answers);
        self.fail(channel, problem)
    }

    fn fail(&self, channel: &impl Underlying, problem: TlsProblem) -> TransportError {
        channel.tls_error(self.problem.get_or_init(|| problem).clone())
    }
}

impl Sealed {
    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn append(&mut self, messages: &mut Vec<u8>) -> Result<(), TlsProblem> {
        let room = self.bytes.len() - self.len;
        if messages.len() > room {
            return Err(TlsProblem::Broken("the peer requests too many TLS answers at once".to_owned()));
        }
        self.bytes[self.len..self.len + messages.len()].copy_from_slice(messages);
        self.len += messages.len();
        messages.clear();
        Ok(())
    }
}

/// One side's TLS state machine, with received bytes that are sealed or still unread.
pub(super) struct SessionState {
    side: Side,
    inbox: Box<[u8]>,
    start: usize,
    end: usize,
    plain: Vec<u8>,
    plain_start: usize,
    /// TLS messages that must be sent before anything else.
    out: Vec<u8>,
    is_closed: bool,
    /// The error that broke the session. rustls returns it only once, to whichever thread calls first.
    failed: Option<Error>,
}

pub(super) enum Side {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// Result of one step of the state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The machine advanced and may advance further.
    Progress,
    /// The machine needs more bytes, or is ready to write.
    Idle,
}

/// Action for the moment when the machine is ready to write.
enum Wish<'a> {
    Nothing,
    Seal(&'a [u8], &'a mut Sealed),
    Goodbye(&'a mut Sealed),
}

impl SessionState {
    pub(super) fn new(side: Side) -> Self {
        SessionState {
            side,
            inbox: zeros(INBOX),
            start: 0,
            end: 0,
            plain: Vec::new(),
            plain_start: 0,
            out: Vec::new(),
            is_closed: false,
            failed: None,
        }
    }

    pub(super) fn common(&self) -> &CommonState {
        match &self.side {
            Side::Client(client) => client,
            Side::Server(server) => server,
        }
    }

    /// Ciphertext that was received and is not opened yet.
    pub(super) fn received(&self) -> &[u8] {
        &self.inbox[self.start..self.end]
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Takes the TLS messages to send now.
    pub(super) fn take_out(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Advances the machine without writing data.
    pub(super) fn step(&mut self) -> Result<Step, Error> {
        let mut hoard = std::mem::take(&mut self.plain);
        let step = self.advance(Wish::Nothing, &mut |record| hoard.extend_from_slice(record));
        self.plain = hoard;
        step
    }

    /// Receives available bytes without waiting. Returns 0 at the end of the stream.
    pub(super) fn receive(&mut self, channel: &impl Underlying) -> io::Result<usize> {
        if self.is_closed {
            return Ok(0);
        }
        if self.start > 0 {
            self.inbox.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.inbox.len() {
            // The buffer is full of bytes that cannot be opened: the message is longer than any that is accepted here.
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an endless TLS message"));
        }
        let count = channel.receive_now(&mut self.inbox[self.end..])?;
        self.end += count;
        self.is_closed = count == 0;
        Ok(count)
    }

    /// Moves plain bytes into `places`: first the stored ones, then those of further records.
    fn open_into<P: Part>(&mut self, places: &mut Remaining<'_, P>) -> Result<(), Error> {
        if self.plain_start < self.plain.len() {
            self.plain_start += places.put_bytes(&self.plain[self.plain_start..]);
        }
        if self.plain_start == self.plain.len() {
            self.plain.clear();
            self.plain_start = 0;
        }
        while places.bytes() > 0 {
            let mut rest = std::mem::take(&mut self.plain);
            let step = self.advance(Wish::Nothing, &mut |record| {
                let taken = places.put_bytes(record);
                rest.extend_from_slice(&record[taken..]);
            });
            self.plain = rest;
            if step? == Step::Idle {
                break;
            }
        }
        Ok(())
    }

    /// Opens all received records and stores their plain bytes.
    pub(super) fn hoard(&mut self) -> Result<(), Error> {
        while self.step()? == Step::Progress {}
        Ok(())
    }

    /// Appends bytes as if they had been received.
    #[cfg(test)]
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.inbox[self.end..self.end + bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }

    /// Lets rustls put an alert into `out` after an error, if it has one.
    pub(super) fn prepare_alert(&mut self) {
        let failed = self.failed.take();
        let _ = self.step();
        self.failed = failed;
    }

    fn seal(&mut self, plain: &[u8], sealed: &mut Sealed) -> Result<(), TlsProblem> {
        self.write(Wish::Seal(plain, sealed))
    }

    fn goodbye(&mut self, sealed: &mut Sealed) -> Result<(), TlsProblem> {
        self.write(Wish::Goodbye(sealed))
    }

    /// Advances the machine until it can write, and writes. Records that are opened meanwhile wait for a reader.
    fn write(&mut self, mut wish: Wish<'_>) -> Result<(), TlsProblem> {
        let mut hoard = std::mem::take(&mut self.plain);
        let result = loop {
            let again = match &mut wish {
                Wish::Nothing => break Ok(()),
                Wish::Seal(plain, sealed) => Wish::Seal(plain, sealed),
                Wish::Goodbye(sealed) => Wish::Goodbye(sealed),
            };
            let before = again.len();
            match self.advance(again, &mut |record| hoard.extend_from_slice(record)) {
                Ok(Step::Progress) => {}
                Ok(Step::Idle) if wish.len() > before => break Ok(()),
                Ok(Step::Idle) => break Err(TlsProblem::Broken("the session has ended".to_owned())),
                Err(error) => break Err(TlsProblem::from_rustls(error)),
            }
        };
        self.plain = hoard;
        result
    }

    fn advance(&mut self, wish: Wish<'_>, give: &mut dyn FnMut(&[u8])) -> Result<Step, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let incoming = &mut self.inbox[self.start..self.end];
        let (discard, step) = match &mut self.side {
            Side::Client(client) => {
                digest(client.process_tls_records(incoming), wish, give, &mut self.out, &mut self.is_closed)
            }
            Side::Server(server) => {
                digest(server.process_tls_records(incoming), wish, give, &mut self.out, &mut self.is_closed)
            }
        };
        self.start += discard;
        self.failed = step.as_ref().err().cloned();
        step
    }
}

impl Wish<'_> {
    /// Number of sealed bytes so far.
    fn len(&self) -> usize {
        match self {
            Wish::Nothing => 0,
            Wish::Seal(_, sealed) | Wish::Goodbye(sealed) => sealed.len,
        }
    }
}

/// Handles one status of rustls. Returns how many bytes to drop from the inbox.
fn digest<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    wish: Wish<'_>,
    give: &mut dyn FnMut(&[u8]),
    out: &mut Vec<u8>,
    is_closed: &mut bool,
) -> (usize, Result<Step, Error>) {
    let mut discard = status.discard;
    let step = match status.state {
        Err(error) => Err(error),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                Some(Ok(record)) => {
                    discard += record.discard;
                    give(record.payload);
                }
                Some(Err(error)) => break Err(error),
                None => break Ok(Step::Progress),
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut message)) => {
            let at = out.len();
            out.resize(at + SPARE.max(2 * RECORD), 0);
            let written = message.encode(&mut out[at..]);
            out.truncate(at + written.as_ref().copied().unwrap_or(0));
            written.map(|_| Step::Progress).map_err(|error| Error::General(error.to_string()))
        }
        Ok(ConnectionState::TransmitTlsData(transmit)) => {
            // The message is in `out`, which is sent before other data.
            transmit.done();
            Ok(Step::Progress)
        }
        Ok(ConnectionState::PeerClosed) => {
            *is_closed = true;
            Ok(Step::Progress)
        }
        Ok(ConnectionState::WriteTraffic(mut traffic)) => match wish {
            Wish::Nothing => Ok(Step::Idle),
            Wish::Seal(plain, sealed) => sealed
                .append(out)
                .map_err(|problem| Error::General(problem.to_string()))
                .and_then(|()| {
                    let room = &mut sealed.bytes[sealed.len..];
                    traffic.encrypt(plain, room).map_err(unsealed)
                })
                .map(|count| {
                    sealed.len += count;
                    Step::Idle
                }),
            Wish::Goodbye(sealed) => sealed
                .append(out)
                .map_err(|problem| Error::General(problem.to_string()))
                .and_then(|()| {
                    let room = &mut sealed.bytes[sealed.len..];
                    traffic.queue_close_notify(room).map_err(unsealed)
                })
                .map(|count| {
                    sealed.len += count;
                    Step::Idle
                }),
        },
        // Early data is never offered. The other states wait for bytes, or the session is closed.
        Ok(_) => Ok(Step::Idle),
    };
    (discard, step)
}

/// Converts an error of sealing into rustls's general type. [`TlsProblem::from_rustls`] recognises `EncryptError`
/// again.
fn unsealed(error: EncryptError) -> Error {
    match error {
        EncryptError::EncryptExhausted => Error::EncryptError,
        error => Error::General(error.to_string()),
    }
}

fn zeros(len: usize) -> Box<[u8]> {
    vec![0; len].into_boxed_slice()
}
