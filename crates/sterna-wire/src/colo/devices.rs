//! The device state of a checkpoint: FULL sections and `00`, without lengths (`specs/colo.md §5`).
//!
//! A checkpoint contains each section of the seeding once. The ids, names and lengths of the seeding therefore
//! show where a section ends. The footer at the expected length is accepted if EOF follows, or a section that
//! has not appeared yet.
//!
//! A length may change, for example with a device's queue. Then the first footer that meets the same condition
//! is accepted. Sections of a Sterna primary that contain the guest's own bytes state their length.

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
    /// The section's id, which is the same in header and footer.
    pub id: u32,
    /// Name of the section, which identifies the device together with `instance`.
    pub name: String,
    /// Number that distinguishes devices with the same name.
    pub instance: u32,
    /// Version of the body.
    pub version: u32,
    /// Length of the body in bytes.
    pub length_bytes: usize,
    /// Whether the section preceded RAM in the seeding.
    pub is_early: bool,
}

impl KnownDevice {
    fn is_at(&self, id: u32, name: &str, instance: u32, version: u32) -> bool {
        self.id == id && self.name == name && self.instance == instance && self.version == version
    }
}

/// The devices of a machine in the order of the seeding's sections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceList {
    devices: Vec<KnownDevice>,
    by_name: HashMap<(String, u32), usize>,
}

/// Positions of the sections in the device state of a checkpoint, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointDevices {
    /// One pair per device of the list, in its order: section and body.
    ///
    /// The section's range includes header and footer.
    pub sections: Vec<(Range<usize>, Range<usize>)>,
}

impl DeviceList {
    /// A list without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device whose section the decoder delivered as one item.
    ///
    /// # Errors
    /// The device is in the list already, or the list has [`SECTIONS`] entries.
    pub fn push(&mut self, device: KnownDevice) -> Result<(), WireError> {
        if self.devices.len() >= SECTIONS {
            return Err(bad(0, format!("more than {SECTIONS} sections")));
        }
        let key = (device.name.clone(), device.instance);
        if self.by_name.contains_key(&key) {
            return Err(bad(0, format!("section {:?} instance {} occurs twice", key.0, key.1)));
        }
        self.by_name.insert(key, self.devices.len());
        self.devices.push(device);
        Ok(())
    }

    /// Adds the devices whose sections followed RAM.
    ///
    /// `bytes` holds these sections without EOF. `description` is the JSON description of the seeding, if it
    /// had one.
    ///
    /// # Errors
    /// The sections do not fill `bytes`, or a section appears twice.
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

    /// The devices in stream order: first those whose sections preceded RAM.
    pub fn devices(&self) -> &[KnownDevice] {
        &self.devices
    }

    /// The index of a device in [`devices`](Self::devices()).
    pub fn find(&self, name: &str, instance: u32) -> Option<usize> {
        self.by_name.get(&(name.to_owned(), instance)).copied()
    }

    /// Finds every section of a checkpoint's device state.
    ///
    /// # Errors
    /// - a section that the seeding did not contain, or contained with another id or version
    /// - a section that appears twice, is missing, or has no recognisable end
    /// - other bytes where a section must begin, or no EOF at the end
    pub fn check(&self, bytes: &[u8]) -> Result<CheckpointDevices, WireError> {
        let Some((&EOF, _)) = bytes.split_last() else {
            return Err(bad(bytes.len().saturating_sub(1), "device state does not end with EOF (00)"));
        };
        let end = bytes.len() - 1;
        let mut found: Vec<Option<(Range<usize>, Range<usize>)>> = vec![None; self.devices.len()];
        let mut at = 0;
        while at < end {
            let (index, body) = self.header(bytes, at, &found)?;
            // Marked before the footer is searched, so that a repeated header of the same section is not accepted
            // as continuation.
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

    /// Reads the header of a section that has not appeared yet. Returns the device's index and the start of the
    /// body.
    fn header<T>(&self, bytes: &[u8], at: usize, found: &[Option<T>]) -> Result<(usize, usize), WireError> {
        let Some(header) = full_section(bytes, at) else {
            return Err(bad(at, "no FULL section begins here"));
        };
        let (name, instance) = (header.name, header.instance);
        let Some(index) = self.find(name, instance) else {
            let rule = format!(
                "section {name:?} instance {instance} was not in the seeding: protect the guest again after plugging \
                 a device"
            );
            return Err(bad(at, rule));
        };
        let known = &self.devices[index];
        if !known.is_at(header.id, name, instance, header.version) {
            let rule = format!(
                "section {name:?} instance {instance} has id {} and version {}, but {} and {} in the seeding",
                header.id, header.version, known.id, known.version
            );
            return Err(bad(at, rule));
        }
        if found[index].is_some() {
            let rule = format!("section {name:?} instance {instance} occurs twice in a checkpoint");
            return Err(bad(at, rule));
        }
        Ok((index, header.body))
    }

    /// Position of the footer of the section of device `index`. `bytes` excludes EOF.
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
        let rule = format!("section {:?} instance {} has no end", known.name, known.instance);
        Err(bad(body, rule))
    }

    /// Position of the footer of a section whose body begins with its length. The guest's bytes in such a body
    /// may look like a footer, so they are not searched.
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
            bad(body, format!("section {name:?} instance {instance} does not end after its length"))
        })
    }

    /// Whether a footer of section `id` is at `at`, with a valid continuation.
    ///
    /// Valid are the end of the bytes, and a section that has not appeared yet.
    fn is_foot<T>(&self, bytes: &[u8], at: usize, id: u32, found: &[Option<T>]) -> bool {
        let Some(next) = at.checked_add(FOOTER_BYTES) else { return false };
        let Some(footer) = bytes.get(at..next) else { return false };
        footer[0] == FOOTER
            && footer[1..] == id.to_be_bytes()
            && (next == bytes.len() || self.header(bytes, next, found).is_ok())
    }
}

/// Whether a Sterna primary sends this section with a length.
///
/// These sections contain arbitrary bytes: output or memory of the guest, and digests.
fn is_framed(name: &str) -> bool {
    [Output::SECTION_NAME, CheckpointSummary::SECTION_NAME].contains(&name)
        || EpochSection::device_of(name).is_some()
}

fn bad(at: usize, rule: impl Into<String>) -> WireError {
    WireError::misbehaved(MESSAGE, at as u64, SPEC, rule.into())
}
