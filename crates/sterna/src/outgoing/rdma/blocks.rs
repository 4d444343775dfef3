//! RAM's sections around a phase, and the exchange of block places (`specs/rdma.md §5.2`, `§5.3`).

use sterna_wire::ram::BlockList;
use sterna_wire::rdma::session::Command;
use sterna_wire::rdma::{BlockPlaces, Message, MessageType, encode_empty};

use super::super::main_channel::MainChannel;
use super::super::main_stream::MainStream;
use super::source::RdmaSource;
use crate::error::MigrationError;

const CHANNEL: &str = "RDMA connection";

impl RdmaSource {
    /// Writes the START section of RAM, and the first flush of lanes.
    ///
    /// In the section's phase the destination reports the places of its blocks.
    pub(in crate::outgoing) fn start_ram(
        &self,
        main: &MainChannel,
        blocks: &BlockList,
        flush: bool,
    ) -> Result<(), MigrationError> {
        let lengths: Vec<u64> = blocks.blocks.iter().map(|block| block.length_bytes).collect();
        let begin = |stream: &mut MainStream| stream.ram_start_before_phase(blocks);
        self.section(main, begin, || self.exchange_blocks(&lengths), flush)
    }

    /// Writes the END section of RAM. Its phase is empty, because all pages have been written.
    pub(in crate::outgoing) fn end_ram(&self, main: &MainChannel) -> Result<(), MigrationError> {
        self.section(main, |stream| Ok(stream.ram_part_before_phase(true)), || Ok(()), false)
    }

    /// Opens a phase in a PART of RAM.
    pub(super) fn begin_part(&self, main: &MainChannel) -> Result<(), MigrationError> {
        main.begin_phase(|stream| self.begin_phase(&stream.ram_part_before_phase(false)))
    }

    /// Ends the phase. All WRITEs are complete.
    pub(super) fn end_part(&self, main: &MainChannel) -> Result<(), MigrationError> {
        let finished = self.finish_phase();
        main.end_phase(|stream| {
            finished?;
            stream.end_ram_section(false)
        })
    }

    /// Waits until the destination has processed a flush that was just written.
    ///
    /// It has then processed all packets before the flush.
    ///
    /// The destination clears the zero pages of packets itself, and must not do so after a WRITE of the next
    /// round. An empty phase shows it: the destination asks for the phase's command only after it has read the
    /// stream up to there.
    pub(in crate::outgoing) fn wait_for_flush(&self, main: &MainChannel) -> Result<(), MigrationError> {
        self.begin_part(main)?;
        self.end_part(main)
    }

    fn section(
        &self,
        main: &MainChannel,
        begin: impl FnOnce(&mut MainStream) -> Result<Vec<u8>, MigrationError>,
        within: impl FnOnce() -> Result<(), MigrationError>,
        flush: bool,
    ) -> Result<(), MigrationError> {
        main.begin_phase(|stream| self.begin_phase(&begin(stream)?))?;
        let done = within().and_then(|()| self.finish_phase());
        main.end_phase(|stream| {
            done?;
            stream.end_ram_section(flush)
        })
    }

    fn begin_phase(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        self.stream.begin_phase(bytes, Some(self.stall)).map_err(self.failed())
    }

    fn finish_phase(&self) -> Result<(), MigrationError> {
        self.command(Command::Finished, &empty(MessageType::RegisterFinished)?, 0).map(drop)
    }

    fn exchange_blocks(&self, lengths: &[u64]) -> Result<(), MigrationError> {
        // With pin-all the destination registers all of its memory before it answers.
        let total = lengths.iter().sum();
        let message = empty(MessageType::RamBlocksRequest)?;
        let answer = self.command(Command::RamBlocks, &message, total)?;
        let wire = MigrationError::wire(CHANNEL);
        let places = match Message::decode(answer.answer().unwrap_or_default()).map_err(&wire)? {
            Message::RamBlocksResult(blocks) => BlockPlaces::agreed(&blocks, lengths, self.registration),
            other => return Err(unasked(&other)),
        };
        self.places
            .set(places.map_err(&wire)?)
            .map_err(|_| MigrationError::Internal("the destination's blocks were asked for twice".to_owned()))
    }
}

fn empty(kind: MessageType) -> Result<Vec<u8>, MigrationError> {
    let mut message = Vec::new();
    encode_empty(kind, 1, &mut message).map_err(MigrationError::wire(CHANNEL))?;
    Ok(message)
}

/// The error for an unexpected answer. The session accepts only the expected one, so it shows an internal error.
pub(super) fn unasked(message: &Message<'_>) -> MigrationError {
    MigrationError::Internal(format!("{} came as an answer, and another was due", message.kind().name()))
}
