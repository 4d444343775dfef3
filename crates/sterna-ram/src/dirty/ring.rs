//! KVM's dirty rings, as a dirty source.
//!
//! # The model
//! Instead of one bitmap per slot, every vCPU has a ring in memory that the kernel and this process share. When
//! a vCPU writes to a protected page, the kernel removes the protection. It puts the page into that vCPU's
//! ring, as an entry with the flag *dirty*. This process takes entries out and marks them *reset*. The system
//! call KVM_RESET_DIRTY_RINGS then protects the pages of all marked entries again and frees their places. The
//! cost therefore depends on the number of written pages instead of the guest's size, and it is known which
//! vCPU wrote them.
//!
//! A vCPU whose ring is nearly full exits from the guest (exit reason [`KvmDirtyRing::EXIT_RING_FULL`]). It
//! must not run again before its ring was emptied ([`KvmDirtyRing::reap_full`]). Emptying rings earlier avoids
//! these exits: [`KvmDirtyRing::poll`], called every few milliseconds, empties rings that are half full. The
//! pages of removed entries are stored in the *pending* bitmaps until the next sync. A page counts for the vCPU
//! that made it pending.
//!
//! # Order
//! A page's bit may be handed out only after the reset that protects the page again. If it were handed out
//! earlier, a write could be lost. A lane could read the page, and the guest could write to it unnoticed,
//! because it is not protected. The reset would follow too late. Removing entries and resetting them is
//! therefore one step under one lock, for vCPU threads and for syncs. A sync reports no page before its own
//! reset is done. A write after the reset makes a new entry. A write before it is seen by every read that
//! follows the sync.
//!
//! Syncing re-arms, so [`DirtySource::rearm`] does nothing. The ring of a stopped vCPU contains all of its
//! writes: every exit from the guest empties the processor's own log of dirty pages.
//!
//! # Limits
//! An entry has 16 bytes. A ring has a power of two of entries, at most the kernel's limit (65,536). The kernel
//! reserves some (64, and 512 more if the processor logs pages), so the smallest ring that works everywhere has
//! 1024 entries. Rings must be enabled before the VM has its first vCPU, and cannot be disabled. The bitmaps of
//! [`super::KvmDirtyLog`] do not work in that VM.
//!
//! # Overruns
//! A kernel that checks its limit too rarely overwrites entries that were not removed yet. The limit leaves
//! room for 64 entries. Kernels that emulate the guest's instructions may add hundreds between two checks. The
//! lost pages are unknown, so all pages are reported and protected again. [`KvmDirtyRing::overruns`] counts
//! overruns. One of these signs reveals an overrun:
//! - Every entry is dirty. A kernel that respects its limit never fills the ring.
//! - An entry that is not dirty is followed by a dirty one. After an overrun, the kernel's positions are ahead
//!   of this process's position. The entries between them are marked, too, because the kernel waits for them.
//! - Marked entries are not reset, because they were overwritten before their reset. They are removed again.
//! - A vCPU exits twice for a full ring that is empty: there are only places without entries.
//!
//! An entry that names a page of no slot is skipped. From then on every sync fails until tracking is restarted,
//! because the written page is unknown.

mod map;
mod pending;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::bitmaps::DirtyBitmaps;
use super::kvm::KvmSlot;
use super::kvm::{capability, check_slots, enable_capability, set_logging};
use super::source::{DirtySource, check_bitmaps, check_rearm};
use super::sync_report::SyncReport;
use crate::bitmap::PageBitmap;
use crate::error::DirtyError;
use crate::guest::GuestRam;
use crate::sys;
use map::RingMap;
use parking_lot::{Mutex, RwLock};
use pending::Pending;

const NAME: &str = "kvm-dirty-ring";

const KVM_CAP_DIRTY_LOG_RING: u32 = 192;
const KVM_CAP_DIRTY_LOG_RING_ACQ_REL: u32 = 223;
const KVM_RESET_DIRTY_RINGS: u32 = 0xaec7;
const ENTRY_BYTES: u32 = 16;

/// Dirty rings that were enabled in a VM without vCPUs.
#[derive(Debug)]
pub struct KvmDirtyRings {
    vm: OwnedFd,
    entries: u32,
}

impl KvmDirtyRings {
    /// Returns the limit of entries per ring; 0 if the kernel has no dirty rings.
    pub fn most_entries(vm: BorrowedFd<'_>) -> u32 {
        capability(vm, ring_capability(vm)) / ENTRY_BYTES
    }

