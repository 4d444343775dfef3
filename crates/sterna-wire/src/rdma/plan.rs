//! Decides which memory to register and when, and which WRITEs to post (`specs/rdma.md §6`).
//!
//! The plan has no connection and no keys. From runs of pages it makes a [`Batch`]: windows to deregister,
//! windows to request, and WRITEs that fit into the registered windows.

use super::chunk::ChunkSize;
use super::places::BlockRange;
use crate::PAGE_SIZE;
use crate::error::WireError;
use std::collections::{BTreeMap, VecDeque};

const SPEC: &str = "specs/rdma.md §6.4";
/// Longest WRITE, independent of the port's own limit.
const MOST_WRITE: u64 = 1 << 31;

/// How the side whose memory is written registers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Destination {
    /// All memory has keys already. The plan requests and deregisters nothing.
    PinAll,
    /// A QEMU with dynamic registration, and the length of a window.
    ///
    /// A window starts at a multiple of its length. One key therefore covers the window with every chunk size
    /// of the QEMU, and with every earlier registration (§6.4).
    ///
    /// A long window saves exchanges. But a QEMU with chunks of n MiB registers n times the requested memory if
    /// the request counts in units of 1 MiB. Therefore request in units of the QEMU's chunk size
    /// ([`BlockPlaces::request`](super::BlockPlaces::request)), with windows of [`ChunkSize::window`]. A
    /// monitor or a [`ChunkProbe`](super::ChunkProbe) reveals the chunk size.
    Qemu(ChunkSize),
    /// A Sterna with dynamic registration, and its chunk size. It is the other side or this one.
    ///
    /// Where memory is written in sequence, windows grow up to [`ChunkSize::window`]. An exchange for each
    /// chunk of 1 MiB would cost more than writing the chunk.
    Sterna(ChunkSize),
}

/// Limits that a plan must respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// The chunk size of this side.
    pub own_chunk: ChunkSize,
    /// Most bytes of one message of the port.
    pub most_message: u64,
    /// Most bytes that may be registered at the same time.
    ///
    /// Applies only where windows can be deregistered: towards a Sterna.
    pub pinned: Option<u64>,
}

/// The next actions, in the order of the fields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// Windows to deregister after their WRITEs are complete: the least recently used ones.
    pub give_back: Vec<BlockRange>,
    /// Windows to request, in the order in which they are written.
    pub ask: Vec<BlockRange>,
    /// WRITEs. Each lies inside one window.
    pub writes: Vec<BlockRange>,
}

/// Windows that are registered at the other side, and windows that will be.
#[derive(Debug, Clone)]
pub struct RegistrationPlan {
    blocks: Vec<u64>,
    /// Windows begin and end at multiples of this length in bytes.
    grid: u64,
    /// Adjacent grid cells that are requested together form one window. Its length in bytes is at most `wide`,
    /// and it does not cross a multiple of `wide`.
    wide: u64,
    most_write: u64,
    limit: u64,
    /// By block and start: a window's end, and the last batch that used it.
    windows: BTreeMap<(usize, u64), Window>,
    pinned: u64,
    batch: u64,
}

#[derive(Debug, Clone, Copy)]
struct Window {
    end: u64,
    used: u64,
    /// Whether the window counts against the limit. Only such a window is deregistered.
    is_pinned: bool,
}

