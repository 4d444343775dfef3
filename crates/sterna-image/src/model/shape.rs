//! A machine's stream without its pages.

use sterna_wire::global_state::{BODY_BYTES, GlobalState};
use sterna_wire::main::Configuration;

use crate::format::Form;

/// The content of a machine's stream, except its pages.
///
/// Sterna keeps parts that it does not understand byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Machine type, capabilities (in stream order) and UUID.
    pub configuration: Configuration,
    /// Whether the stream has a configuration; very old machine types have none (`specs/mapped-ram.md §1.2`).
    pub has_configuration: bool,
    /// Sections and commands between configuration and START of `ram`, verbatim.
    pub early: Vec<u8>,
    /// The section `ram`, which Sterna decodes.
    pub ram: RamShape,
    /// The START and FULL sections directly after START of `ram`, verbatim.
    ///
    /// These are sections of other live devices, and the sections that QEMU 10.0 loads before RAM's pages
    /// (`specs/mapped-ram.md §1.4`).
    pub setup: Vec<u8>,
    /// All other elements between RAM's sections, verbatim.
    ///
    /// These are commands (number 11 if the machine type has it) and sections of other live devices.
    pub between: Vec<u8>,
    /// Whether the stream has RAM's END section; background snapshots lack it.
    pub has_end: bool,
    /// The devices, verbatim: from the first section after RAM's END up to EOF (exclusive).
    ///
    /// Without an END, they start at the first FULL section that no section of RAM follows.
    pub devices: Vec<u8>,
    /// Whether the stream has the EOF byte. Without it, the image is truncated.
    pub has_eof: bool,
    /// The JSON after EOF, verbatim.
    pub description: Option<Vec<u8>>,
}

/// The section `ram` without its pages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RamShape {
    /// Number of the section in the stream.
    pub section_id: u32,
    /// The RAM blocks in stream order.
    pub blocks: Vec<BlockShape>,
    /// Whether sections have footers; sections of very old machine types have none.
    pub footers: bool,
}

/// One RAM block without its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockShape {
    /// Name of the block, such as `pc.ram`.
    pub name: String,
    /// Used length in bytes, a multiple of the page size.
    pub length_bytes: u64,
    /// Guest physical address; only with `x-ignore-shared`.
    pub address: Option<u64>,
    /// The host's page size for this block in bytes, if the stream contains it (`postcopy-ram`).
    pub host_page_bytes: Option<u64>,
    /// Whether the image contains none of its pages because it is shared memory (`x-ignore-shared`, §4.8).
    pub is_skipped: bool,
}

/// The capability that marks [`Form::Mapped`].
pub(crate) const MAPPED_RAM: &str = "mapped-ram";
/// The capability that leaves shared memory out of the stream.
pub(crate) const IGNORE_SHARED: &str = "x-ignore-shared";

impl Shape {
    /// Makes an empty shape, which a reader then fills.
    pub fn empty() -> Self {
        Self {
            configuration: Configuration::default(),
            has_configuration: false,
            early: Vec::new(),
            ram: RamShape::default(),
            setup: Vec::new(),
            between: Vec::new(),
            has_end: false,
            devices: Vec::new(),
            has_eof: false,
            description: None,
        }
    }

    /// The form that the configuration's capabilities select.
    pub fn form(&self) -> Form {
        if self.has_capability(MAPPED_RAM) { Form::Mapped } else { Form::Legacy }
    }

    /// Whether the configuration lists the capability.
    pub fn has_capability(&self, name: &str) -> bool {
        self.configuration.capabilities.iter().any(|capability| capability == name)
    }

    /// The guest's run state when it was saved, such as `running` or `paused`.
    ///
    /// None if the devices do not contain it.
    pub fn run_state(&self) -> Option<String> {
        const NAME: &[u8] = b"\x0bglobalstate";
        // After the name, the section header contains instance and version (8 bytes).
        let mut found = self.devices.windows(NAME.len()).enumerate().filter(|(_, name)| *name == NAME);
        found.find_map(|(at, _)| {
            let start = at + NAME.len() + 8;
            let body = self.devices.get(start..start + BODY_BYTES)?;
            Some(GlobalState::decode(body).ok()?.run_state)
        })
    }

    /// Whether the guest was running when it was saved.
    pub fn was_running(&self) -> bool {
        matches!(self.run_state().as_deref(), Some("running" | "suspended"))
    }

    /// Whether a writer must separate [`setup`](Self::setup) from [`between`](Self::between) by a PART of RAM.
    ///
    /// A reader could not find the border otherwise, because [`between`](Self::between) starts with a START or FULL
    /// section.
    pub(crate) fn begins_between_anew(&self) -> bool {
        // The kinds START and FULL.
        matches!(self.between.first(), Some(1 | 4))
    }

    /// Sum of the used lengths of all blocks in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.ram.blocks.iter().map(|block| block.length_bytes).sum()
    }
}
