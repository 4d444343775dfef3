//! A virtual machine out of the program's callbacks.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::StartError;
use sterna::ram::Custody;

use crate::boundary::{Done, borrow, enter, hand_out, quietly, read, text, writable};
use crate::callbacks::{Owned, User, may_wait, notify, sterna_notice};
use crate::error::{Failure, STERNA_ERROR_ARGUMENT, STERNA_ERROR_NULL, STERNA_ERROR_STATE, sterna_error};
use crate::machine::Machine;
use crate::parts::{Parts, VmCallbacks, sterna_vm_callbacks};

/// A virtual machine: callbacks, memory, devices, hooks, and sources of dirty pages.
pub struct sterna_vm {
    state: Mutex<State>,
}

/// Makes a virtual machine. Add its memory, devices, hooks and sources of dirty pages, then start a migration or
/// listen for one.
///
/// `machine_type` and `uuid` must be equal on both sides. `uuid` is NULL or has 16 bytes. All arguments are
/// copied. After an error `destroy` is not called. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_new(
    machine_type: *const c_char,
    uuid: *const u8,
    callbacks: *const sterna_vm_callbacks,
    vm: *mut *mut sterna_vm,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            writable(vm, "vm")?;
            let machine_type = text(machine_type, "machine_type")?.to_owned();
            let uuid = uuid.cast::<[u8; 16]>().as_ref().copied();
            let given = read(callbacks)?;
            let needed = [
                ("is_running", given.is_running.is_some()),
                ("stop", given.stop.is_some()),
                ("resume", given.resume.is_some()),
                ("start", given.start.is_some()),
            ];
            if let Some((name, _)) = needed.iter().find(|(_, is_there)| !is_there) {
                return Err(Failure::new(STERNA_ERROR_NULL, format!("sterna_vm_callbacks.{name} is NULL")));
            }
            let owned = Arc::new(Owned::new(given.user, given.destroy));
            let parts = Parts {
                machine_type,
                uuid,
                vm: Arc::new(VmCallbacks { given, owned }),
                blocks: Vec::new(),
                keeps_bytes: Vec::new(),
                devices: Vec::new(),
                hooks: Vec::new(),
                compatibility: None,
                shares_ram_with: None,
                dirty: Vec::new(),
            };
            hand_out(vm, sterna_vm { state: Mutex::new(State::Open(Box::new(parts))) });
            Ok(())
        })
    }
}

/// Names other processes that have the guest's memory mapped, such as devices in processes of their own.
/// Postcopy is then refused.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_set_shares_ram_with(
    vm: *mut sterna_vm,
    names: *const c_char,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let names = text(names, "names")?.to_owned();
            sterna_vm::change(vm, |parts| {
                parts.shares_ram_with = Some(names);
                Ok(())
            })
        })
    }
}

/// Whether the VMM may run the guest when its operator asks for it. False from the stop for the switchover on
/// until it is undone, and while the guest is elsewhere, undecided, held, or saved. To act on the answer use
/// sterna_vm_while_free.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_may_run(vm: *const sterna_vm) -> bool {
    // SAFETY: the header has these contracts.
    quietly(false, || unsafe { vm.as_ref() }.is_some_and(|vm| vm.custody().may_run()))
}

/// Runs `act`, the operator's pause or resume of the guest, on this thread, unless a migration has the guest. No
/// migration stops or resumes the guest before `act` has returned. Wrap every pause and resume in it: otherwise
/// an operator could start a guest that runs elsewhere.
///
/// As a migration does, the call fixes the VM's parts: add them before.
///
/// Errors: STERNA_ERROR_STATE, and `act` was not called. Threads: any, but not in a callback or in `act`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_while_free(
    vm: *mut sterna_vm,
    act: sterna_notice,
    user: *mut c_void,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            may_wait("sterna_vm_while_free")?;
            let machine = borrow(vm, "vm")?.machine()?;
            machine.ram.while_free(|| notify(act, User(user))).map_err(not_free)
        })
    }
}

