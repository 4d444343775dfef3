//! Acknowledges the switchover in one of two forms, and decides when (specs/stream.md §5.3).
//!
//! Up to 11.0 the destination counts. It sends one acknowledgement when its last device is ready, or
//! immediately if no device requires one.
//! From 11.1 on the source counts. The destination sends one acknowledgement for each device that requires one,
//! when that device is ready.
//! A surplus acknowledgement is fatal to a source. With a missing one, the source waits without limit.

use std::sync::Arc;

use super::streams::inboxes::Inboxes;
use crate::machine_type::acknowledges_in_old_form;
use crate::params::Capabilities;
use crate::vm::Device;

pub(super) struct Acks {
    /// Devices that require an acknowledgement and are not ready.
    waiting: Vec<Arc<dyn Device>>,
    form: Form,
}

enum Form {
    /// No acknowledgement was requested, or all were sent.
    Done,
    Old,
    Present,
}

impl Acks {
    /// Chooses the form for `machine_type`, and selects those of the `devices` that require an acknowledgement.
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

    /// Number of acknowledgements to send when the return path opens.
    pub(super) fn at_opening(&mut self, streams: &Inboxes) -> usize {
        match self.form {
            // It is unknown yet whether the devices' streams have initial bytes, because RAM's first section
            // follows the opening.
            Form::Old if self.waiting.iter().any(|device| device.stream().is_some()) => 0,
            Form::Old => self.at_section(streams),
            // The source counts its devices before it sends its first section of RAM.
            Form::Done | Form::Present => 0,
        }
    }

    /// Number of acknowledgements to send after a section of RAM was read.
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
