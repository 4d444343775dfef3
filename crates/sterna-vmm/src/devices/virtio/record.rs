//! The virtio devices' part of the compatibility record (`sterna/compatibility`), on which both sides must
//! agree.

use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_FS};

use crate::config::DiskMigration;
use crate::devices::codec::{StateError, length};
use crate::devices::context::Context;
use crate::hardware::virtio::{Identity, Said};

/// Encodes the identity of every virtio device of this machine for the compatibility record.
pub(in crate::devices) fn identities(context: &Context) -> Vec<u8> {
    let mut bytes = Vec::new();
    for transport in context.hardware.virtio.all() {
        let Identity { kind, queue_sizes, .. } = &transport.identity;
        let features = transport.identity.features();
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

/// Compares the source's devices with this machine's, one by one.
pub(in crate::devices) fn compare(context: &Context, mut theirs: &[u8]) -> Result<(), StateError> {
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
        let identity @ Identity { kind, queue_sizes, name, .. } = &transport.identity;
        let differs = |of: &str, theirs: String, ours: String| {
            Err(StateError::Mismatch { what: format!("{} ({name})", what(of)), theirs, ours })
        };
        if their.kind != *kind {
            return differs("its kind", their.kind.to_string(), kind.to_string());
        }
        transport.find_configuration(&their.said()).map_err(|why| StateError::value(*b"virt", why))?;
        let (features, configuration) = (identity.features(), &transport.configuration());
        if their.mode != mode(identity) {
            let [theirs, ours] = [their.mode, mode(identity)].map(told);
            return differs("its kind of migration", theirs.to_owned(), ours.to_owned());
        }
        if usize::from(their.queues) != queue_sizes.len() {
            return differs("its queues", their.queues.to_string(), queue_sizes.len().to_string());
        }
        if their.features & !features != 0 {
            let lacking = format!("{:#x}, which this machine's device lacks", their.features & !features);
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

/// Mode of a vhost-user device whose back end has state of its own.
const WITH_STATE: u8 = 4;

/// Identity of one device of the source.
struct Theirs<'a> {
    mode: u8,
    kind: u32,
    features: u64,
    queues: u16,
    configuration: &'a [u8],
}

impl<'a> Theirs<'a> {
    /// The properties that a device needs if it is handed over with the guest.
    fn said(&self) -> Said<'a> {
        let has_state = self.mode == WITH_STATE;
        Said { features: self.features, has_state, configuration: self.configuration }
    }

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

/// Encodes how a device moves, as a byte.
fn mode(identity: &Identity) -> u8 {
    match identity.disk.as_ref().map(|disk| disk.migration()) {
        None => {
            identity.process.as_ref().map_or(0, |process| if process.has_state() { WITH_STATE } else { 5 })
        }
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
        WITH_STATE => "a vhost-user back end that saves its state",
        5 => "a vhost-user back end that does not save its state",
        _ => "an unknown kind of migration; the source may be newer",
    }
}

/// The property by which an operator recognises a device. It is a disk's length or a file system's tag, which
/// the operator chooses.
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
