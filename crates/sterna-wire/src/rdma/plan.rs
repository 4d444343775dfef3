//! Which memory to register when, and which WRITEs to post (`specs/rdma.md §6`).
//!
//! The plan holds no connection and no key. It is asked with runs of pages that are to be written and answers with a
//! [`Batch`]: which windows to give back, which to ask for, and then which WRITEs fit into the windows that are there.

use super::chunk::ChunkSize;
use super::places::BlockRange;
use crate::PAGE_SIZE;
use crate::error::WireError;
use std::collections::{BTreeMap, VecDeque};

const SPEC: &str = "specs/rdma.md §6.4";
/// No WRITE is longer, whatever the port takes.
const MOST_WRITE: u64 = 1 << 31;

/// How the side whose memory is registered does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Destination {
    /// All of it has keys already; nothing is asked for or given back.
    PinAll,
    /// A QEMU with dynamic registration, and how long a window is. It lies at a multiple of its length: so one key
    /// covers it whatever chunk size the QEMU has, and whatever it has registered before (§6.4). A long window saves
    /// exchanges. But a QEMU with chunks of n MiB registers n times as much as is asked for in units of 1 MiB: ask in
    /// units of its chunk size ([`BlockPlaces::request`](super::BlockPlaces::request)), which a monitor or a
    /// [`ChunkProbe`](super::ChunkProbe) tells, and make windows [`ChunkSize::window`] long.
    Qemu(ChunkSize),
    /// A Sterna with dynamic registration, and its chunk size: the other side, or this one. Windows grow up to
    /// [`ChunkSize::window`] where their memory is written one after the other: an exchange for each chunk of 1 MiB would
    /// cost more than writing it.
    Sterna(ChunkSize),
}

/// What bounds a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// The chunk size of this side.
    pub own_chunk: ChunkSize,
    /// Most bytes of one message of the port.
    pub most_message: u64,
    /// Most bytes that may be registered at once, where windows can be given back: towards a Sterna.
    pub pinned: Option<u64>,
}

/// What to do next, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// Windows to give back when their WRITEs are complete: those not used for longest.
    pub give_back: Vec<BlockRange>,
    /// Windows to ask for, in the order in which they are written.
    pub ask: Vec<BlockRange>,
    /// WRITEs, each inside one window.
    pub writes: Vec<BlockRange>,
}

/// Windows that are registered at the other side, and those that will be.
#[derive(Debug, Clone)]
pub struct RegistrationPlan {
    blocks: Vec<u64>,
    /// Windows begin and end at multiples of this.
    grid: u64,
    /// Neighbours on the grid that are asked for together make one window up to so many bytes, at a multiple of it.
    wide: u64,
    most_write: u64,
    limit: u64,
    /// By block and start: where a window ends, and in which batch it was used last.
    windows: BTreeMap<(usize, u64), Window>,
    pinned: u64,
    batch: u64,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    end: u64,
    used: u64,
    /// It counts against the limit, and is given back when it was not used for longest.
    is_pinned: bool,
}

impl RegistrationPlan {
    /// A plan for blocks of these lengths. Nothing is registered yet, but with pin-all everything.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a port whose messages hold no page, or a limit below 1 MiB.
    pub fn new(blocks: &[u64], destination: Destination, limits: PlanLimits) -> Result<Self, WireError> {
        let most_write = limits.most_message.min(MOST_WRITE) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        if most_write == 0 {
            let rule = format!("a port with messages of {} bytes takes no page", limits.most_message);
            return Err(WireError::local("WRITE", 0, "specs/rdma.md §6.1", rule));
        }
        let (grid, wide, limit) = match destination {
            Destination::PinAll => (u64::MAX, u64::MAX, u64::MAX),
            Destination::Qemu(window) => (window.bytes(), window.bytes(), u64::MAX),
            Destination::Sterna(chunk) => {
                sterna(chunk.min(limits.own_chunk), limits.pinned.unwrap_or(u64::MAX))?
            }
        };
        let mut plan = Self {
            blocks: blocks.to_vec(),
            grid,
            wide,
            most_write,
            limit,
            windows: BTreeMap::new(),
            pinned: 0,
            batch: 0,
        };
        if destination == Destination::PinAll {
            for (block, length) in blocks.iter().enumerate().filter(|(_, length)| **length > 0) {
                plan.add(BlockRange { block, start: 0, length: *length });
            }
        }
        Ok(plan)
    }

