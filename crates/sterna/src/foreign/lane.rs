//! Pages of one receiving lane on their way into an image.
//!
//! A lane receives into buffers of its own and writes from there, page ranges as long as possible, several on
//! their way at once. There are two halves: while one is on its way to the disk, the other is filled.

use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_image::MappedWriter;
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock, RamSlice};
use sterna_transport::{PageQueue, QueueOptions};

use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageSink;

/// Pages in one half: four times what a packet brings.
const HALF_PAGES: u64 = 512;
/// Pages that are written in one piece at most: 1 MiB.
const PIECE_PAGES: u64 = 256;
/// Pieces of a half on their way at once.
const DEPTH: usize = 8;

/// One lane's way into the image.
pub(super) struct ImageLane {
    /// The buffers: one block for each half.
    buffers: GuestRam,
    /// None once it is closed.
    state: Mutex<Option<State>>,
}

struct State {
    writer: MappedWriter,
    halves: [PageQueue; 2],
    /// The half that is being filled, and how many of its pages are.
    half: usize,
    filled: u64,
    /// Prepared and not committed: the pages, and where they are in the half.
    open: Vec<(PageRun, u64)>,
    /// Committed and not yet sent on its way.
    ready: Option<(PageRun, u64)>,
    /// Where a page may come again at any time: those that are on their way, and in which runs.
    on_the_way: Option<(DirtyBitmaps, Vec<PageRun>)>,
}

impl ImageLane {
    /// A lane into `writer`'s image. `again`: the guest's RAM, if pages may come again without the lanes being
    /// brought in step between.
    pub fn new(writer: &MappedWriter, again: Option<&GuestRam>) -> Result<Self, MigrationError> {
        let half = |name: &str| RamBlock::new(name, HALF_PAGES * PAGE_SIZE as u64, Backing::Anonymous);
        let buffers = GuestRam::new(vec![half("half 0")?, half("half 1")?])?;
        let queue = || {
            let options = QueueOptions { depth: DEPTH, register_ram: true, ..QueueOptions::default() };
            PageQueue::with_ram(writer.file(), &buffers, options)
        };
        let state = State {
            writer: writer.clone(),
            halves: [queue(), queue()],
            half: 0,
            filled: 0,
            open: Vec::new(),
            ready: None,
            on_the_way: again.map(|ram| (DirtyBitmaps::new(ram), Vec::new())),
        };
        Ok(Self { buffers, state: Mutex::new(Some(state)) })
    }

    /// Lets go of the image. What is on its way is waited for, what is not is dropped.
    pub fn close(&self) {
        *self.lock() = None;
    }

    fn with<T>(
        &self,
        act: impl FnOnce(&mut State) -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        match &mut *self.lock() {
            Some(state) => act(state),
            None => Err(MigrationError::Cancelled),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Finds room for `run` in a half, and remembers it.
    fn place(&mut self, run: PageRun) -> Result<(usize, u64), MigrationError> {
        if run.count > HALF_PAGES - self.filled {
            // What is prepared and not committed would lie in the half that is left behind.
            if !self.open.is_empty() {
                return Err(MigrationError::Internal("a lane prepared more than a packet holds".to_owned()));
            }
            self.send_ready()?;
            self.half = 1 - self.half;
            self.filled = 0;
            self.halves[self.half].drain().map_err(MigrationError::storage)?;
        }
        let at = self.filled;
        self.filled += run.count;
        self.open.push((run, at));
        Ok((self.half, at))
    }

    fn commit(&mut self, run: PageRun) -> Result<(), MigrationError> {
        let Some(index) = self.open.iter().position(|(open, _)| *open == run) else {
            return Err(MigrationError::Internal(format!("commit of {run:?}, which was not prepared")));
        };
        let (_, at) = self.open.remove(index);
        self.come_after(run)?;
        if let Some((bits, runs)) = &mut self.on_the_way {
            bits.block(run.block).set_range(run.first, run.count);
            match runs.last_mut().filter(|last| last.block == run.block && last.end() == run.first) {
                Some(last) => last.count += run.count,
                None => runs.push(run),
            }
        }
        let follows = |(ready, start): &(PageRun, u64)| {
            ready.block == run.block
                && ready.end() == run.first
                && start + ready.count == at
                && ready.count + run.count <= PIECE_PAGES
        };
        match &mut self.ready {
            Some(ready) if follows(ready) => ready.0.count += run.count,
            _ => {
                self.send_ready()?;
                self.ready = Some((run, at));
            }
        }
        Ok(())
    }

    /// Sends what is committed on its way.
    fn send_ready(&mut self) -> Result<(), MigrationError> {
        let Some((run, at)) = self.ready.take() else { return Ok(()) };
        let place = self.writer.pages_offset(run.block) + run.first * PAGE_SIZE as u64;
        let (offset, length) = (at * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE);
        let half = self.half;
        self.halves[half].write_ram(place, half, offset, length).map_err(MigrationError::storage)?;
        self.writer.mark(run.block, run.first, run.count);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), MigrationError> {
        self.send_ready()?;
        for half in &mut self.halves {
            half.drain().map_err(MigrationError::storage)?;
        }
        if let Some((bits, runs)) = &mut self.on_the_way {
            for run in runs.drain(..) {
                bits.block(run.block).clear_range(run.first, run.count);
            }
        }
        Ok(())
    }

    /// A page that comes again must not overtake itself.
    fn come_after(&mut self, run: PageRun) -> Result<(), MigrationError> {
        let again = self
            .on_the_way
            .as_ref()
            .is_some_and(|(bits, _)| bits.block(run.block).count_range(run.first, run.count) > 0);
        if again { self.settle() } else { Ok(()) }
    }
}

impl PageSink for ImageLane {
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let (half, at) = self.with(|state| state.place(run))?;
        let half = self.buffers.block(half);
        Ok(half.slice(at * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE)?)
    }

    fn commit(&self, run: PageRun) -> Result<(), MigrationError> {
        self.with(|state| state.commit(run))
    }

    fn zero(&self, run: PageRun) -> Result<(), MigrationError> {
        self.with(|state| {
            state.come_after(run)?;
            state.writer.zero(run.block, run.first, run.count);
            Ok(())
        })
    }

    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError> {
        self.with(|state| {
            state.settle()?;
            for (index, to) in to.chunks_exact_mut(PAGE_SIZE).enumerate() {
                let mut page = [0; PAGE_SIZE];
                state.writer.read(run.block, run.first + index as u64, &mut page)?;
                to.copy_from_slice(&page);
            }
            Ok(())
        })
    }

    fn settle(&self) -> Result<(), MigrationError> {
        self.with(State::settle)
    }
}
