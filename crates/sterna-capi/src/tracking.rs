//! Sources of dirty pages, before the memory that they watch is known.

use std::ffi::c_void;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sterna::VmError;
use sterna::ram::dirty::{
    Combined, DirtySource, ExternalLog, FoundPages, KvmDirtyLog, KvmSlot, UffdDirtyLog, VmmLog,
};
use sterna::ram::{DirtyError, GuestRam};

use crate::boundary::Versioned;
use crate::callbacks::{Owned, User, attempt, run, sterna_failure, sterna_step};

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
    pub(crate) given: sterna_dirty_log,
    /// Until the log is dropped, `destroy` is not called.
    pub(crate) _owned: Arc<Owned>,
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
