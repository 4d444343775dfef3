//! A QMP server in front of libvirt's own monitor.
//!
//! A thread answers a QMP client on one end of a socket pair. libvirt has negotiated with QEMU already, so the thread answers
//! `qmp_capabilities` itself. libvirt numbers commands itself, so the thread removes the client's `id` and puts it into the
//! answer. Events and descriptors are forwarded.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use sterna_transport::CancelFlag;

use crate::access::Access;
use crate::error::LibvirtError;
use crate::packet::MonitorEvent;

/// Largest command, in bytes. libvirt refuses longer strings.
const COMMAND_BYTES: usize = crate::xdr::STRING_BYTES;
/// Most descriptors that wait for their command.
const FILES: usize = 16;

/// The thread. It ends when this value is dropped, or when the client closes its end.
pub(crate) struct Passthrough {
    thread: Option<JoinHandle<()>>,
    end: OwnedFd,
    cancel: CancelFlag,
}

impl Passthrough {
    /// Starts the thread. Returns it with the client's end of the socket.
    pub(crate) fn start(mut access: Access, version: &Value) -> Result<(Self, OwnedFd), LibvirtError> {
        let failed = |error| LibvirtError::Io { call: "socketpair", error };
        access.register_events()?;
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let end = OwnedFd::from(ours.try_clone().map_err(failed)?);
        let cancel = access.cancel().clone();
        let greeting = json!({"QMP": {"version": version, "capabilities": []}});
        let serving = move || {
            let mut server = Server { access, client: ours, received: Vec::new(), files: VecDeque::new() };
            // The end of the client, or an error that the client sees as the end of its connection.
            let _ = server.send(&greeting).and_then(|()| server.serve());
        };
        let thread = std::thread::Builder::new().name("libvirt monitor".to_owned()).spawn(serving);
        Ok((Self { thread: Some(thread.map_err(failed)?), end, cancel }, theirs.into()))
    }
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        // The thread may wait for libvirt, or for the client.
        self.cancel.cancel();
        let _ = rustix::net::shutdown(&self.end, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Server {
    access: Access,
    client: UnixStream,
    received: Vec<u8>,
    files: VecDeque<OwnedFd>,
}

impl Server {
    fn serve(&mut self) -> io::Result<()> {
        loop {
            while let Some(line) = self.next_line() {
                self.answer(&line)?;
            }
            while let Some(event) = self.access.event().map_err(io::Error::other)? {
                self.send(&event_of(event))?;
            }
            if self.wait()? && !self.receive()? {
                return Ok(());
            }
        }
    }

    /// Waits for the client or libvirt. Returns whether the client has sent something.
    fn wait(&mut self) -> io::Result<bool> {
        let Self { access, client, .. } = self;
        let mut looks = vec![PollFd::new(client, PollFlags::IN)];
        looks.extend(access.connection().map(|one| PollFd::from_borrowed_fd(one.socket(), PollFlags::IN)));
        match poll(&mut looks, None) {
            Ok(_) => Ok(!looks[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads bytes and descriptors. Returns false at the end.
    fn receive(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.client, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files.take(FILES));
            }
        }
        self.received.extend(&bytes[..received.bytes]);
        if self.received.len() > COMMAND_BYTES || self.files.len() > FILES {
            return Err(io::Error::other("a command is too long for libvirt"));
        }
        Ok(received.bytes > 0)
    }

    fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.received.iter().position(|byte| *byte == b'\n')?;
        let rest = self.received.split_off(end + 1);
        Some(std::mem::replace(&mut self.received, rest))
    }

    fn answer(&mut self, line: &[u8]) -> io::Result<()> {
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let mut command = match serde_json::from_slice(line) {
            Ok(command @ Value::Object(_)) => command,
            _ => return self.send(&refusal("the command is not a JSON object")),
        };
        let id = command.as_object_mut().and_then(|command| command.remove("id"));
        let file = self.takes_file(&command).then(|| self.files.pop_front()).flatten();
        let mut answer = match command["execute"].as_str() {
            Some("qmp_capabilities") => json!({"return": {}}),
            Some(_) => {
                match self.access.answer(&command, file.as_ref().map(|file| file.as_fd()).as_slice()) {
                    Ok(answer) => answer,
                    Err(error) if is_refusal(&error) => refusal(&error.to_string()),
                    Err(error) => return Err(io::Error::other(error)),
                }
            }
            None => refusal("the command has no member `execute`"),
        };
        if let Some(answer) = answer.as_object_mut() {
            answer.remove("id");
            answer.extend(id.map(|id| ("id".to_owned(), id)));
        }
        self.send(&answer)
    }

    fn takes_file(&self, command: &Value) -> bool {
        matches!(command["execute"].as_str(), Some("add-fd" | "getfd"))
    }

    fn send(&mut self, message: &Value) -> io::Result<()> {
        let mut line = message.to_string().into_bytes();
        line.extend(b"\r\n");
        self.client.write_all(&line)
    }
}

/// Whether the connection can be used after this error.
fn is_refusal(error: &LibvirtError) -> bool {
    matches!(
        error,
        LibvirtError::Refused { .. }
            | LibvirtError::Virsh { .. }
            | LibvirtError::OtherHost { .. }
            | LibvirtError::TimedOut { .. }
            | LibvirtError::Answer { .. }
    )
}

fn refusal(why: &str) -> Value {
    json!({"error": {"class": "GenericError", "desc": why}})
}

fn event_of(event: MonitorEvent) -> Value {
    let timestamp = json!({"seconds": event.seconds, "microseconds": event.microseconds});
    let mut message = json!({"event": event.name, "timestamp": timestamp});
    let data = event.details.and_then(|details| serde_json::from_str::<Value>(&details).ok());
    if let Some(data) = data {
        message["data"] = data;
    }
    message
}
