//! A source, a destination and their connection. A seed decides the order of events.

use super::actors::{Destination, Op, Source};
use super::planted::Plant;
use fastrand::Rng;
use std::collections::VecDeque;
use sterna_wire::main::{
    Configuration, FileHeader, SectionHeader, encode_end, encode_footer, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::rdma::{BlockRange, ChunkSize, Message, MessageType};
use sterna_wire::vmdesc;

pub const PAGE: u64 = 4096;
/// More steps than the longest run needs.
const MOST_STEPS: usize = 200_000;

/// The kinds of source and destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    Sternas,
    ToQemu,
    FromQemu,
}

impl Pairing {
    pub const ALL: [Self; 3] = [Self::Sternas, Self::ToQemu, Self::FromQemu];
}

/// A message or a WRITE in transit.
#[derive(Debug, Clone)]
pub enum Packet {
    Send(Vec<u8>),
    Write { key: u32, address: u64, pages: Vec<u64> },
}

/// One direction of the connection, with the receives at its end. The RNR retry count is 0.
#[derive(Debug, Default)]
pub struct Wire {
    pub posted: usize,
    pub flight: VecDeque<Packet>,
    pub arrived: VecDeque<Vec<u8>>,
}

/// Both sides and both directions of the connection.
pub struct World {
    rng: Rng,
    source: Source,
    destination: Destination,
    to_destination: Wire,
    to_source: Wire,
    /// Number of WRITEs that are done and whose completions the source has not seen.
    completions: usize,
    pages: Vec<usize>,
    expected: Vec<Vec<u64>>,
}

impl World {
    pub fn new(seed: u64, pairing: Pairing, plant: Option<Plant>) -> Self {
        let mut rng = Rng::with_seed(seed);
        let pages: Vec<usize> = (0..rng.usize(1..4)).map(|_| rng.usize(1..1500)).collect();
        let chunk = ChunkSize::new(1 << rng.u32(20..23)).unwrap();
        let mut expected: Vec<Vec<u64>> = pages.iter().map(|count| vec![0; *count]).collect();
        let script = script(&mut rng, &mut expected);
        let blocks: Vec<u64> = pages.iter().map(|count| *count as u64 * PAGE).collect();
        Self {
            source: Source::new(pairing, plant, script, blocks.clone(), rng.fork()),
            destination: Destination::new(pairing, plant, blocks, chunk, rng.fork()),
            rng,
            to_destination: Wire::default(),
            to_source: Wire::default(),
            completions: 0,
            pages,
            expected,
        }
    }

    /// Runs to the end. Returns the number of phases, or the failure.
    pub fn run(mut self) -> Result<u64, String> {
        self.to_source.posted += self.source.starting();
        self.to_destination.posted += self.destination.starting();
        let mut idle = 0;
        for _ in 0..MOST_STEPS {
            let moved = match self.rng.u32(0..5) {
                0 => self.source.act(&mut self.to_destination, &mut self.to_source)?,
                1 => self.destination.act(&mut self.to_source, &mut self.to_destination)?,
                2 => self.arrive_at_destination()?,
                3 => self.arrive_at_source()?,
                _ => self.complete()?,
            };
            idle = if moved { 0 } else { idle + 1 };
            if self.source.is_done() && self.destination.is_done() {
                return self.compare();
            }
            // After so many idle steps, every actor has had many turns.
            if idle > 200 {
                let (source, destination) = (&self.source, &self.destination);
                return Err(format!("stuck: {source:?} and {destination:?}"));
            }
        }
        Err("stuck: it never ends".to_owned())
    }

    fn arrive_at_destination(&mut self) -> Result<bool, String> {
        match self.to_destination.flight.pop_front() {
            Some(Packet::Send(bytes)) => {
                let kind = Message::decode(&bytes).map_err(|error| error.to_string())?.kind();
                if kind == MessageType::RegisterFinished && self.source.writes > 0 {
                    return Err(format!("{kind}, and {} WRITEs are not complete", self.source.writes));
                }
                receive(&mut self.to_destination, bytes)?;
            }
            Some(Packet::Write { key, address, pages }) => {
                self.destination.written(key, address, &pages)?;
                self.completions += 1;
            }
            None => return Ok(false),
        }
        Ok(true)
    }