/// Records that the VMM has booted or loaded a new guest into this VM, after a migration.
///
/// Errors: STERNA_ERROR_STATE while a migration still needs the present guest. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_has_new_guest(vm: *mut sterna_vm, error: *mut *mut sterna_error) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(vm, "vm")?.machine()?.ram.has_new_guest().map_err(not_free)) }
}

/// Records that the VMM has discarded the guest, so that another one may arrive.
///
/// Errors: STERNA_ERROR_STATE while a migration still needs the present guest. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_has_no_guest(vm: *mut sterna_vm, error: *mut *mut sterna_error) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe { enter(error, || borrow(vm, "vm")?.machine()?.ram.has_no_guest().map_err(not_free)) }
}

/// Frees the handle. Migrations of the VM continue; `destroy` is called when the last of them has ended and was
/// freed. NULL is allowed.
///
/// Threads: any, once, and no other call with this handle runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_free(vm: *mut sterna_vm) {
    if !vm.is_null() {
        // SAFETY: `sterna_vm_new` has made the box, and the caller gives it back once.
        quietly((), || drop(unsafe { Box::from_raw(vm) }));
    }
}

enum State {
    Open(Box<Parts>),
    Ready(Arc<Machine>),
    /// The parts do not fit together.
    Broken(String),
}

impl sterna_vm {
    /// Changes the parts of a machine that has not migrated yet.
    ///
    /// # Safety
    /// `vm` is null or a handle that was not freed.
    pub(crate) unsafe fn change(vm: *mut Self, change: impl FnOnce(&mut Parts) -> Done) -> Done {
        // SAFETY: as the contract says.
        match &mut *unsafe { borrow(vm, "vm") }?.state.lock() {
            State::Open(parts) => change(parts),
            State::Ready(_) => Err(Failure::new(
                STERNA_ERROR_STATE,
                "this VM is in use: add its parts before its first migration, or make another VM",
            )),
            State::Broken(why) => Err(broken(why)),
        }
    }

    /// The machine; its parts are fixed from now on.
    pub(crate) fn machine(&self) -> Done<Arc<Machine>> {
        let mut state = self.state.lock();
        let parts = match &mut *state {
            State::Ready(machine) => return Ok(Arc::clone(machine)),
            State::Broken(why) => return Err(broken(why)),
            State::Open(parts) if parts.blocks.is_empty() => {
                return Err(Failure::new(
                    STERNA_ERROR_STATE,
                    "this VM has no memory: call sterna_vm_add_ram first",
                ));
            }
            State::Open(_) => std::mem::replace(&mut *state, State::Broken(String::new())),
        };
        let State::Open(parts) = parts else { return Err(broken("")) };
        match Machine::new(*parts) {
            Ok(machine) => {
                let machine = Arc::new(machine);
                *state = State::Ready(Arc::clone(&machine));
                Ok(machine)
            }
            Err(why) => {
                *state = State::Broken(why.clone());
                Err(broken(&why))
            }
        }
    }

    /// The machine, whose guest can leave.
    pub(crate) fn source(&self) -> Done<Arc<Machine>> {
        let machine = self.machine()?;
        if machine.is_tracked { Ok(machine) } else { Err(untracked()) }
    }

    fn custody(&self) -> Custody {
        match &*self.state.lock() {
            State::Ready(machine) => machine.ram.custody(),
            State::Open(_) | State::Broken(_) => Custody::Free,
        }
    }
}

fn untracked() -> Failure {
    Failure::new(
        STERNA_ERROR_STATE,
        "this VM has no source of dirty pages, so its guest cannot leave: call sterna_vm_use_kvm_dirty_log, \
         sterna_vm_use_userfaultfd or sterna_vm_use_dirty_log first",
    )
}

fn broken(why: &str) -> Failure {
    Failure::new(
        STERNA_ERROR_ARGUMENT,
        format!("the parts of this VM do not fit together: {why}. Make another VM"),
    )
}

fn not_free(custody: Custody) -> Failure {
    Failure::new(STERNA_ERROR_STATE, StartError::Guest(custody))
}