    /// Bytes that are registered at the other side once the last batch has been carried out.
    pub fn pinned(&self) -> u64 {
        self.pinned
    }

    /// How much to take in one batch so that windows become as long as they should, and no longer.
    pub fn step(&self) -> u64 {
        self.wide.clamp(ChunkSize::LEAST.bytes(), ChunkSize::WINDOW.bytes())
    }

    /// Takes in a window that is registered already, by a [`ChunkProbe`](super::ChunkProbe).
    pub fn registered(&mut self, window: BlockRange) {
        self.add(window);
    }

    /// Takes in a block whose adapter follows its memory instead of pinning it: all of it is registered, counts nothing
    /// against the limit, and is never given back. Before the first run in this block.
    pub fn on_demand(&mut self, block: usize) {
        if let Some(end) = self.blocks.get(block).copied().filter(|length| *length > 0) {
            self.windows.insert((block, 0), Window { end, used: self.batch, is_pinned: false });
        }
    }

    /// The window that holds this byte, if one does.
    pub fn window(&self, block: usize, offset: u64) -> Option<BlockRange> {
        let (&(found, start), window) = self.windows.range(..=(block, offset)).next_back()?;
        let holds = found == block && offset < window.end;
        holds.then_some(BlockRange { block, start, length: window.end - start })
    }

    /// Takes runs from the front of `runs` as long as their windows fit the limit and the WRITEs have no more than
    /// `most_bytes` (at least one page goes). What it does not take stays; a run may be cut.
    ///
    /// The windows to give back are not those of this batch. They may still be written by an earlier one.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a run that is empty or leaves its block. Then nothing has been taken.
    pub fn next_batch(
        &mut self,
        runs: &mut VecDeque<BlockRange>,
        most_bytes: u64,
    ) -> Result<Batch, WireError> {
        runs.iter().try_for_each(|run| self.check(run))?;
        Ok(self.take(runs, most_bytes, true))
    }

    /// Whether a run has bytes, and all of them are in its block.
    pub(super) fn check(&self, run: &BlockRange) -> Result<(), WireError> {
        let BlockRange { block, start, length } = *run;
        let most = self.blocks.get(block).copied().unwrap_or(0);
        if length > 0 && start < most && length <= most - start {
            return Ok(());
        }
        let rule = format!("{length} bytes from {start:#x} on are none, or not inside block {block}");
        Err(WireError::local("WRITE", 0, "specs/rdma.md §6.1", rule))
    }

    /// As [`Self::next_batch`], of runs that were checked. With `may_ask` false it takes what lies in windows that are planned
    /// already, and stops at the first byte that does not.
    pub(super) fn take(&mut self, runs: &mut VecDeque<BlockRange>, most_bytes: u64, may_ask: bool) -> Batch {
        self.batch += 1;
        let mut batch = Batch::default();
        let mut pieces = Vec::new();
        let page = PAGE_SIZE as u64;
        let mut room = (most_bytes / page * page).max(page);
        while let Some(run) = runs.front_mut() {
            let cell = self.cell(run.block, run.start);
            let is_there = self.windows.contains_key(&(cell.block, cell.start));
            // A window that this batch cannot fill is left to the next one, which can.
            let is_too_late = !pieces.is_empty() && cell.start.is_multiple_of(self.wide) && room < self.wide;
            if room == 0 || !is_there && (!may_ask || is_too_late) || !self.cover(cell, &mut batch) {
                break;
            }
            let length = run.length.min(cell.end() - run.start).min(room);
            pieces.push(BlockRange { length, ..*run });
            room -= length;
            run.start += length;
            run.length -= length;
            if run.length == 0 {
                runs.pop_front();
            }
        }
        // Windows have grown while the batch did; WRITEs are cut when all of them are known.
        let mut joined: Option<BlockRange> = None;
        for piece in pieces {
            match &mut joined {
                Some(last) if last.block == piece.block && last.end() == piece.start => {
                    last.length += piece.length
                }
                _ => {
                    if let Some(last) = joined.replace(piece) {
                        self.cut(last, &mut batch.writes);
                    }
                }
            }
        }
        if let Some(last) = joined {
            self.cut(last, &mut batch.writes);
        }
        batch
    }

