//! A machine without KVM: memory, one device, a guest that only exists as a flag, and a dirty log.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};

use parking_lot::Mutex;
use sterna_capi::*;

/// Bytes of guest memory.
pub(crate) const BYTES: usize = 4 << 20;

/// What the callbacks see, and a test.
pub(crate) struct Plain {
    pub(crate) memory: *mut u8,
    pub(crate) runs: AtomicBool,
    pub(crate) device: AtomicU32,
    /// Whether each sync reports every page, so that precopy does not converge.
    pub(crate) writes_all: AtomicBool,
    /// Text with which `stop` fails.
    pub(crate) stop_fails: Mutex<Option<CString>>,
    /// Text with which `load` fails.
    pub(crate) load_fails: Mutex<Option<CString>>,
    /// What the source says about its machine.
    pub(crate) configuration: Mutex<Option<&'static [u8]>>,
    pub(crate) resumed: AtomicUsize,
    pub(crate) reset: AtomicUsize,
    pub(crate) destroyed: AtomicUsize,
}

/// A machine and its handle, which is freed first.
pub(crate) struct Machine {
    pub(crate) vm: *mut sterna_vm,
    pub(crate) plain: Arc<Plain>,
}

// SAFETY: the functions of the library may be called on any thread, and `Plain`'s memory is not moved.
unsafe impl Send for Machine {}
// SAFETY: as above.
unsafe impl Sync for Machine {}
// SAFETY: as above; the tests do not write memory while a migration reads it.
unsafe impl Send for Plain {}
// SAFETY: as above.
unsafe impl Sync for Plain {}

impl Machine {
    pub(crate) fn new() -> Self {
        let plain = Plain::new();
        let mut vm = null_mut();
        let callbacks = callbacks(&plain);
        // SAFETY: every pointer is valid, here and below.
        unsafe {
            done(|e| sterna_vm_new(c"plain-1".as_ptr(), null(), &raw const callbacks, &raw mut vm, e));
            let block = block(&plain);
            done(|e| sterna_vm_add_ram(vm, &raw const block, e));
            let device = device(&plain);
            done(|e| sterna_vm_add_device(vm, &raw const device, e));
            let log = sterna_dirty_log {
                size: size_of::<sterna_dirty_log>(),
                user: Arc::as_ptr(&plain).cast_mut().cast(),
                start: None,
                stop: None,
                read: Some(read),
            };
            done(|e| sterna_vm_use_dirty_log(vm, &raw const log, e));
        }
        Self { vm, plain }
    }

    /// Fills the memory with a pattern and lets the guest run.
    pub(crate) fn boot(&self) {
        for page in 0..BYTES / 4096 {
            // SAFETY: inside of the memory.
            unsafe { self.plain.memory.add(page * 4096).cast::<u64>().write_volatile(page as u64 * 3 + 1) };
        }
        self.plain.device.store(4711, SeqCst);
        self.plain.runs.store(true, SeqCst);
    }

    /// Asserts that a guest of [`Machine::boot`] is here.
    pub(crate) fn assert_guest(&self) {
        for page in 0..BYTES / 4096 {
            // SAFETY: inside of the memory.
            let word = unsafe { self.plain.memory.add(page * 4096).cast::<u64>().read_volatile() };
            assert_eq!(word, page as u64 * 3 + 1, "page {page}");
        }
        assert_eq!(self.plain.device.load(SeqCst), 4711);
    }

    pub(crate) fn runs(&self) -> bool {
        self.plain.runs.load(SeqCst)
    }

    pub(crate) fn start(&self, to: &str, settings: &Settings) -> Migration {
        self.try_start(to, settings, null()).expect("started")
    }

    pub(crate) fn try_start(
        &self,
        to: &str,
        settings: &Settings,
        observer: *const sterna_observer,
    ) -> Result<Migration, Failed> {
        let (to, mut migration) = (CString::new(to).expect("no NUL"), null_mut());
        // SAFETY: every pointer is valid.
        tried(|e| unsafe {
            sterna_migration_start(self.vm, to.as_ptr(), settings.0, observer, &raw mut migration, e)
        })?;
        Ok(Migration(migration))
    }

