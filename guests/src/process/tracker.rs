//! Detection of the guest's writes.

use std::sync::Arc;

use sterna_ram::dirty::{Combined, SoftwareLog, UffdDirtyLog};
use sterna_ram::{DirtySource, GuestRam};

use super::ProcessError;

/// The method that detects writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tracking {
    /// Each worker marks the page that it wrote. As with KVM's log, a page is reported again only after a
    /// re-arm. Works on every machine.
    Software,
    /// userfaultfd write-protection and PAGEMAP_SCAN: the kernel detects all writes, including those of
    /// system calls.
    Userfaultfd,
    /// [`Tracking::Userfaultfd`] if this machine's kernel supports it, otherwise [`Tracking::Software`].
    Automatic,
}

impl Tracking {
    /// Every method that this machine supports.
    pub fn available() -> Vec<Self> {
        if UffdDirtyLog::is_supported() {
            vec![Self::Software, Self::Userfaultfd]
        } else {
            vec![Self::Software]
        }
    }
}

/// The dirty log, and the software log for changes that are not writes.
pub(super) struct Tracker {
    source: Arc<dyn DirtySource>,
    told: Arc<SoftwareLog>,
    /// Whether workers must mark their writes too.
    tells_writes: bool,
}

impl Tracker {
    pub fn new(tracking: Tracking, ram: &GuestRam) -> Result<Self, ProcessError> {
        let told = Arc::new(SoftwareLog::new(ram));
        let is_software = match tracking {
            Tracking::Software => true,
            Tracking::Userfaultfd => false,
            Tracking::Automatic => !UffdDirtyLog::is_supported(),
        };
        let source: Arc<dyn DirtySource> = match is_software {
            true => Arc::clone(&told) as _,
            // Memory that is given back causes no fault, so the software log reports it.
            false => Arc::new(Combined::new(vec![
                Arc::new(UffdDirtyLog::new(ram.clone())),
                Arc::clone(&told) as _,
            ])),
        };
        Ok(Self { source, told, tells_writes: is_software })
    }

    pub fn source(&self) -> &dyn DirtySource {
        &*self.source
    }

    /// Records a write; call it after each write.
    #[inline]
    pub fn written(&self, block: usize, page: u64) {
        if self.tells_writes {
            self.told.mark(block, page);
        }
    }

    /// Records pages that were given back; call it afterwards.
    pub fn given_back(&self, block: usize, first: u64, count: u64) {
        self.told.mark_range(block, first, count);
    }
}
