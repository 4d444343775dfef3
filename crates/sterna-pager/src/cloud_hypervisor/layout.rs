//! Where a machine's memory is: in its slots, in the image, and in the guest's addresses. Pure.
//!
//! A machine has memory slots, each with a file of its own. The image has the slots' memory in the order of the ranges of the
//! VMM's own snapshots, so that both have the same memory file.

use serde::Deserialize;

use super::machine_error::MachineError;
use super::rules::SLOTS_MOST;

const PAGE_BYTES: u64 = 4096;
/// Most bytes of memory: more than any processor addresses.
const MEMORY_MOST: u64 = 1 << 52;

/// A memory slot of the VMM: guest memory that is one range of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Number of the slot.
    pub number: u32,
    /// First guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Place of the slot's first byte in its file.
    pub file_offset: u64,
    /// Name of the memory zone, for messages.
    pub zone: String,
    /// Whether only a part of the slot may be in use (virtio-mem).
    pub is_virtio_mem: bool,
}

/// Memory of one slot that the image contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Place in the image's memory, in bytes.
    pub offset: u64,
    /// Index of the slot.
    pub slot: usize,
    /// First guest-physical address.
    pub address: u64,
    /// Place in the slot's file, in bytes.
    pub file_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Where a range of guest-physical addresses is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The image contains it.
    Image {
        /// Place in the image's memory, in bytes.
        offset: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// It was not in use when the machine was saved, and reads as zeros.
    Unused {
        /// Index of the slot.
        slot: usize,
        /// Place in the slot's file, in bytes.
        file_offset: u64,
        /// Length in bytes.
        bytes: u64,
    },
}

/// The layout of a machine's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLayout {
    slots: Vec<Slot>,
    /// In the order of their offsets, without gaps.
    parts: Vec<Part>,
    /// Indices of the parts, in the order of their addresses.
    by_address: Vec<usize>,
}

/// A range of memory in a machine's texts.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Range {
    pub(super) gpa: u64,
    pub(super) length: u64,
}

impl MemoryLayout {
    /// Checks slots and ranges. Without ranges, each slot is one.
    pub(super) fn of(slots: Vec<Slot>, mut ranges: Vec<Range>) -> Result<Self, MachineError> {
        if slots.is_empty() || slots.len() > SLOTS_MOST {
            return Err(MachineError::Slots { count: slots.len() });
        }
        slots.iter().try_for_each(Slot::check)?;
        let mut by_address: Vec<usize> = (0..slots.len()).collect();
        by_address.sort_by_key(|index| slots[*index].address);
        for pair in by_address.windows(2) {
            let (before, after) = (&slots[pair[0]], &slots[pair[1]]);
            if before.address + before.bytes > after.address {
                return Err(MachineError::Overlap { what: "memory slots", address: after.address });
            }
        }
        for (index, slot) in slots.iter().enumerate() {
            if slots[..index].iter().any(|other| other.number == slot.number) {
                let (value, rule) = (u64::from(slot.number), "another slot has, too");
                return Err(MachineError::Number {
                    what: "a memory slot".into(),
                    field: "slot",
                    value,
                    rule,
                });
            }
        }
        if ranges.is_empty() {
            let whole = |index: &usize| Range { gpa: slots[*index].address, length: slots[*index].bytes };
            ranges = by_address.iter().map(whole).collect();
        }
        let mut layout = Self { slots, parts: Vec::new(), by_address };
        for range in ranges {
            layout.add(range)?;
        }
        layout.by_address = (0..layout.parts.len()).collect();
        layout.by_address.sort_by_key(|index| layout.parts[*index].address);
        layout.check_parts().map(|()| layout)
    }

