//! The source's end of the main channel: writes elements in order.
//!
//! Only one thread writes at a time.

#[cfg(feature = "standby")]
mod checkpoints;
#[cfg(any(feature = "postcopy", feature = "standby"))]
pub(super) mod collector;
#[cfg(feature = "rdma")]
mod phases;

use std::sync::Arc;

use sterna_transport::{Channel, IoPart};
use sterna_wire::extension::{Handover, SourceConfiguration};
use sterna_wire::main::{
    Command, Configuration, FileHeader, SectionHeader, encode_footer, encode_length_prefixed,
    encode_section_part,
};
use sterna_wire::ram::RamRecordWriter;
use sterna_wire::vmdesc;

use super::measure::Counters;
use crate::error::MigrationError;
use crate::streams;

const CHANNEL: &str = "main channel";

/// A target for the bytes of a main channel.
pub(crate) trait Sink: Send + Sync {
    /// Writes all parts, one after the other.
    fn write_parts(&self, parts: &[IoPart<'_>]) -> Result<(), MigrationError>;
}

impl Sink for Channel {
    fn write_parts(&self, parts: &[IoPart<'_>]) -> Result<(), MigrationError> {
        Ok(Channel::write_parts(self, parts)?)
    }
}

/// The stream on the main channel. A thread that has locked it writes whole elements.
pub struct MainStream {
    channel: Arc<dyn Sink>,
    counters: Arc<Counters>,
    records: RamRecordWriter,
    /// The section id of `ram`. Ids only link the sections of one device.
    ram_section: u32,
    next_section: u32,
    /// The configuration at the beginning of the stream.
    configuration: Configuration,
    /// The devices for the description after EOF.
    described: Vec<vmdesc::Device>,
    /// A phase of RDMA is open: nothing may be written.
    is_in_phase: bool,
    /// The id of the devices' first section, after it is sent. Checkpoints use the same ids again.
    first_device: Option<u32>,
    /// RAM's records are written into one END section (specs/colo.md §4).
    is_in_checkpoint: bool,
    /// The number of checkpoints that were begun.
    checkpoints: u64,
}

impl MainStream {
    /// A stream with the given ids of RAM's section and of the first device's section.
    pub(super) fn new(channel: Arc<dyn Sink>, counters: Arc<Counters>, ids: (u32, u32)) -> Self {
        Self {
            channel,
            counters,
            records: RamRecordWriter::new(),
            ram_section: ids.0,
            next_section: ids.1,
            configuration: Configuration::default(),
            described: Vec::new(),
            is_in_phase: false,
            first_device: None,
            is_in_checkpoint: false,
            checkpoints: 0,
        }
    }

    /// Records that the devices' sections follow, which each checkpoint repeats.
    pub(super) fn mark_devices(&mut self) {
        self.first_device = Some(self.next_section);
    }

    /// The number of the checkpoint to which pages belong now; `None` in the seeding.
    pub(super) fn checkpoint(&self) -> Option<u64> {
        self.is_in_checkpoint.then_some(self.checkpoints)
    }

    /// Whether a phase of RDMA is open.
    pub(super) fn is_in_phase(&self) -> bool {
        self.is_in_phase
    }

    /// Writes whole elements, which `fill` appends.
    pub fn send(
        &mut self,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<(), sterna_wire::WireError>,
    ) -> Result<(), MigrationError> {
        let mut bytes = Vec::new();
        fill(&mut bytes).map_err(MigrationError::wire(CHANNEL))?;
        self.write(&[IoPart::Bytes(&bytes)], bytes.len())
    }

    /// Writes header and configuration, the first bytes of the stream.
    pub(super) fn greet(&mut self, configuration: Configuration) -> Result<(), MigrationError> {
        self.configuration = configuration.clone();
        self.send(|out| {
            FileHeader.encode(out);
            configuration.encode(out)
        })
    }

    /// Writes all commands in one call.
    pub fn commands(&mut self, commands: &[Command]) -> Result<(), MigrationError> {
        self.send(|out| commands.iter().try_for_each(|command| command.encode(out)))
    }

    /// Writes one FULL section. Its body has a length field, or none.
    pub fn full_section(
        &mut self,
        header: (&str, u32, u32),
        body: &[u8],
        length_prefixed: bool,
    ) -> Result<(), MigrationError> {
        let (name, instance, version) = header;
        let id = self.next_section;
        self.next_section += 1;
        let mut fields = vec![vmdesc::Field::new("data", "buffer", body.len() as u64)];
        if length_prefixed {
            fields.insert(0, vmdesc::Field::new("length", "uint32", 4));
        }
        // The migration's name and the VM's configuration are no device state. A receiver that stores the description
        // must not store them.
        if ![Handover::SECTION_NAME, SourceConfiguration::SECTION_NAME].contains(&name) {
            self.described.push(vmdesc::Device { name: name.to_owned(), instance, version, fields });
        }
        self.send(|out| {
            SectionHeader { id, name, instance, version }.encode_full(out)?;
            if length_prefixed {
                encode_length_prefixed(body, out)?;
            } else {
                out.extend_from_slice(body);
            }
            encode_footer(id, out);
            Ok(())
        })
    }

    /// Writes the START section of RAM: the block list, and with multifd the first flush.
    pub(crate) fn ram_start(
        &mut self,
        blocks: &sterna_wire::ram::BlockList,
        flush: bool,
    ) -> Result<(), MigrationError> {
        let id = self.ram_section;
        self.send(|out| {
            SectionHeader { id, name: "ram", instance: 0, version: 4 }.encode_start(out)?;
            blocks.encode(out)?;
            end_of_ram(id, flush, out);
            Ok(())
        })
    }

    /// The id of RAM's section.
    pub(super) fn ram_section(&self) -> u32 {
        self.ram_section
    }

    /// Ends a section of RAM: after a block list in pieces, or after a phase.
    pub(super) fn end_ram_section(&mut self, flush: bool) -> Result<(), MigrationError> {
        let id = self.ram_section;
        self.send(|out| {
            end_of_ram(id, flush, out);
            Ok(())
        })
    }

    /// Writes a PART (or the END) of RAM without pages. `flush` adds the flush for pages on multifd channels.
    pub(crate) fn ram_part(&mut self, last: bool, flush: bool) -> Result<(), MigrationError> {
        let id = self.ram_section;
        self.send(|out| {
            encode_section_part(id, last, out);
            end_of_ram(id, flush, out);
            Ok(())
        })
    }

    /// Writes a PART of RAM with the records that `fill` appends. None of them may be a raw page.
    pub(crate) fn ram_records(
        &mut self,
        fill: impl FnOnce(&mut RamRecordWriter, &mut Vec<u8>) -> Result<(), sterna_wire::WireError>,
    ) -> Result<(), MigrationError> {
        let (id, has_frame) = (self.ram_section, !self.is_in_checkpoint);
        let mut records = std::mem::take(&mut self.records);
        let result = self.send(|out| {
            if has_frame {
                encode_section_part(id, false, out);
            }
            fill(&mut records, out)?;
            if has_frame {
                end_of_ram(id, false, out);
            }
            Ok(())
        });
        self.records = records;
        result
    }

    /// Writes a PART of RAM with raw pages, from guest RAM without a copy. Gives the number of bytes.
    pub(crate) fn ram_pages<'a>(
        &mut self,
        fill: impl FnOnce(&mut RamRecordWriter, &mut PagesPart<'a>) -> Result<(), MigrationError>,
    ) -> Result<u64, MigrationError> {
        let mut part = PagesPart::default();
        if !self.is_in_checkpoint {
            encode_section_part(self.ram_section, false, &mut part.bytes);
        }
        fill(&mut self.records, &mut part)?;
        if !self.is_in_checkpoint {
            end_of_ram(self.ram_section, false, &mut part.bytes);
        }
        // In a checkpoint with differences, the standby may hold all pages of the run already.
        if part.bytes.is_empty() {
            return Ok(0);
        }
        let (parts, length) = part.parts();
        self.write(&parts, length)?;
        Ok(length as u64)
    }

    /// Makes the next page record name its block.
    ///
    /// It is called when a guest resumes at the destination before its pages are there.
    #[cfg(feature = "postcopy")]
    pub(super) fn forget_block(&mut self) {
        self.records.forget_block();
    }

    /// Opens the section of a device's stream on the main channel (specs/extension.md §9). Gives its id.
    pub(super) fn stream_section(&mut self, device: &str, instance: u32) -> Result<u32, MigrationError> {
        let id = self.next_section;
        self.next_section += 1;
        let name = streams::section_name(device);
        self.send(|out| {
            SectionHeader { id, name: &name, instance, version: 1 }.encode_start(out)?;
            encode_length_prefixed(&[], out)?;
            encode_footer(id, out);
            Ok(())
        })?;
        Ok(id)
    }

    /// Writes a part of a device stream's section.
    pub(super) fn stream_part(&mut self, id: u32, body: &[u8], last: bool) -> Result<(), MigrationError> {
        let mut head = Vec::new();
        encode_section_part(id, last, &mut head);
        head.extend_from_slice(&(body.len() as u32).to_be_bytes());
        let mut foot = Vec::new();
        encode_footer(id, &mut foot);
        let parts = [IoPart::Bytes(&head), IoPart::Bytes(body), IoPart::Bytes(&foot)];
        self.write(&parts, head.len() + body.len() + foot.len())
    }

    /// The JSON description that follows EOF.
    pub fn description(&self) -> String {
        vmdesc::build_for(&self.configuration, &self.described)
    }

    fn write(&mut self, parts: &[IoPart<'_>], length: usize) -> Result<(), MigrationError> {
        self.channel.write_parts(parts)?;
        self.counters.main(length as u64);
        Ok(())
    }
}

/// The records of one PART, with raw pages between them.
#[derive(Default)]
pub(crate) struct PagesPart<'a> {
    /// All bytes except page content.
    pub bytes: Vec<u8>,
    /// The positions in `bytes` at which a page follows.
    cuts: Vec<(usize, sterna_ram::RamSlice<'a>)>,
}

impl<'a> PagesPart<'a> {
    /// Adds the content of a page whose header was just appended to `bytes`.
    pub(crate) fn page(&mut self, content: sterna_ram::RamSlice<'a>) {
        self.cuts.push((self.bytes.len(), content));
    }

    /// All parts to write, in order, and their size in bytes.
    pub(super) fn parts(&self) -> (Vec<IoPart<'_>>, usize) {
        let mut parts = Vec::with_capacity(self.cuts.len() * 2 + 1);
        let mut start = 0;
        let mut length = self.bytes.len();
        for &(end, page) in &self.cuts {
            parts.push(IoPart::Bytes(&self.bytes[start..end]));
            parts.push(IoPart::Ram(page));
            length += page.len();
            start = end;
        }
        parts.push(IoPart::Bytes(&self.bytes[start..]));
        (parts, length)
    }
}

fn end_of_ram(id: u32, flush: bool, out: &mut Vec<u8>) {
    if flush {
        RamRecordWriter::multifd_flush(out);
    }
    RamRecordWriter::eos(out);
    // The footer belongs to the section header that the caller has written.
    encode_footer(id, out);
}
