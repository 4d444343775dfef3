//! A hand-made destination: reads the stream like QEMU, and answers according to its script.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use sterna::Address;
use sterna::ram::PAGE_SIZE;
use sterna_wire::extension::{Handover, Status, StatusAnswer, StatusQuestion};
use sterna_wire::main::{BodyKind, Command, Expectations, MainDecoder, MainItem, SectionKind, Step};
use sterna_wire::return_path::ReturnMessage;

use super::recording::spawn;

/// The element that the destination has just read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    ReturnPath,
    Ping(u32),
    RamStart,
    Switchover,
    Eof,
    Description,
}

/// Its reaction.
pub enum Reply {
    Nothing,
    Say(Vec<u8>),
    Close,
}

pub type Script = Box<dyn FnMut(Seen) -> Reply + Send>;

pub struct HandMade {
    address: Address,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    script: Mutex<Script>,
    /// Its answer to the status question; `None` closes the connection.
    answer: Mutex<Option<u32>>,
    questions: Mutex<u32>,
    /// Whether it reads questions without answering.
    hangs: Mutex<bool>,
    /// Whether its answers belong to a question with another nonce.
    replays: Mutex<bool>,
    /// Content of the source's handover section.
    handover: Mutex<Option<Handover>>,
    main: Mutex<Vec<u8>>,
    sockets: Mutex<Vec<TcpStream>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    ends: Mutex<bool>,
    multifd: Mutex<bool>,
    opaque: Mutex<bool>,
}

