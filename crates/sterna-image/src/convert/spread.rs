//! Legacy to mapped-ram: one thread reads records, several put pages to their places.
//!
//! A page may come again, and the last one counts. So a page always goes to the same thread, by its stripe of
//! 1 MiB, and each thread takes its work in order. Neighbours within a stripe go over together.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};

use sterna_wire::PAGE_SIZE;

use super::Counts;
use crate::ImageError;
use crate::model::Shape;
use crate::read::PageVisitor;
use crate::read::begun::Begun;
use crate::read::body::{End, RecordSink};
use crate::write::{MappedLane, MappedWriter};

/// Pages in a stripe.
const STRIPE: u64 = 256;
/// Pieces of work that may wait for a thread.
const WAITING: usize = 16;

/// Pages for a thread.
enum Work {
    Pages(usize, u64, Vec<u8>),
    Zero(usize, u64, u64),
    Delta(usize, u64, Vec<u8>),
}

/// Reads the rest of `begun`; its pages go to `writer`.
pub(super) fn spread(
    begun: Begun,
    writer: &MappedWriter,
    wanted: usize,
    counts: &Counts,
) -> Result<(Shape, End), ImageError> {
    // One reads and decompresses; more than four write faster than it can read.
    let count = super::threads(wanted).clamp(1, 4);
    thread::scope(|scope| {
        let mut lanes = Vec::new();
        let mut threads = Vec::new();
        for _ in 0..count {
            let (sender, receiver) = sync_channel(WAITING);
            let lane = writer.lane();
            lanes.push(Lane { sender, work: None });
            threads.push(scope.spawn(move || write(lane, &receiver)));
        }
        let mut spread = Spread { lanes, counts };
        let read = begun.finish(&mut spread);
        let sent = spread.lanes.iter_mut().try_for_each(Lane::send);
        drop(spread);
        // What a thread says explains why nothing more could be sent to it.
        let written: Result<Vec<()>, ImageError> = threads.into_iter().map(join).collect();
        match (read, written, sent) {
            (_, Err(error), _) | (Err(error), ..) | (.., Err(error)) => Err(error),
            (Ok(done), Ok(_), Ok(())) => Ok(done),
        }
    })
}

fn join(thread: ScopedJoinHandle<'_, Result<(), ImageError>>) -> Result<(), ImageError> {
    thread.join().unwrap_or_else(|_| Err(gone()))
}

fn gone() -> ImageError {
    ImageError::Request("a thread that writes pages has panicked".to_owned())
}

/// A thread's work.
fn write(mut lane: MappedLane, work: &Receiver<Work>) -> Result<(), ImageError> {
    for work in work {
        match work {
            Work::Pages(block, first, content) => lane.pages(block, first, &content)?,
            Work::Zero(block, first, count) => PageVisitor::zero(&mut lane, block, first, count)?,
            Work::Delta(block, page, delta) => lane.delta(block, page, &delta)?,
        }
    }
    lane.drain()
}

/// The way to one thread.
struct Lane {
    sender: SyncSender<Work>,
    /// Pages that are being collected.
    work: Option<Work>,
}

impl Lane {
    fn send(&mut self) -> Result<(), ImageError> {
        match self.work.take() {
            Some(work) => self.sender.send(work).map_err(|_| gone()),
            None => Ok(()),
        }
    }

    fn page(&mut self, block: usize, page: u64, content: &[u8]) -> Result<(), ImageError> {
        match &mut self.work {
            Some(Work::Pages(last, first, bytes))
                if *last == block && follows(*first, bytes.len() / PAGE_SIZE, page) =>
            {
                bytes.extend_from_slice(content);
            }
            _ => {
                self.send()?;
                self.work = Some(Work::Pages(block, page, content.to_vec()));
            }
        }
        Ok(())
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError> {
        match &mut self.work {
            Some(Work::Zero(last, first, count))
                if *last == block && follows(*first, *count as usize, page) =>
            {
                *count += 1;
            }
            _ => {
                self.send()?;
                self.work = Some(Work::Zero(block, page, 1));
            }
        }
        Ok(())
    }
}

/// Whether `page` comes right behind `count` pages from `first` on, in the same stripe.
fn follows(first: u64, count: usize, page: u64) -> bool {
    first + count as u64 == page && page / STRIPE == first / STRIPE
}

/// Hands records out to the threads.
struct Spread<'a> {
    lanes: Vec<Lane>,
    counts: &'a Counts,
}

impl Spread<'_> {
    fn lane(&mut self, block: usize, page: u64) -> &mut Lane {
        let index = (page / STRIPE + block as u64) % self.lanes.len() as u64;
        &mut self.lanes[index as usize]
    }
}

impl RecordSink for Spread<'_> {
    fn page(&mut self, block: usize, page: u64, content: &[u8; PAGE_SIZE]) -> Result<(), ImageError> {
        // Zeros that were sent as a page need no room.
        if content.iter().all(|byte| *byte == 0) {
            return self.zero(block, page);
        }
        self.counts.data.fetch_add(1, Ordering::Relaxed);
        self.lane(block, page).page(block, page, content)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ImageError> {
        self.counts.zero.fetch_add(1, Ordering::Relaxed);
        self.lane(block, page).zero(block, page)
    }

    fn delta(&mut self, block: usize, page: u64, delta: &[u8]) -> Result<(), ImageError> {
        self.counts.data.fetch_add(1, Ordering::Relaxed);
        let lane = self.lane(block, page);
        lane.send()?;
        lane.work = Some(Work::Delta(block, page, delta.to_vec()));
        Ok(())
    }
}
