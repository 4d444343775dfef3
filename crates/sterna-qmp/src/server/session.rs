//! Serves one client: reads commands, executes them one by one, writes answers and events. It is one thread without a
//! queue of commands, so it reads no commands while the client does not read.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, Shutdown, recvmsg, send, shutdown,
};
use serde_json::{Map, Value, json};

use super::arguments::Arguments;
use super::bus::{EventBus, Outbox};
use super::handler::{Context, Handler};
use super::limits::MAX_COMMAND_BYTES;
use super::schema;
use super::spec::{CommandSpec, MemberKind, MemberSpec, optional, required};
use super::version::version;
use crate::error::QmpError;
use crate::framing::{Frame, Framer, to_line};

/// Number of unread bytes above which no further command of the client is executed.
const HIGH_WATER_BYTES: usize = 64 << 10;
/// How long sending the last answers may take when the connection ends.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of open descriptors that a client has passed, named or not.
const MAX_FDS: usize = 16;

pub(crate) struct Session {
    socket: OwnedFd,
    outbox: Arc<Outbox>,
    handler: Arc<dyn Handler>,
    commands: Arc<Vec<CommandSpec>>,
    context: Context,
    negotiated: bool,
}

/// The commands that every session knows, with any handler.
pub const BUILTIN_COMMANDS: &[CommandSpec] = &[
    CommandSpec::new("qmp_capabilities", "Ends the negotiation; commands and events follow.")
        .takes(&[optional("enable", MemberKind::Array, "Features of the protocol: none is offered.")]),
    CommandSpec::new(
        "query-version",
        "Returns Sterna's version, and the version of QEMU whose protocol this monitor implements.",
    )
    .returns(MemberKind::Members(&[
        required("qemu", MemberKind::Members(VERSION), "Version of QEMU."),
        required("package", MemberKind::String, "Sterna's name and version."),
    ])),
    CommandSpec::new("query-commands", "Lists the commands.").returns(MemberKind::List(&[required(
        "name",
        MemberKind::String,
        "",
    )])),
    CommandSpec::new("query-qmp-schema", "Describes every command and event.").returns(MemberKind::Array),
    CommandSpec::new("getfd", "Gives the descriptor that is sent with this command a name, for `fd:NAME`.")
        .takes(&[required("fdname", MemberKind::String, "A name that does not begin with a digit.")]),
    CommandSpec::new("closefd", "Closes a descriptor that `getfd` has named.").takes(&[required(
        "fdname",
        MemberKind::String,
        "The name.",
    )]),
];

const VERSION: &[MemberSpec] = &[
    required("major", MemberKind::Integer, ""),
    required("minor", MemberKind::Integer, ""),
    required("micro", MemberKind::Integer, ""),
];

impl Session {
    pub(super) fn new(
        socket: OwnedFd,
        outbox: Arc<Outbox>,
        handler: Arc<dyn Handler>,
        commands: Arc<Vec<CommandSpec>>,
    ) -> Self {
        Self { socket, outbox, handler, commands, context: Context::default(), negotiated: false }
    }

    /// Serves the client until it disconnects or breaks the protocol, or until the server closes.
    pub(super) fn run(mut self, bus: &EventBus) {
        bus.join(&self.outbox);
        self.reply(&json!({"QMP": {"version": version(), "capabilities": []}}), false);
        // An error means that the client has disconnected, so it cannot be reported to the client.
        let _ = self.serve();
        let _ = self.flush();
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn serve(&mut self) -> Result<(), Errno> {
        let mut framer = Framer::new(MAX_COMMAND_BYTES);
        let mut frames = VecDeque::new();
        loop {
            let state = self.outbox.state();
            if state.closing || state.overflowed {
                return Ok(());
            }
            if state.pending_bytes < HIGH_WATER_BYTES
                && let Some(frame) = frames.pop_front()
            {
                self.answer(frame);
                continue;
            }
            let may_read = frames.is_empty() && state.pending_bytes < HIGH_WATER_BYTES;
            let ready = self.wait(may_read, state.pending_bytes > 0, None)?;
            if ready.contains(PollFlags::OUT) {
                self.write_some()?;
            }
            if may_read && ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                let mut bytes = [0; 16 << 10];
                match self.receive(&mut bytes) {
                    Ok(0) => return Ok(()),
                    Ok(count) => framer.push(&bytes[..count], &mut frames),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(error) => return Err(error),
                }
            } else if ready.intersects(PollFlags::HUP | PollFlags::ERR) {
                return Err(Errno::PIPE);
            }
        }
    }

    fn answer(&mut self, frame: Frame) {
        let (result, id, negotiates) = match frame {
            Frame::Malformed(why) => (Err(QmpError::generic(why)), None, false),
            Frame::Value(Value::Object(request)) => {
                let was = self.negotiated;
                let result = self.execute(&request);
                (result, request.get("id").cloned(), self.negotiated && !was)
            }
            Frame::Value(_) => (Err(QmpError::generic("QMP input must be a JSON object")), None, false),
        };
        let mut answer = match result {
            Ok(value) => json!({"return": value}),
            Err(error) => json!({"error": error.to_json()}),
        };
        if let (Some(id), Some(answer)) = (id, answer.as_object_mut()) {
            answer.insert("id".into(), id);
        }
        self.reply(&answer, negotiates);
        let actions = std::mem::take(&mut self.context.after_reply);
        if !actions.is_empty() {
            let _ = self.flush();
            actions.into_iter().for_each(|action| action());
        }
    }