    /// Forgets windows that the other side has given back by itself, or that were asked for in vain.
    pub fn lost(&mut self, window: BlockRange) {
        if let Some(known) = self.windows.remove(&(window.block, window.start))
            && known.is_pinned
        {
            self.pinned -= known.end - window.start;
        }
    }

    /// The memory that is registered for this byte if it is not yet. Beside windows that are shorter than the grid, of a
    /// probe, it is shorter, too: it keeps its rule, a power of two at a multiple of its length.
    fn cell(&self, block: usize, offset: u64) -> BlockRange {
        if let Some(window) = self.window(block, offset) {
            return window;
        }
        let mut length = self.grid;
        loop {
            let start = offset - offset % length;
            let cell = BlockRange { block, start, length: length.min(self.blocks[block] - start) };
            if length <= ChunkSize::LEAST.bytes() || self.is_free(&cell) {
                return cell;
            }
            length /= 2;
        }
    }

    fn is_free(&self, cell: &BlockRange) -> bool {
        let before_end = self.windows.range(..(cell.block, cell.end())).next_back();
        before_end.is_none_or(|(&(block, _), window)| block != cell.block || window.end <= cell.start)
    }

    /// Whether the cell is registered now, or is asked for in this batch.
    fn cover(&mut self, cell: BlockRange, batch: &mut Batch) -> bool {
        let key = (cell.block, cell.start);
        if let Some(window) = self.windows.get_mut(&key) {
            window.used = self.batch;
            return true;
        }
        while self.limit - self.pinned < cell.length {
            let idle = self.windows.iter().filter(|(_, window)| window.is_pinned && window.used < self.batch);
            let Some((&(block, start), _)) = idle.min_by_key(|(_, window)| window.used) else { return false };
            let Some(oldest) = self.window(block, start) else { return false };
            self.lost(oldest);
            batch.give_back.push(oldest);
        }
        match batch.ask.last_mut() {
            Some(last) if self.grows(last, &cell) => {
                last.length += cell.length;
                self.pinned += cell.length;
                let grown = Window { end: last.end(), used: self.batch, is_pinned: true };
                self.windows.insert((last.block, last.start), grown);
            }
            _ => {
                batch.ask.push(cell);
                self.add(cell);
            }
        }
        true
    }

    /// Whether the cell makes one window with the one that was asked for last. Cells that are shorter than the grid do not.
    fn grows(&self, last: &BlockRange, cell: &BlockRange) -> bool {
        let are_whole = last.start.is_multiple_of(self.grid) && cell.start.is_multiple_of(self.grid);
        let is_next = last.block == cell.block && last.end() == cell.start;
        are_whole && is_next && !cell.start.is_multiple_of(self.wide)
    }

    fn add(&mut self, window: BlockRange) {
        self.pinned += window.length;
        let known = Window { end: window.end(), used: self.batch, is_pinned: true };
        self.windows.insert((window.block, window.start), known);
    }

    /// The WRITEs of one run: cut at windows, and at the longest message.
    fn cut(&self, mut run: BlockRange, writes: &mut Vec<BlockRange>) {
        while run.length > 0 {
            let end = self.cell(run.block, run.start).end().min(run.end());
            let length = (end - run.start).min(self.most_write);
            writes.push(BlockRange { length, ..run });
            run.start += length;
            run.length -= length;
        }
    }
}

/// Grid, widest window and limit towards a Sterna: the smaller wish for memory counts.
fn sterna(chunk: ChunkSize, limit: u64) -> Result<(u64, u64, u64), WireError> {
    if limit < ChunkSize::LEAST.bytes() {
        let rule =
            format!("{limit} bytes may be registered, and a window has 1 MiB at least: raise the limit");
        return Err(WireError::local("x-sterna-rdma-pinned-limit", 0, SPEC, rule));
    }
    let grid = chunk.twice_within(limit).bytes();
    Ok((grid, ChunkSize::WINDOW.twice_within(limit).bytes().max(grid), limit))
}
