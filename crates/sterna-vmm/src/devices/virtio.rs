//! Sections `virtio/N`, version 1: the virtio device in place N.
//!
//! | field | what |
//! | --- | --- |
//! | `kind` | virtio's number of the kind, u32 |
//! | `conf` | the configuration space, as the driver reads it |
//! | `stat` | status, causes of the interrupt, and the three selectors, u32 each |
//! | `feat` | the features that the driver chose, u64 |
//! | `queu` | each queue: most entries, entries, next available, next used (u16 each), ready, event index (u8 each), addresses of descriptors, available ring and used ring (u64 each) |
//! | `more` | of a network card with several pairs of queues: how many are active, u16; of a console: what was typed and not read yet |
//!
//! Of a device that another process serves (vhost-user) how far its queues are also stands in that one's stream
//! (`vhost-user/N`), which is what its back end gets.
//!
//! A device is saved when nothing is in flight: what it has taken it has returned, and the rest stands in the rings.
//!
//! *Compatibility rule*: kind and configuration space are equal on both sides, and the destination offers what the driver chose.
//! `sterna/compatibility` compares them before any RAM moves.

use std::sync::Arc;

use sterna::{Device, DeviceStream, VmError};
use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_FS};
use virtio_queue::QueueState;

use super::codec::{Body, Fields, StateError, length};
use super::context::{Context, saving};
use crate::config::DiskMigration;
use crate::hardware::virtio::{Identity, Transport, TransportState};

const QUEUE_BYTES: usize = 34;
const WORDS: usize = 5;

pub(crate) struct Virtio {
    context: Arc<Context>,
    place: usize,
}

/// All of the machine, in the order of their places.
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

    /// What a disk sends while the guest runs is loaded before the switchover.
    fn asks_switchover_ack(&self) -> bool {
        self.transport().identity.stream.is_some()
    }

    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        self.transport().identity.stream.clone()
    }
}

