//! The steps at which carriers differ.

use std::sync::Arc;

use sterna_proto::source::Event as Fed;
use sterna_transport::Channel;

use super::writers::Writers;
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::waits::Waits;
use crate::outgoing::workers::Workers;

/// The way that a guest takes. The control thread calls the steps in this order; the last two follow the commit.
pub(in crate::outgoing) trait Carrier: Send {
    /// The main channel.
    fn main(&self) -> &Arc<MainChannel>;

    /// Channels that each carry a lane.
    fn multifd(&self) -> &[Arc<Channel>] {
        &[]
    }

    /// Writes what the stream begins with.
    fn greet(&self) -> Result<(), MigrationError>;

    /// What explains a failure of the main channel better than the channel does; asked on another thread.
    fn cause(&self) -> Box<dyn Fn() -> Option<MigrationError> + Send> {
        Box::new(|| None)
    }

    /// The destination has introduced itself, and nothing of the guest was sent.
    fn enter(&mut self, _waits: &mut Waits) -> Result<(), Break> {
        Ok(())
    }

    /// Whether lanes need the START section of RAM. Multifd channels write their first SYNC before it, because the flush in it
    /// waits for that.
    fn begins_ram_before_lanes(&self) -> bool {
        false
    }

    /// Writes the START section of RAM.
    fn begin_ram(&mut self) -> Result<(), MigrationError>;

    /// Makes a writer for each lane.
    fn lanes(&mut self) -> Result<Writers, MigrationError>;

    /// Starts the threads that work for the lanes. They end with them.
    fn start_helpers(&self, _workers: &mut Workers) -> Result<(), MigrationError> {
        Ok(())
    }

    /// Every lane is through with a round: separates it from the next one. `is_last`: the guest is stopped.
    fn end_round(&self, is_last: bool) -> Result<(), MigrationError>;

    /// Writes the END section of RAM.
    fn end_ram(&self) -> Result<(), MigrationError>;

    /// Does everything that can fail before the commit, where this side alone commits. `None`: the destination has a say.
    fn store(&self) -> Option<Result<(), MigrationError>> {
        None
    }

    /// Writes the end of the stream; where this side alone commits, this is the commit.
    fn end(&self) -> Result<(), MigrationError>;

    /// What the machine learns if that fails.
    fn end_failed(&self) -> Fed {
        Fed::EofFailed
    }

    /// Ends the multifd channels, to which nothing is written any more.
    fn say_goodbye(&self) {
        // A QEMU demands it after the last packet (specs/stream.md §3.7). A lane whose end is lost has lost nothing else: its last
        // SYNC is out.
        for channel in self.multifd() {
            if let Err(error) = channel.say_goodbye() {
                tracing::debug!(%error, "end of a multifd channel");
            }
        }
    }

    /// Ends all access to the guest's memory. No thread works for the carrier any more.
    fn close(&mut self) {}
}
