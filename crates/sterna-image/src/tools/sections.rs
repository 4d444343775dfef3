//! The sections of devices in a stretch of a stream, found by their description or by their footers.
//!
//! A body has no length (specs/stream.md §1.3). Where the description names the next section its length is taken
//! and the footer behind it demanded; else the body ends at the first footer that something plausible follows
//! (§1.6, method B). Nothing is believed: what does not fit becomes a [`Flaw`], and the walk goes on as far as it
//! can.

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
    /// Its name.
    pub name: String,
    /// Which of the devices of that name.
    pub instance: u32,
    /// Version of its body.
    pub version: u32,
    /// Its number in the stream.
    pub id: u32,
    /// Where its type byte stands, from the start of the stretch.
    pub offset: usize,
    /// Where its body starts, from the start of the stretch.
    pub body_offset: usize,
    /// Length of its body in bytes.
    pub body_bytes: usize,
    /// Its place in [`Description::devices`], if that describes it; START sections are never described.
    pub described: Option<usize>,
}

impl DeviceSection {
    /// Where its body is.
    pub fn body(&self) -> Range<usize> {
        self.body_offset..self.body_offset + self.body_bytes
    }
}

/// A PART or END of a section that was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Where its type byte stands, from the start of the stretch.
    pub offset: usize,
    /// Number of the section.
    pub id: u32,
    /// Whether it is the END.
    pub is_end: bool,
    /// Length of its body in bytes; the body starts 5 bytes behind the type byte.
    pub body_bytes: usize,
}

impl Part {
    /// Where its body is.
    pub fn body(&self) -> Range<usize> {
        self.offset + 5..self.offset + 5 + self.body_bytes
    }
}

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// Its number.
    pub number: u16,
    /// Where its type byte stands, from the start of the stretch.
    pub offset: usize,
    /// Length of its body in bytes; the body starts 5 bytes behind the type byte.
    pub body_bytes: usize,
}

impl Command {
    /// Where its body is.
    pub fn body(&self) -> Range<usize> {
        self.offset + 5..self.offset + 5 + self.body_bytes
    }
}

/// Something that a stretch must not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// Where, from the start of the stretch.
    pub offset: usize,
    /// What is wrong.
    pub what: String,
    /// Whether the description is wrong rather than the sections.
    pub in_description: bool,
}

/// How a walk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// At the end of the stretch, between two elements.
    Whole,
    /// At EOF; the offset is that of the byte behind it.
    Eof(usize),
    /// At a byte that no element starts with, or in an element that is truncated.
    Lost(usize),
}

/// What was found.
#[derive(Debug, Clone)]
pub struct Walk {
    /// FULL sections, in stream order.
    pub sections: Vec<DeviceSection>,
    /// START sections: of devices that live beside RAM, whose PARTs and END follow.
    pub starts: Vec<DeviceSection>,
    /// PARTs and ENDs, in stream order.
    pub parts: Vec<Part>,
    /// Commands, in stream order.
    pub commands: Vec<Command>,
    /// What is wrong.
    pub flaws: Vec<Flaw>,
    /// How it ended.
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

/// The stretches of a machine's stream in which sections of devices stand, walked one after the other.
#[derive(Debug, Clone)]
pub struct ShapeWalk {
    /// [`Shape::early`].
    pub early: Walk,
    /// [`Shape::setup`].
    pub setup: Walk,
    /// [`Shape::between`].
    pub between: Walk,
    /// [`Shape::devices`].
    pub devices: Walk,
}

impl ShapeWalk {
    /// Walks all of `shape`, whose sections must have footers.
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

/// Walks `bytes`, a stretch behind [`Shape::early`] that RAM's sections are part of: RAM's number is `ram`. Gives the
/// walk of `early`, and that of `bytes`.
pub fn walk_behind(early: &[u8], ram: u32, bytes: &[u8], description: Option<&Description>) -> (Walk, Walk) {
    let mut walker = Walker::new(description);
    let early = walker.stretch(early);
    walker.opens(ram);
    (early, walker.stretch(bytes))
}

/// What can be said of the end of a tail without footers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BareEnd {
    /// EOF and a description that reaches exactly to the end.
    Described,
    /// What may be EOF, or EOF and a part of a description, and may be bytes of a device.
    Unsure,
    /// No EOF: the stream is truncated.
    Cut,
}

/// Looks at the end of `bytes`, a tail without footers.
pub fn bare_end(bytes: &[u8]) -> BareEnd {
    let heads = |at: &usize| bytes[*at..].starts_with(&[EOF, DESCRIPTION]);
    let reaches_end = |at: usize| {
        let length = bytes.get(at + 2..at + 6).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]) as usize);
        length.is_some_and(|length| at + 6 + length == bytes.len() && bytes.get(at + 6) == Some(&b'{'))
    };
    // From a description's first byte on no byte is zero.
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
