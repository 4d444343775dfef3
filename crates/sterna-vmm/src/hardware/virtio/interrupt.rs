//! How a device calls its driver.

use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// A device's interrupt: the line, and why it was raised (`InterruptStatus`).
///
/// The kernel raises the line a moment after the event: it may be on its way when the vCPUs stop, and then it is in no saved
/// state. So whoever loads a state whose causes were not acknowledged raises it again.
pub(crate) struct Interrupt {
    causes: AtomicU32,
    line: EventFd,
}

impl Interrupt {
    pub(crate) fn new(line: EventFd) -> Self {
        Self { causes: AtomicU32::new(0), line }
    }

    /// For KVM.
    pub(super) fn line(&self) -> &EventFd {
        &self.line
    }

    pub(crate) fn raise(&self, cause: u32) {
        self.causes.fetch_or(cause, Ordering::SeqCst);
        self.pulse();
    }

    /// As [`Interrupt::raise`], for causes that the driver has not acknowledged.
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

    /// The driver has seen these causes.
    pub(crate) fn acknowledge(&self, causes: u32) {
        self.causes.fetch_and(!causes, Ordering::SeqCst);
    }

    fn pulse(&self) {
        // Refused only if nobody has taken 2^64 events.
        if let Err(error) = self.line.write(1) {
            tracing::error!(%error, "an interrupt is lost");
        }
    }
}
