//! KVM's dirty log, as a dirty source.
//!
//! A memory slot with KVM_MEM_LOG_DIRTY_PAGES has a bitmap in the kernel.
//!
//! - With *manual protection*, GET_DIRTY_LOG only copies the bitmap. CLEAR_DIRTY_LOG clears and write-protects
//!   given pages, slice by slice. The cost is spread, and applies only to pages that are about to be read.
//! - With *initially set*, all bits of the bitmap are set at the start, and no page is protected. Each page is
//!   protected when its bit is first cleared.
//! - Without either, GET clears and protects in one step.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use super::bitmaps::DirtyBitmaps;
use super::source::{DirtySource, check_bitmaps, check_rearm};
use super::sync_report::SyncReport;
use crate::bitmap::PageBitmap;
use crate::error::DirtyError;
use crate::guest::GuestRam;
use crate::page::PAGE_BYTES;
use crate::sys;
use parking_lot::{Mutex, RwLock};

const NAME: &str = "kvm-dirty-log";

const KVM_CHECK_EXTENSION: u32 = 0xae03;
const KVM_SET_USER_MEMORY_REGION: u32 = 0x4020_ae46;
const KVM_GET_DIRTY_LOG: u32 = 0x4010_ae42;
const KVM_CLEAR_DIRTY_LOG: u32 = 0xc018_aec0;
const KVM_ENABLE_CAP: u32 = 0x4068_aea3;
const KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2: u32 = 168;
const KVM_MEM_LOG_DIRTY_PAGES: u32 = 1;

/// Largest number of pages per CLEAR_DIRTY_LOG: 1 GiB, a bitmap of 32 KiB.
const CLEAR_PAGES: u64 = 1 << 18;

/// The argument of KVM_SET_USER_MEMORY_REGION: `struct kvm_userspace_memory_region`.
#[repr(C)]
struct MemoryRegion {
    slot: u32,
    flags: u32,
    guest_address: u64,
    bytes: u64,
    host_address: u64,
}

/// The argument of KVM_GET_DIRTY_LOG: `struct kvm_dirty_log`.
#[repr(C)]
struct DirtyLog {
    slot: u32,
    padding: u32,
    bitmap: u64,
}

/// The argument of KVM_CLEAR_DIRTY_LOG: `struct kvm_clear_dirty_log`.
#[repr(C)]
struct ClearDirtyLog {
    slot: u32,
    pages: u32,
    first_page: u64,
    bitmap: u64,
}

/// The argument of KVM_ENABLE_CAP: `struct kvm_enable_cap`.
#[repr(C)]
struct EnableCap {
    capability: u32,
    flags: u32,
    arguments: [u64; 4],
    padding: [u8; 64],
}

const _: () = assert!(
    size_of::<MemoryRegion>() == 32
        && size_of::<DirtyLog>() == 16
        && size_of::<ClearDirtyLog>() == 24
        && size_of::<EnableCap>() == 104
);

/// A memory slot of the VM, and the part of guest RAM that it maps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvmSlot {
    /// Number of the slot, with the address space in the upper half, as in KVM.
    pub slot: u32,
    /// Flags of the slot, without KVM_MEM_LOG_DIRTY_PAGES.
    pub flags: u32,
    /// Guest-physical address of the slot.
    pub guest_address: u64,
    /// Index of the mapped block.
    pub block: usize,
    /// First page of the block that the slot maps.
    pub first_page: u64,
    /// Number of mapped pages of 4 KiB.
    pub pages: u64,
}

/// The way in which KVM keeps the log, ordered from the worst to the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum KvmLogMode {
    /// GET_DIRTY_LOG clears and protects, so syncing re-arms.
    Automatic = 0,
    /// CLEAR_DIRTY_LOG clears and protects. Starting protects all pages.
    Manual = 1,
    /// Like `Manual`, but starting protects no page and reports all pages.
    InitiallySet = 3,
}

