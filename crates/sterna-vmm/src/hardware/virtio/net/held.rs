//! Hands a card's tap over to another process on the same host, with the guest.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sterna::{Hook, HostDescriptors, VmError};

use super::outlet::Outlet;

/// All queues of a card's tap.
pub(crate) struct HeldTap {
    index: usize,
    name: String,
    outlets: Vec<Arc<Outlet>>,
}

impl HeldTap {
    pub(super) fn new(index: usize, name: &str, outlets: Vec<Arc<Outlet>>) -> Self {
        Self { index, name: name.to_owned(), outlets }
    }

    fn what(&self) -> String {
        format!("tap {}", self.name)
    }
}

impl HostDescriptors for HeldTap {
    fn name(&self) -> String {
        self.what()
    }

    fn instance(&self) -> u32 {
        self.index as u32
    }

    fn give(&self) -> Result<Vec<OwnedFd>, VmError> {
        let given = self.outlets.iter().map(|outlet| outlet.tap().give());
        given.collect::<Result<_, _>>().map_err(|error| VmError::new(self.what(), error))
    }

    fn take(&self, descriptors: Vec<OwnedFd>) -> Result<(), VmError> {
        if descriptors.len() != self.outlets.len() {
            let why = format!(
                "the source has {} queues, but this machine has {}",
                descriptors.len(),
                self.outlets.len()
            );
            return Err(VmError::new(self.what(), why));
        }
        for (outlet, queue) in self.outlets.iter().zip(&descriptors) {
            outlet
                .tap()
                .take(queue)
                .map_err(|error| VmError::new(self.what(), format!("it is not a tap: {error}")))?;
        }
        Ok(())
    }

    fn let_go(&self) {
        for outlet in &self.outlets {
            if let Err(error) = outlet.tap().let_go() {
                tracing::error!(tap = self.name, %error, "the tap stays open");
            }
        }
    }
}

impl Hook for HeldTap {
    fn name(&self) -> String {
        self.what()
    }

    fn acquire(&self) -> Result<(), VmError> {
        if self.outlets.iter().all(|outlet| outlet.tap().is_here()) {
            return Ok(());
        }
        let why = "another program uses it and did not pass it on: migrate with mode cpr-transfer, or use another tap";
        Err(VmError::new(self.what(), why))
    }

    fn seize(&self) -> Result<(), VmError> {
        self.acquire()
    }
}
