//! Devices whose state migrates.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use sterna::{Device, VmError};

use crate::boundary::{Done, Versioned, enter, read, text};
use crate::callbacks::{Owned, attempt, sterna_failure, sterna_state};
use crate::error::{Failure, STERNA_ERROR_ARGUMENT, sterna_error};
use crate::vm::sterna_vm;

/// A device: a name, and the functions that save and load its state. A vCPU is a device, too.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_device {
    /// sizeof(sterna_device).
    pub size: usize,
    /// Passed to the callbacks. Valid until `destroy` of the VM's callbacks was called.
    pub user: *mut c_void,
    /// The name, 1 to 255 bytes, equal on both sides. Copied.
    pub name: *const c_char,
    /// Distinguishes devices of the same name.
    pub instance: u32,
    /// The version of the state that `save` writes, from 1 on; 0 counts as 1.
    pub version: u32,
    /// The oldest version that `load` accepts; 0 counts as `version`.
    pub oldest_version: u32,
    /// Maximum length of a state that is loaded, in bytes; 0 for 16 MiB. A longer one is refused before it is read.
    pub body_limit: u32,
    /// Source, guest stopped: writes the state with sterna_state_write. Returns 0, or fails with sterna_failure_set.
    pub save: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            state: *mut sterna_state,
            failure: *mut sterna_failure,
        ) -> i32,
    >,
    /// Destination, guest not started: loads `length` bytes that the peer sent. Check them: they may have any
    /// content. Starts nothing, and does not write guest memory. May be called again after the VM's `reset`.
    pub load: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            version: u32,
            body: *const u8,
            length: usize,
            failure: *mut sterna_failure,
        ) -> i32,
    >,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_device {
    const NAME: &str = "sterna_device";
    const LEAST_BYTES: usize = size_of::<Self>();
}

/// Adds a device. Devices are added before the VM's first migration. The source saves them in this order. The
/// source must send each device that the destination has.
///
/// Threads: any. The callbacks run on threads of the library, one after the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_add_device(
    vm: *mut sterna_vm,
    device: *const sterna_device,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                let device = CDevice::new(&read(device)?, &parts.vm.owned)?;
                parts.devices.push(Arc::new(device));
                Ok(())
            })
        })
    }
}

/// Sets the record of properties that both machines must share, such as CPUID. The source saves it before any
/// memory is sent, and the destination loads and checks it. Its name and instance have no effect.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_vm_set_compatibility(
    vm: *mut sterna_vm,
    record: *const sterna_device,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            sterna_vm::change(vm, |parts| {
                parts.compatibility = Some(Arc::new(CDevice::new(&read(record)?, &parts.vm.owned)?));
                Ok(())
            })
        })
    }
}

/// A device as the engine sees it.
struct CDevice {
    name: String,
    given: sterna_device,
    /// Until the device is dropped, `destroy` is not called.
    _owned: Arc<Owned>,
}

// SAFETY: the callbacks may be called on any thread, by their contract; the name's pointer is not used after `new`.
unsafe impl Send for CDevice {}
// SAFETY: as above.
unsafe impl Sync for CDevice {}

impl CDevice {
    /// # Safety
    /// The members of `given` are as the header says.
    unsafe fn new(given: &sterna_device, owned: &Arc<Owned>) -> Done<Self> {
        // SAFETY: as the contract says.
        let name = unsafe { text(given.name, "sterna_device.name") }?;
        let refuse = |rule| Err(Failure::new(STERNA_ERROR_ARGUMENT, format!("device {name}: {rule}")));
        if name.is_empty() || name.len() > 255 {
            return refuse("a name has 1 to 255 bytes");
        }
        if given.save.is_none() || given.load.is_none() {
            return refuse("save and load must not be NULL");
        }
        if given.oldest_version > given.version.max(1) {
            return refuse("oldest_version is greater than version");
        }
        Ok(Self { name: name.to_owned(), given: *given, _owned: Arc::clone(owned) })
    }
}

impl Device for CDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn instance(&self) -> u32 {
        self.given.instance
    }

    fn version(&self) -> u32 {
        self.given.version.max(1)
    }

    fn oldest_version(&self) -> u32 {
        if self.given.oldest_version == 0 { self.version() } else { self.given.oldest_version }
    }

    fn body_limit(&self) -> usize {
        if self.given.body_limit == 0 { 16 << 20 } else { self.given.body_limit as usize }
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        let mut state = sterna_state(Vec::new());
        let Some(save) = self.given.save else { return Ok(state.0) };
        let user = self.given.user;
        // SAFETY: the program gave the callback for this pointer, which is not destroyed while `_owned` lives.
        attempt(&format!("save {}", self.name), |failure| unsafe { save(user, &raw mut state, failure) })?;
        Ok(state.0)
    }

    fn load(&self, version: u32, body: &[u8]) -> Result<(), VmError> {
        let Some(load) = self.given.load else { return Ok(()) };
        let user = self.given.user;
        // SAFETY: as in `save`.
        attempt(&format!("load {}", self.name), |failure| unsafe {
            load(user, version, body.as_ptr(), body.len(), failure)
        })
    }
}
