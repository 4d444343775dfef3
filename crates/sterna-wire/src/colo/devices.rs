//! Device state of a checkpoint: FULL sections and `00`, without lengths (`specs/colo.md §5`).
//!
//! A checkpoint has the sections of the seeding, each once. So the seeding's ids, names and lengths say where one ends: its
//! footer is believed where the length says, if what follows is the end, or a section that has not come yet. A length may
//! change (a device's queue): then the first footer is taken behind which that holds. Sections of a Sterna's in which the guest's own
//! bytes stand say how long they are.

use std::collections::HashMap;
use std::ops::Range;

use crate::error::WireError;
use crate::limits::SECTIONS;
use crate::main::{full_section, sections};
use crate::replica::{CheckpointSummary, EpochSection, Output};
use crate::vmdesc;

const MESSAGE: &str = "device state of a checkpoint";
const SPEC: &str = "specs/colo.md §5";
const FOOTER: u8 = 0x7e;
const FOOTER_BYTES: usize = 5;
const EOF: u8 = 0;

/// A FULL section of the seeding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownDevice {
    /// The section's id, which links header and footer.
    pub id: u32,
    /// Name of the section.
    pub name: String,
    /// Its instance.
    pub instance: u32,
    /// Version of the body.
    pub version: u32,
    /// Length of the body in bytes.
    pub length_bytes: usize,
    /// Whether it came before RAM.
    pub is_early: bool,
}

impl KnownDevice {
    fn is_at(&self, id: u32, name: &str, instance: u32, version: u32) -> bool {
        self.id == id && self.name == name && self.instance == instance && self.version == version
    }
}

/// The devices of a machine, as its seeding listed them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceList {
    devices: Vec<KnownDevice>,
    by_name: HashMap<(String, u32), usize>,
}

/// Where the sections of a checkpoint's device state are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointDevices {
    /// For each device of the list, in its order: the section from its header to behind its footer, and its body.
    pub sections: Vec<(Range<usize>, Range<usize>)>,
}

impl DeviceList {
    /// A list without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device whose section came by itself.
    ///
    /// # Errors
    /// It comes twice, or there are too many.
    pub fn push(&mut self, device: KnownDevice) -> Result<(), WireError> {
        if self.devices.len() >= SECTIONS {
            return Err(bad(0, format!("more than {SECTIONS} sections")));
        }
        let key = (device.name.clone(), device.instance);
        if self.by_name.contains_key(&key) {
            return Err(bad(0, format!("section {:?} instance {} comes twice", key.0, key.1)));
        }
        self.by_name.insert(key, self.devices.len());
        self.devices.push(device);
        Ok(())
    }

    /// Adds the devices whose sections came behind RAM: `bytes`, without EOF. `description`: what the seeding said of them.
    ///
    /// # Errors
    /// The sections do not fill `bytes`, or one comes twice.
    pub fn push_tail(&mut self, bytes: &[u8], description: Option<&[u8]>) -> Result<(), WireError> {
        let lengths = description.and_then(|text| vmdesc::section_lengths(text).ok()).unwrap_or_default();
        let lengths: HashMap<(&str, u32), u64> = lengths
            .iter()
            .map(|device| ((device.name.as_str(), device.instance), device.length_bytes))
            .collect();
        let found = sections(bytes, |name, instance| lengths.get(&(name, instance)).copied());
        let Some(found) = found else {
            return Err(bad(0, "the sections of the seeding's devices do not fill their bytes"));
        };
        for section in found {
            let Some(header) = full_section(bytes, section.start) else {
                return Err(bad(section.start, "no section of a device begins here"));
            };
            self.push(KnownDevice {
                id: header.id,
                name: header.name.to_owned(),
                instance: header.instance,
                version: header.version,
                length_bytes: section.end - FOOTER_BYTES - header.body,
                is_early: false,
            })?;
        }
        Ok(())
    }

    /// The devices, those that came before RAM first.
    pub fn devices(&self) -> &[KnownDevice] {
        &self.devices
    }

    /// The index of a device.
    pub fn find(&self, name: &str, instance: u32) -> Option<usize> {
        self.by_name.get(&(name.to_owned(), instance)).copied()
    }

