//! A connection to libvirt's daemon: one call at a time, with a limit on every wait.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use sterna_transport::{Address, CancelFlag, TransportError, connect_socket};

use crate::error::LibvirtError;
use crate::packet::{
    Domain, ErrorReply, Head, KEEP_ALIVE, MonitorEvent, PING, PONG, QEMU, REMOTE, authentications,
    packet_length,
};
use crate::xdr::{Reader, Writer, XdrError};

/// Authentication type of a daemon that wants none.
const NO_AUTHENTICATION: u32 = 0;
/// Flags of GET_XML_DESC: the inactive definition, in the form for migration and saving.
const XML_INACTIVE: u32 = 2;
const XML_MIGRATABLE: u32 = 8;
/// Maximum number of events that are kept. The oldest are dropped.
const MAX_KEPT_EVENTS: usize = 10_000;
/// How long a connection that ends waits for the daemon.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// Interval at which a wait checks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(50);

/// A procedure of the daemon.
#[derive(Debug, Clone, Copy)]
struct Call {
    name: &'static str,
    program: u32,
    procedure: i32,
}

const fn call(name: &'static str, program: u32, procedure: i32) -> Call {
    Call { name, program, procedure }
}

const AUTH_LIST: Call = call("AUTH_LIST", REMOTE, 66);
const OPEN: Call = call("CONNECT_OPEN", REMOTE, 1);
const CLOSE: Call = call("CONNECT_CLOSE", REMOTE, 2);
const GET_XML: Call = call("DOMAIN_GET_XML_DESC", REMOTE, 14);
const LOOKUP_BY_NAME: Call = call("DOMAIN_LOOKUP_BY_NAME", REMOTE, 23);
const LOOKUP_BY_UUID: Call = call("DOMAIN_LOOKUP_BY_UUID", REMOTE, 24);
const COMMAND: Call = call("QEMU_DOMAIN_MONITOR_COMMAND", QEMU, 1);
const REGISTER: Call = call("QEMU_CONNECT_DOMAIN_MONITOR_EVENT_REGISTER", QEMU, 4);
const COMMAND_WITH_FILES: Call = call("QEMU_DOMAIN_MONITOR_COMMAND_WITH_FILES", QEMU, 7);
/// Name of a wait without a call.
const EVENT: Call = call("the next event", QEMU, MonitorEvent::PROCEDURE);

/// An open connection to the daemon.
pub struct Connection {
    socket: OwnedFd,
    received: Vec<u8>,
    events: VecDeque<MonitorEvent>,
    serial: u32,
    limit: Duration,
    cancel: CancelFlag,
}

impl Connection {
    /// Connects to the daemon's socket at `path`, and opens `uri`. `limit` applies to every later wait, too. `cancel` also
    /// ends every later wait.
    ///
    /// # Errors
    /// [`LibvirtError::Io`] for a socket that cannot be reached, [`LibvirtError::Authentication`], and those of every call.
    pub fn open(path: &Path, uri: &str, limit: Duration, cancel: &CancelFlag) -> Result<Self, LibvirtError> {
        let failed = |error| LibvirtError::Io { call: "connect", error };
        let socket =
            connect_socket(&Address::Unix(path.to_owned()), limit, cancel).map_err(|error| match error {
                TransportError::Cancelled { .. } => LibvirtError::Cancelled,
                TransportError::Connect { source, .. } => failed(source),
                error => failed(io::Error::other(error)),
            })?;
        let (received, events, cancel) = (Vec::new(), VecDeque::new(), cancel.clone());
        let mut connection = Self { socket, received, events, serial: 0, limit, cancel };
        let offered = connection.call(AUTH_LIST, &[], &[])?;
        let offered = authentications(&offered).map_err(|error| malformed(AUTH_LIST, error))?;
        if !offered.contains(&NO_AUTHENTICATION) {
            return Err(LibvirtError::Authentication { socket: path.to_owned(), offered });
        }
        let arguments = Writer::default().u32(1).string(uri).u32(0);
        connection.call(OPEN, &arguments.into_bytes(), &[])?;
        Ok(connection)
    }

    /// Finds a domain by its UUID if `name` has the form of one, else by its name.
    ///
    /// # Errors
    /// [`LibvirtError::Refused`] with code 42 if there is none.
    pub fn lookup(&mut self, name: &str) -> Result<Domain, LibvirtError> {
        let (call, arguments) = match uuid(name) {
            Some(uuid) => (LOOKUP_BY_UUID, Writer::default().fixed(&uuid)),
            None => (LOOKUP_BY_NAME, Writer::default().string(name)),
        };
        let reply = self.call(call, &arguments.into_bytes(), &[])?;
        Domain::decode(&mut Reader::new(&reply)).map_err(|error| malformed(call, error))
    }

