//! A source and a destination with their state machines, and planted bugs between machine and connection.

use super::planted::Plant;
use super::qemu::{QemuCommander, QemuListener};
use super::world::{PAGE, Packet, Pairing, Wire};
use fastrand::Rng;
use std::collections::VecDeque;
use sterna_wire::main::{BodyKind, Expectations, MainDecoder, MainItem, SectionKind, Step};
use sterna_wire::rdma::session::{Arrival, Command, DestinationSession, Heard, Peer, SourceSession};
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, ChunkSize, Message, MessageType, RegisterResult, Registration,
    UnregisterRequest, encode_empty, encode_file, encode_records,
};

/// The next operation of a source.
#[derive(Debug, Clone)]
pub enum Op {
    Stream { bytes: Vec<u8>, hook: bool },
    Blocks,
    Write(BlockRange, Vec<u64>),
    Zero(BlockRange),
    Finished,
    End,
}

#[derive(Debug)]
enum Commands {
    Sterna(SourceSession),
    Qemu(QemuCommander),
}

#[derive(Debug)]
enum Invitations {
    Sterna(DestinationSession),
    Qemu(QemuListener),
}

fn said(error: sterna_wire::WireError) -> String {
    error.to_string()
}

fn message(fill: impl FnOnce(&mut Vec<u8>) -> Result<(), sterna_wire::WireError>) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    fill(&mut out).map_err(said)?;
    Ok(out)
}

/// The side that sends the pages.
#[derive(Debug)]
pub struct Source {
    commands: Commands,
    plant: Option<Plant>,
    script: VecDeque<Op>,
    blocks: Vec<u64>,
    /// Whether the source requests whole blocks, as towards a QEMU, instead of chunks.
    whole_blocks: bool,
    /// Whether a message may continue after its hook, as with a source that is not a Sterna.
    is_careless: bool,
    places: Option<BlockPlaces>,
    windows: Vec<(BlockRange, u32)>,
    asked: Option<BlockRange>,
    pub writes: usize,
    pub phases: u64,
    rng: Rng,
    done: bool,
}

impl Source {
    pub fn new(
        pairing: Pairing,
        plant: Option<Plant>,
        script: VecDeque<Op>,
        blocks: Vec<u64>,
        mut rng: Rng,
    ) -> Self {
        let commands = match pairing {
            Pairing::Sternas => Commands::Sterna(SourceSession::new(Peer::Sterna)),
            Pairing::ToQemu => Commands::Sterna(SourceSession::new(Peer::Qemu)),
            Pairing::FromQemu => Commands::Qemu(QemuCommander::default()),
        };
        Self {
            commands,
            plant,
            script,
            blocks,
            whole_blocks: pairing == Pairing::ToQemu,
            is_careless: plant == Some(Plant::HookInside) || pairing == Pairing::FromQemu && rng.bool(),
            places: None,
            windows: Vec::new(),
            asked: None,
            writes: 0,
            phases: 0,
            rng,
            done: false,
        }
    }

    pub fn starting(&mut self) -> usize {
        match &mut self.commands {
            Commands::Sterna(session) => session.starting(),
            Commands::Qemu(_) => 1,
        }
    }

    pub fn is_done(&self) -> bool {
        self.done
    }

    pub fn completed(&mut self, writes: usize) -> Result<(), String> {
        self.writes -= writes;
        match &mut self.commands {
            Commands::Sterna(session) => session.completed(writes).map_err(said),
            Commands::Qemu(_) => Ok(()),
        }
    }

    pub fn disconnected(&mut self) -> Result<(), String> {
        match &mut self.commands {
            Commands::Sterna(session) => session.disconnected().map_err(said),
            Commands::Qemu(_) => Ok(()),
        }
    }

    fn may_send(&self) -> bool {
        let may = match &self.commands {
            Commands::Sterna(session) => session.may_send(),
            Commands::Qemu(commander) => commander.may_send(),
        };
        may || match self.plant {
            // Only in some states. Otherwise the first message would always be the one that fails.
            Some(Plant::SendWithoutReady) => self.asked.is_none(),
            Some(Plant::SendBeforeAnswer) => self.asked.is_some(),
            _ => false,
        }
    }

