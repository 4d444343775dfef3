//! The sections that a stream has introduced so far (`specs/stream.md §1.4`).
//!
//! With them the decoder checks ids, duplicates, and the order of PART and END.

use crate::limits::SECTIONS;
use crate::main::element::SectionHeader;
use crate::main::element::SectionKind;
use std::collections::{BTreeMap, HashSet};

/// A section that a START or FULL has introduced.
#[derive(Debug, Clone)]
pub(super) struct Section {
    pub(super) name: String,
    pub(super) instance: u32,
    pub(super) version: u32,
    /// Whether PART and END may still follow.
    pub(super) open: bool,
    pub(super) is_ram: bool,
}

/// Every section of the stream, by id.
#[derive(Debug, Default)]
pub(super) struct Sections {
    /// Ordered, so that an error about several sections names the same one in every run.
    by_id: BTreeMap<u32, Section>,
    devices: HashSet<(String, u32)>,
}

impl Sections {
    /// Registers a new section. The error is the text of the broken rule.
    pub(super) fn introduce(
        &mut self,
        header: &SectionHeader<'_>,
        kind: SectionKind,
        is_ram: bool,
    ) -> Result<(), String> {
        let SectionHeader { id, name, instance, version } = *header;
        if self.by_id.len() >= SECTIONS {
            return Err(format!("more than {SECTIONS} sections"));
        }
        if self.by_id.contains_key(&id) {
            return Err(format!("section id {id} is already used"));
        }
        if !self.devices.insert((name.to_owned(), instance)) {
            return Err(format!("section {name:?} instance {instance} occurs twice"));
        }
        let open = kind == SectionKind::Start;
        self.by_id.insert(id, Section { name: name.to_owned(), instance, version, open, is_ram });
        Ok(())
    }

    pub(super) fn get(&self, id: u32) -> Option<&Section> {
        self.by_id.get(&id)
    }

    /// Records that END has been read.
    pub(super) fn close(&mut self, id: u32) {
        if let Some(section) = self.by_id.get_mut(&id) {
            section.open = false;
        }
    }

    /// Allows PARTs of RAM again.
    pub(super) fn reopen_ram(&mut self) {
        if let Some(section) = self.by_id.values_mut().find(|section| section.is_ram) {
            section.open = true;
        }
    }

    pub(super) fn is_used(&self, id: u32) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn is_open(&self, id: u32) -> bool {
        self.by_id.get(&id).is_some_and(|section| section.open)
    }

    /// Name of the section with the lowest id whose END is missing.
    pub(super) fn first_open(&self) -> Option<&str> {
        self.by_id.values().find(|section| section.open).map(|section| section.name.as_str())
    }

    pub(super) fn has_ram(&self) -> bool {
        self.by_id.values().any(|section| section.is_ram)
    }

    /// Whether the END of RAM has been read.
    pub(super) fn is_ram_over(&self) -> bool {
        self.by_id.values().any(|section| section.is_ram && !section.open)
    }

    /// Id of the RAM section, once it is introduced.
    pub(super) fn ram_id(&self) -> Option<u32> {
        self.by_id.iter().find(|(_, section)| section.is_ram).map(|(id, _)| *id)
    }
}
