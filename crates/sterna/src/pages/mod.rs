//! What carries pages: where a lane puts them ([`PageWriter`]) and where a receiver does ([`PageSink`]).
//!
//! Neither knows the other: a writer may speak multifd, records of the main channel, or no protocol at
//! all (a file); a sink may be guest RAM, an image, later a COLO cache or userfaultfd copies.

mod file;
mod ram_sink;
mod sink;
#[cfg(test)]
mod tests;

pub(crate) use file::{FileWriter, MappedFile};
pub(crate) use ram_sink::RamSink;
pub(crate) use sink::PageSink;

use sterna_transport::Channel;

use crate::error::MigrationError;
use crate::order::PageRun;

/// Takes runs of pages from one lane and carries them away.
pub(crate) trait PageWriter: Send {
    /// Carries the content of `run`. The guest may write it meanwhile: what arrives is then stale or torn,
    /// and the page is reported dirty.
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError>;
    /// Carries the news that the pages of `run` are zero.
    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError>;
    /// As [`PageWriter::zero_run`], of pages that were never populated and must not be read.
    fn absent_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.zero_run(run)
    }
    /// Carries a packet with a chunk of a device's stream, whole. Only where the way of the streams leads over lanes.
    fn device_packet(&mut self, packet: &[u8]) -> Result<(), MigrationError> {
        let _ = packet;
        Err(MigrationError::Internal("this writer carries pages alone".to_owned()))
    }
    /// From now on nothing goes over a channel that others need: the main channel has the pages that the destination waits for.
    fn keep_to_itself(&mut self) {}
    /// The channel that it alone writes to, if there is one.
    fn channel(&self) -> Option<&Channel> {
        None
    }
    /// All pages taken so far are out, and none that follows can overtake them.
    fn barrier(&mut self) -> Result<(), MigrationError>;
    /// The migration ends early: unblock whoever waits, drop what is not out.
    fn abort(&mut self);
}
