//! At the receiver: turns PACKED of one carrier back into DATA.

use std::io;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::cache::Cache;
use super::hash::PageHash;
use super::window::WINDOW_LOG;
use crate::frame::{FrameError, Kind, Method, NamedPage, PAGE_BYTES, PackedHead, Rule};

/// What a PACKED frame contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unpacked {
    /// The plain bytes.
    Bytes(Vec<u8>),
    /// A page to which it refers is not here.
    Missing,
}

/// Unpacks the frames of one carrier, in their order.
pub struct Unpacker {
    cache: Arc<Cache>,
    stream: Decoder<'static>,
    literals: Vec<u8>,
}

impl Unpacker {
    /// An unpacker for a new carrier.
    ///
    /// # Errors
    /// zstd has no memory.
    pub fn new(cache: Arc<Cache>) -> io::Result<Self> {
        let mut stream = Decoder::new()?;
        stream.set_parameter(DParameter::WindowLogMax(WINDOW_LOG))?;
        Ok(Self { cache, stream, literals: Vec::new() })
    }

    /// Unpacks the next frame. It keeps the pages that the frame names, and never makes more bytes than the frame states.
    ///
    /// # Errors
    /// The payload breaks a rule of `specs/relay.md §10`.
    pub fn unpack(&mut self, flow: u32, head: &PackedHead, payload: &[u8]) -> Result<Unpacked, FrameError> {
        let bad = |at, rule| FrameError::new(Kind::Packed.name(), flow, at, rule);
        let (pages, used) = NamedPage::decode_all(flow, head, payload)?;
        let at = crate::frame::Head::BYTES + PackedHead::BYTES + used;
        let references = pages.iter().filter(|page| page.hash.is_some()).count();
        let due = head.length - references * PAGE_BYTES;
        match head.method {
            Method::Plain if payload.len() - used != due => return Err(bad(at, Rule::Short)),
            Method::Plain => {
                self.literals.clear();
                self.literals.extend_from_slice(&payload[used..]);
            }
            Method::Zstd => {
                self.literals.resize(due, 0);
                let filled = expand(&mut self.stream, &payload[used..], &mut self.literals);
                filled.map_err(|rule| bad(at, rule))?;
            }
        }
        let Some(bytes) = self.assemble(head, &pages) else { return Ok(Unpacked::Missing) };
        match xxh3_64(&bytes) {
            found if found != head.check => Err(bad(16, Rule::Content { stated: head.check, found })),
            _ => Ok(Unpacked::Bytes(bytes)),
        }
    }

    /// Puts the pages between the other bytes. All pages are kept before a missing one is reported.
    fn assemble(&self, head: &PackedHead, pages: &[NamedPage]) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(head.length);
        let mut rest = &self.literals[..];
        let mut is_missing = false;
        let mut page_bytes = [0; PAGE_BYTES];
        for page in pages {
            let literal = page.gap + if page.hash.is_some() { 0 } else { PAGE_BYTES };
            let (here, behind) = rest.split_at(literal.min(rest.len()));
            bytes.extend_from_slice(here);
            rest = behind;
            match page.hash {
                Some(hash) => {
                    is_missing |= !self.cache.copy(&PageHash(hash), &mut page_bytes);
                    bytes.extend_from_slice(&page_bytes);
                }
                None => {
                    let kept = &here[here.len().saturating_sub(PAGE_BYTES)..];
                    self.cache.keep(PageHash::of(kept), kept);
                }
            }
        }
        bytes.extend_from_slice(rest);
        (!is_missing).then_some(bytes)
    }
}

/// Fills `out` with the next block of the stream.
fn expand(stream: &mut Decoder<'static>, block: &[u8], out: &mut [u8]) -> Result<(), Rule> {
    let due = out.len();
    let failed = |error: io::Error| Rule::Compressed(error.to_string());
    let mut input = InBuffer::around(block);
    let mut output = OutBuffer::around(out);
    let mut is_over = false;
    loop {
        let before = (input.pos(), output.pos());
        if output.pos() < due {
            is_over |= stream.run(&mut input, &mut output).map_err(failed)? == 0;
        } else {
            let mut spare = [0; 1];
            let mut more = OutBuffer::around(&mut spare[..]);
            is_over |= stream.run(&mut input, &mut more).map_err(failed)? == 0;
            if more.pos() > 0 {
                return Err(Rule::Expands(due));
            }
        }
        // The stream of a carrier has no end.
        if is_over {
            return Err(Rule::Compressed("the stream ends".to_owned()));
        }
        if (input.pos(), output.pos()) == before {
            break;
        }
    }
    if output.pos() < due || input.pos() < block.len() { Err(Rule::Short) } else { Ok(()) }
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}
