//! Sections `vfio-user/N` and `vhost-user/N`, version 1: the identity of a device that another process
//! serves. The device's state is sent as a device stream.
//!
//! | section | field | content |
//! | --- | --- | --- |
//! | `vfio-user/N` | `info` | number of regions and of interrupt types, u32 each |
//! | `vhost-user/N` | `queu` | number of queues, u32 |
//!
//! *Compatibility rule*: equality. The two device processes check everything else. A device refuses a state
//! of another kind. Virtio features are checked with the rings, because only the rings tell which features
//! the guest uses.

use std::sync::Arc;

use sterna::{Device, DeviceStream, VmError};

use super::codec::{Body, StateError, Tag, length};
use super::context::Context;

/// A device in another process.
pub(crate) struct ExternalProcess {
    context: Arc<Context>,
    name: String,
    field: Tag,
    /// Description of `field` for error messages.
    told: &'static str,
    value: Vec<u8>,
    stream: Arc<dyn DeviceStream>,
}

/// The machine's devices in other processes, in save order.
pub(crate) fn all(context: &Arc<Context>) -> Vec<Arc<dyn Device>> {
    let vfio = context.hardware.external.vfio_user.iter().enumerate().map(|(index, device)| {
        let info = device.client.info();
        ExternalProcess {
            context: Arc::clone(context),
            name: format!("vfio-user/{index}"),
            field: *b"info",
            told: "regions and interrupts of the device",
            value: [info.regions, info.irqs].map(u32::to_le_bytes).concat(),
            stream: Arc::clone(&device.stream) as _,
        }
    });
    let vhost =
        context.hardware.external.vhost_user.iter().enumerate().map(|(index, device)| ExternalProcess {
            context: Arc::clone(context),
            name: format!("vhost-user/{index}"),
            field: *b"queu",
            told: "queues of the device",
            value: (device.queues() as u32).to_le_bytes().to_vec(),
            stream: Arc::clone(device) as _,
        });
    vfio.chain(vhost).map(|device| Arc::new(device) as Arc<dyn Device>).collect()
}

impl Device for ExternalProcess {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let mut body = Body::default();
        body.bytes(self.field, &self.value);
        Ok(body.finish())
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        self.context.load(self, body, |fields| {
            let (theirs, ours) = (fields.bytes(self.field)?, self.value.as_slice());
            if theirs.len() != ours.len() {
                return Err(length(self.field, theirs.len(), ours.len()));
            }
            if theirs != ours {
                return Err(StateError::Mismatch {
                    what: self.told.into(),
                    theirs: format!("{theirs:02x?}"),
                    ours: format!("{ours:02x?}"),
                });
            }
            Ok(())
        })
    }

    fn body_limit(&self) -> usize {
        4096
    }

    /// The stream's chunks that are sent while the guest runs are loaded before the switchover. A device
    /// without such chunks acknowledges immediately.
    fn asks_switchover_ack(&self) -> bool {
        true
    }

    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(Arc::clone(&self.stream))
    }
}
