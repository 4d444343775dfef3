//! What a walk over device sections finds.

use std::ops::Range;

pub(super) const EOF: u8 = 0x00;
pub(super) const DESCRIPTION: u8 = 0x06;

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
    /// Index in [`Description::devices`](crate::tools::description::Description::devices), if the description
    /// contains the section. None for START sections.
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
    pub(super) fn empty() -> Self {
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
