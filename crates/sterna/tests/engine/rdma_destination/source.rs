//! A source like QEMU: requests memory by chunks of its own size, which it does not announce, and writes anywhere in
//! a chunk.

use std::collections::HashMap;
use std::sync::Arc;

use sterna::ram::{GuestRam, PAGE_SIZE, RamBlock};
use sterna::rdma::SourceStream;
use sterna::{ChunkSize, Vm};
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_transport::rdma::{Access, Memory, Registration, Write};
use sterna_transport::{ByteStream, CancelFlag, StreamError};
use sterna_wire::extension::{COMPATIBILITY_SECTION, Handover, MigrationSecret, PREPARE_PING};
use sterna_wire::main::{
    Command as StreamCommand, SectionHeader, encode_footer, encode_length_prefixed, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{
    BlockPlaces, BlockRange, ConnectRequest, Introduction, Message, MessageType, Part, RegisterRequest,
    Registration as When, ZeroRange, encode_empty, encode_records,
};

use super::{LIMIT, LONG, Lab};
use crate::support::TestVm;
use crate::support::recording::Recording;

/// A guest to send: its memory, and the stream around its pages.
pub struct Guest {
    pub ram: GuestRam,
    /// Bytes up to RAM's START.
    head: Vec<u8>,
    /// Header of the START section.
    start: Vec<u8>,
    ram_section: u32,
    /// Devices, EOF and the description.
    tail: Vec<u8>,
    vm: Arc<TestVm>,
}

impl Guest {
    /// A paused guest.
    pub fn new(config: &ProcessConfig) -> Self {
        let vm = TestVm::new(ProcessGuest::boot(config.clone()).unwrap());
        vm.guest.cont().unwrap();
        assert!(vm.guest.wait_progress(100, LONG));
        let recording = Recording::of(&vm, 0);
        let main = &recording.main;
        let start = recording.find(b"\x03ram\0\0\0\0\0\0\0\x04") - 5;
        let ram_section = u32::from_be_bytes(main[start + 1..start + 5].try_into().unwrap());
        // RAM's END section ends with this word, after all pages.
        let mut end = vec![0, 0, 0, 0, 0, 0, 0, 0x10];
        encode_footer(ram_section, &mut end);
        let at = main.windows(end.len()).rposition(|window| window == end).unwrap() + end.len();
        Self {
            ram: vm.ram(),
            head: main[..start].to_vec(),
            start: main[start..start + 17].to_vec(),
            ram_section,
            tail: main[at..].to_vec(),
            vm,
        }
    }

    /// Adds OPEN_RETURN_PATH, so that the destination sends SHUT.
    pub fn with_return_path(mut self) -> Self {
        self.head.extend([8, 0, 1, 0, 0]);
        self
    }

    /// Adds a Sterna's sections: the migration's identity, and the compatibility record.
    pub fn with_handover(mut self, migration_id: [u8; 16]) -> Self {
        let secret = Some(MigrationSecret::from_bytes([5; 32]));
        let (version, body) = Handover { migration_id, secret }.encode();
        self.section(4711, Handover::SECTION_NAME, version, &body);
        if let Some(record) = self.vm.compatibility() {
            self.section(4712, COMPATIBILITY_SECTION, record.version(), &record.save().unwrap());
        }
        self
    }

    fn section(&mut self, id: u32, name: &str, version: u32, body: &[u8]) {
        SectionHeader { id, name, instance: 0, version }.encode_full(&mut self.head).unwrap();
        encode_length_prefixed(body, &mut self.head).unwrap();
        encode_footer(id, &mut self.head);
    }

    /// Sends *prepare* before EOF. Returns the bytes from EOF on, to be sent later.
    pub fn split_at_prepare(mut self) -> (Self, Vec<u8>) {
        let description = b"{\"configuration\"";
        let eof = self.tail.windows(description.len()).position(|window| window == description).unwrap() - 6;
        let rest = self.tail.split_off(eof);
        StreamCommand::Ping(PREPARE_PING).encode(&mut self.tail).unwrap();
        (self, rest)
    }

    pub fn lengths(&self) -> Vec<u64> {
        self.ram.blocks().iter().map(RamBlock::len_bytes).collect()
    }

    /// The stream up to and including the first hook.
    pub fn to_first_hook(&self) -> Vec<u8> {
        let blocks = self.ram.blocks().iter().map(|block| BlockEntry::new(block.name(), block.len_bytes()));
        let mut out = [&self.head[..], &self.start].concat();
        BlockList { blocks: blocks.collect() }.encode(&mut out).unwrap();
        RamRecordWriter::hook(&mut out);
        out
    }

    /// The stream from the end of a phase up to the next hook.
    pub fn to_next_hook(&self, is_last: bool) -> Vec<u8> {
        let mut out = self.after_phase();
        encode_section_part(self.ram_section, is_last, &mut out);
        RamRecordWriter::hook(&mut out);
        out
    }

    fn after_phase(&self) -> Vec<u8> {
        let mut out = Vec::new();
        RamRecordWriter::eos(&mut out);
        encode_footer(self.ram_section, &mut out);
        out
    }

    /// The stream from the last phase to the end.
    pub fn to_end(&self) -> Vec<u8> {
        [self.after_phase(), self.tail.clone()].concat()
    }
}

/// How a source connects and requests memory.
#[derive(Clone, Copy)]
pub struct Habits {
    pub chunk: ChunkSize,
    pub pin_all: bool,
    pub return_path: bool,
    pub introduction: Option<Introduction>,
}

impl Habits {
    pub fn qemu(chunk_mib: u64) -> Self {
        let chunk = ChunkSize::new(chunk_mib << 20).unwrap();
        Self { chunk, pin_all: false, return_path: false, introduction: None }
    }

    pub fn sterna(chunk_mib: u64) -> Self {
        let plain = Self::qemu(chunk_mib);
        let introduction = Introduction {
            version: Introduction::VERSION,
            part: Part::Main,
            lanes: 0,
            chunk: plain.chunk,
            session: [7; 16],
            nonce: [9; 16],
        };
        Self { introduction: Some(introduction), ..plain }
    }

    pub fn with_return_path(self) -> Self {
        Self { return_path: true, ..self }
    }

    fn request(&self, part: Part) -> ConnectRequest {
        let introduction = self.introduction.map(|it| Introduction { part, ..it });
        ConnectRequest { pin_all: self.pin_all, introduction }
    }
}

/// A connected source.
pub struct Source<'a> {
    pub stream: Arc<SourceStream>,
    pub guest: &'a Guest,
    habits: Habits,
    /// Chunk size of the destination that the source's requests use.
    unit: ChunkSize,
    pub places: BlockPlaces,
    memory: Vec<Registration>,
    /// Keys by block and chunk.
    pub keys: HashMap<(usize, u64), u32>,
}

