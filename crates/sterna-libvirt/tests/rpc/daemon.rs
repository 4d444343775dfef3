//! A daemon that speaks libvirt's RPC as libvirt 12.8 was observed to do, with one domain `web1`.

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::Value;
use sterna_libvirt::packet::{
    Domain, Head, KEEP_ALIVE, MonitorEvent, PING, PONG, QEMU, REMOTE, packet_length,
};
use sterna_libvirt::xdr::{Reader, Writer};
use tempfile::TempDir;

use crate::qemu::Qemu;

/// How the daemon deviates from a healthy one.
#[derive(Default)]
pub struct Mood {
    /// Accepted authentications. Empty: none is needed.
    pub authentications: Vec<u32>,
    /// Number of the domain, -1 if it does not run.
    pub id: i32,
    /// Sends PING before every reply, and closes the connection if no PONG arrives before the next call.
    pub pings: bool,
    /// In place of the reply to this procedure of the program QEMU: these bytes, after which the daemon closes.
    pub instead: Option<(i32, Vec<u8>)>,
    /// The reply to the first command is sent only before the reply to the second one.
    pub late: bool,
    /// The events that a registration sends.
    pub events: Vec<(&'static str, Option<&'static str>)>,
    /// The domain's QEMU.
    pub qemu: Qemu,
}

/// A running daemon. Its threads end with their connections.
pub struct Daemon {
    directory: TempDir,
    pub mood: Arc<Mutex<Mood>>,
}

impl Daemon {
    pub fn start(change: impl FnOnce(&mut Mood)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("libvirt-sock")).unwrap();
        let mut mood = Mood { id: 1, ..Mood::default() };
        change(&mut mood);
        let mood = Arc::new(Mutex::new(mood));
        let shared = Arc::clone(&mood);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let mood = Arc::clone(&shared);
                std::thread::spawn(move || Session::new(stream, mood).serve());
            }
        });
        Self { directory, mood }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("libvirt-sock")
    }

    /// The address of the domain `web1`.
    pub fn address(&self) -> sterna_libvirt::DomainAddress {
        self.address_of("web1")
    }

    pub fn address_of(&self, name: &str) -> sterna_libvirt::DomainAddress {
        format!("libvirt+qemu:///system?socket={}:{name}", self.socket().display()).parse().unwrap()
    }
}

pub const UUID: [u8; 16] = [0x0c; 16];

struct Session {
    stream: UnixStream,
    mood: Arc<Mutex<Mood>>,
    received: Vec<u8>,
    files: Vec<OwnedFd>,
    is_open: bool,
    held: Option<Vec<u8>>,
    pongs: (usize, usize),
}

/// libvirt's error numbers.
const INTERNAL: i32 = 1;
const INVALID_ARGUMENT: i32 = 8;
const RPC: i32 = 39;
const NO_DOMAIN: i32 = 42;

type Answer = Result<Vec<u8>, (i32, String)>;

impl Session {
    fn new(stream: UnixStream, mood: Arc<Mutex<Mood>>) -> Self {
        let (received, files) = (Vec::new(), Vec::new());
        Self { stream, mood, received, files, is_open: false, held: None, pongs: (0, 0) }
    }

    fn serve(&mut self) {
        while let Ok((head, payload)) = self.next() {
            if self.handle(head, &payload).is_err() {
                return;
            }
        }
    }

