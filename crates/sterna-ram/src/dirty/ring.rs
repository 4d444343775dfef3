//! KVM's dirty ring.
//!
//! # The model
//! Instead of a bitmap for each slot every vCPU has a ring in memory that the kernel and this process share. When
//! a vCPU writes to a page that is protected, the kernel lifts the protection and puts the page into that vCPU's
//! ring: one entry, with the flag *dirty*. We take entries out and mark them *reset*; the system call
//! KVM_RESET_DIRTY_RINGS then protects the pages of all marked entries again and frees their places. So the cost
//! follows the pages that were written and not the size of the guest, and it is known which vCPU wrote them.
//!
//! A vCPU whose ring is nearly full comes out of the guest (exit reason [`KvmDirtyRing::EXIT_RING_FULL`]) and may
//! not go on before its ring was emptied ([`KvmDirtyRing::reap_full`]). It is better to empty rings earlier:
//! [`KvmDirtyRing::poll`], called every few milliseconds, empties those that are half full. What was taken out
//! waits in the *pending* bitmaps for the next sync. A page counts for the vCPU that made it pending.
//!
//! # The order that makes it right
//! A page's bit may be handed out only after the reset that protects the page again: if it came earlier, a lane
//! could read the page, the guest write to it (unprotected still, so unnoticed), and the reset come last. That
//! write would never be sent. So taking entries out and their reset are one step under one lock, for the vCPUs'
//! threads as for a sync; and a sync reports nothing before its own reset is done. A write
//! after the reset makes a new entry; a write before it is seen by every read that follows the sync.
//!
//! Syncing re-arms, so [`DirtySource::rearm`] does nothing. A stopped vCPU has put all of its writes into its
//! ring: the processor's own log of dirty pages is emptied at every exit from the guest.
//!
//! # Bounds
//! One entry is 16 bytes; a ring has a power of two of them, at most what the kernel says (65,536). It keeps some
//! for itself (64, and 512 more where the processor logs pages), so the smallest ring that works everywhere has
//! 1024. Rings are switched on before the VM has its first vCPU, and for good: the bitmaps of
//! [`super::KvmDirtyLog`] do not work in that VM.
//!
//! # Rings that run over
//! A kernel that checks its limit too seldom writes over entries that were not taken out yet. (The limit leaves
//! room for 64; kernels that emulate the guest's instructions go on for hundreds between two checks.) Which pages
//! were lost cannot be known, so all are reported and protected again; [`KvmDirtyRing::overruns`] counts that.
//! It shows in one of these ways:
//! - Every entry is dirty: a kernel that keeps to its limit never comes so far.
//! - An entry that is not dirty has a dirty one after it. After an overrun the kernel's positions are ahead of
//!   ours; the places between are marked too, or it would wait for them for ever.
//! - Marked entries are not reset, as they were written over before their reset. Those are taken out again.
//! - A vCPU comes out twice for a full ring that is empty: there are only places without entries.
//!
//! An entry that names a page of no slot is skipped, and from then on every sync fails until tracking is
//! started anew: a page was written and it is unknown which.

mod map;
mod pending;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::kvm::{capability, check_slots, enable_capability, set_logging};
use super::{DirtyBitmaps, DirtySource, KvmSlot, SyncReport, check_bitmaps, check_rearm};
use crate::{DirtyError, GuestRam, PageBitmap, sys};
use map::RingMap;
use parking_lot::{Mutex, RwLock};
use pending::Pending;

const NAME: &str = "kvm-dirty-ring";

const KVM_CAP_DIRTY_LOG_RING: u32 = 192;
const KVM_CAP_DIRTY_LOG_RING_ACQ_REL: u32 = 223;
const KVM_RESET_DIRTY_RINGS: u32 = 0xaec7;
const ENTRY_BYTES: u32 = 16;

/// Rings that were switched on in a VM that has no vCPU yet.
#[derive(Debug)]
pub struct KvmDirtyRings {
    vm: OwnedFd,
    entries: u32,
}

impl KvmDirtyRings {
    /// The most entries that a ring may have in this VM; 0 if its kernel has no dirty rings.
    pub fn most_entries(vm: BorrowedFd<'_>) -> u32 {
        capability(vm, ring_capability(vm)) / ENTRY_BYTES
    }

    /// Switches rings of `entries` entries on, for good. `vm` is a duplicate of the VM's descriptor; the VM has no
    /// vCPU yet.
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
                // Below a page, or below what the kernel keeps for itself.
                Some(libc::EINVAL) if entries < 1024 => DirtyError::RingSize { entries, most },
                _ => failed("KVM_ENABLE_CAP", "ring size", entries.into(), source),
            }
        })?;
        Ok(Self { vm, entries })
    }

    /// Maps the rings of the VM's vCPUs (all of them, in their order) as a source over the given slots, which must
    /// be set up already and mapped where `ram` has its blocks. Not started.
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

