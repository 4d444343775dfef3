//! At the sender: turns DATA of one carrier into PACKED.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;
use zstd::bulk::Compressor;
use zstd::stream::raw::{CParameter, Encoder, InBuffer, Operation, OutBuffer};

use super::effort::Effort;
use super::hash::PageHash;
use super::known::Known;
use super::mode::Mode;
use super::trial::Trial;
use super::window::WINDOW_LOG;
use crate::frame::{DATA_BYTES, Frame, Head, Method, NamedPage, PAGE_BYTES, PackedHead};

/// Frames with fewer bytes are sent as they are.
const LEAST: usize = 64;
/// Flows whose trials are remembered.
const MOST_FLOWS: usize = 1024;

/// Turns the bulk data of one carrier into PACKED frames.
pub struct Packer {
    mode: Mode,
    /// Distinguishes the carrier from others in [`Known`].
    carrier: u64,
    known: Arc<Mutex<Known>>,
    stream: Encoder<'static>,
    sampler: Compressor<'static>,
    trials: HashMap<u32, Trial>,
    effort: Effort,
    literals: Vec<u8>,
    figures: Figures,
}

/// A frame, and its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// PACKED.
    pub frame: Frame,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// Sums over the bulk data of a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Bytes before compression, packed or not.
    pub plain: u64,
    /// Bytes that were sent for them, with the heads of frames.
    pub sent: u64,
    /// Pages that were sent as references.
    pub references: u64,
    /// Time of compressing and hashing.
    pub spent: Duration,
    /// Frames that the receiver asked for again, because it lacked a page.
    pub misses: u64,
}

impl Figures {
    /// Adds other sums.
    pub fn add(&mut self, other: Figures) {
        self.plain += other.plain;
        self.sent += other.sent;
        self.references += other.references;
        self.spent += other.spent;
        self.misses += other.misses;
    }
}

impl Packer {
    /// A packer for a new carrier. No two carriers of a session have the same number; 0 is none.
    ///
    /// # Errors
    /// zstd has no memory.
    pub fn new(mode: Mode, carrier: u64, known: Arc<Mutex<Known>>) -> io::Result<Self> {
        let mut stream = Encoder::new(i32::from(mode.level()))?;
        stream.set_parameter(CParameter::WindowLog(WINDOW_LOG))?;
        Ok(Self {
            mode,
            carrier,
            known,
            stream,
            sampler: Compressor::new(i32::from(mode.level()))?,
            trials: HashMap::new(),
            effort: Effort::default(),
            literals: Vec::new(),
            figures: Figures::default(),
        })
    }

    /// Packs the bytes of DATA at `offset`. `None`: they are sent as they are.
    ///
    /// `pages` has the positions in `bytes` at which whole pages begin, in order. `is_again`: some of the bytes were
    /// sent before, and go without references.
    ///
    /// # Errors
    /// zstd failed. The carrier must be closed, because both ends of its stream differ now.
    pub fn pack(
        &mut self,
        flow: u32,
        offset: u64,
        bytes: &[u8],
        pages: &[usize],
        is_again: bool,
        clock: &dyn Fn() -> Duration,
    ) -> io::Result<Option<Packed>> {
        let began = clock();
        let packed = match self.decides(flow, bytes) {
            true => Some(self.encode(flow, offset, bytes, pages, is_again)?),
            false => None,
        };
        let now = clock();
        let spent = now.saturating_sub(began);
        self.effort.sent(now, bytes.len(), spent);
        let payload = packed.as_ref().map_or(bytes.len(), |packed| packed.payload.len());
        let head = if packed.is_some() { PackedHead::BYTES } else { 8 };
        if packed.is_some()
            && let Some(trial) = self.trials.get_mut(&flow)
        {
            trial.packed(bytes.len(), payload);
        }
        self.figures.plain += bytes.len() as u64;
        self.figures.sent += (Head::BYTES + head + payload) as u64;
        self.figures.spent += spent;
        Ok(packed)
    }

