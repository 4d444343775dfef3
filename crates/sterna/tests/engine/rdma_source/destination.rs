//! A hand-made destination: acts over RDMA like a QEMU or a Sterna, and checks the requests that it receives.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna::ram::GuestRam;
use sterna::rdma::DestinationStream;
use sterna_transport::rdma::double::Host;
use sterna_transport::rdma::{Access, Fabric, Listener, Memory, Registration};
use sterna_transport::{ByteStream, CancelFlag, StreamError};
use sterna_wire::extension::{EXTENSION_PING, Features};
use sterna_wire::main::{BodyKind, Command, Expectations, MainDecoder, MainItem, SectionKind, Step};
use sterna_wire::rdma::session::Arrival;
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, ChunkSize, ConnectReply, ConnectRequest, Message, MessageType,
    RegisterResult, encode_empty, encode_file, encode_records,
};
use sterna_wire::return_path::ReturnMessage;

const LONG: Duration = Duration::from_secs(60);
const LIMIT: Option<Duration> = Some(LONG);
/// Offset of the blocks, which the destination chooses.
const OFFSET: u64 = 1 << 33;

/// The software whose rules the destination follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Qemu,
    /// Introduces itself, also over the return path.
    Sterna,
}

/// Properties of the destination.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    pub kind: Kind,
    pub chunk: ChunkSize,
    pub has_return_path: bool,
    /// Registers only one chunk, whatever the request says. No QEMU does this.
    pub ignores_counts: bool,
    /// Reports a wrong length for its first block.
    pub lies: bool,
    /// Grants no memory until this is set.
    pub gate: Option<&'static AtomicBool>,
    pub trouble: Option<(Moment, Trouble)>,
}

/// When the destination misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// When the main connection requests to be accepted.
    Request,
    Accepted,
    /// At the first PING of the stream.
    Ping,
    Blocks,
    Register,
    Clear,
    /// At the end of the phase with this number, from 1.
    PhaseOver(usize),
    Switchover,
    Eof,
}

/// Its misbehaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Closes the connections.
    Leaves,
    /// Sends ERROR and closes the connections.
    Fails,
    /// Does nothing until the source closes.
    Sleeps,
}

/// Observations of the destination.
#[derive(Debug, Default)]
pub struct Seen {
    pub session: Option<[u8; 16]>,
    pub windows: Vec<BlockRange>,
    pub given_back: usize,
    pub zero_ranges: usize,
    pub zero_messages: usize,
    pub phases: usize,
    /// Whether the stream ended correctly.
    pub is_whole: bool,
    /// Maximum of registered bytes.
    pub most_pinned: u64,
    /// Time from the stream's end until the source closed.
    pub waited_for_end: Duration,
}

pub struct Destination {
    pub address: String,
    thread: JoinHandle<Seen>,
}

impl Destination {
    pub fn listen(host: &Host, ram: GuestRam, manner: Manner) -> Self {
        let listener = host.listen(([10, 0, 0, 2], 0).into(), 5).unwrap();
        let address = format!("rdma:{}", listener.local_address());
        let thread = std::thread::spawn(move || serve(&*listener, ram, manner));
        Self { address, thread }
    }

    pub fn wait(self) -> Seen {
        self.thread.join().unwrap()
    }
}

/// The destination has misbehaved, or the source has failed.
struct Gone;

impl From<StreamError> for Gone {
    fn from(_: StreamError) -> Self {
        Gone
    }
}

