//! Knowledge of the reader about devices and settings, which decoding a main channel needs.
//!
//! The stream has no lengths of device bodies and repeats few settings, so the caller provides both.

use super::element::SectionKind;
use crate::limits;

/// The rule with which the decoder finds the end of a section's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyKind {
    /// RAM records. Only for the section `ram`, instance 0, version 4.
    Ram,
    /// A u32 length, then so many bytes. No byte that a guest controls can pass for a footer.
    ///
    /// Sterna's own devices use this form.
    LengthPrefixed {
        /// Largest accepted body, in bytes. A longer one is refused as soon as its length has been read.
        most: usize,
    },
    /// Like [`BodyKind::LengthPrefixed`], for bodies that the caller passes on instead of storing.
    ///
    /// They do not count against [`Expectations::device_state_bytes`].
    Passing {
        /// Largest accepted body, in bytes.
        most: usize,
    },
    /// A body of exactly so many bytes.
    FixedLength(usize),
    /// Unknown length: the body ends at a footer that a plausible element follows (§1.6 B).
    OpaqueByFooter,
    /// The section is refused. The text states the reason and the remedy.
    Refuse(String),
}

/// The caller's knowledge of devices. The decoder asks once for every section header.
pub trait SectionKnowledge {
    /// The rule for the end of this section's body.
    fn body(&self, name: &str, instance: u32, version: u32, kind: SectionKind) -> BodyKind;
}

impl<F: Fn(&str, u32, u32, SectionKind) -> BodyKind> SectionKnowledge for F {
    fn body(&self, name: &str, instance: u32, version: u32, kind: SectionKind) -> BodyKind {
        self(name, instance, version, kind)
    }
}

/// Settings that the stream has to agree with.
///
/// [`Default`] expects as little as possible: any machine, any blocks, no multifd, no capability that is
/// visible on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectations {
    /// Machine type that the configuration must name; `None` accepts any.
    pub machine_type: Option<String>,
    /// UUID that a configuration with a UUID must state; `None` accepts any.
    pub uuid: Option<[u8; 16]>,
    /// RAM blocks (name, length in bytes) that the stream must have; `None` accepts any.
    pub blocks: Option<Vec<(String, u64)>>,
    /// Whether there are multifd channels. Without them MULTIFD_FLUSH is refused.
    pub multifd: bool,
    /// Whether memory is sent by RDMA.
    ///
    /// Then RAM's sections have hooks ([`MainItem::Hook`](super::MainItem::Hook)) and no pages. Otherwise hooks
    /// are refused.
    pub rdma: bool,
    /// Whether a source that flushes at each EOS without MULTIFD_FLUSH is accepted.
    ///
    /// Sources of machine types up to 8.0 do so. Only with `multifd`.
    pub accept_legacy_flush: bool,
    /// Whether the stream has the capability `mapped-ram` (a file).
    pub mapped_ram: bool,
    /// Whether the stream has the capability `x-ignore-shared`.
    pub ignore_shared: bool,
    /// Whether commands of postcopy are accepted. Otherwise they are refused.
    pub postcopy: bool,
    /// Whether EOF may precede RAM's END (`background-snapshot`).
    pub background_snapshot: bool,
    /// Whether the stream ends with EOF (`suppress-vmdesc=on`).
    pub no_description: bool,
    /// Whether decoding ends at the first FULL section after RAM, or at EOF.
    ///
    /// For devices that Sterna does not know: the caller takes their state byte for byte
    /// ([`MainItem::Tail`](super::MainItem::Tail)).
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