    fn handle(&mut self, head: Head, payload: &[u8]) -> io::Result<()> {
        match (head.kind, head.program, head.procedure) {
            (Head::MESSAGE, KEEP_ALIVE, PING) => {
                return self.stream.write_all(&Head::message(KEEP_ALIVE, PONG).packet(&[]));
            }
            (Head::MESSAGE, KEEP_ALIVE, PONG) => {
                self.pongs.1 += 1;
                return Ok(());
            }
            (Head::CALL | Head::CALL_WITH_FILES, ..) => {}
            // libvirt ignores replies that it did not ask for.
            _ => return Ok(()),
        }
        let (pings, instead, late) = {
            let mood = self.mood.lock().unwrap();
            (mood.pings, mood.instead.clone(), mood.late)
        };
        if pings && self.pongs.0 != self.pongs.1 {
            return Err(io::Error::other("no PONG"));
        }
        if let Some((procedure, bytes)) = instead
            && (head.program, head.procedure) == (QEMU, procedure)
        {
            self.stream.write_all(&bytes)?;
            return Err(io::Error::other("as ordered"));
        }
        let files = self.files_of(&head, payload)?;
        let arguments = if head.kind == Head::CALL_WITH_FILES { &payload[4..] } else { payload };
        let answer = self.answer(&head, arguments, files);
        let (status, payload) = match answer {
            Ok(payload) => (0, payload),
            Err((code, message)) => {
                let error = Writer::default().i32(code).i32(7).u32(1).string(&message).i32(2);
                (1, error.u32(0).u32(0).u32(0).u32(0).u32(0).i32(-1).i32(-1).u32(0).into_bytes())
            }
        };
        if pings {
            self.pongs.0 += 1;
            self.stream.write_all(&Head::message(KEEP_ALIVE, PING).packet(&[]))?;
        }
        let reply = Head { kind: Head::REPLY, status, ..head }.packet(&payload);
        if late && (head.program, head.procedure) == (QEMU, 1) && self.held.is_none() {
            self.held = Some(reply);
            return Ok(());
        }
        let mut bytes = self.held.take().unwrap_or_default();
        bytes.extend(reply);
        self.stream.write_all(&bytes)?;
        if (head.program, head.procedure, status) == (QEMU, 4, 0) {
            self.send_events()?;
        }
        Ok(())
    }

    fn answer(&mut self, head: &Head, arguments: &[u8], files: Vec<OwnedFd>) -> Answer {
        let Head { program, version, procedure, status, .. } = *head;
        if !([REMOTE, QEMU].contains(&program) && version == 1) {
            return Err((RPC, format!("Cannot find program {program} version {version}")));
        }
        if status != 0 {
            return Err((RPC, format!("Unexpected message status {status}")));
        }
        let undecodable = |_| (RPC, "Unable to decode message payload".to_owned());
        let mut reader = Reader::new(arguments);
        match (program, procedure) {
            (REMOTE, 66) => {
                let types = self.mood.lock().unwrap().authentications.clone();
                let types = if types.is_empty() { vec![0] } else { types };
                let list = Writer::default().u32(types.len() as u32);
                Ok(types.into_iter().fold(list, Writer::u32).into_bytes())
            }
            (REMOTE, 1) => {
                let uri = reader.optional_string("uri").map_err(undecodable)?.unwrap_or_default();
                reader.u32("flags").map_err(undecodable)?;
                if uri != "qemu:///system" {
                    return Err((5, format!("no connection driver available for {uri}")));
                }
                self.is_open = true;
                Ok(Vec::new())
            }
            (REMOTE, 2) => Ok(Vec::new()),
            (REMOTE, 14) => {
                self.domain(&mut reader)?;
                reader.u32("flags").map_err(undecodable)?;
                Ok(Writer::default().string("<domain type='kvm'><name>web1</name></domain>").into_bytes())
            }
            (REMOTE, 23) => {
                let name = reader.string("name").map_err(undecodable)?;
                self.must_be_open()?;
                self.found(name == "web1", name)
            }
            (REMOTE, 24) => {
                let uuid: [u8; 16] = reader.array("uuid").map_err(undecodable)?;
                self.must_be_open()?;
                self.found(uuid == UUID, "a UUID")
            }
            (QEMU, 1 | 7) => {
                self.domain(&mut reader)?;
                let text = reader.string("command").map_err(undecodable)?;
                if reader.u32("flags").map_err(undecodable)? > 1 {
                    return Err((INVALID_ARGUMENT, "unsupported flags".into()));
                }
                if files.len() > 1 {
                    return Err((INVALID_ARGUMENT, "at most 1 fd can be passed".into()));
                }
                self.command(text, files)
            }
            (QEMU, 4) => {
                if reader.u32("marker").map_err(undecodable)? == 1 {
                    self.domain(&mut reader)?;
                }
                Ok(Writer::default().i32(3).into_bytes())
            }
            _ => Err((RPC, format!("unknown procedure: {procedure}"))),
        }
    }

