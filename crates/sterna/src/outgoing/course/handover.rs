//! The course of a migration that moves the guest.

use std::sync::Arc;

use sterna_proto::source::SwitchoverAck;
use sterna_transport::Channel;

use super::interface::{BeforePiece, Course};
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::carrier::interface::Carrier;
use crate::outgoing::limits::ack_form;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::MainStream;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::params::Parameters;

pub(super) struct Handover {
    pub(super) shared: Arc<Shared>,
}

impl Course for Handover {
    fn announces_handover(&self) -> bool {
        true
    }

    /// The count for the present form of `switchover-ack`: one for each device that requests it.
    fn acknowledging_devices(&self) -> usize {
        let vm = &self.shared.guest.vm;
        match ack_form(&self.shared.capabilities, &vm.machine_type()) {
            SwitchoverAck::Modern => {
                vm.devices().iter().filter(|device| device.asks_switchover_ack()).count()
            }
            _ => 0,
        }
    }

    fn adjust(&self, _params: &mut Parameters) {}

    fn begin_streams(&self, channels: &[Arc<Channel>]) -> Result<Option<DeviceStreams>, MigrationError> {
        DeviceStreams::begin(&self.shared, channels)
    }

    fn ram_begun(&self, _main: &MainChannel, _before: BeforePiece<'_>) -> Result<(), Break> {
        Ok(())
    }

    fn prepare_pause(&self, _main: &MainChannel, _before: BeforePiece<'_>) -> Result<(), Break> {
        Ok(())
    }

    fn pages_sent(&self, _main: &MainChannel) -> Result<bool, MigrationError> {
        self.shared.session.lanes.queue.end();
        Ok(false)
    }

    fn write_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError> {
        self.shared.guest.source.send_devices(stream, run_state)
    }

    fn stream_ended(&self, carrier: &dyn Carrier) {
        carrier.say_goodbye();
    }

    fn close(&self) {}
}