/// The dirty log of a KVM virtual machine.
///
/// Several slots may map parts of one block, and several slots may map the same pages (aliases). A page that
/// was written through any slot is dirty.
#[derive(Debug)]
pub struct KvmDirtyLog {
    vm: OwnedFd,
    most: KvmLogMode,
    state: RwLock<LogState>,
    /// Buffer for the kernel's copy of a slot's log. It is kept because the first touch of fresh memory costs
    /// as much as the rest of a sync.
    buffer: Mutex<Vec<u64>>,
}

#[derive(Debug)]
struct LogState {
    slots: Vec<KvmSlot>,
    ram: GuestRam,
    /// The mode of the running tracking; `None` while it does not run.
    running: Option<KvmLogMode>,
}

impl LogState {
    fn started(&self) -> Result<KvmLogMode, DirtyError> {
        self.running.ok_or(DirtyError::NotStarted { origin: NAME })
    }
}

impl KvmDirtyLog {
    /// Makes a log over slots of a VM; `vm` is a duplicate of its descriptor.
    ///
    /// The slots must exist already and map the blocks of `ram`. The log is not started.
    ///
    /// # Errors
    /// [`DirtyError::Slot`].
    pub fn new(vm: OwnedFd, slots: Vec<KvmSlot>, ram: GuestRam) -> Result<Self, DirtyError> {
        check_slots(&slots, &ram)?;
        let state = RwLock::new(LogState { slots, ram, running: None });
        Ok(KvmDirtyLog { vm, most: KvmLogMode::InitiallySet, state, buffer: Mutex::default() })
    }

    /// Replaces the slots and the RAM, after memory was plugged or a slot was moved.
    ///
    /// # Errors
    /// [`DirtyError::Running`] while writes are tracked, [`DirtyError::Slot`]; nothing has changed then.
    pub fn replace_slots(&self, slots: Vec<KvmSlot>, ram: GuestRam) -> Result<(), DirtyError> {
        let mut state = self.state.write();
        if state.running.is_some() {
            return Err(DirtyError::Running { origin: NAME, what: "its slots" });
        }
        check_slots(&slots, &ram)?;
        (state.slots, state.ram) = (slots, ram);
        Ok(())
    }

    /// Limits the mode; the default is the best mode of the kernel.
    pub fn with_mode(mut self, most: KvmLogMode) -> Self {
        self.most = most;
        self
    }

    /// Returns the mode of the running tracking; `None` while it does not run.
    pub fn mode(&self) -> Option<KvmLogMode> {
        self.state.read().running
    }

    /// Makes only the system calls of a sync, so that benches can measure the rest.
    ///
    /// The reported pages are dropped. In the automatic mode, they are lost.
    ///
    /// # Errors
    /// The errors of [`DirtySource::sync`].
    #[cfg(feature = "bench")]
    pub fn system_calls_alone(&self) -> Result<(), DirtyError> {
        let state = self.state.read();
        state.started()?;
        let mut buffer = self.buffer.lock();
        state.slots.iter().try_for_each(|slot| self.read(slot, &mut buffer).map(|_| ()))
    }

    /// Returns the best mode that both the kernel and the caller allow.
    fn best_mode(&self) -> KvmLogMode {
        let kernel = match capability(self.vm.as_fd(), KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2) {
            has if has & 3 == 3 => KvmLogMode::InitiallySet,
            has if has & 1 == 1 => KvmLogMode::Manual,
            _ => KvmLogMode::Automatic,
        };
        kernel.min(self.most)
    }

    fn set_mode(&self, mode: KvmLogMode) -> Result<(), DirtyError> {
        enable_capability(self.vm.as_fd(), KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, mode as u64)
            .map_err(|source| failed("KVM_ENABLE_CAP", 0, source))
    }

    fn set_logging(&self, ram: &GuestRam, slot: &KvmSlot, on: bool) -> Result<(), DirtyError> {
        set_logging(self.vm.as_fd(), ram, slot, on)
            .map_err(|source| failed("KVM_SET_USER_MEMORY_REGION", slot.slot, source))
    }

