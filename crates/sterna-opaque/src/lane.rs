//! Writes the pages of one receiving lane to an image.
//!
//! A lane receives into its own buffers, and writes from there in page ranges that are as long as possible. Several
//! writes are in progress at the same time. There are two halves: while one is being written to the disk, the other
//! is being filled.

use parking_lot::Mutex;
use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna::internals::PageSink;
use sterna_image::MappedWriter;
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, RamBlock, RamSlice};
use sterna_transport::{PageQueue, QueueOptions};
use sterna_wire::limits::PACKET_PAGES;

use super::failure::image_failed;

/// Pages in one half: four times the pages of a packet.
const HALF_PAGES: u64 = 512;
/// Most pages of one write: 1 MiB.
const PIECE_PAGES: u64 = 256;
/// Most runs that are remembered as being written. At this number the lane waits for them, because no other event
/// ends a round of the main channel.
const RUNS_ON_THE_WAY: usize = 4096;
/// Most concurrent writes of one half.
const DEPTH: usize = 8;

/// Writes one lane's pages to the image.
pub(super) struct ImageLane {
    /// The buffers: one block per half.
    buffers: GuestRam,
    /// `None` after the lane is closed.
    state: Mutex<Option<LaneState>>,
}

struct LaneState {
    writer: MappedWriter,
    halves: [PageQueue; 2],
    /// The half that is being filled, and the number of its filled pages.
    half: usize,
    filled: u64,
    /// Runs that are prepared and not committed, with their place in the half.
    open: Vec<(PageRun, u64)>,
    /// A run that is committed and not yet being written, with its place in the half.
    ready: Option<(PageRun, u64)>,
    /// Pages and runs that are being written. `None` if a page cannot arrive again before the lane is settled.
    on_the_way: Option<(DirtyBitmaps, Vec<PageRun>)>,
}

