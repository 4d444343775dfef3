//! A machine's stream without its pages.

use sterna_wire::global_state::{BODY_BYTES, GlobalState};
use sterna_wire::main::Configuration;

use super::Form;

/// All of a machine's stream but its pages. What Sterna cannot know is kept byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Machine type, capabilities, UUID; `capabilities` as they stand in the stream.
    pub configuration: Configuration,
    /// Whether the stream has a configuration; very old machine types have none (`specs/mapped-ram.md §1.2`).
    pub has_configuration: bool,
    /// Sections and commands between configuration and START of `ram`, verbatim.
    pub early: Vec<u8>,
    /// The RAM section.
    pub ram: RamShape,
    /// The START and FULL sections right behind START of `ram`, verbatim: of other live devices, and of those that
    /// QEMU 10.0 loads before RAM's pages (`specs/mapped-ram.md §1.4`).
    pub setup: Vec<u8>,
    /// What else lies between RAM's sections, verbatim: commands (number 11 where the machine type has it), sections
    /// of other live devices.
    pub between: Vec<u8>,
    /// Whether RAM's END section was there; background snapshots lack it.
    pub has_end: bool,
    /// From the first section after RAM's END up to EOF (exclusive), verbatim; without an END, from the first FULL
    /// section on that nothing of RAM follows.
    pub devices: Vec<u8>,
    /// Whether the EOF byte was there. Without it the image is torn.
    pub has_eof: bool,
    /// The JSON after EOF, verbatim.
    pub description: Option<Vec<u8>>,
}

/// The section `ram`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RamShape {
    /// Its number in the stream.
    pub section_id: u32,
    /// Its blocks in stream order.
    pub blocks: Vec<BlockShape>,
    /// Whether sections have footers; those of very old machine types have none.
    pub footers: bool,
}

/// One RAM block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockShape {
    /// Its name.
    pub name: String,
    /// Its used length in bytes, a multiple of the page size.
    pub length_bytes: u64,
    /// Its guest physical address; only with `x-ignore-shared`.
    pub address: Option<u64>,
    /// The host's page size for it, where the stream says so (`postcopy-ram`).
    pub host_page_bytes: Option<u64>,
    /// Whether the image holds none of its pages because it is shared memory (`x-ignore-shared`, §4.8).
    pub is_skipped: bool,
}

/// The capability that marks [`Form::Mapped`].
pub(crate) const MAPPED_RAM: &str = "mapped-ram";
/// The capability that leaves shared memory out.
pub(crate) const IGNORE_SHARED: &str = "x-ignore-shared";

impl Shape {
    /// A shape of nothing, to be filled in as a stream comes.
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

    /// The form that the configuration names.
    pub fn form(&self) -> Form {
        if self.has_capability(MAPPED_RAM) { Form::Mapped } else { Form::Legacy }
    }

    /// Whether the configuration lists the capability.
    pub fn has_capability(&self, name: &str) -> bool {
        self.configuration.capabilities.iter().any(|capability| capability == name)
    }

    /// What the guest was doing when it was saved, such as `running` or `paused`; none if the devices do not say.
    pub fn run_state(&self) -> Option<String> {
        const NAME: &[u8] = b"\x0bglobalstate";
        // The header's rest: instance and version.
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

    /// Whether only a PART of RAM tells where [`setup`](Self::setup) ends and [`between`](Self::between) begins.
    pub(crate) fn begins_between_anew(&self) -> bool {
        // START, FULL
        matches!(self.between.first(), Some(1 | 4))
    }

    /// Sum of the used lengths of all blocks in bytes.
    pub fn ram_bytes(&self) -> u64 {
        self.ram.blocks.iter().map(|block| block.length_bytes).sum()
    }
}