    /// Enables rings of `entries` entries. They cannot be disabled.
    ///
    /// `vm` is a duplicate of the VM's descriptor. The VM must not have a vCPU yet.
    ///
    /// # Errors
    /// [`DirtyError::Unsupported`] without dirty rings in the kernel, [`DirtyError::RingSize`], and
    /// [`DirtyError::System`] if there are vCPUs or rings already.
    pub fn enable(vm: OwnedFd, entries: u32) -> Result<Self, DirtyError> {
        let most = Self::most_entries(vm.as_fd());
        if most == 0 {
            let source = io::Error::from_raw_os_error(libc::ENOTTY);
            return Err(DirtyError::Unsupported { origin: NAME, what: "dirty rings, Linux 5.11", source });
        }
        if !entries.is_power_of_two() || entries > most {
            return Err(DirtyError::RingSize { entries, most });
        }
        let bytes = u64::from(entries) * u64::from(ENTRY_BYTES);
        enable_capability(vm.as_fd(), ring_capability(vm.as_fd()), bytes).map_err(|source| {
            match source.raw_os_error() {
                // `entries` is smaller than a page, or than the kernel's reserve.
                Some(libc::EINVAL) if entries < 1024 => DirtyError::RingSize { entries, most },
                _ => failed("KVM_ENABLE_CAP", "ring size", entries.into(), source),
            }
        })?;
        Ok(Self { vm, entries })
    }

    /// Maps the rings of all vCPUs, in their order, as a source over `slots`.
    ///
    /// The slots must exist already and map the blocks of `ram`. The source is not started.
    ///
    /// # Errors
    /// [`DirtyError::Slot`], or [`DirtyError::System`] if a ring cannot be mapped.
    pub fn source(
        self,
        vcpus: &[BorrowedFd<'_>],
        slots: Vec<KvmSlot>,
        ram: GuestRam,
    ) -> Result<KvmDirtyRing, DirtyError> {
        check_slots(&slots, &ram)?;
        let map = |(index, vcpu): (usize, &BorrowedFd<'_>)| {
            RingMap::new(*vcpu, self.entries).map_err(|source| failed("mmap", "vcpu", index as u64, source))
        };
        let rings: Vec<_> = vcpus.iter().enumerate().map(map).collect::<Result<_, _>>()?;
        let reported = rings.iter().map(|_| AtomicU64::new(0)).collect();
        let pending = Pending::new(&ram);
        let state = RingState { rings, slots, pending, is_all_dirty: false, damage: None, begun: None };
        Ok(KvmDirtyRing {
            vm: self.vm,
            entries: self.entries,
            ram: RwLock::new(ram),
            running: AtomicBool::new(false),
            reported,
            full_exits: AtomicU64::new(0),
            overruns: AtomicU64::new(0),
            state: Mutex::new(state),
        })
    }
}

/// The dirty rings of a KVM virtual machine, as a dirty source. See the module for the model.
#[derive(Debug)]
pub struct KvmDirtyRing {
    vm: OwnedFd,
    /// Number of entries per ring.
    entries: u32,
    /// Changes only under `state`'s lock.
    ram: RwLock<GuestRam>,
    /// Changes only under `state`'s lock.
    running: AtomicBool,
    /// For each vCPU, the number of pages that its ring has named.
    reported: Vec<AtomicU64>,
    full_exits: AtomicU64,
    overruns: AtomicU64,
    state: Mutex<RingState>,
}

#[derive(Debug)]
struct RingState {
    rings: Vec<RingMap>,
    slots: Vec<KvmSlot>,
    /// The pages that the rings have named since the last sync. They are handed out only after the reset.
    pending: Pending,
    /// Whether pages were lost, so that every page counts as named.
    is_all_dirty: bool,
    damage: Option<Damage>,
    /// The start of tracking, and each vCPU's count then; `None` while it does not run.
    begun: Option<(Instant, Vec<u64>)>,
}

/// The reason why tracking cannot be trusted until it is restarted.
#[derive(Debug, Clone, Copy)]
enum Damage {
    /// An entry named a page that does not exist.
    Entry { vcpu: usize, slot: u32, offset: u64 },
    /// After an overrun, the pages of a slot could not be protected again.
    Unprotected { slot: u32, errno: i32 },
}

/// Why a ring is emptied. `Full` means that its vCPU exited because the ring is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reap {
    Some,
    Full,
}

impl KvmDirtyRing {
    /// KVM_EXIT_DIRTY_RING_FULL: the VMM must call [`KvmDirtyRing::reap_full`] before it runs the vCPU again.
    pub const EXIT_RING_FULL: u32 = 31;

    /// Replaces the slots and the RAM, after memory was plugged or a slot was moved.
    ///
    /// # Errors
    /// [`DirtyError::Running`] while writes are tracked, [`DirtyError::Slot`]; nothing has changed then.
    pub fn replace_slots(&self, slots: Vec<KvmSlot>, ram: GuestRam) -> Result<(), DirtyError> {
        let mut state = self.state.lock();
        if self.is_running() {
            return Err(DirtyError::Running { origin: NAME, what: "its slots" });
        }
        check_slots(&slots, &ram)?;
        self.drain(&mut state)?;
        (state.slots, state.pending) = (slots, Pending::new(&ram));
        *self.ram.write() = ram;
        Ok(())
    }

