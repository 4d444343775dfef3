//! A QMP client for Sterna's monitors and for QEMU's.
//!
//! Executes one command at a time, with a limit on every wait. Events that arrive meanwhile are kept, up to
//! [`MAX_KEPT_EVENTS`]. If the caller does not fetch them, the oldest are dropped.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, recv, sendmsg, shutdown,
    sockopt,
};
use serde_json::{Map, Value, json};
use sterna_transport::{Address, CancelFlag, TransportError, connect_socket};

use crate::framing::{Frame, Framer, to_line};
pub use crate::server::Endpoint;

/// Maximum number of events that are kept for [`Client::next_event`].
pub const MAX_KEPT_EVENTS: usize = 10_000;
/// Maximum size of an answer, in bytes. QEMU's longest answer is its schema, below 1 MiB.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Interval at which a wait checks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(50);

/// The reason why a command was not executed, or why it is unknown whether it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No program listens at the endpoint, or the operating system refused.
    #[error("cannot connect to the monitor at {endpoint}: {error}")]
    Connect {
        /// The address of the monitor.
        endpoint: Endpoint,
        /// The reason from the operating system.
        error: io::Error,
    },
    /// Connecting was cancelled. No command was sent.
    #[error("interrupted while connecting to the monitor at {endpoint}")]
    Cancelled {
        /// The address of the monitor.
        endpoint: Endpoint,
    },
    /// The connection broke with an error.
    #[error("the monitor's connection broke during {during}: {error}")]
    Io {
        /// The command or step during which it broke.
        during: String,
        /// The reason from the operating system.
        error: io::Error,
    },
    /// The other side closed the connection, because it was ended or has crashed.
    #[error("the monitor closed the connection during {during}")]
    Closed {
        /// The command or step during which it was closed.
        during: String,
    },
    /// No answer arrived within the limit. The command may still be executed.
    #[error("no answer from the monitor to {during} within {limit:?}")]
    TimedOut {
        /// The command or step that was not answered.
        during: String,
        /// The limit of the wait.
        limit: Duration,
    },
    /// The other side refused the command and has changed nothing.
    #[error("{command}: {desc}")]
    Refused {
        /// Name of the command.
        command: String,
        /// QEMU's error class.
        class: String,
        /// The reason, as text for people.
        desc: String,
    },
    /// The received data is not QMP: the peer is defective, or not a monitor.
    #[error("the peer does not speak QMP: {0}")]
    Protocol(String),
}

/// An event of a monitor.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QmpEvent {
    /// Name of the event, such as `STOP`.
    pub name: String,
    /// The member `data`, or null.
    pub data: Value,
    /// Time of the event by the sender's clock, since the Unix epoch.
    pub timestamp: Duration,
}

impl QmpEvent {
    /// An event as a monitor would send it, for tests of programs that handle events.
    pub fn new(name: impl Into<String>, data: Value, timestamp: Duration) -> Self {
        Self { name: name.into(), data, timestamp }
    }
}

/// A negotiated connection to a monitor.
pub struct Client {
    socket: OwnedFd,
    framer: Framer,
    frames: VecDeque<Frame>,
    events: VecDeque<QmpEvent>,
    version: Value,
    limit: Duration,
    next_id: u64,
    /// Whether commands can be executed out of band, while others wait for the machine.
    has_oob: bool,
    /// A command was sent in part, so the other side would misread the next one.
    is_cut: bool,
    /// While connecting: the address, and the flag that cancels it.
    connecting: Option<(Endpoint, CancelFlag)>,
}

impl Client {
    /// Connects and negotiates. `limit` applies to connecting, to the negotiation and to every later wait.
    pub fn connect(endpoint: &Endpoint, limit: Duration) -> Result<Self, ClientError> {
        Self::connect_unless(endpoint, limit, &CancelFlag::new())
    }

