//! Section `vfio-user/N`, version 1: a device in a process of its own. What it is; its state is its stream.
//!
//! | field | what |
//! | --- | --- |
//! | `info` | number of regions and of interrupt types, u32 each |
//!
//! *Compatibility rule*: equality. Everything else is the two processes' affair: a device refuses a state that is not
//! of its kind.

use std::sync::Arc;

use sterna::{Device, DeviceStream, VmError};

use super::codec::{Body, StateError, length};
use crate::machine::Shared;
use crate::machine::vfio_user::VfioUser;

pub(crate) struct VfioUserDevice {
    pub(crate) shared: Arc<Shared>,
    pub(crate) index: usize,
}

impl VfioUserDevice {
    fn device(&self) -> &VfioUser {
        &self.shared.vfio_user[self.index]
    }
}

impl Device for VfioUserDevice {
    fn name(&self) -> String {
        format!("vfio-user/{}", self.index)
    }

    fn version(&self) -> u32 {
        1
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let mut body = Body::default();
        body.bytes(*b"info", &info(self.device()));
        Ok(body.finish())
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        super::load(&self.shared, self, body, |fields| {
            let (theirs, ours) = (fields.bytes(*b"info")?, info(self.device()));
            if theirs.len() != ours.len() {
                return Err(length(*b"info", theirs.len(), ours.len()));
            }
            if theirs != ours {
                return Err(StateError::Mismatch {
                    what: "regions and interrupts of the device".into(),
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
        Some(Arc::clone(&self.device().stream) as Arc<dyn DeviceStream>)
    }
}

fn info(device: &VfioUser) -> [u8; 8] {
    let info = device.client.info();
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&info.regions.to_le_bytes());
    bytes[4..].copy_from_slice(&info.irqs.to_le_bytes());
    bytes
}
