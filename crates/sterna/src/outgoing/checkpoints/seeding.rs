//! The course of a seeding: a standby gets the guest's state (`specs/replica.md §4`).
//!
//! Checkpoints follow on the same channels.

use std::sync::Arc;

use sterna_transport::Channel;
use sterna_wire::extension::COMPATIBILITY_SECTION;
use sterna_wire::replica::Output;

use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::carrier::interface::Carrier;
use crate::outgoing::course::interface::{BeforePiece, Course};
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::MainStream;
use crate::outgoing::protection::{EpochStreams, Protecting};
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::params::{NonConvergence, Parameters};
use crate::streams::Streamed;
use crate::threads::call;

struct Seeding {
    shared: Arc<Shared>,
    protecting: Arc<Protecting>,
}

/// The course of `shared`'s migration, which seeds the standby of `protecting`.
pub(in crate::outgoing) fn course(shared: Arc<Shared>, protecting: Arc<Protecting>) -> Box<dyn Course> {
    Box::new(Seeding { shared, protecting })
}

impl Course for Seeding {
    fn announces_handover(&self) -> bool {
        // A standby treats the source as any primary, not as a side that hands the guest over.
        false
    }

    fn acknowledging_devices(&self) -> usize {
        // The standby opens its side of each device stream at the beginning, and sends no acknowledgement.
        0
    }

    fn adjust(&self, params: &mut Parameters) {
        // The guest is paused once for the seeding, and checkpoints do not depend on the downtime limit.
        if params.non_convergence == NonConvergence::KeepGoing {
            params.non_convergence = NonConvergence::Switchover;
        }
    }

    fn begin_streams(&self, _channels: &[Arc<Channel>]) -> Result<Option<DeviceStreams>, MigrationError> {
        Ok(None)
    }

    fn ram_begun(&self, main: &MainChannel, before: BeforePiece<'_>) -> Result<(), Break> {
        let streams = EpochStreams::begin(Streamed::of(&self.shared.guest.vm.devices()), main)?;
        self.protecting.set_streams(streams);
        self.prepare_pause(main, before)
    }

    fn prepare_pause(&self, main: &MainChannel, before: BeforePiece<'_>) -> Result<(), Break> {
        match self.protecting.streams() {
            Some(streams) => streams.send_most(main, before),
            None => Ok(()),
        }
    }

    fn pages_sent(&self, main: &MainChannel) -> Result<bool, MigrationError> {
        let Some(streams) = self.protecting.streams() else { return Ok(false) };
        streams.send_rest(main)?;
        Ok(true)
    }

    fn write_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError> {
        // Checkpoints have the same sections as the seeding.
        write_checkpoint(&self.shared, &self.protecting, stream, (run_state, &Output::default(), true))
    }

    fn stream_ended(&self, _carrier: &dyn Carrier) {
        // Checkpoints follow on all channels.
    }

    fn close(&self) {
        if let Some(streams) = self.protecting.take_streams() {
            streams.end();
        }
    }
}

/// Writes all sections of a checkpoint except the last.
///
/// They are the machine's sections, the changes of its device streams, and the guest's output that has not left
/// yet.
pub(in crate::outgoing) fn write_checkpoint(
    shared: &Shared,
    protecting: &Protecting,
    stream: &mut MainStream,
    (run_state, unsaid, is_seeding): (&str, &Output, bool),
) -> Result<(), MigrationError> {
    let source = &shared.guest.source;
    source.send_devices(stream, run_state)?;
    if let Some(record) = call("Vm::compatibility", || source.vm().compatibility()) {
        let body = call("Device::save of the compatibility record", || record.save())?;
        stream.full_section((COMPATIBILITY_SECTION, record.instance(), record.version()), &body, true)?;
    }
    if let Some(streams) = protecting.streams() {
        streams.write_epoch(stream, is_seeding)?;
    }
    stream.output(unsaid)?;
    // The summary of a checkpoint contains the sent pages, which are not known yet.
    if is_seeding { stream.announce_summaries() } else { Ok(()) }
}
