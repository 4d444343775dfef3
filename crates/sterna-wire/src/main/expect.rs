//! What the reader of a main channel knows beforehand.

use super::SectionKind;
use crate::limits;

/// How to find the end of a section's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyKind {
    /// RAM records; only for the section `ram`, instance 0, version 4.
    Ram,
    /// A u32 length, then so many bytes: no byte that a guest controls can pass for a footer. So are Sterna's own
    /// devices framed.
    LengthPrefixed {
        /// The most bytes that it may have; a longer one is refused when its length has been read.
        most: usize,
    },
    /// As [`BodyKind::LengthPrefixed`], of bytes that the caller passes on instead of holding them: they do not count
    /// against [`Expectations::device_state_bytes`].
    Passing {
        /// The most bytes that one may have.
        most: usize,
    },
    /// So many bytes.
    FixedLength(usize),
    /// Unknown: up to a footer that something plausible follows (§1.6 B).
    OpaqueByFooter,
    /// This section must not come; the text says why, and what to change.
    Refuse(String),
}

/// Knowledge of devices, asked once for every section header.
pub trait SectionKnowledge {
    /// How the body of this section is delimited.
    fn body(&self, name: &str, instance: u32, version: u32, kind: SectionKind) -> BodyKind;
}

impl<F: Fn(&str, u32, u32, SectionKind) -> BodyKind> SectionKnowledge for F {
    fn body(&self, name: &str, instance: u32, version: u32, kind: SectionKind) -> BodyKind {
        self(name, instance, version, kind)
    }
}

/// What the stream has to agree with. [`Default`] expects as little as possible: any machine, any blocks, no
/// multifd, no capability that shows on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectations {
    /// Machine type that the configuration must name; `None` accepts any.
    pub machine_type: Option<String>,
    /// UUID that a configuration with a UUID must state; `None` accepts any.
    pub uuid: Option<[u8; 16]>,
    /// RAM blocks (name, length in bytes) that the block list must consist of; `None` accepts any.
    pub blocks: Option<Vec<(String, u64)>>,
    /// Whether multifd channels are there. Without them MULTIFD_FLUSH is refused.
    pub multifd: bool,
    /// Whether memory comes by RDMA: then RAM's sections have hooks ([`MainItem::Hook`](super::MainItem::Hook)) and no
    /// pages. Else hooks are refused.
    pub rdma: bool,
    /// Whether a source that flushes at each EOS without saying so (machine types up to 8.0) is served; else it
    /// is refused. Only with `multifd`.
    pub accept_legacy_flush: bool,
    /// Whether the stream has the capability `mapped-ram` (a file).
    pub mapped_ram: bool,
    /// Whether it has `x-ignore-shared`.
    pub ignore_shared: bool,
    /// Whether commands of postcopy are let through; else they are refused.
    pub postcopy: bool,
    /// Whether RAM need not have ended before EOF (`background-snapshot`).
    pub background_snapshot: bool,
    /// Whether the stream ends with EOF (`suppress-vmdesc=on`).
    pub no_description: bool,
    /// Whether reading ends at the first FULL section behind the END of RAM, or at EOF: the state of devices that
    /// nobody here knows, which the caller takes as it comes ([`MainItem::Tail`](super::MainItem::Tail)).
    pub opaque_tail: bool,
    /// Most bytes of device bodies in the whole stream.
    pub device_state_bytes: u64,
}

impl Default for Expectations {
    fn default() -> Self {
        Self {
            machine_type: None,
            uuid: None,
            blocks: None,
            multifd: false,
            rdma: false,
            accept_legacy_flush: false,
            mapped_ram: false,
            ignore_shared: false,
            postcopy: false,
            background_snapshot: false,
            no_description: false,
            opaque_tail: false,
            device_state_bytes: limits::DEVICE_STATE_BYTES,
        }
    }
}