impl HandMade {
    pub fn new(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let shared = Arc::new(Shared {
            script: Mutex::new(script),
            answer: Mutex::new(None),
            questions: Mutex::new(0),
            hangs: Mutex::new(false),
            replays: Mutex::new(false),
            handover: Mutex::default(),
            main: Mutex::default(),
            sockets: Mutex::default(),
            threads: Mutex::default(),
            ends: Mutex::new(false),
            multifd: Mutex::new(true),
            opaque: Mutex::new(false),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = spawn(move || accept(&accepting, &listener));
        Self { address, shared, acceptor: Some(acceptor) }
    }

    /// A destination like QEMU: echoes every PING, and sends SHUT 0 when all state has arrived.
    pub fn like_qemu() -> Self {
        Self::new(Box::new(qemu))
    }

    /// A destination like QEMU, except for the elements to which `otherwise` returns an answer.
    pub fn except(mut otherwise: impl FnMut(Seen) -> Option<Reply> + Send + 'static) -> Self {
        Self::new(Box::new(move |read| otherwise(read).unwrap_or_else(|| qemu(read))))
    }

    /// Expects pages on the main channel.
    pub fn without_multifd(self) -> Self {
        *self.shared.multifd.lock().unwrap() = false;
        self
    }

    /// Expects devices of another VMM.
    pub fn of_other_devices(self) -> Self {
        *self.shared.opaque.lock().unwrap() = true;
        self
    }

    pub fn address(&self) -> Address {
        self.address.clone()
    }

    /// All bytes of the main channel so far.
    pub fn main(&self) -> Vec<u8> {
        self.shared.main.lock().unwrap().clone()
    }

    pub fn answers(&self, status: Option<u32>) {
        *self.shared.answer.lock().unwrap() = status;
    }

    /// From now on, reads questions without answering.
    pub fn hangs(&self) {
        *self.shared.hangs.lock().unwrap() = true;
    }

    /// From now on, sends answers that belong to another question.
    pub fn replays(&self, on: bool) {
        *self.shared.replays.lock().unwrap() = on;
    }

    pub fn questions(&self) -> u32 {
        *self.shared.questions.lock().unwrap()
    }
}

/// QEMU's answer.
pub fn qemu(read: Seen) -> Reply {
    match read {
        Seen::Ping(value) => say(&ReturnMessage::Pong(value)),
        Seen::Description => say(&ReturnMessage::Shut(0)),
        _ => Reply::Nothing,
    }
}

/// A Sterna's answer until the commit.
pub fn sterna(read: Seen) -> Reply {
    use sterna_wire::extension::{EXTENSION_PING, Features};
    match read {
        Seen::Ping(EXTENSION_PING) => {
            let mut bytes = Vec::new();
            ReturnMessage::Pong(EXTENSION_PING).encode(&mut bytes).unwrap();
            ReturnMessage::Pong(Features::HANDOVER.to_pong()).encode(&mut bytes).unwrap();
            Reply::Say(bytes)
        }
        other => qemu(other),
    }
}

pub fn say(message: &ReturnMessage) -> Reply {
    let mut bytes = Vec::new();
    message.encode(&mut bytes).unwrap();
    Reply::Say(bytes)
}

impl Drop for HandMade {
    fn drop(&mut self) {
        *self.shared.ends.lock().unwrap() = true;
        let _ = TcpStream::connect(("127.0.0.1", super::port(&self.address)));
        self.acceptor.take().unwrap().join().unwrap();
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
        let threads = std::mem::take(&mut *self.shared.threads.lock().unwrap());
        for thread in threads {
            let done = thread.join();
            assert!(done.is_ok() || std::thread::panicking(), "the destination made by hand panicked");
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    while let Ok((socket, _)) = listener.accept() {
        if *shared.ends.lock().unwrap() {
            return;
        }
        shared.sockets.lock().unwrap().push(socket.try_clone().unwrap());
        let serving = Arc::clone(shared);
        shared.threads.lock().unwrap().push(spawn(move || serve(&serving, socket)));
    }
}

fn serve(shared: &Shared, mut socket: TcpStream) {
    let mut first = [0; 4];
    if socket.read_exact(&mut first).is_err() {
        return;
    }
    match &first {
        b"QEVM" => main(shared, socket, first),
        b"STNQ" => {
            let mut question = [0; StatusQuestion::BYTES];
            question[..4].copy_from_slice(&first);
            let _ = socket.read_exact(&mut question[4..]);
            *shared.questions.lock().unwrap() += 1;
            if *shared.hangs.lock().unwrap() {
                let _ = socket.read(&mut [0]);
                return;
            }
            if let Some(status) = *shared.answer.lock().unwrap() {
                let _ = socket.write_all(&answer(shared, &question, status));
            }
            let _ = socket.shutdown(Shutdown::Both);
        }
        _ => {
            let _ = std::io::copy(&mut socket, &mut std::io::sink());
        }
    }
}

/// The answer of a Sterna that knows the secret. For an undefined status, the answer is not authenticated.
fn answer(shared: &Shared, question: &[u8], status: u32) -> Vec<u8> {
    let handover = shared.handover.lock().unwrap().clone().expect("a handover section before");
    let secret = handover.secret.expect("version 2");
    let (mut question, _) = StatusQuestion::decode(question).unwrap().unwrap();
    assert_eq!(question.migration_id, handover.migration_id);
    assert!(question.is_authentic(&secret, &None));
    if *shared.replays.lock().unwrap() {
        question = StatusQuestion::new(question.migration_id, [0; 16], &secret, &None);
    }
    let known = match status {
        1 => Status::Committed,
        2 => Status::Never,
        _ => Status::Pending,
    };
    let mut bytes = Vec::new();
    StatusAnswer::new(known, &question, &secret, &None).encode(&mut bytes);
    bytes[8..12].copy_from_slice(&status.to_be_bytes());
    bytes
}

fn main(shared: &Shared, mut socket: TcpStream, first: [u8; 4]) {
    let opaque = *shared.opaque.lock().unwrap();
    let knowledge = move |name: &str, _: u32, _: u32, _: SectionKind| match name {
        "ram" => BodyKind::Ram,
        _ if opaque => BodyKind::OpaqueByFooter,
        "globalstate" => BodyKind::FixedLength(104),
        _ => BodyKind::LengthPrefixed { most: 16 << 20 },
    };
    let multifd = *shared.multifd.lock().unwrap();
    let mut decoder = MainDecoder::new(
        Box::new(knowledge),
        Expectations { multifd, background_snapshot: opaque, ..Expectations::default() },
    );
    let mut buffer = first.to_vec();
    shared.main.lock().unwrap().extend_from_slice(&first);
    loop {
        match decoder.next(&buffer).expect("the engine's stream follows the format") {
            Step::NeedMore(_) => {
                if !more(shared, &mut socket, &mut buffer) {
                    return;
                }
            }
            Step::Partial { consumed } => drop(buffer.drain(..consumed)),
            Step::End => drop(more(shared, &mut socket, &mut buffer)),
            Step::Item { item, consumed } => {
                buffer.drain(..consumed);
                let read = match item {
                    MainItem::PagePayloadFollows { .. } => {
                        while buffer.len() < PAGE_SIZE {
                            if !more(shared, &mut socket, &mut buffer) {
                                return;
                            }
                        }
                        buffer.drain(..PAGE_SIZE);
                        decoder.payload_consumed();
                        continue;
                    }
                    MainItem::Command(Command::OpenReturnPath) => Seen::ReturnPath,
                    MainItem::Command(Command::Ping(value)) => Seen::Ping(value),
                    MainItem::Command(Command::SwitchoverStart) => Seen::Switchover,
                    MainItem::RamStart(_) => Seen::RamStart,
                    MainItem::Section { name, version, body, .. } if name == Handover::SECTION_NAME => {
                        let handover = Handover::decode(version, &body).expect("a sound section");
                        *shared.handover.lock().unwrap() = Some(handover);
                        continue;
                    }
                    MainItem::Eof => Seen::Eof,
                    MainItem::VmDescription(_) => Seen::Description,
                    _ => continue,
                };
                match (shared.script.lock().unwrap())(read) {
                    Reply::Nothing => {}
                    Reply::Say(bytes) => drop(socket.write_all(&bytes)),
                    Reply::Close => {
                        let _ = socket.shutdown(Shutdown::Both);
                        return;
                    }
                }
                if read == Seen::Description {
                    while more(shared, &mut socket, &mut buffer) {}
                    return;
                }
            }
        }
    }
}

fn more(shared: &Shared, socket: &mut TcpStream, buffer: &mut Vec<u8>) -> bool {
    let mut piece = [0; 16 * 1024];
    let Ok(count @ 1..) = socket.read(&mut piece) else { return false };
    buffer.extend_from_slice(&piece[..count]);
    shared.main.lock().unwrap().extend_from_slice(&piece[..count]);
    true
}
