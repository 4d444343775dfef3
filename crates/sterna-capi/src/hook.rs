//! Hooks: resources that only one host may have.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use sterna::{Hook, VmError};

use crate::boundary::{Versioned, enter, read, text};
use crate::callbacks::{Owned, User, notify, run, sterna_notice, sterna_step};
use crate::error::sterna_error;
use crate::vm::sterna_vm;

/// A resource that only one host may have: disk locks, leases, network addresses. The two sides never hold it at
/// the same time. Each callback may be NULL.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_hook {
    /// sizeof(sterna_hook).
    pub size: usize,
    /// Passed to the callbacks. Valid until `destroy` of the VM's callbacks was called.
    pub user: *mut c_void,
    /// The name, for errors. Copied.
    pub name: *const c_char,
    /// Source, guest stopped: releases the resource.
    pub release: sterna_step,
    /// Source, after a failure: acquires it again. If this fails, the guest is held.
    pub take_back: sterna_step,
    /// Destination, before the guest starts: acquires the resource, or fails immediately.
    pub acquire: sterna_step,
    /// Destination, after a failure: releases it.
    pub give_back: sterna_notice,
    /// Destination, guest running: announces the guest's new place to the network.
    pub announce: sterna_step,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_hook {
    const NAME: &str = "sterna_hook";
    const LEAST_BYTES: usize = size_of::<Self>();
}

/// Adds a hook. Hooks are added before the VM's first migration; they are released and acquired in this order.
///
/// Threads: any. The callbacks run on threads of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_add_hook(
    vm: *mut sterna_vm,
    hook: *const sterna_hook,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                let given = read(hook)?;
                let name = text(given.name, "sterna_hook.name")?.to_owned();
                parts.hooks.push(Arc::new(CHook { name, given, _owned: Arc::clone(&parts.vm.owned) }));
                Ok(())
            })
        })
    }
}

/// A hook as the engine sees it.
struct CHook {
    name: String,
    given: sterna_hook,
    /// Until the hook is dropped, `destroy` is not called.
    _owned: Arc<Owned>,
}

// SAFETY: the callbacks may be called on any thread, by their contract; the name's pointer is not used after the copy.
unsafe impl Send for CHook {}
// SAFETY: as above.
unsafe impl Sync for CHook {}

impl CHook {
    fn run(&self, what: &str, step: sterna_step) -> Result<(), VmError> {
        // SAFETY: the program gave the callback for this pointer, which is not destroyed while `_owned` lives.
        unsafe { run(&format!("{what} {}", self.name), step, User(self.given.user)) }
    }
}

impl Hook for CHook {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn release(&self) -> Result<(), VmError> {
        self.run("release", self.given.release)
    }

    fn take_back(&self) -> Result<(), VmError> {
        self.run("take back", self.given.take_back)
    }

    fn acquire(&self) -> Result<(), VmError> {
        self.run("acquire", self.given.acquire)
    }

    fn give_back(&self) {
        // SAFETY: as in `run`.
        unsafe { notify(self.given.give_back, User(self.given.user)) }
    }

    fn announce(&self) -> Result<(), VmError> {
        self.run("announce", self.given.announce)
    }
}
