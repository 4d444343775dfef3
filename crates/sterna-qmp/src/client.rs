//! A QMP client for Sterna's monitors and for QEMU's.
//!
//! One command at a time, every wait limited. Events that arrive between answers are kept, up to
//! [`MAX_KEPT_EVENTS`]; the oldest go first when nobody fetches them.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use serde_json::{Map, Value, json};

use crate::framing::{Frame, Framer, to_line};
pub use crate::server::Endpoint;

/// Events kept for [`Client::next_event`].
pub const MAX_KEPT_EVENTS: usize = 10_000;
/// The longest answer that is taken; QEMU's schema is the longest that it gives, under 1 MiB.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Why a command was not executed, or why it is not known whether it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens, or the system refused.
    #[error("cannot connect to the monitor at {endpoint}: {error}")]
    Connect {
        /// Where to.
        endpoint: Endpoint,
        /// The system's reason.
        error: io::Error,
    },
    /// The connection broke.
    #[error("the monitor's connection broke during {during}: {error}")]
    Io {
        /// What was being done.
        during: String,
        /// The system's reason.
        error: io::Error,
    },
    /// The other side closed the connection: it was quit, or has crashed.
    #[error("the monitor closed the connection during {during}")]
    Closed {
        /// What was being done.
        during: String,
    },
    /// No answer in time; the command may still be executed.
    #[error("no answer from the monitor to {during} within {limit:?}")]
    TimedOut {
        /// What was being done.
        during: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The other side refused the command. Nothing has changed there.
    #[error("{command}: {desc}")]
    Refused {
        /// Which command.
        command: String,
        /// QEMU's error class.
        class: String,
        /// The reason, for people.
        desc: String,
    },
    /// What came is no QMP: the peer misbehaves, or is no monitor.
    #[error("the peer does not speak QMP: {0}")]
    Protocol(String),
}

/// An event.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QmpEvent {
    /// Such as `STOP`.
    pub name: String,
    /// Its `data`, or null.
    pub data: Value,
    /// When it happened, by the sender's clock, since the Unix epoch.
    pub timestamp: Duration,
}

/// A connection to a monitor, negotiated.
pub struct Client {
    socket: OwnedFd,
    framer: Framer,
    frames: VecDeque<Frame>,
    events: VecDeque<QmpEvent>,
    version: Value,
    limit: Duration,
    next_id: u64,
    /// Commands can be executed while others wait for the machine.
    has_oob: bool,
}

impl Client {
    /// Connects and negotiates. `limit` bounds this and every later wait.
    pub fn connect(endpoint: &Endpoint, limit: Duration) -> Result<Self, ClientError> {
        Self::negotiated(Self::socket_to(endpoint, limit)?, limit, false)
    }

    /// As [`connect`](Self::connect), with out-of-band execution where the other side has it
    /// ([`execute_oob`](Self::execute_oob)).
    pub fn connect_oob(endpoint: &Endpoint, limit: Duration) -> Result<Self, ClientError> {
        Self::negotiated(Self::socket_to(endpoint, limit)?, limit, true)
    }

