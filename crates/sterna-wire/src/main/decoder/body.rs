//! Bodies of sections other than RAM.
//!
//! The decoder takes them over piece by piece, so that the caller's buffer stays small.

use super::{DecoderState, MainDecoder, Taken, silent};
use crate::main::element::FOOTER;
use crate::main::footer::{Context, Judgement, judge};
use crate::reader::{Reader, Stop};

impl MainDecoder {
    pub(super) fn body_length(
        &mut self,
        r: &mut Reader<'_>,
        most: usize,
        is_held: bool,
    ) -> Result<Taken, Stop> {
        let length = r.u32()?;
        if length as usize > most {
            let name = self.sections.get(self.current.id).map_or("", |section| &section.name);
            let rule = format!("{length} bytes of section {name:?}, which has at most {most} at this side");
            return Err(r.bad("specs/stream.md §9", rule));
        }
        if is_held {
            self.claim(r, u64::from(length))?;
        }
        self.state = DecoderState::BodyBytes { left: length as usize };
        silent(r)
    }

    pub(super) fn body_bytes(&mut self, r: &mut Reader<'_>, left: usize) -> Result<Taken, Stop> {
        let left = self.take_over(r, left)?;
        self.state = if left > 0 { DecoderState::BodyBytes { left } } else { DecoderState::Footer };
        silent(r)
    }

    /// Moves the bytes that have arrived, at most `left`, into the body. Returns how many are missing.
    pub(super) fn take_over(&mut self, r: &mut Reader<'_>, left: usize) -> Result<usize, Stop> {
        let here = r.rest().len().min(left);
        if here == 0 && left > 0 {
            return Err(Stop::Short(1));
        }
        self.body.extend_from_slice(r.take(here)?);
        Ok(left - here)
    }

    /// Moves bytes up to a footer into the body. Bytes that may be a footer stay in the caller's buffer until
    /// more arrive.
    pub(super) fn body_opaque(&mut self, r: &mut Reader<'_>) -> Result<Taken, Stop> {
        let buf = r.rest();
        let context = Context {
            id: self.current.id,
            no_description: self.expect.no_description,
            is_used: &|id| self.sections.is_used(id),
            is_open: &|id| self.sections.is_open(id),
        };
        let mut from = 0;
        let (sure, judgement) = loop {
            let Some(at) = buf[from..].iter().position(|byte| *byte == FOOTER) else {
                break (buf.len(), Judgement::NeedMore(1));
            };
            match judge(&buf[from + at..], &context) {
                Judgement::Body => from += at + 1,
                other => break (from + at, other),
            }
        };
        if sure == 0
            && let Judgement::NeedMore(needed) = judgement
        {
            return Err(Stop::Short(needed));
        }
        self.claim(r, sure as u64)?;
        self.body.extend_from_slice(r.take(sure)?);
        if judgement == Judgement::Footer {
            self.state = DecoderState::Footer;
        }
        silent(r)
    }
}