    /// Performs one action. Returns whether there was one.
    pub fn act(&mut self, out: &mut Wire, own: &mut Wire) -> Result<bool, String> {
        if !own.arrived.is_empty() && self.rng.bool() {
            let bytes = own.arrived.pop_front().unwrap_or_default();
            self.received(&bytes)?;
            return Ok(true);
        }
        let Some(op) = self.script.front().cloned() else { return Ok(false) };
        let did = self.perform(&op, out, own)?;
        if did.is_some() {
            self.script.pop_front();
        }
        Ok(did.is_some() || self.asked.is_some() && !own.arrived.is_empty())
    }

    /// Returns `Some` when the operation is over.
    fn perform(&mut self, op: &Op, out: &mut Wire, own: &mut Wire) -> Result<Option<()>, String> {
        match op {
            Op::Stream { bytes, hook } => {
                if !self.may_send() {
                    return Ok(None);
                }
                self.phases += u64::from(*hook);
                let mut bytes = bytes.clone();
                let mut stated = hook.then_some(bytes.len());
                if self.is_careless && *hook {
                    self.take_next_stream(&mut bytes);
                    stated = Some(bytes.len());
                }
                let command = Command::File { bytes: bytes.len(), hook_ends_at: stated };
                self.send(command, message(|out| encode_file(&bytes, out))?, out, own)?;
            }
            Op::Blocks => {
                if !self.may_send() || self.asked.is_some() {
                    return Ok(None);
                }
                if self.plant == Some(Plant::RegisterFirst) {
                    let record = sterna_wire::rdma::RegisterRequest { key: 0, block: 0, more_chunks: 0 };
                    self.send(
                        Command::Register(1),
                        message(|out| encode_records(&[record], out))?,
                        out,
                        own,
                    )?;
                }
                let bytes = message(|out| encode_empty(MessageType::RamBlocksRequest, 1, out))?;
                self.send(Command::RamBlocks, bytes, out, own)?;
                if self.plant == Some(Plant::BlocksTwice) && self.places.is_none() {
                    self.script.insert(1, Op::Blocks);
                }
            }
            Op::Write(range, pages) => return self.write(*range, pages, out, own),
            Op::Zero(range) => {
                let Some(places) = self.places.clone().filter(|_| self.may_send()) else { return Ok(None) };
                let record = places.zero_range(*range).map_err(said)?;
                self.send(Command::Compress(1), message(|out| encode_records(&[record], out))?, out, own)?;
            }
            Op::Finished => {
                let is_early = self.plant == Some(Plant::FinishedEarly);
                if !self.may_send() || self.writes > 0 && !is_early || self.places.is_none() {
                    return Ok(None);
                }
                if self.plant == Some(Plant::FileInPhase) && self.rng.bool() {
                    let bytes = message(|out| encode_file(&[0; 3], out))?;
                    self.send(Command::File { bytes: 3, hook_ends_at: None }, bytes, out, own)?;
                }
                let bytes = message(|out| encode_empty(MessageType::RegisterFinished, 1, out))?;
                self.send(Command::Finished, bytes, out, own)?;
            }
            Op::End => {
                if let Commands::Sterna(session) = &mut self.commands {
                    session.finish().map_err(said)?;
                }
                self.done = true;
            }
        }
        Ok(Some(()))
    }

    /// Models QEMU's buffer: bytes that follow the hook are sent in the same message.
    fn take_next_stream(&mut self, bytes: &mut Vec<u8>) {
        if let Some(Op::Stream { bytes: next, .. }) =
            self.script.iter_mut().skip(1).find(|op| matches!(op, Op::Stream { .. }))
            && next.len() > 8
        {
            bytes.extend(next.drain(..4));
        }
    }