    /// Takes the sums since the last call.
    pub fn take_figures(&mut self) -> Figures {
        std::mem::take(&mut self.figures)
    }

    fn decides(&mut self, flow: u32, bytes: &[u8]) -> bool {
        if self.mode == Mode::Off || !(LEAST..=DATA_BYTES).contains(&bytes.len()) {
            return false;
        }
        if self.mode != Mode::Auto {
            return true;
        }
        if !self.effort.packs() {
            return false;
        }
        if self.trials.len() >= MOST_FLOWS && !self.trials.contains_key(&flow) {
            self.trials.clear();
        }
        let sampler = &mut self.sampler;
        let try_sample = |sample: &[u8]| sampler.compress(sample).map_or(sample.len(), |out| out.len());
        self.trials.entry(flow).or_default().packs(bytes, try_sample)
    }

    fn encode(
        &mut self,
        flow: u32,
        offset: u64,
        bytes: &[u8],
        pages: &[usize],
        is_again: bool,
    ) -> io::Result<Packed> {
        let named = self.name(bytes, pages, is_again);
        let mut payload = Vec::with_capacity(bytes.len() / 2);
        named.iter().for_each(|page| page.encode(&mut payload));
        self.literals.clear();
        let mut at = 0;
        for page in &named {
            let ends = at + page.gap + PAGE_BYTES;
            let literal_end = if page.hash.is_some() { at + page.gap } else { ends };
            self.literals.extend_from_slice(&bytes[at..literal_end]);
            at = ends;
        }
        self.literals.extend_from_slice(&bytes[at..]);
        let method = if self.literals.len() < LEAST { Method::Plain } else { Method::Zstd };
        match method {
            Method::Plain => payload.extend_from_slice(&self.literals),
            Method::Zstd => compress(&mut self.stream, &self.literals, &mut payload)?,
        }
        self.figures.references += named.iter().filter(|page| page.hash.is_some()).count() as u64;
        let check = xxh3_64(bytes);
        let head = PackedHead { offset, check, length: bytes.len(), pages: named.len(), method };
        Ok(Packed { frame: Frame::Packed { flow, head, payload: payload.len() }, payload })
    }

    /// Names the pages that the receiver has or keeps.
    fn name(&mut self, bytes: &[u8], pages: &[usize], is_again: bool) -> Vec<NamedPage> {
        let mut named = Vec::new();
        if pages.is_empty() || !self.known.lock().is_used() {
            return named;
        }
        let mut ends = 0;
        for begin in pages {
            let Some(page) = bytes.get(*begin..begin + PAGE_BYTES) else { continue };
            let Some(gap) = begin.checked_sub(ends) else { continue };
            let hash = PageHash::of(page);
            let mut known = self.known.lock();
            if !is_again && known.has(&hash, self.carrier) {
                named.push(NamedPage { gap, hash: Some(hash.0) });
            } else if known.note(&hash, self.carrier) {
                named.push(NamedPage { gap, hash: None });
            } else {
                continue;
            }
            ends = begin + PAGE_BYTES;
        }
        named
    }
}

/// Appends `bytes` as the next block of the stream.
pub(super) fn compress(stream: &mut Encoder<'static>, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
    let mut input = InBuffer::around(bytes);
    while input.pos() < bytes.len() {
        with_room(out, bytes.len(), |output| stream.run(&mut input, output).map(drop))?;
    }
    while with_room(out, 4096, |output| stream.flush(output))? > 0 {}
    Ok(())
}

/// Lets `step` write after the bytes that `out` contains.
fn with_room<T>(
    out: &mut Vec<u8>,
    room: usize,
    step: impl FnOnce(&mut OutBuffer<'_, [u8]>) -> io::Result<T>,
) -> io::Result<T> {
    let start = out.len();
    out.resize(start + room + 1024, 0);
    let mut output = OutBuffer::around(&mut out[start..]);
    let result = step(&mut output);
    let written = output.pos();
    out.truncate(start + written);
    result
}

impl std::fmt::Debug for Packer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Packer").field("mode", &self.mode).finish_non_exhaustive()
    }
}