    fn command(&mut self, text: &str, files: Vec<OwnedFd>) -> Answer {
        let command: Value =
            serde_json::from_str(text).map_err(|_| (INTERNAL, "failed to parse JSON".to_owned()))?;
        if command.get("id").is_some() {
            return Err((INTERNAL, "Unable to append command 'id' string".into()));
        }
        let mut answer = self.mood.lock().unwrap().qemu.execute(&command, files);
        answer["id"] = "libvirt-13".into();
        Ok(Writer::default().string(&answer.to_string()).into_bytes())
    }

    fn must_be_open(&self) -> Result<(), (i32, String)> {
        if self.is_open { Ok(()) } else { Err((INTERNAL, "hypervisor connection not open".into())) }
    }

    fn found(&self, is_known: bool, name: &str) -> Answer {
        if !is_known {
            return Err((NO_DOMAIN, format!("Domain not found: no domain with matching name '{name}'")));
        }
        let id = self.mood.lock().unwrap().id;
        Ok(Domain { name: "web1".into(), uuid: UUID, id }.encode(Writer::default()).into_bytes())
    }

    fn domain(&self, reader: &mut Reader<'_>) -> Result<(), (i32, String)> {
        let domain = Domain::decode(reader).map_err(|error| (RPC, error.to_string()))?;
        self.must_be_open()?;
        match domain.uuid == UUID {
            true => Ok(()),
            false => Err((NO_DOMAIN, "Domain not found: no domain with matching uuid".into())),
        }
    }

    fn send_events(&mut self) -> io::Result<()> {
        let events = std::mem::take(&mut self.mood.lock().unwrap().events);
        for (name, details) in events {
            let domain = Domain { name: "web1".into(), uuid: UUID, id: 1 };
            let event = domain.encode(Writer::default().i32(3)).string(name).u32(0).u32(7).u32(250_000);
            let event = match details {
                None => event.u32(0),
                Some(details) => event.u32(1).string(details),
            };
            let head = Head::message(QEMU, MonitorEvent::PROCEDURE);
            self.stream.write_all(&head.packet(&event.into_bytes()))?;
        }
        Ok(())
    }

    fn files_of(&mut self, head: &Head, payload: &[u8]) -> io::Result<Vec<OwnedFd>> {
        if head.kind != Head::CALL_WITH_FILES {
            return Ok(Vec::new());
        }
        let count = payload.first_chunk().map_or(0, |count| u32::from_be_bytes(*count)) as usize;
        if count > 32 {
            return Err(io::Error::other("too many descriptors"));
        }
        // One byte for each descriptor follows the packet.
        while self.received.len() < count || self.files.len() < count {
            self.receive()?;
        }
        self.received.drain(..count);
        Ok(self.files.drain(..count).collect())
    }

    fn next(&mut self) -> io::Result<(Head, Vec<u8>)> {
        loop {
            let length = packet_length(&self.received).map_err(|_| io::Error::other("length"))?;
            if let Some(length) = length.filter(|length| self.received.len() >= *length) {
                let packet: Vec<u8> = self.received.drain(..length).collect();
                let mut reader = Reader::new(&packet[4..]);
                let head = Head::decode(&mut reader).map_err(io::Error::other)?;
                return Ok((head, reader.rest().to_vec()));
            }
            self.receive()?;
        }
    }

    fn receive(&mut self) -> io::Result<()> {
        let mut bytes = vec![0; 64 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(33))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.received.extend(&bytes[..received.bytes]);
        Ok(())
    }
}