    fn write(
        &mut self,
        range: BlockRange,
        pages: &[u64],
        out: &mut Wire,
        own: &mut Wire,
    ) -> Result<Option<()>, String> {
        let Some(places) = self.places.clone() else { return Ok(None) };
        let covers = |window: &&(BlockRange, u32)| {
            window.0.block == range.block && window.0.start <= range.start && range.end() <= window.0.end()
        };
        if let Some((window, key)) = self.windows.iter().find(covers).copied() {
            if let Commands::Sterna(session) = &mut self.commands {
                session.write().map_err(said)?;
            }
            self.writes += 1;
            let mut address = places.address(range).map_err(said)?;
            if self.plant == Some(Plant::WriteBeyond) && self.rng.u32(0..4) == 0 {
                address += window.end() - range.start;
            }
            out.flight.push_back(Packet::Write { key, address, pages: pages.to_vec() });
            return Ok(Some(()));
        }
        if self.asked.is_some() && self.plant != Some(Plant::SendBeforeAnswer) || !self.may_send() {
            return Ok(None);
        }
        let window = if self.whole_blocks {
            BlockRange { block: range.block, start: 0, length: self.blocks[range.block] }
        } else {
            let start = range.start >> 20 << 20;
            let length = (self.blocks[range.block] - start).min(1 << 20);
            BlockRange { block: range.block, start, length }
        };
        let asked = if self.whole_blocks { window } else { range };
        let record = places.request(asked, ChunkSize::LEAST).map_err(said)?;
        self.send(Command::Register(1), message(|out| encode_records(&[record], out))?, out, own)?;
        self.asked = Some(window);
        Ok(None)
    }

    fn send(
        &mut self,
        command: Command,
        bytes: Vec<u8>,
        out: &mut Wire,
        own: &mut Wire,
    ) -> Result<(), String> {
        let receives = match &mut self.commands {
            // The machine refuses the action of a planted bug. The bug performs it nevertheless.
            Commands::Sterna(session) => match session.send(command) {
                Ok(sending) => sending.receives,
                Err(error) if self.plant.is_none() => return Err(format!("refused: {error}")),
                Err(_) => 0,
            },
            Commands::Qemu(commander) => commander.send(command.kind()),
        };
        if self.plant != Some(Plant::ForgottenReceives) || self.rng.bool() {
            own.posted += receives;
        }
        out.flight.push_back(Packet::Send(bytes));
        Ok(())
    }

