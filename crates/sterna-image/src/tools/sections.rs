//! Finds the device sections in a stretch of a stream, by description or footers.
//!
//! A body has no length field (specs/stream.md §1.3). If the description names the next section, its length is used,
//! and the footer must be at that place. Otherwise the body ends at the first footer with a plausible element after
//! it (§1.6, method B). All input is checked: an inconsistency becomes a [`Flaw`], and the walk continues as far as
//! possible.

mod found;
mod walker;

use super::description::Description;
use crate::model::Shape;
pub use found::{Command, DeviceSection, Flaw, Part, Stop, Walk};
use found::{DESCRIPTION, EOF};
use walker::Walker;

/// Walks through all stretches of a machine's stream that contain device sections.
#[derive(Debug, Clone)]
pub struct ShapeWalk {
    /// Elements of [`Shape::early`], before RAM's START.
    pub early: Walk,
    /// Elements of [`Shape::setup`], directly after RAM's START.
    pub setup: Walk,
    /// Elements of [`Shape::between`], between RAM's sections.
    pub between: Walk,
    /// Elements of [`Shape::devices`], after RAM.
    pub devices: Walk,
}

impl ShapeWalk {
    /// Walks through all of `shape`, whose sections must have footers.
    pub fn of(shape: &Shape, description: Option<&Description>) -> Self {
        let mut walker = Walker::new(description);
        let early = walker.stretch(&shape.early);
        walker.opens(shape.ram.section_id);
        let setup = walker.stretch(&shape.setup);
        let between = walker.stretch(&shape.between);
        walker.closes(shape.ram.section_id);
        Self { early, setup, between, devices: walker.stretch(&shape.devices) }
    }

    /// The walks in stream order, each with its stretch.
    pub fn stretches<'w, 's>(&'w self, shape: &'s Shape) -> [(&'w Walk, &'s [u8]); 4] {
        [
            (&self.early, &shape.early[..]),
            (&self.setup, &shape.setup),
            (&self.between, &shape.between),
            (&self.devices, &shape.devices),
        ]
    }
}

/// Walks through `early` and then `bytes`, a stretch after [`Shape::early`] that includes RAM's sections.
///
/// `ram` is the number of RAM's section. Returns the walk of `early` and the walk of `bytes`.
pub fn walk_behind(early: &[u8], ram: u32, bytes: &[u8], description: Option<&Description>) -> (Walk, Walk) {
    let mut walker = Walker::new(description);
    let early = walker.stretch(early);
    walker.opens(ram);
    (early, walker.stretch(bytes))
}

/// How a tail without footers ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BareEnd {
    /// EOF and a description that reaches exactly to the end.
    Described,
    /// Bytes that may be EOF with part of a description, or a device's bytes.
    Unsure,
    /// No EOF: the stream is truncated.
    Cut,
}

/// Examines the end of `bytes`, a tail without footers.
pub fn bare_end(bytes: &[u8]) -> BareEnd {
    let heads = |at: &usize| bytes[*at..].starts_with(&[EOF, DESCRIPTION]);
    let reaches_end = |at: usize| {
        let length = bytes.get(at + 2..at + 6).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]) as usize);
        length.is_some_and(|length| at + 6 + length == bytes.len() && bytes.get(at + 6) == Some(&b'{'))
    };
    // After the description's length field, no byte is zero.
    let may_be_torn = |at: usize| bytes.get(at + 6..).is_none_or(|text| !text.contains(&EOF));
    let places = || (0..bytes.len()).rev().filter(heads);
    if places().any(reaches_end) {
        BareEnd::Described
    } else if bytes.last() == Some(&EOF) || places().any(may_be_torn) {
        BareEnd::Unsure
    } else {
        BareEnd::Cut
    }
}