    /// Empties a full ring, so that its vCPU can run again.
    ///
    /// It may be called on any thread, also while tracking does not run.
    ///
    /// # Errors
    /// [`DirtyError::System`]: the kernel does not free the ring, so the vCPU cannot run.
    ///
    /// # Panics
    /// If there is no vCPU of this index.
    pub fn reap_full(&self, vcpu: usize) -> Result<(), DirtyError> {
        self.full_exits.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        self.reap(&mut state, vcpu, Reap::Full)?;
        self.forget_unless_running(&mut state);
        Ok(())
    }

    /// Counts the rings' new entries, for [`KvmDirtyRing::reported`], and empties rings that are half full.
    ///
    /// # Errors
    /// [`DirtyError::System`]: the kernel does not free a ring.
    pub fn poll(&self) -> Result<(), DirtyError> {
        let mut state = self.state.lock();
        for vcpu in 0..state.rings.len() {
            let RingState { rings, slots, pending, .. } = &mut *state;
            // Invalid entries are detected when they are removed.
            rings[vcpu].each_new(|slot, offset| {
                self.note(slots, vcpu, (slot, offset), pending);
            });
            if rings[vcpu].is_half_full() {
                self.reap(&mut state, vcpu, Reap::Some)?;
            }
        }
        self.forget_unless_running(&mut state);
        Ok(())
    }