    fn received(&mut self, bytes: &[u8]) -> Result<(), String> {
        let message = Message::decode(bytes).map_err(said)?;
        match &mut self.commands {
            Commands::Sterna(session) => {
                if session.received(&message).map_err(said)? == Heard::Failed {
                    return Err("the destination says ERROR".to_owned());
                }
            }
            Commands::Qemu(commander) => commander.received(message.kind())?,
        }
        match message {
            Message::RamBlocksResult(list) => {
                let agreed = BlockPlaces::agreed(&list, &self.blocks, Registration::Dynamic);
                self.places = Some(agreed.map_err(said)?);
            }
            Message::RegisterResult(list) => {
                let window = self.asked.take().ok_or("a result, and nothing was asked")?;
                let places = self.places.as_ref().ok_or("a result before the blocks")?;
                for (at, result) in list.iter() {
                    let key = places.key(window.block, &result, at).map_err(said)?;
                    self.windows.push((window, key));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The side that receives the pages.
pub struct Destination {
    invitations: Invitations,
    plant: Option<Plant>,
    places: BlockPlaces,
    chunk: ChunkSize,
    decoder: MainDecoder,
    stream: Vec<u8>,
    in_phase: bool,
    owed: Option<(MessageType, Vec<u8>)>,
    /// Registered memory. A key is the index plus one.
    windows: Vec<BlockRange>,
    pub memory: Vec<Vec<u64>>,
    rng: Rng,
    done: bool,
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Destination")
            .field("invitations", &self.invitations)
            .field("decoder", &self.decoder)
            .field("left", &self.stream.len())
            .field("owed", &self.owed)
            .finish_non_exhaustive()
    }
}

impl Destination {
    pub fn new(
        pairing: Pairing,
        plant: Option<Plant>,
        blocks: Vec<u64>,
        chunk: ChunkSize,
        mut rng: Rng,
    ) -> Self {
        let mut next = rng.u64(0..1 << 40) << 12;
        let places = blocks.iter().enumerate().map(|(index, length_bytes)| {
            next += length_bytes + (1 << 30);
            // A QEMU states its own offsets. 0 for all blocks is valid, too.
            let offset = if pairing == Pairing::ToQemu { next >> 3 } else { 0 };
            BlockPlace { host_address: next + index as u64, offset, length_bytes: *length_bytes, key: 0 }
        });
        let expect = Expectations {
            blocks: Some(
                blocks.iter().enumerate().map(|(index, length)| (format!("b{index}"), *length)).collect(),
            ),
            rdma: true,
            ..Expectations::default()
        };
        let knowledge = |name: &str, _: u32, _: u32, _: SectionKind| match name {
            "ram" => BodyKind::Ram,
            _ => BodyKind::OpaqueByFooter,
        };
        Self {
            invitations: match pairing {
                Pairing::ToQemu => Invitations::Qemu(QemuListener::default()),
                _ => Invitations::Sterna(DestinationSession::new()),
            },
            plant,
            places: BlockPlaces::new(places.collect()).expect("addresses fit"),
            chunk,
            decoder: MainDecoder::new(Box::new(knowledge), expect),
            stream: Vec::new(),
            in_phase: false,
            owed: None,
            windows: Vec::new(),
            memory: blocks.iter().map(|length| vec![0; (length / PAGE) as usize]).collect(),
            rng,
            done: false,
        }
    }

    pub fn starting(&mut self) -> usize {
        match &mut self.invitations {
            Invitations::Sterna(session) => session.starting(),
            Invitations::Qemu(listener) => listener.starting(),
        }
    }

    pub fn is_done(&self) -> bool {
        self.done
    }

    pub fn disconnected(&mut self) -> Result<(), String> {
        match &mut self.invitations {
            Invitations::Sterna(session) => session.disconnected().map_err(said),
            Invitations::Qemu(_) => Ok(()),
        }
    }

    /// Performs one action. Returns whether there was one.
    pub fn act(&mut self, out: &mut Wire, own: &mut Wire) -> Result<bool, String> {
        if let Some((kind, bytes)) = self.owed.take() {
            if self.plant == Some(Plant::AnswerAfterReady) {
                self.ready(out);
            }
            match &mut self.invitations {
                Invitations::Sterna(session) => {
                    own.posted += session.answer(kind).map_err(said)?.receives;
                }
                Invitations::Qemu(listener) => listener.answer(),
            }
            if self.plant != Some(Plant::NoAnswer) {
                out.flight.push_back(Packet::Send(bytes));
            }
            return Ok(true);
        }
        if let Some(bytes) = own.arrived.pop_front() {
            self.received(&bytes)?;
            return Ok(true);
        }
        let (may, receives) = match &mut self.invitations {
            Invitations::Sterna(session) if session.may_invite() && !self.done => {
                (true, session.invite().map_err(said)?.receives)
            }
            Invitations::Qemu(listener) if listener.may_invite() && !self.done => (true, listener.invite()),
            _ => (false, 0),
        };
        if may {
            if self.plant != Some(Plant::ReadyWithoutReceive) {
                own.posted += receives;
            }
            self.ready(out);
            if self.plant == Some(Plant::ReadyTwice) && self.rng.bool() {
                self.ready(out);
            }
        }
        Ok(may)
    }

    fn ready(&mut self, out: &mut Wire) {
        let mut bytes = Vec::new();
        encode_empty(MessageType::Ready, 1, &mut bytes).expect("READY has no payload");
        out.flight.push_back(Packet::Send(bytes));
    }

    fn received(&mut self, bytes: &[u8]) -> Result<(), String> {
        let message = Message::decode(bytes).map_err(said)?;
        match &mut self.invitations {
            Invitations::Sterna(session) => {
                let arrival = session.received(message.kind()).map_err(said)?;
                if arrival == Arrival::Failed {
                    return Err("the source says ERROR".to_owned());
                }
            }
            Invitations::Qemu(listener) => {
                listener.received(message.kind())?;
                // The next command overwrites the buffer with the rest of the stream.
                if self.in_phase {
                    self.stream.clear();
                }
                if self.in_phase == (message.kind() == MessageType::File) {
                    return Err(format!("a QEMU gets {} in its phase: {}", message.kind(), self.in_phase));
                }
            }
        }
        match message {
            Message::File(bytes) => {
                self.stream.extend_from_slice(bytes);
                self.decode()?;
            }
            Message::RamBlocksRequest => {
                let list = self.places.blocks().to_vec();
                self.owe(MessageType::RamBlocksResult, |out| encode_records(&list, out))?;
            }
            Message::Compress(list) => {
                for (at, record) in list.iter() {
                    let range = self.places.cleared(&record, at).map_err(said)?;
                    self.pages(range).fill(0);
                }
            }
            Message::RegisterRequest(list) => {
                let mut results = Vec::new();
                for (at, record) in list.iter() {
                    let range = self.places.requested(&record, self.chunk, at).map_err(said)?;
                    results.push(self.register(range));
                }
                self.owe(MessageType::RegisterResult, |out| encode_records(&results, out))?;
            }
            Message::UnregisterRequest(list) => {
                let check = |(at, record): (u64, UnregisterRequest)| {
                    let known = |range: BlockRange| self.windows.contains(&range);
                    self.places.given_back(&record, self.chunk, known, at).map_err(said)
                };
                list.iter().try_for_each(|item| check(item).map(drop))?;
                self.owe(MessageType::UnregisterFinished, |out| {
                    encode_empty(MessageType::UnregisterFinished, 1, out)
                })?;
            }
            Message::RegisterFinished => {
                self.in_phase = false;
                if self.plant == Some(Plant::BytesDropped) {
                    self.stream.clear();
                }
                self.decode()?;
            }
            Message::Error | Message::Ready | Message::RamBlocksResult(_) | Message::RegisterResult(_) => {}
            Message::UnregisterFinished => {}
        }
        Ok(())
    }

    fn owe(
        &mut self,
        kind: MessageType,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<(), sterna_wire::WireError>,
    ) -> Result<(), String> {
        let bytes = match self.plant {
            Some(Plant::OtherAnswer) => message(|out| encode_empty(MessageType::UnregisterFinished, 1, out))?,
            _ => message(fill)?,
        };
        self.owed = Some((kind, bytes));
        Ok(())
    }

    fn register(&mut self, range: BlockRange) -> RegisterResult {
        // QEMU remembers a registration under its first chunk.
        let known = |window: &BlockRange| (window.block, window.start) == (range.block, range.start);
        let index = self.windows.iter().position(known).unwrap_or_else(|| {
            self.windows.push(range);
            self.windows.len() - 1
        });
        let key = if self.plant == Some(Plant::KeyZero) { 0 } else { index as u32 + 1 };
        RegisterResult { key, host_address: self.places.blocks()[range.block].host_address }
    }

    fn decode(&mut self) -> Result<(), String> {
        while !self.in_phase {
            match self.decoder.next(&self.stream).map_err(said)? {
                Step::NeedMore(_) => return Ok(()),
                Step::Partial { consumed } => drop(self.stream.drain(..consumed)),
                Step::Item { item, consumed } => {
                    self.stream.drain(..consumed);
                    if matches!(item, MainItem::Hook { .. }) {
                        self.in_phase = true;
                        if let Invitations::Sterna(session) = &mut self.invitations {
                            session.hook().map_err(said)?;
                        }
                    }
                }
                Step::End => {
                    if let Invitations::Sterna(session) = &mut self.invitations
                        && !self.done
                    {
                        session.finish().map_err(said)?;
                    }
                    self.done = true;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn pages(&mut self, range: BlockRange) -> &mut [u64] {
        let pages = (range.start / PAGE) as usize..(range.end() / PAGE) as usize;
        &mut self.memory[range.block][pages]
    }

    /// Performs a WRITE as the adapter does.
    pub fn written(&mut self, key: u32, address: u64, pages: &[u64]) -> Result<(), String> {
        let window = key.checked_sub(1).and_then(|index| self.windows.get(index as usize)).copied();
        let window = window.ok_or("remote access error: no such key")?;
        let base = self.places.blocks()[window.block].host_address;
        let length = pages.len() as u64 * PAGE;
        let start = address.checked_sub(base).filter(|start| *start >= window.start);
        let start = start.filter(|start| start + length <= window.end());
        let start = start.ok_or("remote access error: outside of the window")?;
        self.pages(BlockRange { block: window.block, start, length }).copy_from_slice(pages);
        Ok(())
    }
}