    /// Does the same as [`connect`](Self::connect), until `cancel` is cancelled.
    ///
    /// # Errors
    /// [`ClientError::Cancelled`], and those of [`connect`](Self::connect).
    pub fn connect_unless(
        endpoint: &Endpoint,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Self, ClientError> {
        let socket = Self::socket_to(endpoint, limit, cancel)?;
        Self::negotiated(socket, limit, false, Some((endpoint.clone(), cancel.clone())))
    }

    /// Does the same as [`connect`](Self::connect), with out-of-band execution if the other side supports it
    /// ([`execute_oob`](Self::execute_oob)).
    pub fn connect_oob(endpoint: &Endpoint, limit: Duration) -> Result<Self, ClientError> {
        Self::connect_oob_unless(endpoint, limit, &CancelFlag::new())
    }

    /// Does the same as [`connect_oob`](Self::connect_oob), until `cancel` is cancelled.
    ///
    /// # Errors
    /// [`ClientError::Cancelled`], and those of [`connect_oob`](Self::connect_oob).
    pub fn connect_oob_unless(
        endpoint: &Endpoint,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Self, ClientError> {
        let socket = Self::socket_to(endpoint, limit, cancel)?;
        Self::negotiated(socket, limit, true, Some((endpoint.clone(), cancel.clone())))
    }

    fn socket_to(endpoint: &Endpoint, limit: Duration, cancel: &CancelFlag) -> Result<OwnedFd, ClientError> {
        let failed = |error| ClientError::Connect { endpoint: endpoint.clone(), error };
        let address = match endpoint {
            Endpoint::Unix(path) => Address::Unix(path.clone()),
            Endpoint::Tcp(address) => Address::Tcp { host: address.ip().to_string(), port: address.port() },
        };
        let socket = connect_socket(&address, limit, cancel).map_err(|error| match error {
            TransportError::Cancelled { .. } => ClientError::Cancelled { endpoint: endpoint.clone() },
            TransportError::Connect { source, .. } => failed(source),
            error => failed(io::Error::other(error)),
        })?;
        if matches!(endpoint, Endpoint::Tcp(_)) {
            sockopt::set_tcp_nodelay(&socket, true).map_err(|error| failed(error.into()))?;
        }
        Ok(socket)
    }

    /// Negotiates over a connected socket.
    pub fn from_socket(socket: OwnedFd, limit: Duration) -> Result<Self, ClientError> {
        Self::negotiated(socket, limit, false, None)
    }

    fn negotiated(
        socket: OwnedFd,
        limit: Duration,
        wants_oob: bool,
        connecting: Option<(Endpoint, CancelFlag)>,
    ) -> Result<Self, ClientError> {
        let mut client = Self {
            socket,
            framer: Framer::new(MAX_ANSWER_BYTES),
            frames: VecDeque::new(),
            events: VecDeque::new(),
            version: Value::Null,
            limit,
            next_id: 1,
            has_oob: false,
            is_cut: false,
            connecting,
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
        client.connecting = None;
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

    /// Whether commands can be executed out of band ([`execute_oob`](Self::execute_oob)).
    pub fn has_oob(&self) -> bool {
        self.has_oob
    }

    /// Closes the connection. Every later command fails.
    pub fn close(&mut self) {
        // An error means that the connection is broken, so it needs no closing.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// The socket, for `poll`. Do not read from it or write to it.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The limit on every wait for an answer.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Changes the limit on every wait for an answer.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Executes `command` and waits for its answer. `arguments` is an object, or null for none.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.execute_with(command, arguments, &[])
    }

    /// Does the same as [`execute`](Self::execute), but out of band (`exec-oob`). The command is executed
    /// immediately, even if the machine waits for memory and answers no other command. Only few commands support
    /// this. Without out-of-band execution, it is sent as any other command.
    pub fn execute_oob(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        let verb = if self.has_oob { "exec-oob" } else { "execute" };
        self.execute_as(verb, command, arguments, &[])
    }

    /// Passes `fd` to the other side under `name`, for `fd:NAME` addresses. Unix sockets only.
    pub fn send_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), ClientError> {
        self.execute_with("getfd", json!({"fdname": name}), &[fd]).map(drop)
    }

    /// Executes `command` and passes `fd` with it, as `add-fd` requires. Unix sockets only.
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, ClientError> {
        self.execute_with(command, arguments, &[fd])
    }

    /// Executes a line of the human monitor and returns its output.
    pub fn human(&mut self, line: &str) -> Result<String, ClientError> {
        match self.execute("human-monitor-command", json!({"command-line": line}))? {
            Value::String(text) => Ok(text),
            other => Err(ClientError::Protocol(format!("human-monitor-command returned {other}"))),
        }
    }

    /// The next event, after waiting at most `limit`. None if no event arrived.
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
            // An answer to an earlier command, which has timed out, has an older id. The answer to unparsable text
            // has none.
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
        self.events.push_back(QmpEvent::new(name, data, timestamp));
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
        if self.is_cut {
            let error = io::Error::other("an earlier command was sent only partly: connect again");
            return Err(ClientError::Io { during: during.to_owned(), error });
        }
        // True while only a part of the command is sent.
        let mut is_cut = false;
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
                    is_cut = true;
                }
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::OUT, during, deadline).inspect_err(|_| self.is_cut = is_cut)?;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(broken(during, error)),
            }
        }
        Ok(())
    }

    fn wait(&self, interest: PollFlags, during: &str, deadline: Instant) -> Result<(), ClientError> {
        loop {
            if let Some((endpoint, cancel)) = &self.connecting
                && cancel.is_cancelled()
            {
                return Err(ClientError::Cancelled { endpoint: endpoint.clone() });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let slice = if self.connecting.is_some() { left.min(LOOK) } else { left };
            let timeout = Timespec {
                tv_sec: i64::try_from(slice.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: slice.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::from_borrowed_fd(self.socket.as_fd(), interest)], Some(&timeout)) {
                Ok(0) if slice < left => {}
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

/// Converts a limit into a deadline. A limit that is too long for `Instant` counts as one year.
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
    message.remove("return").ok_or_else(|| {
        ClientError::Protocol(format!("an answer with neither return nor error: {}", Value::Object(message)))
    })
}

fn broken(during: &str, error: Errno) -> ClientError {
    match error {
        Errno::PIPE | Errno::CONNRESET => ClientError::Closed { during: during.to_owned() },
        _ => ClientError::Io { during: during.to_owned(), error: error.into() },
    }
}
