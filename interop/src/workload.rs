//! Guests for QEMU that check their own memory and print their count ([`crate::ticks`]).

mod boot;
mod linux;
mod scribe;
mod sweep;
mod talker;

use std::path::Path;

pub use boot::{
    GAPS, GAPS_ADDRESS, LAST_STEP_ADDRESS, LONGEST_GAP_ADDRESS, MOST_LATE_ADDRESS, PACE_ADDRESS,
    SAYS_ADDRESS, gap_ticks,
};
pub use scribe::{DONE_ADDRESS, SCRIBE_BYTES, scribe_devices, scribe_disks, scribed};
pub(crate) use sweep::{PLACES, Sweep};
pub use talker::{NUMBER_ADDRESS, NUMBER_IN_FRAME};

use crate::{Failure, Root, skip};

/// The guest program of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Guest {
    /// No guest: the firmware finds no disk.
    #[default]
    None,
    /// A boot sector that rewrites half of RAM in passes. It compares each page with the content from the
    /// previous pass. It uses only plain integer instructions, so it runs on any KVM. It starts within a
    /// second. 16 MiB or more.
    Boot,
    /// Like [`Boot`](Self::Boot), but consecutive pages are far apart in memory.
    Scattered,
    /// Like [`Boot`](Self::Boot), over a ring of 64 MiB in order, like a receive buffer. 256 MiB or more.
    Ring,
    /// Debian's stock kernel with a busybox. The busybox rewrites files in a tmpfs and compares their
    /// digests. It boots in some seconds under TCG. 128 MiB or more.
    Linux,
    /// A boot sector that sends numbered frames through an NE2000, whose netdev is `n0`. Only for `pc`.
    Talker,
    /// A boot sector that writes numbered sectors to the quorum `q0`. Only for `pc`.
    Scribe,
}

impl Guest {
    /// Whether the guest is available here. If not, reports `test` as skipped. Only Linux has a requirement:
    /// apt, to download the kernel's package.
    pub fn available_for(self, root: &Root, test: &str) -> bool {
        if self != Self::Linux {
            return true;
        }
        let checked = linux::check(root);
        if let Err(why) = &checked {
            skip(test, &format!("no kernel for the guest: {why}"));
        }
        checked.is_ok()
    }

    /// Arguments with which QEMU boots the guest. The files that they name are made in `directory`.
    pub(crate) fn arguments(
        self,
        root: &Root,
        machine: &str,
        memory_mib: u64,
        directory: &Path,
    ) -> Result<Vec<String>, Failure> {
        match self {
            Self::None => Ok(Vec::new()),
            Self::Boot => boot::arguments(machine, Sweep::in_order(memory_mib), directory),
            Self::Scattered => boot::arguments(machine, Sweep::scattered(memory_mib), directory),
            Self::Ring => boot::arguments(machine, Sweep::ring(), directory),
            Self::Linux => linux::arguments(root),
            Self::Talker => talker::arguments(directory),
            Self::Scribe => scribe::arguments(directory),
        }
    }
}

/// Writes the boot disk of [`Guest::Boot`], for machines that this crate does not start.
///
/// # Errors
/// If the file cannot be written.
pub fn boot_disk(path: &Path, memory_mib: u64) -> Result<(), Failure> {
    boot::disk(path, Sweep::in_order(memory_mib))
}