impl RegistrationPlan {
    /// A plan for blocks of these lengths, without registered windows.
    ///
    /// With pin-all, all memory counts as registered.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a port whose messages are shorter than a page, or a limit
    /// below 1 MiB.
    pub fn new(blocks: &[u64], destination: Destination, limits: PlanLimits) -> Result<Self, WireError> {
        let most_write = limits.most_message.min(MOST_WRITE) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        if most_write == 0 {
            let rule =
                format!("a port with messages of {} bytes has no room for a page", limits.most_message);
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

    /// Bytes that are registered at the other side after the last batch has been performed.
    pub fn pinned(&self) -> u64 {
        self.pinned
    }

    /// Bytes for one batch that give windows their intended length.
    pub fn step(&self) -> u64 {
        self.wide.clamp(ChunkSize::LEAST.bytes(), ChunkSize::WINDOW.bytes())
    }

    /// Adds a window that a [`ChunkProbe`](super::ChunkProbe) has registered.
    pub fn registered(&mut self, window: BlockRange) {
        self.add(window);
    }

    /// Adds a block whose adapter pages on demand, so that its memory is not pinned.
    ///
    /// The whole block counts as registered. It does not count against the limit, and is never deregistered.
    /// Call it before the first run in this block.
    pub fn on_demand(&mut self, block: usize) {
        if let Some(end) = self.blocks.get(block).copied().filter(|length| *length > 0) {
            self.windows.insert((block, 0), Window { end, used: self.batch, is_pinned: false });
        }
    }

    /// The window that contains this byte; `None` if it is not registered.
    pub fn window(&self, block: usize, offset: u64) -> Option<BlockRange> {
        let (&(found, start), window) = self.windows.range(..=(block, offset)).next_back()?;
        let holds = found == block && offset < window.end;
        holds.then_some(BlockRange { block, start, length: window.end - start })
    }

    /// Takes runs from the front, within the limit and up to `most_bytes` of WRITEs.
    ///
    /// It takes at least one page. The other runs remain in `runs`, and one run may be split.
    ///
    /// The windows to deregister do not belong to this batch. WRITEs of an earlier batch may still use them.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a run that is empty or leaves its block. Then nothing has been
    /// taken.
    pub fn next_batch(
        &mut self,
        runs: &mut VecDeque<BlockRange>,
        most_bytes: u64,
    ) -> Result<Batch, WireError> {
        runs.iter().try_for_each(|run| self.check(run))?;
        Ok(self.take(runs, most_bytes, true))
    }

    /// Checks that a run is not empty and lies in its block.
    pub(super) fn check(&self, run: &BlockRange) -> Result<(), WireError> {
        let BlockRange { block, start, length } = *run;
        let most = self.blocks.get(block).copied().unwrap_or(0);
        if length > 0 && start < most && length <= most - start {
            return Ok(());
        }
        let rule = format!("{length} bytes at {start:#x} are no bytes, or not inside block {block}");
        Err(WireError::local("WRITE", 0, "specs/rdma.md §6.1", rule))
    }

    /// Like [`Self::next_batch`], for checked runs. Without `may_ask` it takes only runs in windows that are
    /// planned already, and stops at the first byte outside.
    pub(super) fn take(&mut self, runs: &mut VecDeque<BlockRange>, most_bytes: u64, may_ask: bool) -> Batch {
        self.batch += 1;
        let mut batch = Batch::default();
        let mut pieces = Vec::new();
        let page = PAGE_SIZE as u64;
        let mut room = (most_bytes / page * page).max(page);
        while let Some(run) = runs.front_mut() {
            let cell = self.cell(run.block, run.start);
            let is_there = self.windows.contains_key(&(cell.block, cell.start));
            // This batch cannot fill the window, but the next batch can. It is left to the next batch.
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
        // Windows have grown with the batch, so WRITEs are split only now that all windows are known.
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

    /// Forgets a window that the other side has deregistered itself, or whose request failed.
    pub fn lost(&mut self, window: BlockRange) {
        if let Some(known) = self.windows.remove(&(window.block, window.start))
            && known.is_pinned
        {
            self.pinned -= known.end - window.start;
        }
    }

    /// The window of this byte, or the cell to register for it. Next to shorter windows of a probe, the cell is
    /// shorter than the grid. Its length is still a power of two, and its start a multiple of its length.
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

    /// Ensures that the cell is registered or requested by this batch. Returns `false` if the limit prevents
    /// it.
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

    /// Whether the cell extends the window that was requested last. Cells shorter than the grid do not.
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

    /// Splits one run into WRITEs, at window borders and at the longest message.
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

/// Grid, widest window and limit towards a Sterna. `chunk` is the smaller of the two sides' chunk sizes.
fn sterna(chunk: ChunkSize, limit: u64) -> Result<(u64, u64, u64), WireError> {
    if limit < ChunkSize::LEAST.bytes() {
        let rule =
            format!("{limit} bytes may be registered, but a window needs at least 1 MiB: raise the limit");
        return Err(WireError::local("x-sterna-rdma-pinned-limit", 0, SPEC, rule));
    }
    let grid = chunk.twice_within(limit).bytes();
    Ok((grid, ChunkSize::WINDOW.twice_within(limit).bytes().max(grid), limit))
}
