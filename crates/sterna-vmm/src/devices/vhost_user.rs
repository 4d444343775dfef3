//! Section `vhost-user/N`, version 1: a virtio device in a process of its own. Its state and its rings are its stream.
//!
//! | field | what |
//! | --- | --- |
//! | `queu` | number of queues, u32 |
//!
//! *Compatibility rule*: equality. Features are checked with the rings, where it is known which ones the guest uses.

use std::sync::Arc;

use sterna::{Device, DeviceStream, VmError};
use sterna_devices::vhost_user::VhostUserDevice;

use super::codec::{Body, StateError, length};
use crate::machine::Shared;

pub(crate) struct VhostUser {
    pub(crate) shared: Arc<Shared>,
    pub(crate) index: usize,
}

impl VhostUser {
    fn device(&self) -> &Arc<VhostUserDevice> {
        &self.shared.vhost_user[self.index]
    }

    fn queues(&self) -> [u8; 4] {
        (self.device().queues() as u32).to_le_bytes()
    }
}

impl Device for VhostUser {
    fn name(&self) -> String {
        format!("vhost-user/{}", self.index)
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let mut body = Body::default();
        body.bytes(*b"queu", &self.queues());
        Ok(body.finish())
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        super::load(&self.shared, self, body, |fields| {
            let (theirs, ours) = (fields.bytes(*b"queu")?, self.queues());
            if theirs.len() != ours.len() {
                return Err(length(*b"queu", theirs.len(), ours.len()));
            }
            if theirs != ours {
                return Err(StateError::Mismatch {
                    what: "queues of the device".into(),
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

    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(Arc::clone(self.device()) as Arc<dyn DeviceStream>)
    }
}