    /// Undoes `start`. Continues after an error, and returns the first one.
    fn undo(&self, state: &LogState, mode: KvmLogMode) -> Result<(), DirtyError> {
        let mut result = Ok(());
        for slot in &state.slots {
            result = result.and(self.set_logging(&state.ram, slot, false));
        }
        if mode != KvmLogMode::Automatic {
            result = result.and(self.set_mode(KvmLogMode::Automatic));
        }
        result
    }

    /// Makes the kernel copy the slot's log into the buffer, and returns its words.
    fn read<'a>(&self, slot: &KvmSlot, buffer: &'a mut Vec<u64>) -> Result<&'a [u64], DirtyError> {
        let len = slot.pages.div_ceil(64) as usize;
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let words = &mut buffer[..len];
        let mut log = DirtyLog { slot: slot.slot, padding: 0, bitmap: words.as_mut_ptr() as u64 };
        // SAFETY: the request expects this structure; `bitmap` names words for all pages of the slot,
        // which is as much as the kernel writes.
        unsafe { sys::ioctl(self.vm.as_fd(), KVM_GET_DIRTY_LOG, &mut log) }
            .map_err(|source| failed("KVM_GET_DIRTY_LOG", slot.slot, source))?;
        // Bits after the slot's last page would be merged into the next slot of the block.
        keep_only(&mut words[len - 1..], 0, (slot.pages - 1) % 64 + 1);
        Ok(words)
    }

    /// Re-arms the pages of `[first, end)` that a sync reported. The range is counted inside the slot.
    fn clear(&self, slot: &KvmSlot, first: u64, end: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        // KVM requires whole words of the slot's bitmap. Pages around [first, end) in them must not change, so
        // their bits are cleared.
        let (from, to) = (first / 64 * 64, end.next_multiple_of(64).min(slot.pages));
        let mut words = vec![0u64; (to - from).min(CLEAR_PAGES).div_ceil(64) as usize];
        let mut at = from;
        while at < to {
            let pages = (to - at).min(CLEAR_PAGES);
            let words = &mut words[..pages.div_ceil(64) as usize];
            synced.copy_words(slot.first_page + at, words);
            keep_only(words, first.saturating_sub(at), (end - at).min(pages));
            if words.iter().any(|word| *word != 0) {
                let mut clear = ClearDirtyLog {
                    slot: slot.slot,
                    pages: pages as u32,
                    first_page: at,
                    bitmap: words.as_ptr() as u64,
                };
                // SAFETY: the request expects this structure; `bitmap` names words for `pages` bits,
                // which the kernel only reads.
                unsafe { sys::ioctl(self.vm.as_fd(), KVM_CLEAR_DIRTY_LOG, &mut clear) }
                    .map_err(|source| failed("KVM_CLEAR_DIRTY_LOG", slot.slot, source))?;
            }
            at += pages;
        }
        Ok(())
    }
}