    fn execute(&mut self, request: &Map<String, Value>) -> Result<Value, QmpError> {
        let (command, arguments) = dissect(request)?;
        if !self.negotiated && command != "qmp_capabilities" {
            return Err(QmpError::command_not_found(
                "Expecting capabilities negotiation with 'qmp_capabilities'",
            ));
        }
        let known = self.commands.iter().find(|spec| spec.name == command).ok_or_else(|| {
            QmpError::command_not_found(format!("The command {command} has not been found"))
        })?;
        let known = *known;
        known.check(arguments)?;
        let answer = self.answer_to(command, arguments)?;
        debug_assert_eq!(known.undeclared(&answer), None);
        Ok(answer)
    }

    fn answer_to(&mut self, command: &str, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
        match command {
            "qmp_capabilities" => self.negotiate(arguments),
            "query-version" => Ok(version()),
            "query-commands" => {
                Ok(self.commands.iter().map(|spec| json!({"name": spec.name})).collect::<Vec<_>>().into())
            }
            "query-qmp-schema" => Ok(schema::schema(&self.commands, &self.handler.events())),
            "getfd" => self.name_fd(Arguments(arguments).required_string("fdname")?),
            "closefd" => {
                let name = Arguments(arguments).required_string("fdname")?;
                self.context
                    .take_fd(name)
                    .map(|_| json!({}))
                    .ok_or_else(|| QmpError::generic(format!("File descriptor named '{name}' not found")))
            }
            _ => self.handler.execute(command, arguments, &mut self.context),
        }
    }

    fn negotiate(&mut self, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
        if self.negotiated {
            return Err(QmpError::command_not_found(
                "Capabilities negotiation is already complete, command ignored",
            ));
        }
        let wanted = arguments.get("enable").and_then(Value::as_array).and_then(|list| list.first());
        if let Some(wanted) = wanted {
            return Err(QmpError::generic(format!("QMP capability {wanted} is not available here")));
        }
        self.negotiated = true;
        Ok(json!({}))
    }

    fn name_fd(&mut self, name: &str) -> Result<Value, QmpError> {
        if name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(QmpError::expects("fdname", "a name not starting with a digit"));
        }
        if self.context.received_fds.is_empty() {
            return Err(QmpError::generic("No file descriptor supplied via SCM_RIGHTS"));
        }
        let replaces = self.context.named_fds.iter().any(|(known, _)| known == name);
        if self.context.named_fds.len() >= MAX_FDS && !replaces {
            return Err(QmpError::generic("Too many named file descriptors; close some with 'closefd'"));
        }
        let fd = self.context.received_fds.remove(0);
        self.context.put_fd(name, fd);
        Ok(json!({}))
    }

    fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                let room = MAX_FDS.saturating_sub(self.context.received_fds.len());
                self.context.received_fds.extend(fds.take(room));
            }
        }
        Ok(received.bytes)
    }

    fn reply(&self, answer: &Value, negotiates: bool) {
        self.outbox.reply(&to_line(answer), negotiates);
    }

    fn write_some(&self) -> Result<(), Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        self.outbox.drain(|bytes| match send(&self.socket, bytes, flags) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            other => other,
        })
    }

    /// Writes the waiting bytes, for at most `FLUSH_LIMIT`.
    fn flush(&self) -> Result<(), Errno> {
        let deadline = Instant::now() + FLUSH_LIMIT;
        while self.outbox.state().pending_bytes > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Errno::TIMEDOUT);
            }
            let ready = self.wait(false, true, Some(left))?;
            if ready.contains(PollFlags::OUT) {
                self.write_some()?;
            } else if ready.intersects(PollFlags::HUP | PollFlags::ERR) {
                return Err(Errno::PIPE);
            }
        }
        Ok(())
    }

    fn wait(&self, read: bool, write: bool, limit: Option<Duration>) -> Result<PollFlags, Errno> {
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, read);
        interest.set(PollFlags::OUT, write);
        let limit = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let mut fds = [
            PollFd::from_borrowed_fd(self.socket.as_fd(), interest),
            PollFd::from_borrowed_fd(self.outbox.wake_fd().as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(PollFlags::empty()),
            Err(error) => return Err(error),
        }
        let (socket, wake) = (fds[0].revents(), fds[1].revents());
        if wake.contains(PollFlags::IN) {
            self.outbox.clear_wake();
        }
        Ok(socket)
    }
}

/// The command's name and arguments, or QEMU's error about the form of the request.
fn dissect(request: &Map<String, Value>) -> Result<(&str, &Map<String, Value>), QmpError> {
    static NONE: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
    for key in request.keys() {
        match key.as_str() {
            "execute" | "arguments" | "id" => {}
            "exec-oob" => {
                return Err(QmpError::generic(
                    "QMP input member 'exec-oob' is unexpected: oob is not offered",
                ));
            }
            other => return Err(QmpError::generic(format!("QMP input member '{other}' is unexpected"))),
        }
    }
    let command = match request.get("execute") {
        None => return Err(QmpError::generic("QMP input lacks member 'execute'")),
        Some(Value::String(command)) => command,
        Some(_) => return Err(QmpError::generic("QMP input member 'execute' must be a string")),
    };
    match request.get("arguments") {
        None => Ok((command, &NONE)),
        Some(Value::Object(arguments)) => Ok((command, arguments)),
        Some(_) => Err(QmpError::generic("QMP input member 'arguments' must be an object")),
    }
}