    fn arrive_at_source(&mut self) -> Result<bool, String> {
        match self.to_source.flight.pop_front() {
            Some(Packet::Send(bytes)) => receive(&mut self.to_source, bytes)?,
            Some(Packet::Write { .. }) => return Err("a destination writes".to_owned()),
            None => return Ok(false),
        }
        Ok(true)
    }

    fn complete(&mut self) -> Result<bool, String> {
        let seen = self.rng.usize(0..=self.completions);
        self.completions -= seen;
        self.source.completed(seen)?;
        Ok(seen > 0)
    }

    fn compare(mut self) -> Result<u64, String> {
        self.source.disconnected()?;
        self.destination.disconnected()?;
        for block in 0..self.pages.len() {
            if self.destination.memory[block] != self.expected[block] {
                return Err(format!("block {block} differs"));
            }
        }
        Ok(self.source.phases)
    }
}

fn receive(wire: &mut Wire, bytes: Vec<u8>) -> Result<(), String> {
    wire.posted = wire.posted.checked_sub(1).ok_or_else(|| {
        let kind = Message::decode(&bytes).map(|message| message.kind());
        format!("no receive is posted for {kind:?}: the queue pair breaks")
    })?;
    wire.arrived.push_back(bytes);
    Ok(())
}

/// The operations of the source. `expected` receives the memory that the destination must have at the end.
fn script(rng: &mut Rng, expected: &mut [Vec<u64>]) -> VecDeque<Op> {
    let mut ops = VecDeque::new();
    let mut piece = Vec::new();
    FileHeader.encode(&mut piece);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut piece).unwrap();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut piece).unwrap();
    let blocks = expected.iter().enumerate();
    let blocks = blocks
        .map(|(index, block)| BlockEntry::new(format!("b{index}"), block.len() as u64 * PAGE))
        .collect();
    BlockList { blocks }.encode(&mut piece).unwrap();
    cut(rng, &mut piece, true, &mut ops);
    ops.extend([Op::Blocks, Op::Finished]);
    let rounds = rng.u32(1..6);
    for round in 0..=rounds {
        RamRecordWriter::eos(&mut piece);
        encode_footer(1, &mut piece);
        encode_section_part(1, round == rounds, &mut piece);
        cut(rng, &mut piece, true, &mut ops);
        memory(rng, expected, &mut ops);
        ops.push_back(Op::Finished);
    }
    RamRecordWriter::eos(&mut piece);
    encode_footer(1, &mut piece);
    encode_end(&mut piece);
    vmdesc::encode(&vmdesc::build("none", &[]), &mut piece).unwrap();
    cut(rng, &mut piece, false, &mut ops);
    ops.push_back(Op::End);
    ops
}

/// Splits the stream so far into FILE messages of random sizes.
///
/// With `hook`, the last message ends with a hook.
fn cut(rng: &mut Rng, piece: &mut Vec<u8>, hook: bool, ops: &mut VecDeque<Op>) {
    if hook {
        RamRecordWriter::hook(piece);
    }
    let mut rest = std::mem::take(piece);
    while !rest.is_empty() {
        let count = if rng.bool() { rest.len() } else { rng.usize(1..=rest.len()) };
        let behind = rest.split_off(count);
        let ends_with_hook = hook && behind.is_empty();
        ops.push_back(Op::Stream { bytes: rest, hook: ends_with_hook });
        rest = behind;
    }
}

/// Runs of pages. Each page is written at most once, and no run crosses a chunk of 1 MiB.
fn memory(rng: &mut Rng, expected: &mut [Vec<u64>], ops: &mut VecDeque<Op>) {
    for (block, pages) in expected.iter_mut().enumerate() {
        let mut at = rng.usize(0..=pages.len());
        while at < pages.len() && rng.u32(0..8) > 0 {
            let chunk_end = (at / 256 + 1) * 256;
            let count = rng.usize(1..=64).min(pages.len().min(chunk_end) - at);
            let content: Vec<u64> = (0..count).map(|_| rng.u64(1..)).collect();
            let is_zero = rng.u32(0..4) == 0;
            let content = if is_zero { vec![0; count] } else { content };
            pages[at..at + count].copy_from_slice(&content);
            let range = BlockRange { block, start: at as u64 * PAGE, length: count as u64 * PAGE };
            ops.push_back(if is_zero { Op::Zero(range) } else { Op::Write(range, content) });
            at += count + rng.usize(0..300);
        }
    }
}
