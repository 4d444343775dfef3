//! Checkpoints on the main channel (specs/colo.md §4, specs/replica.md §7).

use sterna_transport::IoPart;
use sterna_wire::main::{
    SectionHeader, encode_end, encode_footer, encode_length_prefixed, encode_section_part,
};
use sterna_wire::replica::{CheckpointSummary, Output, PageSums};
use sterna_wire::vmdesc;

use super::collector::CollectedDevices;
use super::{CHANNEL, MainStream, end_of_ram};
use crate::error::MigrationError;

impl CollectedDevices {
    /// The end of the checkpoint, for after its pages: the summary, and EOF.
    pub(in crate::outgoing) fn end(&self, number: u64, pages: PageSums) -> Result<Vec<u8>, MigrationError> {
        let body = CheckpointSummary::of(number, pages, &self.sections).encode();
        let (name, id) = (CheckpointSummary::SECTION_NAME, self.next_section);
        let (instance, version) = (CheckpointSummary::SECTION_INSTANCE, CheckpointSummary::SECTION_VERSION);
        let mut end = Vec::new();
        let header = SectionHeader { id, name, instance, version }.encode_full(&mut end);
        let framed = header.and_then(|()| encode_length_prefixed(&body, &mut end));
        framed.map_err(MigrationError::wire(CHANNEL))?;
        encode_footer(id, &mut end);
        encode_end(&mut end);
        Ok(end)
    }
}

impl MainStream {
    /// Writes the section with output of the guest that has not left yet.
    pub(in crate::outgoing) fn output(&mut self, output: &Output) -> Result<(), MigrationError> {
        let header = (Output::SECTION_NAME, Output::SECTION_INSTANCE, Output::SECTION_VERSION);
        self.full_section(header, &output.encode(), true)
    }

    /// Writes the seeding's section of summaries: each checkpoint ends with a summary.
    pub(in crate::outgoing) fn announce_summaries(&mut self) -> Result<(), MigrationError> {
        let (instance, version) = (CheckpointSummary::SECTION_INSTANCE, CheckpointSummary::SECTION_VERSION);
        let header = (CheckpointSummary::SECTION_NAME, instance, version);
        self.full_section(header, &CheckpointSummary::default().encode(), true)
    }

    /// Begins RAM of a checkpoint.
    pub(in crate::outgoing) fn begin_checkpoint(&mut self) -> Result<(), MigrationError> {
        self.is_in_checkpoint = true;
        self.checkpoints += 1;
        let id = self.ram_section;
        self.send(|out| {
            encode_section_part(id, true, out);
            Ok(())
        })
    }

    /// Ends RAM of a checkpoint.
    pub(in crate::outgoing) fn end_checkpoint(&mut self, flush: bool) -> Result<(), MigrationError> {
        self.is_in_checkpoint = false;
        let id = self.ram_section;
        self.send(|out| {
            end_of_ram(id, flush, out);
            encode_end(out);
            Ok(())
        })
    }

    /// Writes one FULL section with a length field. `fill` appends its body, which may be long and is not copied.
    pub(in crate::outgoing) fn long_section(
        &mut self,
        header: (&str, u32, u32),
        fill: impl FnOnce(&mut Vec<u8>) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let (name, instance, version) = header;
        let id = self.next_section;
        self.next_section += 1;
        let mut out = Vec::new();
        let encoded = SectionHeader { id, name, instance, version }.encode_full(&mut out);
        encoded.map_err(MigrationError::wire(CHANNEL))?;
        let at = out.len();
        out.extend_from_slice(&[0; 4]);
        fill(&mut out)?;
        let length = out.len() - at - 4;
        let framed = u32::try_from(length)
            .map_err(|_| MigrationError::Internal(format!("{length} bytes in one section")))?;
        out[at..at + 4].copy_from_slice(&framed.to_be_bytes());
        encode_footer(id, &mut out);
        let fields = [("length", "uint32", 4), ("data", "buffer", length as u64)];
        let fields = fields.map(|(name, kind, bytes)| vmdesc::Field::new(name, kind, bytes)).to_vec();
        self.described.push(vmdesc::Device { name: name.to_owned(), instance, version, fields });
        self.write(&[IoPart::Bytes(&out)], out.len())
    }
}
