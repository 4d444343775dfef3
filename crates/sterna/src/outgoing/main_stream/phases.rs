//! RAM's sections around phases of RDMA.

use sterna_wire::main::{SectionHeader, encode_section_part};
use sterna_wire::ram::RamRecordWriter;

use super::{CHANNEL, MainStream};
use crate::error::MigrationError;

impl MainStream {
    pub(in crate::outgoing) fn set_in_phase(&mut self, is_in_phase: bool) {
        self.is_in_phase = is_in_phase;
    }

    /// The beginning of RAM's START section over RDMA: the block list and a hook. Counts as written.
    pub(in crate::outgoing) fn ram_start_before_phase(
        &self,
        blocks: &sterna_wire::ram::BlockList,
    ) -> Result<Vec<u8>, MigrationError> {
        let mut out = Vec::new();
        let header = SectionHeader { id: self.ram_section, name: "ram", instance: 0, version: 4 };
        header.encode_start(&mut out).map_err(MigrationError::wire(CHANNEL))?;
        blocks.encode(&mut out).map_err(MigrationError::wire(CHANNEL))?;
        Ok(self.before_phase(out))
    }

    /// The beginning of a PART (or the END) of RAM over RDMA. Counts as written.
    pub(in crate::outgoing) fn ram_part_before_phase(&self, last: bool) -> Vec<u8> {
        let mut out = Vec::new();
        encode_section_part(self.ram_section, last, &mut out);
        self.before_phase(out)
    }

    fn before_phase(&self, mut out: Vec<u8>) -> Vec<u8> {
        RamRecordWriter::hook(&mut out);
        self.counters.main(out.len() as u64);
        out
    }
}