    /// The domain's XML, as `virsh dumpxml --migratable --inactive` prints it.
    ///
    /// # Errors
    /// Those of every call.
    pub fn xml(&mut self, domain: &Domain) -> Result<String, LibvirtError> {
        let arguments = domain.encode(Writer::default()).u32(XML_INACTIVE | XML_MIGRATABLE);
        self.text(GET_XML, arguments, &[])
    }

    /// Executes a QMP command in the domain's QEMU. `command` is JSON without an `id`. Returns the whole answer of QEMU,
    /// with libvirt's `id`: an error of QEMU is an answer. libvirt passes at most one descriptor with a command.
    ///
    /// # Errors
    /// Those of every call. [`LibvirtError::Refused`] for broken JSON, a command with an `id`, or a domain that another job
    /// holds.
    pub fn command(
        &mut self,
        domain: &Domain,
        command: &str,
        files: &[BorrowedFd<'_>],
    ) -> Result<String, LibvirtError> {
        let call = if files.is_empty() { COMMAND } else { COMMAND_WITH_FILES };
        self.text(call, domain.encode(Writer::default()).string(command).u32(0), files)
    }

    /// Makes the daemon send all events of the domain's QEMU. Returns the number of the registration.
    ///
    /// # Errors
    /// Those of every call.
    pub fn register_events(&mut self, domain: &Domain) -> Result<i32, LibvirtError> {
        let arguments = domain.encode(Writer::default().u32(1)).u32(0).u32(0);
        let reply = self.call(REGISTER, &arguments.into_bytes(), &[])?;
        Reader::new(&reply).i32("callback").map_err(|error| malformed(REGISTER, error))
    }

    /// The next event that arrives within `limit`. None if there is none. Answers keep-alive messages meanwhile.
    ///
    /// # Errors
    /// The connection broke, or the daemon sent something else.
    pub fn next_event(&mut self, limit: Duration) -> Result<Option<MonitorEvent>, LibvirtError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.next_packet(EVENT, deadline) {
                Ok((head, payload)) => self.take_message(EVENT, head, &payload)?,
                Err(LibvirtError::TimedOut { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Changes the limit of every later wait.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// The socket, for `poll`. Do not read from it or write to it.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn text(
        &mut self,
        call: Call,
        arguments: Writer,
        files: &[BorrowedFd<'_>],
    ) -> Result<String, LibvirtError> {
        let reply = self.call(call, &arguments.into_bytes(), files)?;
        let text = Reader::new(&reply).string("text").map_err(|error| malformed(call, error))?;
        Ok(text.to_owned())
    }

    /// Sends a call and waits for its reply. Returns the reply's payload.
    fn call(
        &mut self,
        call: Call,
        arguments: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<Vec<u8>, LibvirtError> {
        // A call that timed out has its reply still under way, with another number.
        self.serial = self.serial.wrapping_add(1);
        let Call { program, procedure, .. } = call;
        let kind = if files.is_empty() { Head::CALL } else { Head::CALL_WITH_FILES };
        let head = Head { program, version: 1, procedure, kind, serial: self.serial, status: 0 };
        let deadline = Instant::now() + self.limit;
        if files.is_empty() {
            self.send(call, &head.packet(arguments), &[], deadline)?;
        } else {
            let count = (files.len() as u32).to_be_bytes();
            self.send(call, &head.packet(&[&count, arguments].concat()), &[], deadline)?;
            for file in files {
                self.send(call, &[0], &[*file], deadline)?;
            }
        }
        loop {
            let (head, payload) = self.next_packet(call, deadline)?;
            if head.kind != Head::REPLY {
                self.take_message(call, head, &payload)?;
                continue;
            }
            if head.serial != self.serial {
                // The reply to an earlier call, which timed out.
                if self.serial.wrapping_sub(head.serial) < u32::MAX / 2 {
                    continue;
                }
                return Err(not_rpc(call, format!("a reply to call {}, which was not sent", head.serial)));
            }
            if (head.program, head.procedure) != (program, procedure) {
                let (program, procedure) = (head.program, head.procedure);
                return Err(not_rpc(call, format!("a reply of program {program:#x}, procedure {procedure}")));
            }
            return match head.status {
                0 => Ok(payload),
                1 => Err(match ErrorReply::decode(&payload) {
                    Ok(ErrorReply { code, message, .. }) => {
                        LibvirtError::Refused { call: call.name, program, procedure, code, message }
                    }
                    Err(error) => malformed(call, error),
                }),
                status => Err(not_rpc(call, format!("a reply with status {status}"))),
            };
        }
    }

    /// Handles a packet that is no reply.
    fn take_message(&mut self, call: Call, head: Head, payload: &[u8]) -> Result<(), LibvirtError> {
        match (head.kind, head.program, head.procedure) {
            (Head::MESSAGE, KEEP_ALIVE, PING) => {
                let pong = Head::message(KEEP_ALIVE, PONG).packet(&[]);
                self.send(call, &pong, &[], Instant::now() + self.limit)
            }
            (Head::MESSAGE, QEMU, MonitorEvent::PROCEDURE) => {
                let event = MonitorEvent::decode(payload).map_err(|error| malformed(EVENT, error))?;
                if self.events.len() == MAX_KEPT_EVENTS {
                    self.events.pop_front();
                }
                self.events.push_back(event);
                Ok(())
            }
            (Head::MESSAGE, ..) | (Head::REPLY, ..) => Ok(()),
            (kind, ..) => Err(not_rpc(call, format!("a packet of kind {kind}"))),
        }
    }

    fn next_packet(&mut self, call: Call, deadline: Instant) -> Result<(Head, Vec<u8>), LibvirtError> {
        loop {
            let length = packet_length(&self.received)
                .map_err(|length| not_rpc(call, format!("a packet of {length} bytes")))?;
            if let Some(length) = length.filter(|length| self.received.len() >= *length) {
                let rest = self.received.split_off(length);
                let packet = std::mem::replace(&mut self.received, rest);
                let mut reader = Reader::new(&packet[4..]);
                let head = Head::decode(&mut reader).map_err(|error| malformed(call, error))?;
                if head.version != 1 {
                    return Err(not_rpc(call, format!("version {} of a program", head.version)));
                }
                return Ok((head, reader.rest().to_vec()));
            }
            self.receive(call, deadline)?;
        }
    }

    fn receive(&mut self, call: Call, deadline: Instant) -> Result<(), LibvirtError> {
        self.wait(PollFlags::IN, call, deadline)?;
        let mut bytes = [0; 64 << 10];
        match recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(LibvirtError::Closed { call: call.name }),
            Ok((count, _)) => {
                self.received.extend(&bytes[..count]);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(broken(call, error)),
        }
    }

    fn send(
        &mut self,
        call: Call,
        mut bytes: &[u8],
        mut files: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), LibvirtError> {
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !files.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(files));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    files = &[];
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, call, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(broken(call, error)),
            }
        }
        Ok(())
    }

    fn wait(&self, interest: PollFlags, call: Call, deadline: Instant) -> Result<(), LibvirtError> {
        loop {
            if self.cancel.is_cancelled() {
                return Err(LibvirtError::Cancelled);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let slice = left.min(LOOK);
            let timeout = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
            match poll(&mut [PollFd::from_borrowed_fd(self.socket.as_fd(), interest)], Some(&timeout)) {
                Ok(0) if slice < left => {}
                Ok(0) => return Err(LibvirtError::TimedOut { call: call.name, limit: self.limit }),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(broken(call, error)),
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The daemon logs an error for a client that leaves without a word. It needs nothing else of this call.
        self.limit = CLOSE_LIMIT;
        let _ = self.call(CLOSE, &[], &[]);
    }
}

/// The bytes of a UUID in its usual form.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let parts: Vec<usize> = text.split('-').map(str::len).collect();
    let digits = text.replace('-', "");
    let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    (parts == [8, 4, 4, 4, 12] && is_hex)
        .then(|| u128::from_str_radix(&digits, 16).ok())?
        .map(u128::to_be_bytes)
}

fn malformed(call: Call, error: XdrError) -> LibvirtError {
    let Call { name, program, procedure } = call;
    LibvirtError::Malformed { call: name, program, procedure, error }
}

fn not_rpc(call: Call, why: String) -> LibvirtError {
    LibvirtError::NotRpc { call: call.name, why }
}

fn broken(call: Call, error: Errno) -> LibvirtError {
    match error {
        Errno::PIPE | Errno::CONNRESET => LibvirtError::Closed { call: call.name },
        _ => LibvirtError::Io { call: call.name, error: error.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_in_the_form_of_a_uuid_is_one() {
        let bytes = uuid("0c36cce5-98b3-4fc0-bfd7-640ee8041d7a").unwrap();

        assert_eq!((bytes[0], bytes[15]), (0x0c, 0x7a));
        for name in ["web1", "0c36cce598b34fc0bfd7640ee8041d7a", "0c36cce5-98b3-4fc0-bfd7-640ee8041d7g", ""] {
            assert_eq!(uuid(name), None, "{name}");
        }
    }
}
