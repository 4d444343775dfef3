//! Memory of the packets of lanes that have their own connections.

use sterna_transport::rdma::Write;
use sterna_wire::rdma::{BlockRange, take_ready};

use super::{PATIENCE, Remote, State, Work};
use crate::error::MigrationError;

impl Work {
    /// Adds the pages of a filled packet, so that their memory is registered.
    pub(in crate::outgoing::rdma) fn add_packet(&self, ranges: &[BlockRange]) -> Result<(), MigrationError> {
        self.use_blocks(ranges);
        let mut state = self.state()?;
        let bytes: u64 = ranges.iter().map(|range| range.length).sum();
        state.add(ranges)?;
        self.rdma.counts.packet_queued(bytes);
        self.wake(state);
        Ok(())
    }

    /// Takes the ranges that are registered on both sides now out of `left`. Gives their WRITEs, and the ranges.
    ///
    /// `left` are the packet's ranges that are not written yet. A packet may need more memory than may be
    /// registered at the same time. Therefore it is written in parts.
    pub(in crate::outgoing::rdma) fn take_packet(
        &self,
        left: &mut Vec<BlockRange>,
    ) -> Result<(Vec<Write>, Vec<BlockRange>), MigrationError> {
        let places = self.rdma.places()?;
        let mut state = self.state()?;
        let mut taken = Vec::with_capacity(left.len());
        let State { own, remote: Remote::Known(remote), .. } = &mut *state else {
            return Ok(Default::default());
        };
        let mut rest = Vec::new();
        for range in left.drain(..) {
            let mut parts = take_ready(own, remote, range);
            parts.sort_unstable_by_key(|part| part.start);
            let mut at = range.start;
            for part in &parts {
                rest.push(BlockRange { start: at, length: part.start - at, ..range });
                at = part.end();
            }
            rest.push(BlockRange { start: at, length: range.end() - at, ..range });
            taken.append(&mut parts);
        }
        rest.retain(|range| range.length > 0);
        *left = rest;
        let mut writes = Vec::with_capacity(taken.len());
        for range in &taken {
            let mut left = *range;
            while left.length > 0 {
                let length = left.length.min(state.one_write(&left)).min(self.rdma.longest_write());
                let part = BlockRange { length, ..left };
                let write = state.write(part, self.rdma.registration, places);
                writes.push(write.ok_or_else(|| {
                    MigrationError::Internal(format!("{part:?} is to be written and is not registered"))
                })?);
                left.start += length;
                left.length -= length;
            }
            self.rdma.counts.packet_posted(range.length);
        }
        Ok((writes, taken))
    }

    /// Records that all WRITEs of these ranges are complete.
    pub(in crate::outgoing::rdma) fn packet_is_complete(
        &self,
        ranges: &[BlockRange],
    ) -> Result<(), MigrationError> {
        let wire = MigrationError::wire("RDMA memory");
        let mut state = self.state()?;
        for range in ranges {
            state.own.completed(*range).map_err(&wire)?;
            if let Remote::Known(remote) = &mut state.remote {
                remote.completed(*range).map_err(&wire)?;
            }
            self.rdma.counts.packet_completed(range.length);
        }
        self.wake(state);
        Ok(())
    }

    /// Waits shortly until some of this memory is registered on both sides.
    pub(in crate::outgoing::rdma) fn wait_for_memory(
        &self,
        ranges: &[BlockRange],
    ) -> Result<(), MigrationError> {
        let mut state = self.state()?;
        let State { own, remote: Remote::Known(remote), .. } = &mut *state else { return Ok(()) };
        if !ranges.iter().any(|range| own.has_ready(range) && remote.has_ready(range)) {
            self.lane.wait_for(&mut state, PATIENCE);
        }
        Ok(())
    }
}
