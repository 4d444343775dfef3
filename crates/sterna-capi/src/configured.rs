//! A destination whose machine is made from the source's configuration.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use sterna::{Compression, Incoming, SettingLimits, SharedSettings, TargetVm, TlsEndpoint, VmError};

use crate::boundary::{Done, Versioned, borrow, enter, hand_out, read, text, writable};
use crate::callbacks::{Owned, attempt, sterna_failure, sterna_notice};
use crate::error::{Failure, STERNA_ERROR_ARGUMENT, STERNA_ERROR_NULL, sterna_error};
use crate::events::{Teller, sterna_observer};
use crate::incoming::sterna_incoming;
use crate::migration::{address_of, not_started};
use crate::parameters::{Settings, sterna_parameters};
use crate::vm::sterna_vm;

/// `multifd-compression` `zlib` is accepted.
pub const STERNA_COMPRESSION_ZLIB: u32 = 1;
/// `multifd-compression` `zstd` is accepted.
pub const STERNA_COMPRESSION_ZSTD: u32 = 2;

const COMPRESSIONS: [(u32, Compression); 2] =
    [(STERNA_COMPRESSION_ZLIB, Compression::Zlib), (STERNA_COMPRESSION_ZSTD, Compression::Zstd)];

/// Makes the destination's VM.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_vm_maker {
    /// sizeof(sterna_vm_maker).
    pub size: usize,
    /// Passed to the callbacks.
    pub user: *mut c_void,
    /// Makes a VM with sterna_vm_new from the `length` bytes of the source's `configuration`, adds its parts, and
    /// stores it at `*vm`. The handle stays the program's, which frees it when it needs it no more. The bytes are the
    /// peer's: check them. Called at most once, on a thread of the library, before any byte of the guest arrives.
    ///
    /// Returns 0, or fails with sterna_failure_set. A failure ends the migration on both sides, and the source's
    /// operator sees up to 440 bytes of its text.
    pub make: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            configuration: *const u8,
            length: usize,
            vm: *mut *mut sterna_vm,
            failure: *mut sterna_failure,
        ) -> i32,
    >,
    /// Called once, when the library uses `user` for the last time, on any thread. May be NULL.
    pub destroy: sterna_notice,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_vm_maker {
    const NAME: &str = "sterna_vm_maker";
    const LEAST_BYTES: usize = size_of::<Self>();
}

/// The settings of a source that a destination takes over. A member that is zero accepts none of its kind.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sterna_setting_limits {
    /// sizeof(sterna_setting_limits).
    pub size: usize,
    /// Most multifd channels, at most 255. Each takes a thread and a descriptor.
    pub multifd_channels: u32,
    /// STERNA_COMPRESSION_…, combined by "or". Uncompressed pages are always accepted.
    pub compressions: u32,
    /// The longest reconnect window, in milliseconds.
    pub reconnect_window_ms: u64,
    /// Whether postcopy is accepted.
    pub postcopy: bool,
}

// SAFETY: `repr(C)` with the size first; every member may be zero.
unsafe impl Versioned for sterna_setting_limits {
    const NAME: &str = "sterna_setting_limits";
    const LEAST_BYTES: usize = size_of::<Self>();
}

/// As sterna_incoming_listen, for a VM that does not exist yet: `maker` makes it from the configuration of the source
/// (sterna_vm_callbacks.configuration).
///
/// With `limits` the destination takes over what both sides must share, within these limits: multifd, its channels and
/// compression, postcopy, "switchover-ack" and the reconnect window. With NULL its own `parameters` must be equal to
/// the source's. A source whose settings are refused, or that sends no configuration, is refused, and the next one is
/// awaited. All settings but the shared ones are those of `parameters`.
///
/// If the call fails, no `destroy` is called.
///
/// Errors: as sterna_incoming_listen; STERNA_ERROR_SETTINGS for "file:" and "rdma:". Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_incoming_listen_with(
    maker: *const sterna_vm_maker,
    limits: *const sterna_setting_limits,
    address: *const c_char,
    parameters: *const sterna_parameters,
    observer: *const sterna_observer,
    incoming: *mut *mut sterna_incoming,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            writable(incoming, "incoming")?;
            let maker = Maker::new(read(maker)?)?;
            let shared = if limits.is_null() { SharedSettings::AsHere } else { accepted(&read(limits)?)? };
            let address = address_of(text(address, "address")?)?;
            let (values, capabilities) = Settings::of(parameters)?.for_engine(TlsEndpoint::Server)?;
            let teller = Teller::new(observer)?;
            let owned = Arc::clone(&maker.owned);
            let listening = teller.watch(|teller| {
                let make = move |configuration: &[u8]| maker.make(configuration);
                Incoming::listen_with(&address, values, capabilities, shared, teller, make)
            });
            let listening = listening.map_err(not_started)?;
            owned.take();
            hand_out(incoming, sterna_incoming::from(listening));
            Ok(())
        })
    }
}

fn accepted(limits: &sterna_setting_limits) -> Done<SharedSettings> {
    let refuse = |text: String| Err(Failure::new(STERNA_ERROR_ARGUMENT, text));
    let Ok(multifd_channels) = u8::try_from(limits.multifd_channels) else {
        let given = limits.multifd_channels;
        return refuse(format!("sterna_setting_limits.multifd_channels is {given}: at most 255"));
    };
    let known = COMPRESSIONS.iter().fold(0, |all, (flag, _)| all | flag);
    if limits.compressions & !known != 0 {
        let unknown = limits.compressions & !known;
        return refuse(format!(
            "sterna_setting_limits.compressions has the unknown flags {unknown:#x}: use a newer libsterna"
        ));
    }
    let has =
        |(flag, compression): &(u32, Compression)| (limits.compressions & flag != 0).then_some(*compression);
    Ok(SharedSettings::AsSource(SettingLimits {
        multifd_channels,
        compressions: COMPRESSIONS.iter().filter_map(has).collect(),
        postcopy: limits.postcopy,
        reconnect_window: Duration::from_millis(limits.reconnect_window_ms),
    }))
}

/// The program's maker, and the end of its use.
struct Maker {
    given: sterna_vm_maker,
    owned: Arc<Owned>,
}

// SAFETY: the callbacks may be called on any thread, by their contract.
unsafe impl Send for Maker {}

impl Maker {
    fn new(given: sterna_vm_maker) -> Done<Self> {
        if given.make.is_none() {
            return Err(Failure::new(STERNA_ERROR_NULL, "sterna_vm_maker.make is NULL"));
        }
        Ok(Self { given, owned: Arc::new(Owned::offered(given.user, given.destroy)) })
    }

    fn make(&self, configuration: &[u8]) -> Result<Arc<dyn TargetVm>, VmError> {
        const WHAT: &str = "make the VM";
        let refuse = |why: &str| VmError::new(WHAT, why);
        let make = self.given.make.ok_or_else(|| refuse("sterna_vm_maker.make is NULL"))?;
        let mut vm: *mut sterna_vm = std::ptr::null_mut();
        let (bytes, length) = (configuration.as_ptr(), configuration.len());
        // SAFETY: the program gave the callback for this pointer, which `owned` keeps from being destroyed.
        attempt(WHAT, |failure| unsafe { make(self.owned.pointer(), bytes, length, &raw mut vm, failure) })?;
        // SAFETY: the callback has stored a handle that the program does not free now, or nothing.
        let vm = unsafe { borrow(vm, "vm") }.map_err(|_| refuse("the callback stored no VM at *vm"))?;
        Ok(vm.machine().map_err(|failure| refuse(failure.message()))?)
    }
}
