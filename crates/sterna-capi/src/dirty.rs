//! Which pages the guest and its devices write.

use std::ffi::c_void;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use sterna::VmError;
use sterna::ram::dirty::{
    Combined, DirtySource, ExternalLog, FoundPages, KvmDirtyLog, KvmSlot, UffdDirtyLog, VmmLog,
};
use sterna::ram::{DirtyError, GuestRam};

use crate::boundary::{Done, Versioned, enter, is_null, read};
use crate::callbacks::{Owned, User, attempt, run, sterna_step};
use crate::error::{
    Failure, STERNA_ERROR_NULL, STERNA_ERROR_STATE, STERNA_ERROR_SYSTEM, sterna_error, sterna_failure,
};
use crate::vm::sterna_vm;

/// A memory slot of a KVM machine, and the part of guest memory that it maps.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_kvm_slot {
    /// The number of the slot, as in KVM_SET_USER_MEMORY_REGION.
    pub slot: u32,
    /// The slot's flags without KVM_MEM_LOG_DIRTY_PAGES.
    pub flags: u32,
    /// The guest-physical address of the slot.
    pub guest_address: u64,
    /// The mapped block: 0 for the first that was added.
    pub block: u64,
    /// The first page of the block that the slot maps. Pages have 4096 bytes.
    pub first_page: u64,
    /// Number of pages.
    pub pages: u64,
}

/// A dirty log that the program keeps, for writers that KVM does not see.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_dirty_log {
    /// sizeof(sterna_dirty_log).
    pub size: usize,
    /// Passed to the callbacks. Valid until `destroy` of the VM's callbacks was called.
    pub user: *mut c_void,
    /// Begins to log: `read` reports every write from now on.
    pub start: sterna_step,
    /// Ends logging. Also called after a failed `read`.
    pub stop: sterna_step,
    /// Reports the pages written since the last call, with sterna_dirty_pages_add and …_add_bitmap, and logs
    /// their next write again. The last call is made with the guest stopped. More pages may be reported than
    /// were written.
    pub read: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            found: *mut sterna_dirty_pages,
            failure: *mut sterna_failure,
        ) -> i32,
    >,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_dirty_log {
    const NAME: &str = "sterna_dirty_log";
    const LEAST_BYTES: usize = size_of::<Self>();
}

/// Receives the pages that `read` found. Valid until `read` returns.
pub struct sterna_dirty_pages {
    found: *mut FoundPages<'static>,
}

/// Reports `count` pages of block `block` from page `first` on. A page that the block does not have fails the sync.
///
/// Threads: that of `read`, before it returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_dirty_pages_add(
    found: *mut sterna_dirty_pages,
    block: u64,
    first: u64,
    count: u64,
) {
    // SAFETY: `found` is the argument of `read`, whose pages live until it returns.
    if let Some(found) = unsafe { found.as_ref() } {
        let block = usize::try_from(block).unwrap_or(usize::MAX);
        // SAFETY: as above; no other reference exists, because only this thread has the argument.
        unsafe { &mut *found.found }.pages(block, first, count);
    }
}

/// Reports the set bits of `words` as pages of a block from page `first` on; the lowest bit is the first page.
/// This is the format of KVM_GET_DIRTY_LOG. Bits after the block's last page must be clear.
///
/// Threads: that of `read`, before it returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_dirty_pages_add_bitmap(
    found: *mut sterna_dirty_pages,
    block: u64,
    first: u64,
    words: *const u64,
    words_count: usize,
) {
    // SAFETY: as in sterna_dirty_pages_add.
    if let Some(found) = unsafe { found.as_ref() }
        && !words.is_null()
    {
        let block = usize::try_from(block).unwrap_or(usize::MAX);
        // SAFETY: as above; the caller gives `words_count` readable words.
        unsafe { (*found.found).words(block, first, std::slice::from_raw_parts(words, words_count)) };
    }
}

/// Uses KVM's dirty log for the writes of vCPUs. `vm_fd` is the descriptor of the virtual machine; it is
/// duplicated. The library sets and clears KVM_MEM_LOG_DIRTY_PAGES of the slots, which must not change during a
/// migration.
///
/// Sources of dirty pages add up. Together they must cover every thread and device that writes guest memory.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_use_kvm_dirty_log(
    vm: *mut sterna_vm,
    vm_fd: i32,
    slots: *const sterna_kvm_slot,
    slots_count: usize,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            if slots.is_null() {
                return Err(is_null("slots"));
            }
            let slots = std::slice::from_raw_parts(slots, slots_count).iter().map(kvm_slot).collect();
            if vm_fd < 0 {
                return Err(Failure::new(
                    STERNA_ERROR_SYSTEM,
                    format!("vm_fd is {vm_fd}, and no descriptor"),
                ));
            }
            let fd = BorrowedFd::borrow_raw(vm_fd).try_clone_to_owned();
            let fd =
                fd.map_err(|error| Failure::new(STERNA_ERROR_SYSTEM, format!("duplicating vm_fd: {error}")))?;
            sterna_vm::change(vm, |parts| {
                parts.dirty.push(Tracking::Kvm(fd, slots));
                Ok(())
            })
        })
    }
}

