//! The interrupt by which a device notifies its driver.

use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// A device's interrupt: the line, and the causes for which it was raised (`InterruptStatus`).
///
/// The kernel raises the line a moment after the event. An interrupt that is pending when the vCPUs stop is
/// in no saved state. Therefore the line is raised again after the load of a state with unacknowledged
/// causes.
pub(crate) struct Interrupt {
    causes: AtomicU32,
    line: EventFd,
}

impl Interrupt {
    pub(crate) fn new(line: EventFd) -> Self {
        Self { causes: AtomicU32::new(0), line }
    }

    /// The eventfd to register with KVM.
    pub(super) fn line(&self) -> &EventFd {
        &self.line
    }

    pub(crate) fn raise(&self, cause: u32) {
        self.causes.fetch_or(cause, Ordering::SeqCst);
        self.pulse();
    }

    /// Like [`Interrupt::raise`], for causes that the driver has not acknowledged.
    pub(crate) fn raise_again(&self) {
        if self.causes() != 0 {
            self.pulse();
        }
    }

    pub(crate) fn causes(&self) -> u32 {
        self.causes.load(Ordering::SeqCst)
    }

    pub(crate) fn set_causes(&self, causes: u32) {
        self.causes.store(causes, Ordering::SeqCst);
    }

    /// Clears causes that the driver has acknowledged.
    pub(crate) fn acknowledge(&self, causes: u32) {
        self.causes.fetch_and(!causes, Ordering::SeqCst);
    }

    fn pulse(&self) {
        // The write fails only after 2^64 events that the kernel has not taken.
        if let Err(error) = self.line.write(1) {
            tracing::error!(%error, "an interrupt is lost");
        }
    }
}
