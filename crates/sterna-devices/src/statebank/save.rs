//! A save session: selects the next block and produces its bytes.

use std::collections::VecDeque;

use super::content::{self, BLOCK_BYTES};
use super::stream::{End, HEAD_BYTES, Kind, RecordHead, digest};

/// The device's state: the generation of each block.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    pub(super) seed: u64,
    pub(super) bytes: u64,
    pub(super) generations: Vec<u64>,
}

impl Blocks {
    pub(super) fn new(seed: u64, bytes: u64) -> Self {
        let blocks = usize::try_from(bytes.div_ceil(BLOCK_BYTES)).unwrap_or(usize::MAX);
        Self { seed, bytes, generations: vec![0; blocks] }
    }

    /// Length of a block in bytes.
    pub(super) fn len_of(&self, block: usize) -> usize {
        (self.bytes - block as u64 * BLOCK_BYTES).min(BLOCK_BYTES) as usize
    }

    pub(super) fn digest(&self) -> u64 {
        digest(self.seed, &self.generations)
    }
}

/// The progress of a save session.
#[derive(Debug)]
pub(super) struct Saver {
    /// Number of the next record.
    number: u32,
    /// The record that was read in part.
    record: Option<Record>,
    /// Number of leading blocks that can be read while the device runs.
    share: usize,
    /// Number of leading blocks that were read.
    read: usize,
    /// Read blocks that changed afterwards, each once.
    dirty: VecDeque<usize>,
    is_dirty: Vec<bool>,
    ended: bool,
}

#[derive(Debug)]
struct Record {
    head: [u8; HEAD_BYTES],
    body: Body,
    len: usize,
    /// Bytes of head and body that were read.
    at: usize,
}

#[derive(Debug)]
enum Body {
    Content(u64),
    Bytes([u8; End::BYTES]),
}

impl Saver {
    /// A session without reads so far. `percent` of the blocks can be read while the device runs.
    pub(super) fn new(blocks: &Blocks, percent: u8) -> Self {
        let count = blocks.generations.len();
        Self {
            number: 0,
            record: None,
            share: count * usize::from(percent.min(100)) / 100,
            read: 0,
            dirty: VecDeque::new(),
            is_dirty: vec![false; count],
            ended: false,
        }
    }

    /// Records that a block has changed.
    pub(super) fn changed(&mut self, block: usize) {
        if block < self.read && !self.is_dirty[block] {
            self.is_dirty[block] = true;
            self.dirty.push_back(block);
        }
    }

    /// Reads the next bytes and returns their number. `end` is the state with which a stopped device
    /// continues.
    pub(super) fn read(&mut self, blocks: &Blocks, end: Option<&End>, to: &mut [u8]) -> usize {
        let mut done = 0;
        while done < to.len() {
            if self.record.is_none() {
                self.record = self.next_record(blocks, end);
            }
            let Some(record) = &mut self.record else { break };
            done += record.read(&mut to[done..]);
            if record.at == record.len {
                self.record = None;
            }
        }
        done
    }

    /// Unread bytes, and bytes changed since their read, that can be read while running.
    pub(super) fn running_bytes(&self, blocks: &Blocks) -> (u64, u64) {
        let unread = self.read.min(self.share)..self.share;
        let dirty: u64 = self.dirty.iter().map(|block| record_bytes(blocks, *block)).sum();
        (all_bytes(blocks, unread) + self.unfinished(), dirty)
    }

    /// Bytes of the state that remain to be read.
    pub(super) fn left_bytes(&self, blocks: &Blocks) -> u64 {
        if self.ended {
            return self.unfinished();
        }
        let dirty: u64 = self.dirty.iter().map(|block| record_bytes(blocks, *block)).sum();
        let head = if self.number == 0 { HEAD_BYTES } else { 0 };
        let ends = (head + HEAD_BYTES + End::BYTES) as u64;
        all_bytes(blocks, self.read..blocks.generations.len()) + dirty + ends + self.unfinished()
    }

    fn unfinished(&self) -> u64 {
        self.record.as_ref().map_or(0, |record| (record.len - record.at) as u64)
    }

    fn next_record(&mut self, blocks: &Blocks, end: Option<&End>) -> Option<Record> {
        if self.number == 0 {
            return Some(self.record(
                Kind::Head,
                [blocks.seed, blocks.bytes, BLOCK_BYTES],
                Body::Content(0),
                0,
            ));
        }
        if let Some(block) = self.next_block(end.is_some()) {
            let (generation, len) = (blocks.generations[block], blocks.len_of(block));
            let base = content::base(blocks.seed, block as u64, generation);
            let fields = [block as u64, generation, len as u64];
            return Some(self.record(Kind::Block, fields, Body::Content(base), len));
        }
        let end = end.filter(|_| !self.ended)?;
        self.ended = true;
        let fields = [blocks.digest(), blocks.generations.len() as u64, End::BYTES as u64];
        Some(self.record(Kind::End, fields, Body::Bytes(end.encode()), End::BYTES))
    }

    fn next_block(&mut self, stopped: bool) -> Option<usize> {
        let readable = if stopped { self.is_dirty.len() } else { self.share };
        if self.read < readable {
            self.read += 1;
            return Some(self.read - 1);
        }
        let block = self.dirty.pop_front()?;
        self.is_dirty[block] = false;
        Some(block)
    }

    fn record(&mut self, kind: Kind, fields: [u64; 3], body: Body, body_len: usize) -> Record {
        let head = RecordHead { kind: kind as u32, number: self.number, fields }.encode();
        self.number = self.number.wrapping_add(1);
        Record { head, body, len: HEAD_BYTES + body_len, at: 0 }
    }
}

impl Record {
    /// Reads a part of the head or of the body.
    fn read(&mut self, to: &mut [u8]) -> usize {
        let some = if self.at < HEAD_BYTES {
            let rest = &self.head[self.at..];
            let some = rest.len().min(to.len());
            to[..some].copy_from_slice(&rest[..some]);
            some
        } else {
            let offset = self.at - HEAD_BYTES;
            let some = (self.len - self.at).min(to.len());
            match &self.body {
                Body::Content(base) => content::fill(*base, offset, &mut to[..some]),
                Body::Bytes(bytes) => to[..some].copy_from_slice(&bytes[offset..offset + some]),
            }
            some
        };
        self.at += some;
        some
    }
}

fn record_bytes(blocks: &Blocks, block: usize) -> u64 {
    (HEAD_BYTES + blocks.len_of(block)) as u64
}

fn all_bytes(blocks: &Blocks, range: std::ops::Range<usize>) -> u64 {
    let heads = range.len() as u64 * HEAD_BYTES as u64;
    let bytes = |block: usize| (block as u64 * BLOCK_BYTES).min(blocks.bytes);
    heads + bytes(range.end) - bytes(range.start)
}
