//! Converts legacy to mapped-ram: one thread reads records, several threads write pages to their places.
//!
//! A stream may contain a page several times, and the last content counts. Therefore all records of a page go to the
//! same thread, chosen by the page's stripe of 1 MiB. Each thread processes its work in order. Adjacent pages within
//! a stripe are written together.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, Builder, ScopedJoinHandle};

use sterna_wire::PAGE_SIZE;

use super::counts::Counts;
use super::request::threads;
use crate::ImageError;
use crate::model::Shape;
use crate::read::begun::Begun;
use crate::read::body::{End, RecordSink};
use crate::read::visitor::PageVisitor;
use crate::write::{MappedLane, MappedWriter};

/// Pages in a stripe (1 MiB).
const STRIPE: u64 = 256;
/// The limit of queued pieces of work for each thread.
const WAITING: usize = 16;

/// Pages for one writing thread.
enum Work {
    Pages(usize, u64, Vec<u8>),
    Zero(usize, u64, u64),
    Delta(usize, u64, Vec<u8>),
}

/// Reads the remaining stream of `begun` and writes its pages to `writer`.
pub(super) fn spread(
    begun: Begun,
    writer: &MappedWriter,
    wanted: usize,
    counts: &Counts,
) -> Result<(Shape, End), ImageError> {
    // One thread reads and decompresses. More than four writers would be faster than this reader.
    let count = threads(wanted).clamp(1, 4);
    thread::scope(|scope| {
        let mut lanes = Vec::new();
        let mut threads = Vec::new();
        for _ in 0..count {
            let (sender, receiver) = sync_channel(WAITING);
            let lane = writer.lane();
            match Builder::new().spawn_scoped(scope, move || write(lane, &receiver)) {
                Ok(thread) => threads.push(thread),
                // If the host refuses a thread, fewer threads do the work, but at least one is needed.
                Err(_) if !lanes.is_empty() => break,
                Err(error) => {
                    let file = writer.file().path().display().to_string();
                    return Err(ImageError::io(&file, "starting a thread that writes pages", error));
                }
            }
            lanes.push(Lane { sender, work: None });
        }
        let mut spread = Spread { lanes, counts };
        let read = begun.finish(&mut spread);
        let sent = spread.lanes.iter_mut().try_for_each(Lane::send);
        drop(spread);
        // The error of a writing thread comes first, because it explains why sending to that thread failed.
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

/// Runs a writing thread until its sender is dropped.
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

/// The sending end for one writing thread.
struct Lane {
    sender: SyncSender<Work>,
    /// Pages that are collected and not sent yet.
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

/// Whether `page` directly follows `count` pages from `first`, in the same stripe.
fn follows(first: u64, count: usize, page: u64) -> bool {
    first + count as u64 == page && page / STRIPE == first / STRIPE
}

/// Distributes records to the threads.
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
        // A page record that contains only zeros takes no room in the target.
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
