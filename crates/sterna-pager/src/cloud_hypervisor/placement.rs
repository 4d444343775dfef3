//! Places the image's memory into the guest's, each frame once.
//!
//! A guest may write to a page as soon as it is there. A frame is therefore claimed before it is written, and never written
//! again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use super::error::SessionError;
use super::image::SavedMachine;
use super::memory::GuestMemory;
use crate::guest::is_zero;
use crate::source::{HUGE_BYTES, PAGE_BYTES};

const MISSING: u8 = 0;
/// A thread writes the frame.
const PLACING: u8 = 1;
const PLACED: u8 = 2;
/// The frame could not be read. Only a request of the VMM repeats the read.
const LEFT_OUT: u8 = 3;

/// The memory of one guest, and which frames of the image are there.
pub(super) struct Placement {
    pub(super) machine: Arc<SavedMachine>,
    pub(super) memory: GuestMemory,
    frames: Vec<AtomicU8>,
    frame_bytes: u64,
    /// Whether pages of zeros are written, too. Otherwise they stay holes.
    with_zeros: bool,
    /// Bytes that are missing.
    left: AtomicU64,
    lock: Mutex<()>,
    changed: Condvar,
    pub(super) content_pages: AtomicU64,
    pub(super) zero_pages: AtomicU64,
}

/// A frame that this thread writes. Without [`done`](Self::done) it is not there afterwards.
struct Claim<'a> {
    placement: &'a Placement,
    frame: u64,
    result: u8,
}

impl Placement {
    pub(super) fn new(machine: Arc<SavedMachine>, memory: GuestMemory, with_zeros: bool) -> Self {
        let (bytes, frame_bytes) = (machine.memory_bytes(), machine.content.source.frame_bytes());
        Self {
            machine,
            memory,
            frames: (0..bytes.div_ceil(frame_bytes)).map(|_| AtomicU8::new(MISSING)).collect(),
            frame_bytes,
            with_zeros,
            left: AtomicU64::new(bytes),
            lock: Mutex::new(()),
            changed: Condvar::new(),
            content_pages: AtomicU64::new(0),
            zero_pages: AtomicU64::new(0),
        }
    }

    /// Number of frames.
    pub(super) fn frames(&self) -> u64 {
        self.frames.len() as u64
    }

    /// The frame that contains a byte of the image's memory.
    pub(super) fn frame_of(&self, offset: u64) -> u64 {
        offset / self.frame_bytes
    }

    /// Pages that are not there yet.
    pub(super) fn missing_pages(&self) -> u64 {
        self.left.load(Ordering::Acquire) / PAGE_BYTES
    }

    /// The first of these frames that no thread has begun to place.
    pub(super) fn next_missing(&self, frames: std::ops::Range<u64>) -> Option<u64> {
        let end = frames.end.min(self.frames());
        let state = |frame: &u64| self.frames[*frame as usize].load(Ordering::Relaxed);
        (frames.start..end).find(|frame| state(frame) == MISSING)
    }

    /// Places a frame that a thread waits for, and returns when it is there. `buffer` has room for a frame.
    pub(super) fn ensure(&self, frame: u64, buffer: &mut [u8]) -> Result<(), SessionError> {
        loop {
            match self.frames[frame as usize].load(Ordering::Acquire) {
                PLACED => return Ok(()),
                PLACING => self.wait(frame),
                state => {
                    if let Some(claim) = self.claim(frame, state) {
                        return claim.place(buffer);
                    }
                }
            }
        }
    }

    /// Places a frame if it is missing. An error is returned once; the frame is then left out.
    pub(super) fn fill(&self, frame: u64, buffer: &mut [u8]) -> Result<(), SessionError> {
        self.claim(frame, MISSING).map_or(Ok(()), |claim| claim.place(buffer))
    }

    /// Bytes of memory that [`ensure`](Self::ensure) and [`fill`](Self::fill) need.
    pub(super) fn buffer(&self) -> Vec<u8> {
        vec![0; self.frame_bytes.min(HUGE_BYTES) as usize]
    }

    fn claim(&self, frame: u64, state: u8) -> Option<Claim<'_>> {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let claimed = self.frames[frame as usize].compare_exchange(state, PLACING, success, failure);
        claimed.is_ok().then_some(Claim { placement: self, frame, result: LEFT_OUT })
    }

    fn wait(&self, frame: u64) {
        let mut lock = self.lock.lock();
        while self.frames[frame as usize].load(Ordering::Acquire) == PLACING {
            self.changed.wait(&mut lock);
        }
    }
}

impl Claim<'_> {
    fn place(mut self, buffer: &mut [u8]) -> Result<(), SessionError> {
        let Placement { machine, with_zeros, .. } = self.placement;
        let span = machine.content.span(self.frame * self.placement.frame_bytes, PAGE_BYTES);
        let content = &mut buffer[..(span.end - span.start) as usize];
        let is_empty = machine.content.source.is_zero(span.start, content.len() as u64);
        match is_empty {
            true => content.fill(0),
            false => machine.content.read(span.start, content)?,
        }
        let pages = content.len() as u64 / PAGE_BYTES;
        let zeros = match is_empty {
            true => pages,
            false => content.chunks(PAGE_BYTES as usize).filter(|page| is_zero(page)).count() as u64,
        };
        match (with_zeros, zeros) {
            (true, _) | (_, 0) => self.write(span.start, content)?,
            (false, zeros) if zeros == pages => {}
            (false, _) => self.write_held(span.start, content)?,
        }
        self.placement.zero_pages.fetch_add(zeros, Ordering::Relaxed);
        self.placement.content_pages.fetch_add(pages - zeros, Ordering::Relaxed);
        self.placement.left.fetch_sub(pages * PAGE_BYTES, Ordering::AcqRel);
        self.result = PLACED;
        Ok(())
    }

    /// Writes the runs of pages that are not zero.
    fn write_held(&self, start: u64, content: &[u8]) -> Result<(), SessionError> {
        let page = PAGE_BYTES as usize;
        let mut at = 0;
        while at < content.len() {
            let rest = &content[at..];
            let is_held = !is_zero(&rest[..page]);
            let pages = rest.chunks(page).take_while(|page| is_zero(page) != is_held).count();
            if is_held {
                self.write(start + at as u64, &rest[..pages * page])?;
            }
            at += pages * page;
        }
        Ok(())
    }

    fn write(&self, offset: u64, content: &[u8]) -> Result<(), SessionError> {
        let Placement { machine, memory, .. } = self.placement;
        let written = memory.write(&machine.layout, offset, content);
        written.map_err(SessionError::system("writing to the guest's memory (a memfd)"))
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.placement.frames[self.frame as usize].store(self.result, Ordering::Release);
        let _lock = self.placement.lock.lock();
        self.placement.changed.notify_all();
    }
}
