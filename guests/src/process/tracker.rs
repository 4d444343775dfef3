//! How the guest's writes are found.

use sterna_ram::dirty::{SoftwareLog, UffdDirtyLog};
use sterna_ram::{DirtySource, GuestRam};

use super::ProcessError;

/// How writes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tracking {
    /// Each worker marks the page that it wrote: as KVM's log, reported until re-armed. Works everywhere.
    Software,
    /// userfaultfd write-protection and PAGEMAP_SCAN: the kernel finds them, also those of system calls.
    Userfaultfd,
    /// [`Tracking::Userfaultfd`] where this machine's kernel can do it, else [`Tracking::Software`].
    Automatic,
}

impl Tracking {
    /// Every kind that this machine has.
    pub fn available() -> Vec<Self> {
        if UffdDirtyLog::is_supported() {
            vec![Self::Software, Self::Userfaultfd]
        } else {
            vec![Self::Software]
        }
    }
}

pub(super) enum Tracker {
    Software(SoftwareLog),
    Userfaultfd(UffdDirtyLog),
}

impl Tracker {
    pub fn new(tracking: Tracking, ram: &GuestRam) -> Result<Self, ProcessError> {
        Ok(match tracking {
            Tracking::Software => Self::Software(SoftwareLog::new(ram)),
            Tracking::Userfaultfd => Self::Userfaultfd(UffdDirtyLog::new(ram.clone())),
            Tracking::Automatic if UffdDirtyLog::is_supported() => {
                return Self::new(Tracking::Userfaultfd, ram);
            }
            Tracking::Automatic => return Self::new(Tracking::Software, ram),
        })
    }

    pub fn source(&self) -> &dyn DirtySource {
        match self {
            Self::Software(log) => log,
            Self::Userfaultfd(log) => log,
        }
    }

    /// To be called after each write.
    #[inline]
    pub fn written(&self, block: usize, page: u64) {
        match self {
            Self::Software(log) => log.mark(block, page),
            Self::Userfaultfd(_) => {}
        }
    }
}