fn serve(listener: &dyn Listener, ram: GuestRam, manner: Manner) -> Seen {
    let Ok(request) = listener.accept(LIMIT, &CancelFlag::new()) else { return Seen::default() };
    let asked = ConnectRequest::decode(request.private_data()).unwrap();
    let session = asked.introduction.map(|introduction| introduction.session);
    if let Some((Moment::Request, trouble)) = manner.trouble {
        if trouble == Trouble::Sleeps {
            std::thread::sleep(Duration::from_millis(300));
        }
        return Seen { session, ..Seen::default() };
    }
    let Ok(stream) = DestinationStream::accept(request, &reply(&asked, manner), LONG, &CancelFlag::new())
    else {
        return Seen { session, ..Seen::default() };
    };
    let places = ram.blocks().iter().enumerate().map(|(index, block)| BlockPlace {
        host_address: block.host_address() as u64,
        offset: OFFSET * index as u64,
        length_bytes: block.len_bytes(),
        key: 0,
    });
    let mut serving = Serving {
        places: BlockPlaces::new(places.collect()).unwrap(),
        stream,
        ram,
        manner,
        pin_all: asked.pin_all,
        has_spoken: Cell::new(false),
        registered: HashMap::new(),
        seen: Seen { session, ..Seen::default() },
    };
    if serving.run(listener).is_err() && serving.is_asleep() {
        // Until the source closes.
        let _ = serving.stream.main().receive(LIMIT);
        while serving.stream.main().connection().end().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    serving.seen
}

fn reply(asked: &ConnectRequest, manner: Manner) -> ConnectReply {
    match manner.kind {
        Kind::Qemu => ConnectReply { pin_all: asked.pin_all, introduction: None, pinned_limit: None },
        Kind::Sterna => asked.reply(0, manner.chunk).unwrap(),
    }
}

struct Serving {
    stream: DestinationStream,
    ram: GuestRam,
    places: BlockPlaces,
    manner: Manner,
    pin_all: bool,
    /// Whether it has sent on the return path.
    has_spoken: Cell<bool>,
    /// Registrations by block and first byte.
    registered: HashMap<(usize, u64), (Registration, u64)>,
    seen: Seen,
}

impl Serving {
    fn run(&mut self, listener: &dyn Listener) -> Result<(), Gone> {
        if self.manner.has_return_path {
            let request = listener.accept(LIMIT, &CancelFlag::new()).map_err(|_| Gone)?;
            let asked = ConnectRequest::decode(request.private_data()).unwrap();
            assert_eq!(asked.introduction.map(|introduction| introduction.session), self.seen.session);
            let reply = reply(&asked, self.manner);
            assert!(self.stream.accept_return_path(request, &reply, LONG, &CancelFlag::new())?);
        }
        self.at(Moment::Accepted)?;
        let knowledge = |name: &str, _: u32, _: u32, _: SectionKind| match name {
            "ram" => BodyKind::Ram,
            "globalstate" => BodyKind::FixedLength(104),
            _ => BodyKind::LengthPrefixed { most: 16 << 20 },
        };
        let expect = Expectations { rdma: true, ..Expectations::default() };
        let mut decoder = MainDecoder::new(Box::new(knowledge), expect);
        let mut buffer = Vec::new();
        loop {
            match decoder.next(&buffer).expect("the stream follows the format") {
                Step::NeedMore(_) => {
                    if !self.more(&mut buffer)? {
                        return Err(Gone);
                    }
                }
                Step::Partial { consumed } => drop(buffer.drain(..consumed)),
                Step::End => {
                    self.seen.is_whole = true;
                    if !self.manner.has_return_path && self.manner.kind == Kind::Qemu {
                        // There is no answer to send.
                        self.stream.shutdown();
                        return Ok(());
                    }
                    let began = Instant::now();
                    while self.more(&mut buffer)? {}
                    self.seen.waited_for_end = began.elapsed();
                    return Ok(());
                }
                Step::Item { item, consumed } => {
                    buffer.drain(..consumed);
                    self.take(item, &buffer)?;
                }
            }
        }
    }

    fn more(&mut self, buffer: &mut Vec<u8>) -> Result<bool, Gone> {
        let mut piece = [0; 16 << 10];
        let count = self.stream.read(&mut piece, LIMIT)?;
        buffer.extend_from_slice(&piece[..count]);
        Ok(count > 0)
    }

    fn take(&mut self, item: MainItem, rest: &[u8]) -> Result<(), Gone> {
        match item {
            MainItem::Hook { kind } => {
                assert!(rest.is_empty(), "a QEMU would lose what comes after the hook");
                self.stream.begin_phase()?;
                self.phase(kind == SectionKind::Start)
            }
            MainItem::Command(Command::Ping(value)) => {
                self.at(Moment::Ping)?;
                if self.manner.kind == Kind::Sterna && value == EXTENSION_PING {
                    self.say(&ReturnMessage::Pong(value))?;
                    return self.say(&ReturnMessage::Pong(Features::HANDOVER.to_pong()));
                }
                self.say(&ReturnMessage::Pong(value))
            }
            MainItem::Command(Command::SwitchoverStart) => self.at(Moment::Switchover),
            MainItem::Eof => self.at(Moment::Eof),
            MainItem::VmDescription(_) => self.say(&ReturnMessage::Shut(0)),
            _ => Ok(()),
        }
    }

    fn say(&self, message: &ReturnMessage) -> Result<(), Gone> {
        if !self.manner.has_return_path {
            return Ok(());
        }
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        if self.manner.kind == Kind::Qemu && !self.has_spoken.replace(true) {
            // A QEMU does not wait for a READY before its first message.
            let mut message = Vec::new();
            encode_file(&bytes, &mut message).unwrap();
            let back = self.stream.back().ok_or(Gone)?;
            return back.send(&[&message], LIMIT).map_err(|_| Gone);
        }
        self.stream.write(&bytes, LIMIT)?;
        Ok(())
    }

    fn phase(&mut self, is_first: bool) -> Result<(), Gone> {
        loop {
            let (arrival, message) = self.stream.next_command(LIMIT)?;
            match (arrival, Message::decode(&message).unwrap()) {
                (Arrival::Blocks, _) => {
                    assert!(is_first);
                    self.at(Moment::Blocks)?;
                    let blocks = self.blocks();
                    self.answer(MessageType::RamBlocksResult, &blocks)?;
                }
                (Arrival::Clear, Message::Compress(ranges)) => {
                    self.at(Moment::Clear)?;
                    self.seen.zero_messages += 1;
                    assert!(
                        self.manner.kind == Kind::Sterna || ranges.len() == 1,
                        "a QEMU takes the first only"
                    );
                    for (at, range) in ranges.iter() {
                        let range = self.places.cleared(&range, at).unwrap();
                        let block = self.ram.block(range.block);
                        block.slice(range.start, range.length as usize).unwrap().fill_zero().unwrap();
                        self.seen.zero_ranges += 1;
                    }
                }
                (Arrival::Register, Message::RegisterRequest(requests)) => {
                    self.at(Moment::Register)?;
                    while self.manner.gate.is_some_and(|gate| !gate.load(Ordering::Acquire)) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    assert!(!self.pin_all, "all has keys");
                    assert!(self.manner.kind == Kind::Sterna || requests.len() == 1, "a QEMU answers one");
                    let results: Vec<_> = requests
                        .iter()
                        .map(|(at, request)| {
                            let mut range = self.places.requested(&request, self.manner.chunk, at).unwrap();
                            if self.manner.ignores_counts {
                                range.length = range.length.min(self.manner.chunk.bytes());
                            }
                            self.register(range)
                        })
                        .collect();
                    let mut message = Vec::new();
                    encode_records(&results, &mut message).unwrap();
                    self.answer(MessageType::RegisterResult, &message)?;
                }
                (Arrival::Unregister, Message::UnregisterRequest(requests)) => {
                    assert_eq!(self.manner.kind, Kind::Sterna, "a QEMU dies of it");
                    for (at, request) in requests.iter() {
                        let key = (request.block as usize, request.chunk * self.manner.chunk.bytes());
                        let is_there = |_| self.registered.contains_key(&key);
                        self.places.given_back(&request, self.manner.chunk, is_there, at).unwrap();
                        self.registered.remove(&key);
                        self.seen.given_back += 1;
                    }
                    let mut message = Vec::new();
                    let repeat = requests.len() as u32;
                    encode_empty(MessageType::UnregisterFinished, repeat, &mut message).unwrap();
                    self.answer(MessageType::UnregisterFinished, &message)?;
                }
                (Arrival::PhaseOver, _) => {
                    self.seen.phases += 1;
                    return self.at(Moment::PhaseOver(self.seen.phases));
                }
                (arrival, message) => panic!("{arrival:?}: {message:?}"),
            }
        }
    }

    fn answer(&self, kind: MessageType, message: &[u8]) -> Result<(), Gone> {
        Ok(self.stream.answer(kind, message, LIMIT)?)
    }

    fn blocks(&mut self) -> Vec<u8> {
        let mut places = self.places.blocks().to_vec();
        if self.pin_all {
            for (block, place) in places.iter_mut().enumerate() {
                let all = BlockRange { block, start: 0, length: place.length_bytes };
                place.key = self.register(all).key;
            }
        }
        if self.manner.lies {
            places[0].length_bytes += 4096;
        }
        let mut message = Vec::new();
        encode_records(&places, &mut message).unwrap();
        message
    }

    /// Registers memory and records it under its first byte, as a QEMU does.
    fn register(&mut self, range: BlockRange) -> RegisterResult {
        let host_address = self.places.blocks()[range.block].host_address;
        let key = (range.block, range.start);
        if let Some((registration, length)) = self.registered.get(&key) {
            assert!(range.length <= *length, "{range:?} is asked for, and {length} bytes are registered");
            return RegisterResult { key: registration.rkey(), host_address };
        }
        let memory =
            Memory::of_block(self.ram.block(range.block), range.start, range.length as usize).unwrap();
        let adapter = self.stream.main().connection().adapter();
        let registration = adapter.register(memory, Access::REMOTE_WRITE).unwrap();
        let result = RegisterResult { key: registration.rkey(), host_address };
        self.registered.insert(key, (registration, range.length));
        self.seen.windows.push(range);
        let pinned = self.registered.values().map(|(_, length)| length).sum();
        self.seen.most_pinned = self.seen.most_pinned.max(pinned);
        result
    }

    fn at(&self, moment: Moment) -> Result<(), Gone> {
        match self.manner.trouble {
            Some((of, trouble)) if of == moment => {
                if trouble == Trouble::Fails {
                    self.stream.say_error();
                }
                if trouble != Trouble::Sleeps {
                    self.stream.shutdown();
                }
                Err(Gone)
            }
            _ => Ok(()),
        }
    }

    fn is_asleep(&self) -> bool {
        self.manner.trouble.is_some_and(|(_, trouble)| trouble == Trouble::Sleeps)
    }
}

/// Content of all guest memory.
pub fn contents(ram: &GuestRam) -> Vec<Vec<u8>> {
    let content = |block: &sterna::ram::RamBlock| {
        let mut bytes = vec![0; block.len_bytes() as usize];
        block.read(0, &mut bytes).unwrap();
        bytes
    };
    ram.blocks().iter().map(content).collect()
}
