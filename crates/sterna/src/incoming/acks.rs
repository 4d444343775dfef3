//! Acknowledging the switchover: which of the two forms, and when (specs/stream.md §5.3).
//!
//! Until 11.0 the destination counts: one acknowledgement, when its last device is ready, at once if none
//! asks. From 11.1 on the source counts: one for each device that asks, as each is ready. One too many is
//! fatal to a source, one too few makes it wait for ever.

use std::sync::Arc;

use super::streams::inboxes::Inboxes;
use crate::machine_type::acknowledges_in_old_form;
use crate::params::Capabilities;
use crate::vm::Device;

pub(super) struct Acks {
    /// Devices that ask and are not ready.
    waiting: Vec<Arc<dyn Device>>,
    form: Form,
}

enum Form {
    /// Not asked for, or all said.
    Done,
    Old,
    Present,
}

impl Acks {
    /// For a machine of type `machine_type` with these `devices`.
    pub(super) fn new(
        devices: Vec<Arc<dyn Device>>,
        machine_type: &str,
        capabilities: &Capabilities,
    ) -> Self {
        let form = match capabilities.switchover_ack {
            false => Form::Done,
            true if acknowledges_in_old_form(machine_type) => Form::Old,
            true => Form::Present,
        };
        let asking = devices.into_iter().filter(|device| device.asks_switchover_ack());
        Self { waiting: asking.collect(), form }
    }

    /// How many acknowledgements are due now that the return path is open.
    pub(super) fn at_opening(&mut self, streams: &Inboxes) -> usize {
        match self.form {
            // Nobody has said yet whether devices' streams have initial bytes: RAM's first section comes after that.
            Form::Old if self.waiting.iter().any(|device| device.stream().is_some()) => 0,
            Form::Old => self.at_section(streams),
            // The source counts its devices before it sends its first section of RAM.
            Form::Done | Form::Present => 0,
        }
    }

    /// How many are due now that a section of RAM was read.
    pub(super) fn at_section(&mut self, streams: &Inboxes) -> usize {
        let before = self.waiting.len();
        let is_ready = |device: &Arc<dyn Device>| {
            let inbox = streams.find(&device.name(), device.instance());
            device.is_ready_for_switchover() && inbox.map_or(true, |inbox| inbox.is_ready_for_switchover())
        };
        self.waiting.retain(|device| !is_ready(device));
        match self.form {
            Form::Done => 0,
            Form::Present => before - self.waiting.len(),
            Form::Old if self.waiting.is_empty() => {
                self.form = Form::Done;
                1
            }
            Form::Old => 0,
        }
    }
}
