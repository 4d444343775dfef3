//! The entry of a vhost-user device in a machine's list of devices. It is an empty section with a device
//! stream.

use std::sync::Arc;

use sterna::{Device, DeviceStream, VmError};

use super::device::VhostUserDevice;

/// A vhost-user device as a [`Device`]. Its section is empty. The stream and its configuration contain
/// everything.
#[derive(Debug, Clone)]
pub struct VhostUserSection(pub Arc<VhostUserDevice>);

impl Device for VhostUserSection {
    fn name(&self) -> String {
        format!("vhost-user/{}", self.0.name())
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }

    fn load(&self, _version: u32, body: &[u8]) -> Result<(), VmError> {
        if body.is_empty() {
            return Ok(());
        }
        let what = format!("loading section {}", self.name());
        Err(VmError::new(what, format!("the section has {} unexpected bytes", body.len())))
    }

    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(Arc::clone(&self.0) as Arc<dyn DeviceStream>)
    }
}
