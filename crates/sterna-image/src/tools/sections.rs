//! Finds the device sections in a stretch of a stream, by description or footers.
//!
//! A body has no length field (specs/stream.md §1.3). If the description names the next section, its length is used,
//! and the footer must be at that place. Otherwise the body ends at the first footer with a plausible element after
//! it (§1.6, method B). All input is checked: an inconsistency becomes a [`Flaw`], and the walk continues as far as
//! possible.

mod walker;

use std::ops::Range;

use super::description::Description;
use crate::model::Shape;
use walker::Walker;

const EOF: u8 = 0x00;
const DESCRIPTION: u8 = 0x06;

/// A START or FULL section of a device other than RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSection {
    /// Name of the section.
    pub name: String,
    /// Instance number among the devices with that name.
    pub instance: u32,
    /// Version of the body.
    pub version: u32,
    /// Number of the section in the stream.
    pub id: u32,
    /// Offset of the type byte in the stretch.
    pub offset: usize,
    /// Offset of the body in the stretch.
    pub body_offset: usize,
    /// Length of the body in bytes.
    pub body_bytes: usize,
    /// Index in [`Description::devices`], if the description contains the section. None for START sections.
    pub described: Option<usize>,
}

impl DeviceSection {
    /// Range of the body in the stretch.
    pub fn body(&self) -> Range<usize> {
        self.body_offset..self.body_offset + self.body_bytes
    }
}

/// A PART or END of a section that was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Offset of the type byte in the stretch.
    pub offset: usize,
    /// Number of the section in the stream.
    pub id: u32,
    /// Whether it is an END, not a PART.
    pub is_end: bool,
    /// Length of the body in bytes. The body starts 5 bytes after the type byte.
    pub body_bytes: usize,
}

impl Part {
    /// Range of the body in the stretch.
    pub fn body(&self) -> Range<usize> {
        self.offset + 5..self.offset + 5 + self.body_bytes
    }
}

/// A command between sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Number of the command.
    pub number: u16,
    /// Offset of the type byte in the stretch.
    pub offset: usize,
    /// Length of the body in bytes. The body starts 5 bytes after the type byte.
    pub body_bytes: usize,
}

impl Command {
    /// Range of the body in the stretch.
    pub fn body(&self) -> Range<usize> {
        self.offset + 5..self.offset + 5 + self.body_bytes
    }
}

/// A violation of the format in a stretch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// Offset in the stretch.
    pub offset: usize,
    /// The violation, as a clause.
    pub what: String,
    /// Whether the description is wrong, not the sections.
    pub in_description: bool,
}

/// How a walk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// At the end of the stretch, between two elements.
    Whole,
    /// At EOF. The value is the offset after it.
    Eof(usize),
    /// At an unknown element, or in a truncated one. The value is the element's offset.
    Lost(usize),
}

/// The elements of one stretch.
#[derive(Debug, Clone)]
pub struct Walk {
    /// FULL sections, in stream order.
    pub sections: Vec<DeviceSection>,
    /// START sections of other live devices, whose PARTs and END follow.
    pub starts: Vec<DeviceSection>,
    /// PARTs and ENDs, in stream order.
    pub parts: Vec<Part>,
    /// Commands, in stream order.
    pub commands: Vec<Command>,
    /// Violations of the format, in the order of the walk.
    pub flaws: Vec<Flaw>,
    /// How the walk ended.
    pub stop: Stop,
}

impl Walk {
    fn empty() -> Self {
        Self {
            sections: Vec::new(),
            starts: Vec::new(),
            parts: Vec::new(),
            commands: Vec::new(),
            flaws: Vec::new(),
            stop: Stop::Whole,
        }
    }
}

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
