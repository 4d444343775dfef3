//! The state of a virtio device that migrates, except its kind.

use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueState};

use super::transport::Transport;

/// Settings by the driver, and the positions of the queues. Valid only while no request is in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TransportState {
    pub(crate) status: u32,
    /// Causes of the interrupt that the driver has not acknowledged.
    pub(crate) causes: u32,
    pub(crate) driver_features: u64,
    /// The registers `DeviceFeaturesSel`, `DriverFeaturesSel`, `QueueSel`.
    pub(crate) selected: [u32; 3],
    pub(crate) queues: Vec<QueueState>,
    /// State of the device's kind ([`super::backend::Backend::state`]).
    pub(crate) more: Vec<u8>,
}

impl Transport {
    /// The device's state. The guest must be paused.
    pub(crate) fn state(&self) -> TransportState {
        let registers = self.registers.lock();
        let parts = self.parts.lock();
        let mut queues: Vec<_> = parts.queues.iter().map(Queue::state).collect();
        // The rings of another process have stopped by now. If the process does not answer, its own device
        // stream reports the error.
        let rings = self.identity.process.as_ref().and_then(|process| process.rings().ok());
        for (queue, ring) in queues.iter_mut().zip(rings.unwrap_or_default()) {
            (queue.next_avail, queue.next_used) = (ring.base, ring.base);
        }
        TransportState {
            status: self.signals.status.load(Ordering::SeqCst),
            causes: self.signals.interrupt.causes(),
            driver_features: registers.driver_features,
            selected: [
                registers.device_features_select,
                registers.driver_features_select,
                registers.queue_select,
            ],
            queues,
            more: parts.backend.state(),
        }
    }

    /// Loads a state while the guest is paused. A refused state changes nothing.
    pub(crate) fn set_state(&self, state: &TransportState) -> Result<(), String> {
        let (ours, theirs) = (&self.identity.queue_sizes, &state.queues);
        if ours.len() != theirs.len() {
            return Err(format!(
                "the source's device has {} queues, this device has {}",
                theirs.len(),
                ours.len()
            ));
        }
        let mut queues = Vec::new();
        for (index, (size, queue)) in ours.iter().zip(theirs).enumerate() {
            if queue.max_size != *size {
                return Err(format!("queue {index}: {} entries at most, here {size}", queue.max_size));
            }
            // A device returns only chains that it took. If it had returned more and its rings overlapped,
            // each return would look like another request, without end. A driver that breaks rules can make
            // the device take thousands that it never returns. The counters wrap after 65535.
            if queue.next_avail.wrapping_sub(queue.next_used).cast_signed() < 0 {
                let (taken, returned) = (queue.next_avail, queue.next_used);
                return Err(format!("queue {index}: it has returned {returned} chains and taken {taken}"));
            }
            let queue = Queue::try_from(*queue).map_err(|error| format!("queue {index}: {error}"))?;
            queues.push(queue);
        }
        let mut parts = self.parts.lock();
        parts.backend.set_state(&state.more)?;
        parts.queues = queues;
        drop(parts);
        let mut registers = self.registers.lock();
        [registers.device_features_select, registers.driver_features_select, registers.queue_select] =
            state.selected;
        registers.driver_features = state.driver_features;
        self.signals.interrupt.set_causes(state.causes);
        self.signals.status.store(state.status, Ordering::SeqCst);
        Ok(())
    }
}