fn save(transport: &Transport) -> Vec<u8> {
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

fn load(transport: &Transport, fields: &mut Fields<'_>) -> Result<(), StateError> {
    let identity = &transport.identity;
    let (kind, configuration) = (fields.bytes(*b"kind")?, fields.bytes(*b"conf")?);
    if kind != identity.kind.to_le_bytes() {
        return Err(mismatch("kind of device", kind, &identity.kind.to_le_bytes()));
    }
    transport.find_length().map_err(|why| StateError::value(*b"conf", why))?;
    let ours = transport.configuration();
    let stat = fields.bytes(*b"stat")?;
    let words: Vec<u32> = stat.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let [status, causes, device_features, driver_features_select, queue_select] = words[..] else {
        return Err(length(*b"stat", stat.len(), 4 * WORDS));
    };
    if stat.len() != 4 * WORDS {
        return Err(length(*b"stat", stat.len(), 4 * WORDS));
    }
    // The length of a disk that no driver has seen may be another one.
    let unseen = if status == 0 && identity.disk.is_some() { 8 } else { 0 };
    if configuration.get(unseen..) != ours.get(unseen..) {
        return Err(mismatch("configuration space", configuration, &ours));
    }
    let driver_features = fields.u64(*b"feat")?;
    if driver_features & !identity.features != 0 {
        let lacking = format!("{:#x}", driver_features & !identity.features);
        let ours = format!("{:#x}", identity.features);
        let what = "features that the driver chose and this device lacks".to_owned();
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

/// For the record that both sides must agree on: of each device what it is.
pub(super) fn identities(context: &Context) -> Vec<u8> {
    let mut bytes = Vec::new();
    for transport in context.hardware.virtio.all() {
        let Identity { kind, features, queue_sizes, .. } = &transport.identity;
        let configuration = transport.configuration();
        bytes.push(mode(&transport.identity));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(features.to_le_bytes());
        bytes.extend((queue_sizes.len() as u16).to_le_bytes());
        bytes.extend((configuration.len() as u16).to_le_bytes());
        bytes.extend(configuration);
    }
    bytes
}

/// Compares what the source has with this machine, device by device.
pub(super) fn compare(context: &Context, mut theirs: &[u8]) -> Result<(), StateError> {
    let bytes = theirs.len();
    let mut place = 0;
    let ours = context.hardware.virtio.all();
    while !theirs.is_empty() {
        let their = Theirs::take(&mut theirs).ok_or_else(|| length(*b"virt", bytes, "whole devices"))?;
        let what = |of: &str| format!("virtio device {place}: {of}");
        let Some(transport) = ours.get(place) else {
            let theirs = format!("a device of kind {}", their.kind);
            return Err(StateError::Mismatch { what: what("it"), theirs, ours: "none".to_owned() });
        };
        transport.find_configuration().map_err(|why| StateError::value(*b"virt", why))?;
        let identity @ Identity { kind, features, queue_sizes, name, .. } = &transport.identity;
        let configuration = &transport.configuration();
        let differs = |of: &str, theirs: String, ours: String| {
            Err(StateError::Mismatch { what: format!("{} ({name})", what(of)), theirs, ours })
        };
        if their.kind != *kind {
            return differs("its kind", their.kind.to_string(), kind.to_string());
        }
        if their.mode != mode(identity) {
            let [theirs, ours] = [their.mode, mode(identity)].map(told);
            return differs("the way in which it moves", theirs.to_owned(), ours.to_owned());
        }
        if usize::from(their.queues) != queue_sizes.len() {
            return differs("its queues", their.queues.to_string(), queue_sizes.len().to_string());
        }
        if their.features & !features != 0 {
            let lacking = format!("{:#x}, which this one lacks", their.features & !features);
            return differs("its features", lacking, format!("{features:#x}"));
        }
        if their.configuration != configuration {
            let bytes = [their.configuration, configuration.as_slice()];
            return match bytes.map(|bytes| known(*kind, bytes)) {
                [Some((what, theirs)), Some((_, ours))] if theirs != ours => differs(what, theirs, ours),
                _ => {
                    let [theirs, ours] = bytes.map(|bytes| format!("{bytes:02x?}"));
                    differs("its configuration", theirs, ours)
                }
            };
        }
        place += 1;
    }
    match ours.get(place) {
        None => Ok(()),
        Some(transport) => Err(StateError::Mismatch {
            what: format!("virtio device {place}: it"),
            theirs: "none".to_owned(),
            ours: transport.identity.name.clone(),
        }),
    }
}

/// A device of the source.
struct Theirs<'a> {
    mode: u8,
    kind: u32,
    features: u64,
    queues: u16,
    configuration: &'a [u8],
}

impl<'a> Theirs<'a> {
    fn take(bytes: &mut &'a [u8]) -> Option<Self> {
        let (mode, rest) = bytes.split_first()?;
        let (kind, rest) = rest.split_first_chunk()?;
        let (features, rest) = rest.split_first_chunk()?;
        let (queues, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (configuration, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        *bytes = rest;
        Some(Self {
            mode: *mode,
            kind: u32::from_le_bytes(*kind),
            features: u64::from_le_bytes(*features),
            queues: u16::from_le_bytes(*queues),
            configuration,
        })
    }
}

/// How a device moves, as a byte.
fn mode(identity: &Identity) -> u8 {
    match identity.disk.as_ref().map(|disk| disk.migration()) {
        None => identity.process.as_ref().map_or(0, |process| if process.has_state() { 4 } else { 5 }),
        Some(DiskMigration::Shared) => 1,
        Some(DiskMigration::Copy) => 2,
        Some(DiskMigration::None) => 3,
    }
}

fn told(mode: u8) -> &'static str {
    match mode {
        0 => "no disk",
        1 => "migrate=shared",
        2 => "migrate=copy",
        3 => "migrate=none",
        4 => "a vhost-user back end with a state of its own",
        5 => "a vhost-user back end without a state of its own",
        _ => "a way that is unknown here; the source may be newer",
    }
}

/// What operators know a device by, and choose: the length of a disk, a file system's tag.
fn known(kind: u32, configuration: &[u8]) -> Option<(&'static str, String)> {
    match kind {
        VIRTIO_ID_BLOCK => {
            let sectors = u64::from_le_bytes(*configuration.first_chunk()?);
            Some(("its length in sectors of 512 bytes", sectors.to_string()))
        }
        VIRTIO_ID_FS => {
            let tag = configuration.get(..36)?.split(|byte| *byte == 0).next()?;
            Some(("its tag", String::from_utf8_lossy(tag).escape_debug().to_string()))
        }
        _ => None,
    }
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

/// `None` for flags that are none.
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