impl<'a> Source<'a> {
    /// Connects, and sends the stream up to the end of the first phase.
    pub fn start(lab: &Lab, guest: &'a Guest, habits: Habits) -> Self {
        Self::try_start(lab, guest, habits).unwrap()
    }

    pub fn try_start(lab: &Lab, guest: &'a Guest, habits: Habits) -> Result<Self, StreamError> {
        let (stream, pin_all, unit) = connect(lab, habits)?;
        let adapter = stream.main().connection().adapter();
        let register = |block: &RamBlock| {
            let memory = Memory::of_block(block, 0, block.len_bytes() as usize).unwrap();
            adapter.register(memory, Access::SOURCE).unwrap()
        };
        let memory = guest.ram.blocks().iter().map(register).collect();
        stream.begin_phase(&guest.to_first_hook(), LIMIT)?;
        let answer = stream.command(Command::RamBlocks, &empty(MessageType::RamBlocksRequest), LIMIT)?;
        let Message::RamBlocksResult(blocks) = Message::decode(answer.answer().unwrap()).unwrap() else {
            panic!("{answer:?}")
        };
        let when = if pin_all { When::PinAll } else { When::Dynamic };
        let places = BlockPlaces::agreed(&blocks, &guest.lengths(), when).unwrap();
        stream.command(Command::Finished, &empty(MessageType::RegisterFinished), LIMIT)?;
        Ok(Self { stream: Arc::new(stream), guest, habits, unit, places, memory, keys: HashMap::new() })
    }

    /// Sends every page in one phase, and then the rest of the stream.
    pub fn run(mut self) -> Arc<SourceStream> {
        self.begin(false).unwrap();
        for block in 0..self.guest.ram.blocks().len() {
            self.send_block(block).unwrap();
        }
        self.finish().unwrap();
        self.end().unwrap()
    }

    /// Begins a phase of a PART section, or of END.
    pub fn begin(&self, is_last: bool) -> Result<(), StreamError> {
        self.stream.begin_phase(&self.guest.to_next_hook(is_last), LIMIT)
    }

    /// Ends the phase when all writes are complete.
    pub fn finish(&self) -> Result<(), StreamError> {
        self.stream.flush_memory(LIMIT)?;
        self.stream.command(Command::Finished, &empty(MessageType::RegisterFinished), LIMIT).map(drop)
    }

    /// Sends END, devices, EOF and the description.
    pub fn end(self) -> Result<Arc<SourceStream>, StreamError> {
        self.begin(true)?;
        self.finish()?;
        write_all(&self.stream, &self.guest.to_end())?;
        Ok(self.stream)
    }

    /// Sends a block like QEMU, in pieces within a chunk. Zero pieces are sent as zero ranges while their chunk has
    /// no key.
    pub fn send_block(&mut self, block: usize) -> Result<(), StreamError> {
        let ram = self.guest.ram.block(block).clone();
        let piece_bytes = self.habits.chunk.bytes().min(256 << 10);
        let mut start = 0;
        while start < ram.len_bytes() {
            let length = piece_bytes.min(ram.len_bytes() - start);
            let mut page = start;
            while page < start + length {
                let is_zero = |page: u64| ram.page(page / PAGE_SIZE as u64).unwrap().is_zero().unwrap();
                let zero = is_zero(page);
                let mut end = page + PAGE_SIZE as u64;
                while end < start + length && is_zero(end) == zero {
                    end += PAGE_SIZE as u64;
                }
                let range = BlockRange { block, start: page, length: end - page };
                let chunk = page / self.habits.chunk.bytes();
                let has_key = self.keys.contains_key(&(block, chunk)) || self.habits.pin_all;
                if zero && !has_key {
                    self.zero(range)?
                } else {
                    self.write(range)?
                }
                page = end;
            }
            start += length;
        }
        Ok(())
    }