    /// Returns how many pages each vCPU has dirtied while tracking ran.
    ///
    /// The counts are updated by [`KvmDirtyRing::poll`], by a sync and by a full ring. Between two syncs, a
    /// page counts once, for the vCPU that was first.
    pub fn reported(&self) -> Vec<u64> {
        self.reported.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// Returns one vCPU's count of [`KvmDirtyRing::reported`].
    ///
    /// # Panics
    /// If there is no vCPU of this index.
    pub fn reported_by(&self, vcpu: usize) -> u64 {
        self.reported[vcpu].load(Ordering::Relaxed)
    }

    /// Returns the start of tracking and each vCPU's [`reported`](KvmDirtyRing::reported) count at that time.
    ///
    /// `None` while tracking does not run.
    pub fn begun(&self) -> Option<(Instant, Vec<u64>)> {
        self.state.lock().begun.clone()
    }

    /// Returns the number of entries per ring.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns how often a vCPU exited because its ring was full.
    pub fn full_exits(&self) -> u64 {
        self.full_exits.load(Ordering::Relaxed)
    }

    /// Returns how often the kernel overran a ring, so that all pages were reported.
    ///
    /// Larger rings make overruns rarer.
    pub fn overruns(&self) -> u64 {
        self.overruns.load(Ordering::Relaxed)
    }

    /// Whether tracking runs, between `start` and `stop`.
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    /// Makes a page pending, and counts it for the vCPU if it was not pending. Returns `false` if there is no
    /// such page.
    fn note(&self, slots: &[KvmSlot], vcpu: usize, entry: (u32, u64), pending: &mut Pending) -> bool {
        let Some((block, page)) = locate(slots, entry) else { return false };
        if pending.add(block, page) {
            self.reported[vcpu].fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Moves a ring's entries into the pending pages, which the kernel then protects again.
    fn reap(&self, state: &mut RingState, vcpu: usize, how: Reap) -> Result<(), DirtyError> {
        let RingState { rings, slots, pending, damage, .. } = state;
        let each = |slot, offset| {
            if !self.note(slots, vcpu, (slot, offset), pending) {
                damage.get_or_insert(Damage::Entry { vcpu, slot, offset });
            }
        };
        let reset = || {
            sys::ioctl_value(self.vm.as_fd(), KVM_RESET_DIRTY_RINGS, 0)
                .map(|done| done.try_into().unwrap_or(0))
        };
        let reaped = match how {
            Reap::Some => rings[vcpu].reap(each, reset),
            Reap::Full => rings[vcpu].reap_full(each, reset),
        };
        let reaped = reaped.map_err(|source| failed("KVM_RESET_DIRTY_RINGS", "vcpu", vcpu as u64, source))?;
        if reaped.overrun {
            self.recover(state);
        }
        Ok(())
    }

    /// Handles lost pages: protects all pages again, and reports all.
    fn recover(&self, state: &mut RingState) {
        self.overruns.fetch_add(1, Ordering::Relaxed);
        if !self.is_running() {
            return;
        }
        state.is_all_dirty = true;
        let ram = self.ram.read();
        for slot in &state.slots {
            let again = [false, true].iter().try_for_each(|on| set_logging(self.vm.as_fd(), &ram, slot, *on));
            if let Err(error) = again {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                state.damage.get_or_insert(Damage::Unprotected { slot: slot.slot, errno });
            }
        }
    }

    fn forget_unless_running(&self, state: &mut RingState) {
        if !self.is_running() && !state.pending.is_empty() {
            self.forget(state);
        }
    }

    fn forget(&self, state: &mut RingState) {
        state.pending.clear();
        (state.is_all_dirty, state.damage) = (false, None);
    }

    /// Empties the rings and drops their entries.
    fn drain(&self, state: &mut RingState) -> Result<(), DirtyError> {
        for vcpu in 0..state.rings.len() {
            self.reap(state, vcpu, Reap::Some)?;
        }
        self.forget(state);
        Ok(())
    }

    fn set_logging(&self, slot: &KvmSlot, on: bool) -> Result<(), DirtyError> {
        set_logging(self.vm.as_fd(), &self.ram.read(), slot, on)
            .map_err(|source| failed("KVM_SET_USER_MEMORY_REGION", "slot", slot.slot.into(), source))
    }

    /// Turns logging off in every slot. Continues after an error, and returns the first one.
    fn undo(&self, slots: &[KvmSlot]) -> Result<(), DirtyError> {
        let mut result = Ok(());
        for slot in slots {
            result = result.and(self.set_logging(slot, false));
        }
        result
    }
}

impl DirtySource for KvmDirtyRing {
    fn start(&self) -> Result<(), DirtyError> {
        let mut state = self.state.lock();
        if self.is_running() {
            return Ok(());
        }
        self.drain(&mut state)?;
        for slot in &state.slots {
            if let Err(error) = self.set_logging(slot, true) {
                // The caller gets the error of the start, which is the cause.
                let _ = self.undo(&state.slots);
                return Err(error);
            }
        }
        state.begun = Some((Instant::now(), self.reported()));
        self.running.store(true, Ordering::Release);
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let mut state = self.state.lock();
        if !self.running.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        state.begun = None;
        let undone = self.undo(&state.slots);
        undone.and(self.drain(&mut state))
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let mut state = self.state.lock();
        if !self.is_running() {
            return Err(DirtyError::NotStarted { origin: NAME });
        }
        check_bitmaps(NAME, &self.ram.read(), into)?;
        let began = Instant::now();
        for vcpu in 0..state.rings.len() {
            self.reap(&mut state, vcpu, Reap::Some)?;
        }
        let walked = Instant::now();
        match state.damage {
            None => {}
            Some(Damage::Entry { vcpu, slot, offset }) => {
                return Err(DirtyError::RingEntry { vcpu, slot, offset });
            }
            Some(Damage::Unprotected { slot, errno }) => {
                let call = "KVM_SET_USER_MEMORY_REGION, to protect all pages again after a ring overflowed,";
                return Err(failed(call, "slot", slot.into(), io::Error::from_raw_os_error(errno)));
            }
        }
        let mut report = SyncReport::default();
        if std::mem::take(&mut state.is_all_dirty) {
            for slot in &state.slots {
                report.newly_dirty += into.block_mut(slot.block).add_range(slot.first_page, slot.pages);
            }
        }
        report.newly_dirty += state.pending.move_into(into);
        // The pending bitmaps cover whole blocks, so merging needs no shift.
        (report.times.kernel, report.times.aligned) = (walked - began, walked.elapsed());
        Ok(report)
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        if !self.is_running() {
            return Err(DirtyError::NotStarted { origin: NAME });
        }
        let pages = self.ram.read().blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

impl Drop for KvmDirtyRing {
    fn drop(&mut self) {
        // A drop cannot return an error.
        let _ = self.stop();
    }
}

/// Returns the block and the page that an entry names.
fn locate(slots: &[KvmSlot], (slot, offset): (u32, u64)) -> Option<(usize, u64)> {
    let found = slots.iter().find(|known| known.slot == slot)?;
    (offset < found.pages).then(|| (found.block, found.first_page + offset))
}

/// Returns the number of the capability for dirty rings.
///
/// The newer one requires acquire and release order for the flags, which this code uses anyway. Some processors
/// have only the newer one.
fn ring_capability(vm: BorrowedFd<'_>) -> u32 {
    let newer = capability(vm, KVM_CAP_DIRTY_LOG_RING_ACQ_REL) > 0;
    if newer { KVM_CAP_DIRTY_LOG_RING_ACQ_REL } else { KVM_CAP_DIRTY_LOG_RING }
}

fn failed(call: &'static str, what: &'static str, index: u64, source: io::Error) -> DirtyError {
    DirtyError::System { origin: NAME, call, what, index, source }
}