impl DirtySource for KvmDirtyLog {
    fn start(&self) -> Result<(), DirtyError> {
        let mut state = self.state.write();
        if state.running.is_some() {
            return Ok(());
        }
        let mode = self.best_mode();
        if mode != KvmLogMode::Automatic {
            self.set_mode(mode)?;
        }
        for slot in &state.slots {
            if let Err(error) = self.set_logging(&state.ram, slot, true) {
                // The caller gets the error of the start, which is the cause.
                let _ = self.undo(&state, mode);
                return Err(error);
            }
        }
        state.running = Some(mode);
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let mut state = self.state.write();
        match state.running.take() {
            Some(mode) => self.undo(&state, mode),
            None => Ok(()),
        }
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let state = self.state.read();
        state.started()?;
        check_bitmaps(NAME, &state.ram, into)?;
        let mut report = SyncReport::default();
        let mut buffer = self.buffer.lock();
        for slot in &state.slots {
            let began = Instant::now();
            let words = self.read(slot, &mut buffer)?;
            let read = Instant::now();
            report.newly_dirty += into.block_mut(slot.block).merge_words(slot.first_page, words);
            report.times.kernel += read - began;
            report.times.add_merge((slot.first_page % 64) as u32, read.elapsed());
        }
        Ok(report)
    }

    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        let state = self.state.read();
        let mode = state.started()?;
        let pages = state.ram.blocks().get(block).map(|block| block.pages());
        check_rearm(NAME, block, pages, first, count, synced)?;
        if mode == KvmLogMode::Automatic {
            return Ok(());
        }
        for slot in state.slots.iter().filter(|slot| slot.block == block) {
            let from = first.max(slot.first_page);
            let to = (first + count).min(slot.first_page + slot.pages);
            if from < to {
                self.clear(slot, from - slot.first_page, to - slot.first_page, synced)?;
            }
        }
        Ok(())
    }

    fn initially_set(&self) -> bool {
        self.mode() == Some(KvmLogMode::InitiallySet)
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

impl Drop for KvmDirtyLog {
    fn drop(&mut self) {
        // A drop cannot return an error.
        let _ = self.stop();
    }
}

/// Refuses slots that are outside of `ram`, or whose dirty log is already in use.
pub(super) fn check_slots(slots: &[KvmSlot], ram: &GuestRam) -> Result<(), DirtyError> {
    for slot in slots {
        let refuse = |rule| Err(DirtyError::Slot { slot: slot.slot, rule });
        let Some(block) = ram.blocks().get(slot.block) else {
            return refuse("it maps a block that the guest RAM does not have");
        };
        let end = slot.first_page.checked_add(slot.pages);
        if slot.pages == 0 || end.is_none_or(|end| end > block.pages()) {
            return refuse("it is not inside its block");
        }
        if slot.flags & KVM_MEM_LOG_DIRTY_PAGES != 0 {
            return refuse("its dirty log is already in use; only one reader is possible");
        }
    }
    Ok(())
}

/// Turns the logging of a slot on or off, without another change of the slot.
pub(super) fn set_logging(vm: BorrowedFd<'_>, ram: &GuestRam, slot: &KvmSlot, on: bool) -> io::Result<()> {
    let host = ram.block(slot.block).host_address() as u64;
    let mut region = MemoryRegion {
        slot: slot.slot,
        flags: slot.flags | if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_address: slot.guest_address,
        bytes: slot.pages * PAGE_BYTES,
        host_address: host + slot.first_page * PAGE_BYTES,
    };
    // SAFETY: the request expects this structure. The slot maps exactly this memory already, so only its
    // flags change; `ram` keeps the memory alive.
    unsafe { sys::ioctl(vm, KVM_SET_USER_MEMORY_REGION, &mut region) }.map(|_| ())
}

/// Enables a capability of the VM, with one argument.
pub(super) fn enable_capability(vm: BorrowedFd<'_>, capability: u32, argument: u64) -> io::Result<()> {
    let mut enable = EnableCap { capability, flags: 0, arguments: [argument, 0, 0, 0], padding: [0; 64] };
    // SAFETY: the request expects this structure, which points to nothing.
    unsafe { sys::ioctl(vm, KVM_ENABLE_CAP, &mut enable) }.map(|_| ())
}

/// Returns the kernel's value for a capability of the VM; 0 means unsupported.
pub(super) fn capability(vm: BorrowedFd<'_>, capability: u32) -> u32 {
    sys::ioctl_value(vm, KVM_CHECK_EXTENSION, capability.into()).unwrap_or(0).try_into().unwrap_or(0)
}

/// Clears the bits outside of `[first, end)`.
fn keep_only(words: &mut [u64], first: u64, end: u64) {
    for (index, word) in words.iter_mut().enumerate() {
        let start = index as u64 * 64;
        let from = first.saturating_sub(start).min(64);
        let to = end.saturating_sub(start).min(64);
        let below = |bits: u64| if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
        *word &= below(to) & !below(from);
    }
}

fn failed(call: &'static str, slot: u32, source: io::Error) -> DirtyError {
    DirtyError::System { origin: NAME, call, what: "slot", index: u64::from(slot), source }
}