impl ImageLane {
    /// Creates a lane that writes to `writer`'s image. `again`: the guest's RAM, if a page may arrive again without a
    /// synchronization of the lanes in between.
    pub(super) fn new(writer: &MappedWriter, again: Option<&GuestRam>) -> Result<Self, MigrationError> {
        let half = |name: &str| RamBlock::new(name, HALF_PAGES * PAGE_SIZE as u64, Backing::Anonymous);
        let buffers = GuestRam::new(vec![half("half 0")?, half("half 1")?])?;
        let queue = || {
            let options = QueueOptions { depth: DEPTH, register_ram: true, ..QueueOptions::default() };
            PageQueue::with_ram(writer.file(), &buffers, options)
        };
        let state = LaneState {
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

    /// Closes the lane. Waits for writes in progress, and drops all other pages.
    pub(super) fn close(&self) {
        *self.state.lock() = None;
    }

    fn with<T>(
        &self,
        act: impl FnOnce(&mut LaneState) -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        match &mut *self.state.lock() {
            Some(state) => act(state),
            None => Err(MigrationError::Cancelled),
        }
    }
}

impl LaneState {
    /// Reserves a place for `run` in a half.
    fn place(&mut self, run: PageRun) -> Result<(usize, u64), MigrationError> {
        // All runs of a packet must be in one half, because a prepared run cannot stay behind in the other half.
        if self.open.is_empty() && HALF_PAGES - self.filled < PACKET_PAGES as u64 {
            self.send_ready()?;
            self.half = 1 - self.half;
            self.filled = 0;
            self.halves[self.half].drain().map_err(MigrationError::storage)?;
        }
        let at = self.filled;
        if run.count > HALF_PAGES - at {
            return Err(MigrationError::Internal("a lane prepared more than a packet holds".to_owned()));
        }
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
        if self.on_the_way.as_ref().is_some_and(|(_, runs)| runs.len() >= RUNS_ON_THE_WAY) {
            self.settle()?;
        }
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

    /// Starts the write of the committed run.
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

    /// Waits for the write of a page that arrives again. Otherwise the older content could overwrite the newer one.
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
                state.writer.read(run.block, run.first + index as u64, &mut page).map_err(image_failed)?;
                to.copy_from_slice(&page);
            }
            Ok(())
        })
    }

    fn settle(&self) -> Result<(), MigrationError> {
        self.with(LaneState::settle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_image::{BlockShape, Image, MappedOptions, RamShape, Shape};

    /// Pages of one block in packets of scattered runs. Some pages are sent twice, some become zero.
    #[test]
    fn scattered_packets_end_up_at_their_places_however_they_come() {
        let pages = 3000u64;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
        shape.ram = RamShape { section_id: 1, blocks: Vec::new(), footers: true };
        let length_bytes = pages * PAGE_SIZE as u64;
        let block = BlockShape {
            name: "m0".into(),
            length_bytes,
            address: None,
            host_page_bytes: None,
            is_skipped: false,
        };
        shape.ram.blocks.push(block);
        let ram = GuestRam::new(vec![RamBlock::without_memory("m0", length_bytes).unwrap()]).unwrap();
        let writer = MappedWriter::create(&path, &shape, MappedOptions::default()).unwrap();
        let lane = ImageLane::new(&writer, Some(&ram)).unwrap();
        let mut wanted = vec![0u8; pages as usize];
        let mut random = fastrand::Rng::with_seed(1);
        for step in 0..100u64 {
            // A packet of up to 128 pages, in runs with gaps. No page is in the packet twice.
            let (mut page, mut room, mut runs) = (random.u64(..2000), PACKET_PAGES as u64, Vec::new());
            while room > 0 && page < pages {
                let count = random.u64(1..=40).min(room).min(pages - page);
                runs.push(PageRun { block: 0, first: page, count });
                room -= count;
                page += count + random.u64(..3);
            }
            let places: Vec<_> = runs.iter().map(|run| lane.prepare(*run).unwrap()).collect();
            for (run, place) in runs.iter().zip(places) {
                let content: Vec<u8> =
                    (run.first..run.end()).flat_map(|page| [fill(page, step); PAGE_SIZE]).collect();
                place.copy_from(&content).unwrap();
            }
            for run in &runs {
                lane.commit(*run).unwrap();
                (run.first..run.end()).for_each(|page| wanted[page as usize] = fill(page, step));
            }
            let zero = PageRun { block: 0, first: random.u64(..pages - 9), count: 9 };
            lane.zero(zero).unwrap();
            (zero.first..zero.end()).for_each(|page| wanted[page as usize] = 0);
            let mut now = [0; PAGE_SIZE];
            lane.current(PageRun { count: 1, ..runs[0] }, &mut now).unwrap();
            assert_eq!(now, [wanted[runs[0].first as usize]; PAGE_SIZE]);
        }
        lane.settle().unwrap();
        lane.close();
        writer.complete(&shape).unwrap();

        let image = Image::open(&path).unwrap();
        let mut bytes = vec![0; length_bytes as usize];
        image.mapped().unwrap().read(0, 0, &mut bytes).unwrap();
        for (page, content) in bytes.chunks(PAGE_SIZE).enumerate() {
            assert!(content.iter().all(|byte| *byte == wanted[page]), "page {page}");
        }
    }

    #[test]
    fn commit_of_any_number_of_scattered_pages_remembers_a_bounded_number_of_them() {
        let pages = 4 * RUNS_ON_THE_WAY as u64;
        let directory = tempfile::tempdir().unwrap();
        let mut shape = Shape::empty();
        shape.ram.blocks.push(BlockShape {
            name: "m0".into(),
            length_bytes: pages * PAGE_SIZE as u64,
            address: None,
            host_page_bytes: None,
            is_skipped: false,
        });
        let ram = GuestRam::new(vec![RamBlock::without_memory("m0", pages * PAGE_SIZE as u64).unwrap()]);
        let path = directory.path().join("image");
        let writer = MappedWriter::create(&path, &shape, MappedOptions::default()).unwrap();
        let lane = ImageLane::new(&writer, Some(&ram.unwrap())).unwrap();

        for first in (0..pages).step_by(2) {
            let run = PageRun { block: 0, first, count: 1 };
            lane.prepare(run).unwrap();
            lane.commit(run).unwrap();
        }

        let remembered = lane.with(|state| Ok(state.on_the_way.as_ref().map_or(0, |(_, runs)| runs.len())));
        assert!((1..=RUNS_ON_THE_WAY).contains(&remembered.unwrap()));
        assert_eq!(writer.held_pages() + 1, pages / 2, "all but the one that is ready were sent");
    }

    fn fill(page: u64, step: u64) -> u8 {
        (page * 31 + step * 7) as u8 | 1
    }
}