/// The dirty rings of a KVM virtual machine. See the module for the model.
#[derive(Debug)]
pub struct KvmDirtyRing {
    vm: OwnedFd,
    /// Of each ring.
    entries: u32,
    /// Changes under `state`'s lock.
    ram: RwLock<GuestRam>,
    /// Changes under `state`'s lock.
    running: AtomicBool,
    /// Pages that each vCPU's ring has named.
    reported: Vec<AtomicU64>,
    full_exits: AtomicU64,
    overruns: AtomicU64,
    state: Mutex<RingState>,
}

#[derive(Debug)]
struct RingState {
    rings: Vec<RingMap>,
    slots: Vec<KvmSlot>,
    /// What the rings have named since the last sync. Handed out only after the reset.
    pending: Pending,
    /// Pages were lost: every page counts as named.
    is_all_dirty: bool,
    damage: Option<Damage>,
    /// When tracking began, and what each vCPU had reported by then; none while it does not run.
    begun: Option<(Instant, Vec<u64>)>,
}

/// Why tracking cannot be trusted until it is started anew.
#[derive(Debug, Clone, Copy)]
enum Damage {
    /// An entry named a page that does not exist.
    Entry { vcpu: usize, slot: u32, offset: u64 },
    /// After an overrun the pages of a slot could not be protected again.
    Unprotected { slot: u32, errno: i32 },
}

/// How a ring is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reap {
    Some,
    Full,
}

impl KvmDirtyRing {
    /// KVM_EXIT_DIRTY_RING_FULL: answer it with [`KvmDirtyRing::reap_full`] and run the vCPU on.
    pub const EXIT_RING_FULL: u32 = 31;

    /// The VM has other slots now, which map `ram`: memory was plugged, or a slot has moved.
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

    /// Empties the ring of a vCPU that came out because it is full; its next run goes on. To be called on any
    /// thread, while tracking or not.
    ///
    /// # Errors
    /// [`DirtyError::System`]: the kernel does not free the ring, so the vCPU cannot go on.
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
            // What is wrong with an entry is found when it is taken out.
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

    /// How many pages each vCPU has dirtied so far while tracking ran, as of the last [`KvmDirtyRing::poll`], sync
    /// or full ring. A page counts once between two syncs, for the vCPU that was first.
    pub fn reported(&self) -> Vec<u64> {
        self.reported.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    /// One vCPU's count of [`KvmDirtyRing::reported`].
    ///
    /// # Panics
    /// If there is no vCPU of this index.
    pub fn reported_by(&self, vcpu: usize) -> u64 {
        self.reported[vcpu].load(Ordering::Relaxed)
    }

    /// When tracking began, and what each vCPU had [reported](KvmDirtyRing::reported) by then; none while it does not
    /// run.
    pub fn begun(&self) -> Option<(Instant, Vec<u64>)> {
        self.state.lock().begun.clone()
    }

    /// How many entries each ring has.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// How often a vCPU came out because its ring was full.
    pub fn full_exits(&self) -> u64 {
        self.full_exits.load(Ordering::Relaxed)
    }

    /// How often the kernel ran over the end of a ring, and all pages were reported because of it. Larger rings make
    /// it rarer.
    pub fn overruns(&self) -> u64 {
        self.overruns.load(Ordering::Relaxed)
    }

    /// Whether tracking runs.
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    /// Makes a page pending, and counts it for the vCPU if it was not. False: there is no such page.
    fn note(&self, slots: &[KvmSlot], vcpu: usize, entry: (u32, u64), pending: &mut Pending) -> bool {
        let Some((block, page)) = locate(slots, entry) else { return false };
        if pending.add(block, page) {
            self.reported[vcpu].fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Empties a ring into the pending pages and has the kernel protect them again.
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

    /// Pages were lost: protects all of them again, and reports all.
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

    /// Empties the rings and forgets what they held.
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

    /// Turns logging off everywhere; goes on after an error and gives the first.
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
                // The error that matters is the first one.
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
        // The pending bitmaps are those of whole blocks.
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
        // No caller is left to report an error to.
        let _ = self.stop();
    }
}

/// The block and page that an entry names.
fn locate(slots: &[KvmSlot], (slot, offset): (u32, u64)) -> Option<(usize, u64)> {
    let found = slots.iter().find(|known| known.slot == slot)?;
    (offset < found.pages).then(|| (found.block, found.first_page + offset))
}

/// The newer capability says that flags must be read with acquire and written with release order, which is what
/// we do anyway; some processors have only that one.
fn ring_capability(vm: BorrowedFd<'_>) -> u32 {
    let newer = capability(vm, KVM_CAP_DIRTY_LOG_RING_ACQ_REL) > 0;
    if newer { KVM_CAP_DIRTY_LOG_RING_ACQ_REL } else { KVM_CAP_DIRTY_LOG_RING }
}

fn failed(call: &'static str, what: &'static str, index: u64, source: io::Error) -> DirtyError {
    DirtyError::System { origin: NAME, call, what, index, source }
}