    /// Finds every section of a checkpoint's device state.
    ///
    /// # Errors
    /// A section that the seeding did not have, had with another id or version, or that came before; one whose end cannot be
    /// found; one that is missing; bytes that are none of this.
    pub fn check(&self, bytes: &[u8]) -> Result<CheckpointDevices, WireError> {
        let Some((&EOF, _)) = bytes.split_last() else {
            return Err(bad(bytes.len().saturating_sub(1), "device state does not end with EOF (00)"));
        };
        let end = bytes.len() - 1;
        let mut found: Vec<Option<(Range<usize>, Range<usize>)>> = vec![None; self.devices.len()];
        let mut at = 0;
        while at < end {
            let (index, body) = self.header(bytes, at, &found)?;
            // Marked first, so that a footer is not believed before the section's own header.
            found[index] = Some((at..at, body..body));
            let foot = self.foot(&bytes[..end], body, index, &found)?;
            found[index] = Some((at..foot + FOOTER_BYTES, body..foot));
            at = foot + FOOTER_BYTES;
        }
        let missing = found.iter().position(Option::is_none);
        if let Some(missing) = missing {
            let KnownDevice { name, instance, .. } = &self.devices[missing];
            let rule = format!("section {name:?} instance {instance} of the seeding is missing");
            return Err(bad(end, rule));
        }
        Ok(CheckpointDevices { sections: found.into_iter().flatten().collect() })
    }

    /// The header of a section that has not come yet: which device, and where its body begins.
    fn header<T>(&self, bytes: &[u8], at: usize, found: &[Option<T>]) -> Result<(usize, usize), WireError> {
        let Some(header) = full_section(bytes, at) else {
            return Err(bad(at, "no FULL section begins here"));
        };
        let (name, instance) = (header.name, header.instance);
        let Some(index) = self.find(name, instance) else {
            let rule = format!(
                "section {name:?} instance {instance} was not in the seeding: protect the guest anew after plugging"
            );
            return Err(bad(at, rule));
        };
        let known = &self.devices[index];
        if !known.is_at(header.id, name, instance, header.version) {
            let rule = format!(
                "section {name:?} instance {instance} has id {} and version {}, in the seeding {} and {}",
                header.id, header.version, known.id, known.version
            );
            return Err(bad(at, rule));
        }
        if found[index].is_some() {
            let rule = format!("section {name:?} instance {instance} comes twice in a checkpoint");
            return Err(bad(at, rule));
        }
        Ok((index, header.body))
    }

    /// Where the footer of the section of `index` stands. `bytes` end where EOF stands.
    fn foot<T>(
        &self,
        bytes: &[u8],
        body: usize,
        index: usize,
        found: &[Option<T>],
    ) -> Result<usize, WireError> {
        let known = &self.devices[index];
        if is_framed(&known.name) {
            return self.framed_foot(bytes, body, index, found);
        }
        let as_in_seeding = body.saturating_add(known.length_bytes);
        if self.is_foot(bytes, as_in_seeding, known.id, found) {
            return Ok(as_in_seeding);
        }
        let mut from = body;
        while let Some(at) = bytes[from..].iter().position(|byte| *byte == FOOTER) {
            if self.is_foot(bytes, from + at, known.id, found) {
                return Ok(from + at);
            }
            from += at + 1;
        }
        let rule = format!("the end of section {:?} instance {} is not found", known.name, known.instance);
        Err(bad(body, rule))
    }

    /// Where the footer stands of a section whose body says how long it is: what the guest wrote may look like anything.
    fn framed_foot<T>(
        &self,
        bytes: &[u8],
        body: usize,
        index: usize,
        found: &[Option<T>],
    ) -> Result<usize, WireError> {
        let known = &self.devices[index];
        let length = bytes.get(body..).and_then(|rest| rest.first_chunk()).map(|b| u32::from_be_bytes(*b));
        let foot = length.and_then(|length| body.checked_add(4)?.checked_add(length as usize));
        foot.filter(|foot| self.is_foot(bytes, *foot, known.id, found)).ok_or_else(|| {
            let (name, instance) = (&known.name, known.instance);
            bad(body, format!("section {name:?} instance {instance} does not end where its length says"))
        })
    }

    /// Whether a footer of section `id` stands at `at`, and behind it the end or a section that has not come yet.
    fn is_foot<T>(&self, bytes: &[u8], at: usize, id: u32, found: &[Option<T>]) -> bool {
        let Some(next) = at.checked_add(FOOTER_BYTES) else { return false };
        let Some(footer) = bytes.get(at..next) else { return false };
        footer[0] == FOOTER
            && footer[1..] == id.to_be_bytes()
            && (next == bytes.len() || self.header(bytes, next, found).is_ok())
    }
}

/// Sections of a Sterna primary's whose bytes may be any: what its guest said or wrote, and a digest.
fn is_framed(name: &str) -> bool {
    [Output::SECTION_NAME, CheckpointSummary::SECTION_NAME].contains(&name)
        || EpochSection::device_of(name).is_some()
}

fn bad(at: usize, rule: impl Into<String>) -> WireError {
    WireError::misbehaved(MESSAGE, at as u64, SPEC, rule.into())
}
