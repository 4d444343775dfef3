//! The points at which courses differ.

use std::sync::Arc;

use sterna_transport::Channel;

use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::carrier::interface::Carrier;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::MainStream;
use crate::outgoing::streams::DeviceStreams;
use crate::params::Parameters;

/// Called before a piece of so many bytes is sent while the guest runs: waits for the bandwidth limit.
pub(in crate::outgoing) type BeforePiece<'a> = &'a mut dyn FnMut(u64) -> Result<(), Break>;

/// Where a migration that moves a guest and the seeding of a standby differ.
pub(in crate::outgoing) trait Course: Send {
    /// Whether the source names itself a Sterna that hands a guest over (specs/extension.md §1).
    fn announces_handover(&self) -> bool;

    /// Devices whose acknowledgement the switchover needs (specs/stream.md §5.3).
    fn acknowledging_devices(&self) -> usize;

    /// What the policy is told in place of an operator's parameters.
    fn adjust(&self, params: &mut Parameters);

    /// Starts devices' streams that go along with pages.
    fn begin_streams(&self, channels: &[Arc<Channel>]) -> Result<Option<DeviceStreams>, MigrationError>;

    /// RAM has begun, and the guest's writes are tracked. No page was sent.
    fn ram_begun(&self, main: &MainChannel, before: BeforePiece<'_>) -> Result<(), Break>;

    /// The guest is about to be stopped: sends what would lengthen its pause.
    fn prepare_pause(&self, main: &MainChannel, before: BeforePiece<'_>) -> Result<(), Break>;

    /// The last page was sent. True: streams of devices were completed here.
    fn pages_sent(&self, main: &MainChannel) -> Result<bool, MigrationError>;

    /// Writes devices' sections, with the guest stopped.
    fn write_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError>;

    /// The end of this stream was written: ends the channels that are not used any more.
    fn stream_ended(&self, carrier: &dyn Carrier);

    /// No channel is open any more.
    fn close(&self);
}