    pub(crate) fn listen(&self, at: &str, settings: &Settings) -> Incoming {
        let (at, mut incoming) = (CString::new(at).expect("no NUL"), null_mut());
        // SAFETY: every pointer is valid.
        done(|e| unsafe {
            sterna_incoming_listen(self.vm, at.as_ptr(), settings.0, null(), &raw mut incoming, e)
        });
        Incoming(incoming)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { sterna_vm_free(self.vm) };
    }
}

impl Plain {
    /// The `Arc` keeps one count for the library, which `destroy` gives back.
    pub(crate) fn new() -> Arc<Self> {
        // SAFETY: new private memory, or a panic.
        let memory = unsafe {
            libc::mmap(
                null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        Arc::new(Self {
            memory: memory.cast(),
            runs: AtomicBool::new(false),
            device: AtomicU32::new(0),
            writes_all: AtomicBool::new(false),
            stop_fails: Mutex::new(None),
            load_fails: Mutex::new(None),
            configuration: Mutex::new(None),
            resumed: AtomicUsize::new(0),
            reset: AtomicUsize::new(0),
            destroyed: AtomicUsize::new(0),
        })
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: the library has called `destroy`, so it does not use the memory.
        unsafe { libc::munmap(self.memory.cast(), BYTES) };
    }
}

/// The callbacks of a machine. The library owns one count of `plain` from the call that succeeds with them.
pub(crate) fn callbacks(plain: &Arc<Plain>) -> sterna_vm_callbacks {
    sterna_vm_callbacks {
        size: size_of::<sterna_vm_callbacks>(),
        user: Arc::into_raw(Arc::clone(plain)).cast_mut().cast(),
        destroy: Some(destroy),
        is_running: Some(is_running),
        stop: Some(stop),
        quiesce: None,
        resume: Some(resume),
        set_cpu_throttle: None,
        prepare_start: None,
        start: Some(resume),
        take_over_paused: None,
        reset: Some(reset),
        configuration: Some(configuration),
    }
}

pub(crate) fn block(plain: &Plain) -> sterna_ram_block {
    sterna_ram_block {
        size: size_of::<sterna_ram_block>(),
        name: c"ram".as_ptr(),
        address: plain.memory.cast(),
        length: BYTES as u64,
        guest_address: 0,
        fd: -1,
        flags: STERNA_RAM_AT_GUEST_ADDRESS | STERNA_RAM_MAY_DISCARD | STERNA_RAM_MAY_USERFAULTFD,
        fd_offset: 0,
        huge_page_bytes: 0,
    }
}

pub(crate) fn device(plain: &Arc<Plain>) -> sterna_device {
    sterna_device {
        size: size_of::<sterna_device>(),
        user: Arc::as_ptr(plain).cast_mut().cast(),
        name: c"counter".as_ptr(),
        instance: 0,
        version: 0,
        oldest_version: 0,
        body_limit: 0,
        save: Some(save),
        load: Some(load),
    }
}

/// # Safety
/// `user` is a machine's, which is not destroyed.
unsafe fn plain<'a>(user: *mut c_void) -> &'a Plain {
    // SAFETY: as the contract says.
    unsafe { &*user.cast::<Plain>() }
}

unsafe extern "C" fn destroy(user: *mut c_void) {
    // SAFETY: the count that `callbacks` has kept.
    let plain = unsafe { Arc::from_raw(user.cast::<Plain>()) };
    plain.destroyed.fetch_add(1, SeqCst);
}

unsafe extern "C" fn is_running(user: *mut c_void) -> bool {
    // SAFETY: a machine's.
    unsafe { plain(user) }.runs.load(SeqCst)
}

unsafe extern "C" fn stop(user: *mut c_void, failure: *mut sterna_failure) -> i32 {
    // SAFETY: a machine's; the failure is the argument.
    let plain = unsafe { plain(user) };
    if let Some(text) = &*plain.stop_fails.lock() {
        // SAFETY: as above.
        unsafe { sterna_failure_set(failure, text.as_ptr()) };
        return -1;
    }
    plain.runs.store(false, SeqCst);
    0
}

unsafe extern "C" fn resume(user: *mut c_void, _: *mut sterna_failure) -> i32 {
    // SAFETY: a machine's.
    let plain = unsafe { plain(user) };
    plain.runs.store(true, SeqCst);
    plain.resumed.fetch_add(1, SeqCst);
    0
}

unsafe extern "C" fn reset(user: *mut c_void) {
    // SAFETY: a machine's.
    unsafe { plain(user) }.reset.fetch_add(1, SeqCst);
}

unsafe extern "C" fn configuration(user: *mut c_void, state: *mut sterna_state) -> bool {
    // SAFETY: a machine's.
    let Some(bytes) = *unsafe { plain(user) }.configuration.lock() else { return false };
    // SAFETY: the state is the argument.
    unsafe { sterna_state_write(state, bytes.as_ptr().cast(), bytes.len()) };
    true
}

unsafe extern "C" fn save(user: *mut c_void, state: *mut sterna_state, _: *mut sterna_failure) -> i32 {
    // SAFETY: a machine's.
    let bytes = unsafe { plain(user) }.device.load(SeqCst).to_le_bytes();
    for byte in &bytes {
        // SAFETY: one byte at a time, so that the parts are joined.
        unsafe { sterna_state_write(state, std::ptr::from_ref(byte).cast(), 1) };
    }
    0
}

unsafe extern "C" fn load(
    user: *mut c_void,
    version: u32,
    body: *const u8,
    length: usize,
    failure: *mut sterna_failure,
) -> i32 {
    // SAFETY: a machine's; the body has this length.
    let (plain, body) = unsafe { (plain(user), std::slice::from_raw_parts(body, length)) };
    if let Some(text) = &*plain.load_fails.lock() {
        // SAFETY: the failure is the argument.
        unsafe { sterna_failure_set(failure, text.as_ptr()) };
        return 7;
    }
    let Ok(bytes) = body.try_into() else { return 8 };
    plain.device.store(u32::from_le_bytes(bytes), SeqCst);
    i32::from(version != 1)
}

unsafe extern "C" fn read(user: *mut c_void, found: *mut sterna_dirty_pages, _: *mut sterna_failure) -> i32 {
    // SAFETY: a machine's.
    let all = unsafe { plain(user) }.writes_all.load(SeqCst);
    // SAFETY: `found` is the argument; the words outlive the calls.
    unsafe {
        sterna_dirty_pages_add(found, 0, 0, if all { BYTES as u64 / 4096 } else { 1 });
        sterna_dirty_pages_add_bitmap(found, 0, 64, [0b101u64].as_ptr(), 1);
    }
    0
}

/// Settings, freed at the end.
pub(crate) struct Settings(pub(crate) *mut sterna_parameters);

impl Settings {
    pub(crate) fn new() -> Self {
        let mut parameters = null_mut();
        // SAFETY: the pointers are valid, here and below.
        done(|e| unsafe { sterna_parameters_new(&raw mut parameters, e) });
        Self(parameters)
    }

    pub(crate) fn set(self, name: &str, value: &str) -> Self {
        self.try_set(name, value).unwrap_or_else(|failed| panic!("{name}={value}: {failed:?}"));
        self
    }

    pub(crate) fn try_set(&self, name: &str, value: &str) -> Result<(), Failed> {
        let (name, value) = (CString::new(name).expect("no NUL"), CString::new(value).expect("no NUL"));
        // SAFETY: the texts outlive the call.
        tried(|e| unsafe { sterna_parameters_set(self.0, name.as_ptr(), value.as_ptr(), e) })
    }

    pub(crate) fn on(self, capability: &str) -> Self {
        self.try_on(capability).unwrap_or_else(|failed| panic!("{capability}: {failed:?}"));
        self
    }

    pub(crate) fn try_on(&self, capability: &str) -> Result<(), Failed> {
        let name = CString::new(capability).expect("no NUL");
        // SAFETY: the text outlives the call.
        tried(|e| unsafe { sterna_parameters_set_capability(self.0, name.as_ptr(), true, e) })
    }

    pub(crate) fn get(&self, name: &str) -> Option<String> {
        let name = CString::new(name).expect("no NUL");
        // SAFETY: the text outlives the call.
        taken(unsafe { sterna_parameters_get(self.0, name.as_ptr()) })
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { sterna_parameters_free(self.0) };
    }
}

/// A migration, freed at the end.
pub(crate) struct Migration(pub(crate) *mut sterna_migration);

impl Migration {
    pub(crate) fn wait(&self, timeout_ms: i64) -> Result<(), Failed> {
        // SAFETY: the handle is valid until `drop`, here and below.
        tried(|e| unsafe { sterna_migration_wait(self.0, timeout_ms, e) })
    }

    pub(crate) fn cancel(&self) -> Result<(), Failed> {
        // SAFETY: as above.
        tried(|e| unsafe { sterna_migration_cancel(self.0, e) })
    }

    pub(crate) fn set(&self, name: &CStr, value: &CStr) -> Result<(), Failed> {
        // SAFETY: as above.
        tried(|e| unsafe { sterna_migration_set(self.0, name.as_ptr(), value.as_ptr(), e) })
    }

    pub(crate) fn status(&self) -> i32 {
        // SAFETY: as above.
        unsafe { sterna_migration_status(self.0) }
    }

    /// Waits until the status is `status`, which must come.
    pub(crate) fn until(&self, status: i32) {
        while self.status() != status {
            assert_eq!(self.wait(5).expect_err("it runs").code, STERNA_ERROR_TIMED_OUT);
        }
    }

    pub(crate) fn statistics(&self) -> serde_json::Value {
        // SAFETY: as above.
        let text = taken(unsafe { sterna_migration_statistics(self.0) }).expect("statistics");
        serde_json::from_str(&text).expect("JSON")
    }
}

impl Drop for Migration {
    fn drop(&mut self) {
        // SAFETY: made by `sterna_migration_start`.
        unsafe { sterna_migration_free(self.0) };
    }
}

/// An incoming migration, freed at the end.
pub(crate) struct Incoming(pub(crate) *mut sterna_incoming);

impl Incoming {
    /// Whether the arrived guest runs.
    pub(crate) fn wait(&self, timeout_ms: i64) -> Result<bool, Failed> {
        let mut runs = false;
        // SAFETY: the handle is valid until `drop`, here and below.
        tried(|e| unsafe { sterna_incoming_wait(self.0, timeout_ms, &raw mut runs, e) })?;
        Ok(runs)
    }

    pub(crate) fn address(&self) -> String {
        // SAFETY: as above.
        taken(unsafe { sterna_incoming_address(self.0) }).expect("an address")
    }

    pub(crate) fn statistics(&self) -> serde_json::Value {
        // SAFETY: as above.
        let text = taken(unsafe { sterna_incoming_statistics(self.0) }).expect("statistics");
        serde_json::from_str(&text).expect("JSON")
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // SAFETY: made by `sterna_incoming_listen`.
        unsafe { sterna_incoming_free(self.0) };
    }
}

/// An error of the library.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) code: i32,
    pub(crate) text: String,
    pub(crate) fault: i32,
}

/// Calls a function and returns its error.
pub(crate) fn tried(call: impl FnOnce(*mut *mut sterna_error) -> i32) -> Result<(), Failed> {
    let mut error = std::ptr::dangling_mut();
    let code = call(&raw mut error);
    assert_eq!(error.is_null(), code == STERNA_OK);
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: the library has made the error, and it is freed once.
    unsafe {
        let text = CStr::from_ptr(sterna_error_message(error)).to_str().expect("UTF-8").to_owned();
        let failed = Failed { code, text, fault: sterna_error_fault(error) };
        assert_eq!(sterna_error_code(error), code);
        sterna_error_free(error);
        Err(failed)
    }
}

/// Calls a function that succeeds.
pub(crate) fn done(call: impl FnOnce(*mut *mut sterna_error) -> i32) {
    tried(call).expect("success");
}

/// A text of the library, which is freed.
pub(crate) fn taken(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the library has made the text, and it is freed once.
    unsafe {
        let copy = CStr::from_ptr(text).to_str().expect("UTF-8").to_owned();
        sterna_string_free(text);
        Some(copy)
    }
}