    fn socket_to(endpoint: &Endpoint, limit: Duration) -> Result<OwnedFd, ClientError> {
        let failed = |error| ClientError::Connect { endpoint: endpoint.clone(), error };
        Ok(match endpoint {
            Endpoint::Unix(path) => UnixStream::connect(path).map_err(failed)?.into(),
            Endpoint::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, limit).map_err(failed)?;
                stream.set_nodelay(true).map_err(failed)?;
                stream.into()
            }
        })
    }

    /// Negotiates over a socket that is connected already.
    pub fn from_socket(socket: OwnedFd, limit: Duration) -> Result<Self, ClientError> {
        Self::negotiated(socket, limit, false)
    }

    fn negotiated(socket: OwnedFd, limit: Duration, wants_oob: bool) -> Result<Self, ClientError> {
        let mut client = Self {
            socket,
            framer: Framer::new(MAX_ANSWER_BYTES),
            frames: VecDeque::new(),
            events: VecDeque::new(),
            version: Value::Null,
            limit,
            next_id: 1,
            has_oob: false,
        };
        let deadline = deadline_after(limit);
        let greeting = client.next_message("the greeting", deadline)?;
        client.version =
            greeting.get("QMP").and_then(|greeting| greeting.get("version")).cloned().ok_or_else(|| {
                ClientError::Protocol(format!("no greeting, but {}", Value::Object(greeting.clone())))
            })?;
        let offered = greeting_offers_oob(&greeting);
        let arguments = if wants_oob && offered { json!({"enable": ["oob"]}) } else { json!({}) };
        client.execute("qmp_capabilities", arguments)?;
        client.has_oob = wants_oob && offered;
        Ok(client)
    }

    /// The greeting's `version`: `qemu` with `major`, `minor`, `micro`, and `package`.
    pub fn version(&self) -> &Value {
        &self.version
    }

    /// Whether the other side is a Sterna monitor.
    pub fn is_sterna(&self) -> bool {
        self.version["package"].as_str().is_some_and(|package| package.starts_with("Sterna "))
    }

    /// The connection, to be asked about and not to be read or written.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Changes the limit on every wait for an answer.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Executes `command` and waits for its answer. `arguments` is an object, or null for none.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.execute_with(command, arguments, &[])
    }

    /// As [`execute`](Self::execute), and at once even if the machine answers nothing else, because it waits for memory
    /// (`exec-oob`). Only few commands can be executed so. Without out-of-band execution, as any other.
    pub fn execute_oob(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        let verb = if self.has_oob { "exec-oob" } else { "execute" };
        self.execute_as(verb, command, arguments, &[])
    }

    /// Gives `fd` to the other side under `name`, for `fd:NAME` addresses. Unix sockets only.
    pub fn send_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), ClientError> {
        self.execute_with("getfd", json!({"fdname": name}), &[fd]).map(drop)
    }

    /// Executes `command` and passes `fd` beside it, as `add-fd` wants. Unix sockets only.
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, ClientError> {
        self.execute_with(command, arguments, &[fd])
    }

    /// A line of the human monitor, and what it prints.
    pub fn human(&mut self, line: &str) -> Result<String, ClientError> {
        match self.execute("human-monitor-command", json!({"command-line": line}))? {
            Value::String(text) => Ok(text),
            other => Err(ClientError::Protocol(format!("human-monitor-command returned {other}"))),
        }
    }

    /// The next event, waiting at most `limit` for one; None if none came.
    pub fn next_event(&mut self, limit: Duration) -> Result<Option<QmpEvent>, ClientError> {
        let deadline = deadline_after(limit);
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.next_message("an event", deadline) {
                Ok(message) => self.keep_event(&message),
                Err(ClientError::TimedOut { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn execute_with(
        &mut self,
        command: &str,
        arguments: Value,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Value, ClientError> {
        self.execute_as("execute", command, arguments, fds)
    }

    fn execute_as(
        &mut self,
        verb: &str,
        command: &str,
        arguments: Value,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Value, ClientError> {
        let deadline = deadline_after(self.limit);
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({verb: command, "id": id});
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        self.send(&to_line(&request), fds, command, deadline)?;
        loop {
            let message = self.next_message(command, deadline)?;
            if message.contains_key("event") {
                self.keep_event(&message);
                continue;
            }
            // Answers to commands that timed out earlier carry an older id; unparsable ones carry none.
            match message.get("id").and_then(Value::as_u64) {
                Some(answered) if answered < id => continue,
                Some(answered) if answered == id => {}
                _ => {
                    return Err(ClientError::Protocol(format!(
                        "an answer without a request: {}",
                        Value::Object(message)
                    )));
                }
            }
            return answer(command, message);
        }
    }

    fn keep_event(&mut self, message: &Map<String, Value>) {
        let Some(name) = message.get("event").and_then(Value::as_str) else { return };
        if self.events.len() == MAX_KEPT_EVENTS {
            self.events.pop_front();
        }
        let part = |name: &str| {
            message.get("timestamp").and_then(|timestamp| timestamp.get(name)).and_then(Value::as_u64)
        };
        let timestamp = Duration::from_secs(part("seconds").unwrap_or(0))
            .saturating_add(Duration::from_micros(part("microseconds").unwrap_or(0)));
        let data = message.get("data").cloned().unwrap_or(Value::Null);
        self.events.push_back(QmpEvent { name: name.to_owned(), data, timestamp });
    }

    fn next_message(&mut self, during: &str, deadline: Instant) -> Result<Map<String, Value>, ClientError> {
        loop {
            match self.frames.pop_front() {
                Some(Frame::Value(Value::Object(message))) => return Ok(message),
                Some(Frame::Value(other)) => {
                    return Err(ClientError::Protocol(format!("a message that is not an object: {other}")));
                }
                Some(Frame::Malformed(why)) => return Err(ClientError::Protocol(why)),
                None => self.receive(during, deadline)?,
            }
        }
    }

    fn receive(&mut self, during: &str, deadline: Instant) -> Result<(), ClientError> {
        self.wait(PollFlags::IN, during, deadline)?;
        let mut bytes = [0; 16 << 10];
        match recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(ClientError::Closed { during: during.to_owned() }),
            Ok((count, _)) => {
                self.framer.push(&bytes[..count], &mut self.frames);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(broken(during, error)),
        }
    }

    fn send(
        &mut self,
        mut bytes: &[u8],
        mut fds: &[BorrowedFd<'_>],
        during: &str,
        deadline: Instant,
    ) -> Result<(), ClientError> {
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    fds = &[];
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, during, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(broken(during, error)),
            }
        }
        Ok(())
    }

    fn wait(&self, interest: PollFlags, during: &str, deadline: Instant) -> Result<(), ClientError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::from_borrowed_fd(self.socket.as_fd(), interest)], Some(&timeout)) {
                Ok(0) => {
                    return Err(ClientError::TimedOut { during: during.to_owned(), limit: self.limit });
                }
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(broken(during, error)),
            }
        }
    }
}

/// A limit too long to be an instant counts as a year.
fn deadline_after(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

fn greeting_offers_oob(greeting: &Map<String, Value>) -> bool {
    let list =
        greeting.get("QMP").and_then(|greeting| greeting.get("capabilities")).and_then(Value::as_array);
    list.is_some_and(|list| list.iter().any(|name| name == "oob"))
}

fn answer(command: &str, mut message: Map<String, Value>) -> Result<Value, ClientError> {
    if let Some(error) = message.get("error") {
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        return Err(ClientError::Refused {
            command: command.to_owned(),
            class: text("class"),
            desc: text("desc"),
        });
    }
    message
        .remove("return")
        .ok_or_else(|| ClientError::Protocol(format!("neither return nor error: {}", Value::Object(message))))
}

fn broken(during: &str, error: Errno) -> ClientError {
    match error {
        Errno::PIPE | Errno::CONNRESET => ClientError::Closed { during: during.to_owned() },
        _ => ClientError::Io { during: during.to_owned(), error: error.into() },
    }
}
