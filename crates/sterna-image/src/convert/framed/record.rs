//! Records how a legacy stream is put together from pages and other bytes.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_store::{ImageWriter, Piece, Recipe};
use sterna_wire::PAGE_SIZE;
use sterna_wire::ram::flags;

use super::bytes::push_bytes;
use crate::read::begun::Begun;

/// Takes the stream's bytes from a tee, and the places of its pages from the reader.
///
/// The reader reports a page before its bytes arrive here.
#[derive(Clone)]
pub(super) struct Recorder(Arc<Mutex<State>>);

struct State {
    /// Offset of the next byte in the stream.
    position: u64,
    events: VecDeque<Event>,
    /// Bytes of the page that the stream is in.
    skip: usize,
    /// Pieces so far, and the bytes after them that belong to no piece yet.
    parts: Vec<Part>,
    bytes: Vec<u8>,
}

enum Event {
    /// The content of a page begins at the offset.
    Page(u64, u32, u64),
    /// The record of a zero page ends at the offset.
    Zero(u64, u64),
}

enum Part {
    Bytes(Vec<u8>),
    Piece(Piece),
}

impl Recorder {
    pub(super) fn new(begun: &Begun) -> Self {
        let position = if begun.format.is_compressed() { 0 } else { begun.stream_offset };
        let state =
            State { position, events: VecDeque::new(), skip: 0, parts: Vec::new(), bytes: Vec::new() };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(super) fn page(&self, position: u64, block: usize, page: u64) {
        self.event(Event::Page(position, block as u32, page));
    }

    pub(super) fn zero(&self, end: u64, page: u64) {
        self.event(Event::Zero(end, page));
    }

    fn event(&self, event: Event) {
        let mut state = self.0.lock();
        if state.position != u64::MAX {
            state.events.push_back(event);
        }
    }

    /// Gives up the record, because the stream has several contents of a page.
    pub(super) fn give_up(&self) {
        let mut state = self.0.lock();
        (state.events, state.parts, state.bytes) = (VecDeque::new(), Vec::new(), Vec::new());
        state.position = u64::MAX;
    }

    /// The recipe of the stream; its other bytes go to `writer`.
    pub(super) fn finish(&self, writer: &ImageWriter) -> Recipe {
        let mut state = self.0.lock();
        state.end_bytes();
        let mut recipe = Recipe::default();
        for part in std::mem::take(&mut state.parts) {
            match part {
                Part::Bytes(bytes) => push_bytes(writer, &mut recipe, &bytes),
                Part::Piece(piece) => recipe.push(piece),
            }
        }
        recipe
    }
}

impl Write for Recorder {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.lock();
        if state.position != u64::MAX {
            state.take(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl State {
    fn take(&mut self, mut bytes: &[u8]) {
        loop {
            let skipped = self.skip.min(bytes.len());
            (self.skip, self.position) = (self.skip - skipped, self.position + skipped as u64);
            bytes = &bytes[skipped..];
            let place = self.events.front().map(|event| match event {
                Event::Page(place, ..) | Event::Zero(place, _) => *place,
            });
            let ahead = place.map_or(u64::MAX, |place| place.saturating_sub(self.position));
            let count = ahead.min(bytes.len() as u64) as usize;
            self.bytes.extend_from_slice(&bytes[..count]);
            self.position += count as u64;
            bytes = &bytes[count..];
            if place != Some(self.position) {
                return;
            }
            match self.events.pop_front() {
                Some(Event::Page(_, block, page)) => {
                    let piece = match self.ends_with(page, flags::PAGE, &[]) {
                        true => Piece::PageRecords { block, first: page, count: 1 },
                        false => {
                            let length = PAGE_SIZE as u64;
                            Piece::Copy { block, offset: page * length, length }
                        }
                    };
                    self.piece(piece);
                    self.skip = PAGE_SIZE;
                }
                Some(Event::Zero(_, page)) => {
                    if self.ends_with(page, flags::ZERO, &[0]) {
                        self.piece(Piece::ZeroRecords { first: page, count: 1 });
                    }
                }
                None => return,
            }
        }
    }

    /// Removes a record's word from the end of the bytes, if it is one of a run.
    fn ends_with(&mut self, page: u64, flag: u64, fill: &[u8]) -> bool {
        let word = ((page * PAGE_SIZE as u64) | flag | flags::CONTINUE).to_be_bytes();
        let record = [&word[..], fill].concat();
        let is_there = self.bytes.ends_with(&record);
        if is_there {
            self.bytes.truncate(self.bytes.len() - record.len());
        }
        is_there
    }

    fn piece(&mut self, piece: Piece) {
        self.end_bytes();
        if let Some(Part::Piece(last)) = self.parts.last_mut()
            && let Some(joined) = last.joined(piece)
        {
            *last = joined;
            return;
        }
        self.parts.push(Part::Piece(piece));
    }

    fn end_bytes(&mut self) {
        if !self.bytes.is_empty() {
            self.parts.push(Part::Bytes(std::mem::take(&mut self.bytes)));
        }
    }
}