    pub fn range(&self, block: usize, start: u64, length: u64) -> BlockRange {
        BlockRange { block, start, length }
    }

    pub fn zero(&self, range: BlockRange) -> Result<(), StreamError> {
        let zeros = self.places.zero_range(range).unwrap();
        self.zeros(zeros)
    }

    pub fn zeros(&self, zeros: ZeroRange) -> Result<(), StreamError> {
        self.stream.command(Command::Compress(1), &records(&[zeros]), LIMIT).map(drop)
    }

    /// Writes a range inside one chunk.
    pub fn write(&mut self, range: BlockRange) -> Result<(), StreamError> {
        let chunk = range.start / self.habits.chunk.bytes();
        let rkey = match self.keys.get(&(range.block, chunk)).copied() {
            _ if self.habits.pin_all => self.places.blocks()[range.block].key,
            Some(key) => key,
            None => {
                let key = self.ask_for(range)?;
                self.keys.insert((range.block, chunk), key);
                key
            }
        };
        self.write_with(range, rkey)
    }

    /// Requests memory: a QEMU for the byte that it writes first, a Sterna for the complete chunk.
    fn ask_for(&self, range: BlockRange) -> Result<u32, StreamError> {
        let place = self.places.blocks()[range.block];
        let request = if self.habits.introduction.is_some() {
            let chunk = self.habits.chunk.bytes();
            let start = range.start / chunk * chunk;
            let whole = BlockRange { start, length: chunk.min(place.length_bytes - start), ..range };
            self.places.request(whole, self.unit).unwrap()
        } else {
            RegisterRequest { key: place.offset + range.start, block: range.block as u32, more_chunks: 0 }
        };
        self.register(request)
    }

    pub fn register(&self, request: RegisterRequest) -> Result<u32, StreamError> {
        let answer = self.stream.command(Command::Register(1), &records(&[request]), LIMIT)?;
        let Message::RegisterResult(results) = Message::decode(answer.answer().unwrap()).unwrap() else {
            panic!("{answer:?}")
        };
        let (at, result) = results.iter().next().unwrap();
        Ok(self.places.key(request.block as usize, &result, at).unwrap())
    }

    pub fn write_with(&self, range: BlockRange, rkey: u32) -> Result<(), StreamError> {
        self.stream.write_memory(&[self.request(range, rkey)], LIMIT)
    }

    /// A write of the source guest's content.
    pub fn request(&self, range: BlockRange, rkey: u32) -> Write {
        let from = self.memory[range.block].piece(range.start as usize, range.length as u32).unwrap();
        Write { from, address: self.places.address(range).unwrap(), rkey }
    }
}

/// Connects. Returns whether pin-all was agreed, and the destination's chunk size if the destination is a Sterna.
pub fn connect(lab: &Lab, habits: Habits) -> Result<(SourceStream, bool, ChunkSize), StreamError> {
    let main = habits.request(Part::Main);
    let back = habits.return_path.then(|| habits.request(Part::ReturnPath));
    let (to, cancel) = (lab.to(), CancelFlag::new());
    let (stream, reply) = SourceStream::connect(&lab.source, to, (&main, back.as_ref()), 64, LONG, &cancel)?;
    if habits.introduction.is_none()
        && let Some(back) = stream.back()
    {
        // A QEMU invites its destination's first message with a READY; a Sterna waits for it if the peer is a QEMU.
        back.send(&[&empty(MessageType::Ready)], LIMIT)?;
    }
    let unit = reply.introduction.map_or(ChunkSize::LEAST, |introduction| introduction.chunk);
    Ok((stream, reply.pin_all, unit))
}

pub fn write_all(stream: &SourceStream, mut bytes: &[u8]) -> Result<(), StreamError> {
    while !bytes.is_empty() {
        bytes = &bytes[stream.write(bytes, LIMIT)?..];
    }
    Ok(())
}

/// Bytes received on the return path, up to its end.
pub fn returned(stream: &SourceStream) -> Vec<u8> {
    let (mut all, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = stream.read(&mut piece, LIMIT) {
        all.extend(&piece[..count]);
    }
    all
}

pub fn empty(kind: MessageType) -> Vec<u8> {
    let mut message = Vec::new();
    encode_empty(kind, 1, &mut message).unwrap();
    message
}

pub fn records<T: sterna_wire::rdma::Record>(records: &[T]) -> Vec<u8> {
    let mut message = Vec::new();
    encode_records(records, &mut message).unwrap();
    message
}
