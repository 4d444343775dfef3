//! Guests for QEMU that check their own memory and count aloud ([`crate::ticks`]).

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

/// What a machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Guest {
    /// Nothing: the firmware finds no disk.
    #[default]
    None,
    /// A boot sector that rewrites half of RAM, pass after pass, and compares each page with what it wrote
    /// the pass before. Plain integer instructions, so that any KVM runs it; up in a second. 16 MiB or more.
    Boot,
    /// The same, but that neighbours in time are far apart in memory.
    Scattered,
    /// The same over a ring of 64 MiB, in order, as what is received is written to. 256 MiB or more.
    Ring,
    /// Debian's stock kernel with a busybox that rewrites files in a tmpfs and compares their digests. Some
    /// seconds to boot under TCG. 128 MiB or more.
    Linux,
    /// A boot sector that says numbered frames through an NE2000, whose netdev is `n0`. `pc` alone.
    Talker,
    /// A boot sector that writes numbered sectors to the quorum `q0`. `pc` alone.
    Scribe,
}

impl Guest {
    /// Whether it can be had here; if not, `test` is said to be skipped. Only Linux needs anything: apt, to
    /// download the kernel's package.
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

    /// Arguments that make QEMU boot it; what they name is put into `directory`.
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

/// Writes the disk that [`Guest::Boot`] is booted from, for machines that something else starts.
///
/// # Errors
/// The file could not be written.
pub fn boot_disk(path: &Path, memory_mib: u64) -> Result<(), Failure> {
    boot::disk(path, Sweep::in_order(memory_mib))
}