/// Uses userfaultfd for the writes of all threads of this process, of the kernel on their behalf, and of KVM.
/// Needs Linux 6.7, and STERNA_RAM_MAY_USERFAULTFD on every block. It does not see other processes.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_use_userfaultfd(vm: *mut sterna_vm, error: *mut *mut sterna_error) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                parts.dirty.push(Tracking::Userfaultfd);
                Ok(())
            })
        })
    }
}

/// Uses a dirty log that the program keeps.
///
/// Threads: any. The callbacks run on threads of the library, one after the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_use_dirty_log(
    vm: *mut sterna_vm,
    log: *const sterna_dirty_log,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                let given = read(log)?;
                if given.read.is_none() {
                    return Err(Failure::new(STERNA_ERROR_NULL, "sterna_dirty_log.read is NULL"));
                }
                parts.dirty.push(Tracking::Log(CLog { given, _owned: Arc::clone(&parts.vm.owned) }));
                Ok(())
            })
        })
    }
}

/// A dirty source before its memory is known.
pub(crate) enum Tracking {
    Kvm(OwnedFd, Vec<KvmSlot>),
    Userfaultfd,
    Log(CLog),
}

/// The source that joins all of `trackings`.
pub(crate) fn join(trackings: Vec<Tracking>, ram: &GuestRam) -> Result<Combined, DirtyError> {
    let sources = trackings.into_iter().map(|tracking| {
        Ok(match tracking {
            Tracking::Kvm(vm, slots) => {
                Arc::new(KvmDirtyLog::new(vm, slots, ram.clone())?) as Arc<dyn DirtySource>
            }
            Tracking::Userfaultfd => Arc::new(UffdDirtyLog::new(ram.clone())),
            Tracking::Log(log) => Arc::new(ExternalLog::new(ram, log)),
        })
    });
    Ok(Combined::new(sources.collect::<Result<_, DirtyError>>()?))
}

/// The program's log as the engine sees it.
pub(crate) struct CLog {
    given: sterna_dirty_log,
    /// Until the log is dropped, `destroy` is not called.
    _owned: Arc<Owned>,
}

// SAFETY: the callbacks may be called on any thread, by their contract.
unsafe impl Send for CLog {}
// SAFETY: as above.
unsafe impl Sync for CLog {}

impl CLog {
    fn run(&self, what: &str, step: sterna_step) -> io::Result<()> {
        // SAFETY: the program gave the callback for this pointer, which is not destroyed while `_owned` lives.
        unsafe { run(what, step, User(self.given.user)) }.map_err(other)
    }
}

impl VmmLog for CLog {
    fn start(&self) -> io::Result<()> {
        self.run("start the dirty log", self.given.start)
    }

    fn stop(&self) -> io::Result<()> {
        self.run("stop the dirty log", self.given.stop)
    }

    fn read(&self, found: &mut FoundPages<'_>) -> io::Result<()> {
        let Some(read) = self.given.read else { return Ok(()) };
        // The lifetime ends with this call, and so does the argument's validity for the program.
        let mut pages = sterna_dirty_pages { found: std::ptr::from_mut(found).cast() };
        let user = self.given.user;
        // SAFETY: as in `run`; `pages` lives until the callback has returned.
        attempt("read the dirty log", |failure| unsafe { read(user, &raw mut pages, failure) }).map_err(other)
    }
}

fn other(error: VmError) -> io::Error {
    io::Error::other(error)
}

fn kvm_slot(given: &sterna_kvm_slot) -> KvmSlot {
    KvmSlot {
        slot: given.slot,
        flags: given.flags,
        guest_address: given.guest_address,
        block: usize::try_from(given.block).unwrap_or(usize::MAX),
        first_page: given.first_page,
        pages: given.pages,
    }
}

/// No source was named.
pub(crate) fn none() -> Done {
    Err(Failure::new(
        STERNA_ERROR_STATE,
        "this VM has no source of dirty pages, so its guest cannot leave: call sterna_vm_use_kvm_dirty_log, \
         sterna_vm_use_userfaultfd or sterna_vm_use_dirty_log first",
    ))
}