    /// The slots, in the order of the configuration.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The parts, in the order of their places in the image.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Bytes of memory that the image contains.
    pub fn len_bytes(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.offset + part.bytes)
    }

    /// The parts that contain the bytes from `offset` of the image's memory on, cut to these bytes.
    pub fn at_offset(&self, offset: u64, bytes: u64) -> impl Iterator<Item = Part> + '_ {
        let first = self.parts.partition_point(|part| part.offset + part.bytes <= offset);
        let end = offset + bytes;
        self.parts[first..].iter().take_while(move |part| part.offset < end).map(move |part| {
            let start = part.offset.max(offset);
            let skipped = start - part.offset;
            Part {
                offset: start,
                slot: part.slot,
                address: part.address + skipped,
                file_offset: part.file_offset + skipped,
                bytes: (part.offset + part.bytes).min(end) - start,
            }
        })
    }

    /// Where a range of guest-physical addresses is. `None`: a part of it is in no slot.
    pub fn at_address(&self, address: u64, bytes: u64) -> Option<Vec<Found>> {
        let (mut at, end, mut all) = (address, address.checked_add(bytes)?, Vec::new());
        while at < end {
            let next = self.by_address.partition_point(|index| self.end(*index) <= at);
            let part = self.by_address.get(next).map(|index| self.parts[*index]);
            match part {
                Some(part) if part.address <= at => {
                    let count = (part.address + part.bytes).min(end) - at;
                    all.push(Found::Image { offset: part.offset + (at - part.address), bytes: count });
                    at += count;
                }
                part => {
                    let inside = |slot: &Slot| slot.address <= at && at - slot.address < slot.bytes;
                    let index = self.slots.iter().position(inside)?;
                    let slot = &self.slots[index];
                    let limit =
                        (slot.address + slot.bytes).min(part.map_or(end, |part| part.address)).min(end);
                    let file_offset = slot.file_offset + (at - slot.address);
                    all.push(Found::Unused { slot: index, file_offset, bytes: limit - at });
                    at = limit;
                }
            }
        }
        Some(all)
    }

    fn end(&self, part: usize) -> u64 {
        self.parts[part].address + self.parts[part].bytes
    }

    /// Adds the parts of a range. While ranges are added, `by_address` has the slots.
    fn add(&mut self, range: Range) -> Result<(), MachineError> {
        let what = || format!("the memory range at {:#x}", range.gpa);
        check_range(&what, range.gpa, range.length)?;
        let (mut at, end) = (range.gpa, range.gpa + range.length);
        while at < end {
            let next = self.by_address.partition_point(|index| {
                let slot = &self.slots[*index];
                slot.address + slot.bytes <= at
            });
            let slot = self.by_address.get(next).copied().filter(|index| self.slots[*index].address <= at);
            let Some(index) = slot else {
                return Err(MachineError::NoSlot { address: range.gpa, missing: at });
            };
            let slot = &self.slots[index];
            let bytes = (slot.address + slot.bytes).min(end) - at;
            let file_offset = slot.file_offset + (at - slot.address);
            let offset = self.len_bytes();
            if self.parts.len() == 1 << 20 {
                let rule = "is one of more than 1048576";
                return Err(MachineError::Number { what: what(), field: "the address", value: at, rule });
            }
            self.parts.push(Part { offset, slot: index, address: at, file_offset, bytes });
            at += bytes;
        }
        Ok(())
    }

    /// Checks that no byte is there twice, and that none is missing.
    fn check_parts(&self) -> Result<(), MachineError> {
        for pair in self.by_address.windows(2) {
            let after = self.parts[pair[1]].address;
            if self.end(pair[0]) > after {
                return Err(MachineError::Overlap { what: "memory ranges", address: after });
            }
        }
        for slot in self.slots.iter().filter(|slot| !slot.is_virtio_mem) {
            let found = self.at_address(slot.address, slot.bytes).unwrap_or_default();
            let mut at = slot.address;
            for found in found {
                match found {
                    Found::Image { bytes, .. } => at += bytes,
                    Found::Unused { .. } => {
                        return Err(MachineError::Outside { address: at, zone: slot.zone.clone() });
                    }
                }
            }
        }
        Ok(())
    }
}

impl Slot {
    /// Bytes that the slot's file has at least.
    pub fn file_bytes(&self) -> u64 {
        self.file_offset + self.bytes
    }

    fn check(&self) -> Result<(), MachineError> {
        let what = || format!("memory slot {}", self.number);
        check_range(&what, self.address, self.bytes)?;
        let is_right = self.file_offset.is_multiple_of(PAGE_BYTES) && self.file_offset <= MEMORY_MOST;
        if is_right {
            return Ok(());
        }
        let (value, rule) = (self.file_offset, "is no multiple of 4096, or too large");
        Err(MachineError::Number { what: what(), field: "file_offset", value, rule })
    }
}

fn check_range(what: &dyn Fn() -> String, address: u64, bytes: u64) -> Result<(), MachineError> {
    let number = |field, value, rule| Err(MachineError::Number { what: what(), field, value, rule });
    if !address.is_multiple_of(PAGE_BYTES) || address > MEMORY_MOST {
        return number("the address", address, "is no multiple of 4096, or above 2^52");
    }
    if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) || bytes > MEMORY_MOST - address {
        return number("the length", bytes, "is 0, no multiple of 4096, or ends above 2^52");
    }
    Ok(())
}
