//! A sending lane's window onto an image: a ring of buffers into which pages are read.
//!
//! A run is needed twice: when it is searched for zero pages, and when its packet is sent. The ring is long enough
//! that the run is usually still there the second time. A run that has left the ring is read again.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::error::MigrationError;
use sterna::internals::PageReader;
use sterna::internals::PageRun;
use sterna_ram::{Backing, PAGE_SIZE, RamBlock, RamSlice};
use sterna_transport::PageFile;
use sterna_wire::limits::PACKET_PAGES;

/// Pages in the ring: eight packets.
const RING_PAGES: u64 = 8 * PACKET_PAGES as u64;
/// Age limit, in pages: older runs are read again. All runs of one packet must stay in the ring while the packet is
/// built. Building it may read as many pages again, and may leave a gap at the ring's end.
const YOUNG_PAGES: u64 = RING_PAGES - 3 * PACKET_PAGES as u64;

pub(super) struct Window {
    file: Arc<PageFile>,
    /// Offset of each block's pages in the file.
    places: Vec<u64>,
    ring: RamBlock,
    state: Mutex<WindowState>,
}

#[derive(Default)]
struct WindowState {
    /// Number of pages that were put into the ring so far.
    head: u64,
    /// Runs in the ring, each with the value of `head` when it was added; oldest first.
    held: VecDeque<(PageRun, u64)>,
}

impl Window {
    /// Creates a window onto `file`. `places` contains the offset of each block's pages.
    pub(super) fn new(file: Arc<PageFile>, places: Vec<u64>) -> Result<Self, MigrationError> {
        let ring = RamBlock::new("window", RING_PAGES * PAGE_SIZE as u64, Backing::Anonymous)?;
        Ok(Self { file, places, ring, state: Mutex::default() })
    }

    fn read(&self, state: &mut WindowState, run: PageRun) -> Result<u64, MigrationError> {
        let too_much = || MigrationError::Internal(format!("{run:?} does not fit a window"));
        let place = self.places.get(run.block).filter(|_| run.count <= PACKET_PAGES as u64);
        let place = place.ok_or_else(too_much)?;
        if state.head % RING_PAGES + run.count > RING_PAGES {
            state.head = state.head.next_multiple_of(RING_PAGES);
        }
        let at = state.head;
        state.head += run.count;
        while state.held.front().is_some_and(|(_, at)| state.head - at > RING_PAGES) {
            state.held.pop_front();
        }
        let content = self.slice(at, run.count)?;
        self.file
            .read_at(place + run.first * PAGE_SIZE as u64, &[content])
            .map_err(MigrationError::storage)?;
        state.held.push_back((run, at));
        Ok(at)
    }

    fn slice(&self, at: u64, count: u64) -> Result<RamSlice<'_>, MigrationError> {
        Ok(self.ring.slice(at % RING_PAGES * PAGE_SIZE as u64, count as usize * PAGE_SIZE)?)
    }
}

impl PageReader for Window {
    fn content(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let mut state = self.state.lock();
        let holds = |(held, at): &&(PageRun, u64)| {
            held.block == run.block
                && held.first <= run.first
                && run.end() <= held.end()
                && state.head - at <= YOUNG_PAGES
        };
        let at = match state.held.iter().rev().find(holds) {
            Some((held, at)) => at + (run.first - held.first),
            None => self.read(&mut state, run)?,
        };
        self.slice(at, run.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_transport::{IoPart, OpenOptions};

    #[test]
    fn content_asked_for_again_after_any_number_of_others_is_the_pages_own() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pages");
        let pages = 4000u64;
        let file = PageFile::create(&path, Default::default()).unwrap();
        for page in 0..pages {
            file.write_at(4096 + page * 4096, &[IoPart::Bytes(&[page as u8 ^ (page >> 8) as u8; 4096])])
                .unwrap();
        }
        file.complete().unwrap();
        let file = PageFile::open(&path, OpenOptions::default()).unwrap();
        let window = Window::new(Arc::new(file), vec![4096]).unwrap();

        let mut asked = Vec::new();
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..500 {
            let count = random.u64(1..=128);
            let run = PageRun { block: 0, first: random.u64(..pages - count), count };
            asked.push(run);
            let again = asked[asked.len().saturating_sub(random.usize(1..=12))];
            for run in [run, again] {
                let mut content = vec![0; run.count as usize * 4096];
                window.content(run).unwrap().copy_to(&mut content).unwrap();
                for (page, bytes) in (run.first..).zip(content.chunks(4096)) {
                    assert!(bytes.iter().all(|byte| *byte == page as u8 ^ (page >> 8) as u8), "page {page}");
                }
            }
        }
    }

    #[test]
    fn content_of_a_packets_runs_stays_while_the_packet_is_put_together() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pages");
        let file = PageFile::create(&path, Default::default()).unwrap();
        file.set_len((1 << 14) * 4096).unwrap();
        let content = |index: u64| [index as u8 + 1; 4096];
        for index in 0..128u64 {
            file.write_at(index * 128 * 4096, &[IoPart::Bytes(&content(index))]).unwrap();
        }
        file.complete().unwrap();
        let file = PageFile::open(&path, OpenOptions::default()).unwrap();
        let window = Window::new(Arc::new(file), vec![0]).unwrap();

        // The zero search: 128 runs of 128 pages. One page of each goes into the packet.
        let runs: Vec<_> =
            (0..128).map(|index| PageRun { block: 0, first: index * 128, count: 128 }).collect();
        for run in &runs {
            window.content(*run).unwrap();
        }
        // Runs that are still in the ring come first, so that runs that are read again do not replace them.
        let (old, held) = runs.split_at(120);
        let singles: Vec<_> = held.iter().chain(old).map(|run| PageRun { count: 1, ..*run }).collect();
        let packet: Vec<_> = singles.iter().map(|run| window.content(*run).unwrap()).collect();

        for (run, slice) in singles.iter().zip(packet) {
            let mut found = [0; 4096];
            slice.copy_to(&mut found).unwrap();
            assert_eq!(found, content(run.first / 128), "{run:?}");
        }
    }
}
