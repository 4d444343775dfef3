//! Sections `virtio/N`, version 1: the state of the virtio device in slot N.
//!
//! | field | content |
//! | --- | --- |
//! | `kind` | virtio's device type number, u32 |
//! | `conf` | the configuration space, as the driver reads it |
//! | `stat` | status, causes of the interrupt, and the three selectors, u32 each |
//! | `feat` | the features that the driver chose, u64 |
//! | `queu` | for each queue: maximum size, size, next available, next used (u16 each), ready, event index (u8 each), addresses of descriptors, available ring and used ring (u64 each) |
//! | `more` | network card with several queue pairs: number of active pairs, u16. Console: typed input that the guest has not read. Device with free page hinting: the last command id, u32 |
//!
//! For a device that another process serves (vhost-user), the stream `vhost-user/N` also contains the queues'
//! positions. The back end gets the positions from that stream.
//!
//! A device is saved when no request is in flight. It has returned all buffers that it took, and the other
//! requests are still in the rings.
//!
//! *Compatibility rule*: both sides have the same kind and configuration space, and the destination offers
//! every feature that the driver chose. `sterna/compatibility` compares them before any RAM is sent.

pub(super) mod record;

use std::sync::Arc;

use sterna::{Device, DeviceStream, VmError};
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_FEATURES_OK;
use virtio_queue::QueueState;

use super::codec::{Body, Fields, StateError, length};
use super::context::{Context, saving};
use crate::hardware::virtio::{Transport, TransportState};

const QUEUE_BYTES: usize = 34;
const WORDS: usize = 5;

pub(crate) struct Virtio {
    context: Arc<Context>,
    place: usize,
}

/// The machine's virtio devices, in the order of their slots.
pub(crate) fn all(context: &Arc<Context>) -> Vec<Arc<dyn Device>> {
    let devices = 0..context.hardware.virtio.all().len();
    devices.map(|place| Arc::new(Virtio { context: Arc::clone(context), place }) as Arc<dyn Device>).collect()
}

impl Virtio {
    fn transport(&self) -> &Transport {
        &self.context.hardware.virtio.all()[self.place]
    }
}

impl Device for Virtio {
    fn name(&self) -> String {
        format!("virtio/{}", self.place)
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        saving(self, Ok(save(self.transport())))
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        self.context.load(self, body, |fields| load(self.transport(), fields))
    }

    fn body_limit(&self) -> usize {
        16 << 10
    }

    /// The disk content that is sent while the guest runs is loaded before the switchover.
    fn asks_switchover_ack(&self) -> bool {
        self.transport().identity.stream.is_some()
    }

    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        self.transport().identity.stream.clone()
    }
}

pub(crate) fn save(transport: &Transport) -> Vec<u8> {
    let TransportState { status, causes, driver_features, selected, queues, more } = transport.state();
    let words = [[status, causes].as_slice(), &selected].concat();
    let mut body = Body::default();
    body.bytes(*b"kind", &transport.identity.kind.to_le_bytes());
    body.bytes(*b"conf", &transport.configuration());
    body.bytes(*b"stat", &words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    body.u64(*b"feat", driver_features);
    body.bytes(*b"queu", &queues.iter().flat_map(queue_bytes).collect::<Vec<_>>());
    if !more.is_empty() {
        body.bytes(*b"more", &more);
    }
    body.finish()
}

pub(crate) fn load(transport: &Transport, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let identity = &transport.identity;
    let (kind, configuration) = (fields.bytes(*b"kind")?, fields.bytes(*b"conf")?);
    if kind != identity.kind.to_le_bytes() {
        return Err(mismatch("kind of device", kind, &identity.kind.to_le_bytes()));
    }
    transport.find_length().map_err(|why| StateError::value(*b"conf", why))?;
    transport.find_read(configuration).map_err(|why| StateError::value(*b"conf", why))?;
    let ours = transport.configuration();
    let stat = fields.bytes(*b"stat")?;
    let words: Vec<u32> = stat.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let [status, causes, device_features, driver_features_select, queue_select] = words[..] else {
        return Err(length(*b"stat", stat.len(), 4 * WORDS));
    };
    if stat.len() != 4 * WORDS {
        return Err(length(*b"stat", stat.len(), 4 * WORDS));
    }
    // The disk's length may differ, as long as no driver has read it.
    let unseen = if status == 0 && identity.disk.is_some() { 8 } else { 0 };
    if configuration.get(unseen..) != ours.get(unseen..) {
        return Err(mismatch("configuration space", configuration, &ours));
    }
    let driver_features = fields.u64(*b"feat")?;
    // Before FEATURES_OK a driver may have written any bits, and no device uses them.
    if status & VIRTIO_CONFIG_S_FEATURES_OK != 0 && driver_features & !identity.features() != 0 {
        let lacking = format!("{:#x}", driver_features & !identity.features());
        let ours = format!("{:#x}", identity.features());
        let what = "features that the driver has accepted and this device lacks".to_owned();
        return Err(StateError::Mismatch { what, theirs: lacking, ours });
    }
    let bytes = fields.bytes(*b"queu")?;
    let (queues, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        return Err(length(*b"queu", bytes.len(), "a multiple of 34"));
    }
    let queues = queues.iter().map(queue_of).collect::<Option<Vec<_>>>();
    let queues = queues.ok_or_else(|| StateError::value(*b"queu", "a flag is neither 0 nor 1"))?;
    let selected = [device_features, driver_features_select, queue_select];
    let more = fields.optional(*b"more").unwrap_or_default().to_vec();
    let state = TransportState { status, causes, driver_features, selected, queues, more };
    transport.set_state(&state).map_err(|why| StateError::value(*b"queu", why))
}

fn mismatch(what: &str, theirs: &[u8], ours: &[u8]) -> StateError {
    let show = |bytes: &[u8]| format!("{bytes:02x?}");
    StateError::Mismatch { what: what.to_owned(), theirs: show(theirs), ours: show(ours) }
}

fn queue_bytes(queue: &QueueState) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(QUEUE_BYTES);
    for word in [queue.max_size, queue.size, queue.next_avail, queue.next_used] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend([u8::from(queue.ready), u8::from(queue.event_idx_enabled)]);
    for address in [queue.desc_table, queue.avail_ring, queue.used_ring] {
        bytes.extend(address.to_le_bytes());
    }
    bytes
}

/// Decodes a queue's state. `None` if a flag is neither 0 nor 1.
fn queue_of(bytes: &[u8; QUEUE_BYTES]) -> Option<QueueState> {
    let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let long = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    let flag = |at: usize| (bytes[at] < 2).then_some(bytes[at] == 1);
    Some(QueueState {
        max_size: short(0),
        size: short(2),
        next_avail: short(4),
        next_used: short(6),
        ready: flag(8)?,
        event_idx_enabled: flag(9)?,
        desc_table: long(10)?,
        avail_ring: long(18)?,
        used_ring: long(26)?,
    })
}

#[cfg(test)]
mod tests;
