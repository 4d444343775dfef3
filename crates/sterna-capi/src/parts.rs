//! What a virtual machine consists of, before its first migration.

use std::ffi::c_void;
use std::sync::Arc;

use sterna::ram::RamBlock;
use sterna::{Device, Hook};

use crate::boundary::Versioned;
use crate::callbacks::{Owned, sterna_notice, sterna_state, sterna_step};
use crate::tracking::Tracking;

/// The functions of a virtual machine. They run on threads of the library, never on the caller's. None may call
/// a function that waits for a migration. `is_running`, `stop`, `resume` and `start` must not be NULL.
///
/// A function that returns int32_t returns 0 for success. Otherwise it fails, after it has set a text with
/// sterna_failure_set.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_vm_callbacks {
    /// sizeof(sterna_vm_callbacks).
    pub size: usize,
    /// Passed to the callbacks.
    pub user: *mut c_void,
    /// Called once, when the library uses `user`, the VM's memory, its devices, hooks and logs for the last
    /// time. This is after sterna_vm_free, when every migration of the VM has ended and was freed. It runs on
    /// any thread.
    pub destroy: sterna_notice,
    /// Source: whether the vCPUs run now. Must not wait for a vCPU.
    pub is_running: Option<unsafe extern "C" fn(user: *mut c_void) -> bool>,
    /// Source: stops the guest. On return no vCPU runs, I/O is complete, and no device writes guest memory.
    /// Idempotent. After a failure the guest runs as before.
    pub stop: sterna_step,
    /// Source, guest stopped, hooks released: lets stopped devices write guest memory for the last time. On
    /// return none writes it. Undone by `resume`. May be NULL.
    pub quiesce: sterna_step,
    /// Source: undoes `stop`. Idempotent.
    pub resume: sterna_step,
    /// Source: makes each vCPU sleep `percent` percent of the time; 0 removes the throttle. NULL refuses
    /// `auto-converge`.
    pub set_cpu_throttle: Option<unsafe extern "C" fn(user: *mut c_void, percent: u8)>,
    /// Destination: checks all that can prevent `start`. May be NULL.
    pub prepare_start: sterna_step,
    /// Destination: starts the guest from the loaded state. After a failure no vCPU may have run.
    pub start: sterna_step,
    /// Destination: the guest was paused at the source, and is here now. May be NULL.
    pub take_over_paused: sterna_step,
    /// Destination: discards all loaded device state, because the migration failed or begins again. May be NULL.
    pub reset: sterna_notice,
    /// Source: writes the configuration from which the destination makes its VM (sterna_incoming_listen_with), at
    /// most 1 MiB in a form of the program's own, with sterna_state_write. Called at most once in a migration, before
    /// the first page. Returns whether there is a configuration. NULL, as false, refuses such a destination.
    pub configuration:
        Option<unsafe extern "C" fn(user: *mut c_void, configuration: *mut sterna_state) -> bool>,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_vm_callbacks {
    const NAME: &str = "sterna_vm_callbacks";
    const LEAST_BYTES: usize = std::mem::offset_of!(Self, configuration);
}

/// What a machine consists of, before its first migration.
pub(crate) struct Parts {
    pub(crate) machine_type: String,
    pub(crate) uuid: Option<[u8; 16]>,
    pub(crate) vm: Arc<VmCallbacks>,
    pub(crate) blocks: Vec<RamBlock>,
    pub(crate) keeps_bytes: Vec<bool>,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    pub(crate) hooks: Vec<Arc<dyn Hook>>,
    pub(crate) compatibility: Option<Arc<dyn Device>>,
    pub(crate) shares_ram_with: Option<String>,
    pub(crate) dirty: Vec<Tracking>,
}

/// The callbacks, with the end of their use.
pub(crate) struct VmCallbacks {
    pub(crate) given: sterna_vm_callbacks,
    pub(crate) owned: Arc<Owned>,
}

// SAFETY: the callbacks may be called on any thread, by their contract.
unsafe impl Send for VmCallbacks {}
// SAFETY: as above.
unsafe impl Sync for VmCallbacks {}
