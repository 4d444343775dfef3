//! A destination whose machine is made from the source's configuration, and the end of its wait for questions.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_capi::*;

use crate::plain::{Failed, Incoming, Machine, Settings, done, tried};

/// A destination without a machine.
#[derive(Default)]
struct Place {
    seen: Mutex<Vec<u8>>,
    made: Mutex<Option<Machine>>,
    destroyed: AtomicUsize,
}

unsafe extern "C" fn make(
    user: *mut c_void,
    configuration: *const u8,
    length: usize,
    vm: *mut *mut sterna_vm,
    failure: *mut sterna_failure,
) -> i32 {
    let (place, bytes) =
        // SAFETY: the place of a test; the configuration has this length.
        unsafe { (&*user.cast::<Place>(), std::slice::from_raw_parts(configuration, length)) };
    *place.seen.lock() = bytes.to_vec();
    if bytes == b"too large" {
        // SAFETY: the failure is the argument.
        unsafe { sterna_failure_set(failure, c"this host has 4 MiB".as_ptr()) };
        return 1;
    }
    if bytes != b"nothing" {
        let machine = Machine::new();
        // SAFETY: the place for the handle is the argument.
        unsafe { vm.write(machine.vm) };
        *place.made.lock() = Some(machine);
    }
    0
}

unsafe extern "C" fn destroy(user: *mut c_void) {
    // SAFETY: the count that `maker` has kept.
    unsafe { Arc::from_raw(user.cast::<Place>()) }.destroyed.fetch_add(1, SeqCst);
}

/// The library owns one count of `place` from the call that succeeds with it.
fn maker(place: &Arc<Place>) -> sterna_vm_maker {
    sterna_vm_maker {
        size: size_of::<sterna_vm_maker>(),
        user: Arc::into_raw(Arc::clone(place)).cast_mut().cast(),
        make: Some(make),
        destroy: Some(destroy),
    }
}

fn limits() -> sterna_setting_limits {
    sterna_setting_limits {
        size: size_of::<sterna_setting_limits>(),
        multifd_channels: 4,
        compressions: STERNA_COMPRESSION_ZSTD,
        reconnect_window_ms: 0,
        postcopy: false,
    }
}

fn listen_with(
    place: &Arc<Place>,
    limits: *const sterna_setting_limits,
    address: &str,
) -> Result<Incoming, Failed> {
    let (address, mut incoming) = (CString::new(address).expect("no NUL"), null_mut());
    let maker = maker(place);
    // SAFETY: every pointer is valid.
    let listened = tried(|e| unsafe {
        let at = address.as_ptr();
        sterna_incoming_listen_with(&raw const maker, limits, at, null(), null(), &raw mut incoming, e)
    });
    if listened.is_err() {
        // SAFETY: the library has not taken the count over.
        drop(unsafe { Arc::from_raw(maker.user.cast::<Place>()) });
    }
    listened.map(|()| Incoming(incoming))
}

fn configured(configuration: Option<&'static [u8]>) -> Machine {
    let machine = Machine::new();
    *machine.plain.configuration.lock() = configuration;
    machine.boot();
    machine
}

fn until(what: impl Fn() -> bool) {
    while !what() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn machine_is_made_from_the_configuration_and_takes_the_settings_over() {
    let place = Arc::new(Place::default());
    let incoming = listen_with(&place, &limits(), "tcp:127.0.0.1:0").expect("listening");
    let source = configured(Some(b"four MiB"));
    let settings =
        Settings::new().on("multifd").set("multifd-channels", "3").set("multifd-compression", "zstd");

    let migration = source.start(&incoming.address(), &settings);

    migration.wait(-1).expect("completed");
    assert_eq!(incoming.wait(-1), Ok(true));
    assert_eq!(*place.seen.lock(), b"four MiB");
    place.made.lock().as_ref().expect("a machine").assert_guest();
    assert_eq!(migration.statistics()["channels"], 3);
    drop(incoming);
    until(|| place.destroyed.load(SeqCst) == 1);
}

#[test]
fn settings_over_a_limit_are_refused_and_the_next_source_is_awaited() {
    let place = Arc::new(Place::default());
    let incoming = listen_with(&place, &limits(), "tcp:127.0.0.1:0").expect("listening");
    let source = configured(Some(b"four MiB"));

    let many = Settings::new().on("multifd").set("multifd-channels", "5");
    let failed = source.start(&incoming.address(), &many).wait(-1).expect_err("refused");
    assert!(failed.text.contains("multifd-channels") && failed.text.contains("1 to 4"), "{failed:?}");
    assert!(source.runs() && place.made.lock().is_none());

    source.start(&incoming.address(), &Settings::new()).wait(-1).expect("completed");
    assert_eq!(incoming.wait(-1), Ok(true));
}

#[test]
fn maker_that_fails_ends_both_sides_with_its_text() {
    for (configuration, text) in [(&b"too large"[..], "this host has 4 MiB"), (b"nothing", "no VM at *vm")] {
        let place = Arc::new(Place::default());
        let incoming = listen_with(&place, null(), "tcp:127.0.0.1:0").expect("listening");
        let source = configured(Some(configuration));

        let failed =
            source.start(&incoming.address(), &Settings::new()).wait(-1).expect_err("no machine is made");

        assert!(failed.code == STERNA_ERROR_FAILED && failed.text.contains(text), "{failed:?}");
        assert!(source.runs(), "the guest continues at the source");
        let failed = incoming.wait(-1).expect_err("no machine is made");
        assert!(failed.text.contains(text), "{failed:?}");
    }
}

#[test]
fn source_without_a_configuration_is_refused() {
    let place = Arc::new(Place::default());
    let incoming = listen_with(&place, null(), "tcp:127.0.0.1:0").expect("listening");
    let source = configured(None);

    source.start(&incoming.address(), &Settings::new()).wait(-1).expect_err("refused");

    assert!(source.runs() && place.seen.lock().is_empty());
    assert_eq!(incoming.wait(1).expect_err("it waits").code, STERNA_ERROR_TIMED_OUT);
}

#[test]
fn wrong_makers_limits_and_addresses_are_refused_and_nothing_is_destroyed() {
    let place = Arc::new(Place::default());
    let many = sterna_setting_limits { multifd_channels: 256, ..limits() };
    let unknown = sterna_setting_limits { compressions: 4, ..limits() };
    let short = sterna_setting_limits { size: 8, ..limits() };
    for (limits, address, code) in [
        (&raw const many, "tcp:127.0.0.1:0", STERNA_ERROR_ARGUMENT),
        (&raw const unknown, "tcp:127.0.0.1:0", STERNA_ERROR_ARGUMENT),
        (&raw const short, "tcp:127.0.0.1:0", STERNA_ERROR_ARGUMENT),
        (null(), "file:/tmp/none", STERNA_ERROR_SETTINGS),
    ] {
        let refused = listen_with(&place, limits, address).err().expect("refused");
        assert_eq!(refused.code, code, "{refused:?}");
    }
    let without = sterna_vm_maker { make: None, ..maker(&place) };
    // SAFETY: `maker` has kept this count, and the library does not take it over.
    drop(unsafe { Arc::from_raw(without.user.cast::<Place>()) });
    let mut incoming = null_mut();
    let at = c"tcp:127.0.0.1:0".as_ptr();
    // SAFETY: every pointer is valid, or NULL where the function refuses it.
    unsafe {
        let mut made =
            |maker, e| sterna_incoming_listen_with(maker, null(), at, null(), null(), &raw mut incoming, e);
        assert_eq!(tried(|e| made(&raw const without, e)).expect_err("no make").code, STERNA_ERROR_NULL);
        assert_eq!(tried(|e| made(null(), e)).expect_err("no maker").code, STERNA_ERROR_NULL);
    }
    assert_eq!(place.destroyed.load(SeqCst), 0);
    assert_eq!(Arc::strong_count(&place), 1);
}

#[test]
fn settle_releases_the_address_and_the_machine() {
    let (source, target, settings) = (Machine::new(), Machine::new(), Settings::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &settings);
    let address = incoming.address();
    source.boot();
    source.start(&address, &settings).wait(-1).expect("completed");

    // SAFETY: the handle is given back once: its drop is left out.
    let settled = tried(|e| unsafe { sterna_incoming_settle(std::mem::ManuallyDrop::new(incoming).0, 1, e) });

    assert_eq!(settled, Ok(()));
    target.assert_guest();
    drop(Machine::new().listen(&address, &settings));
    let plain = Arc::clone(&target.plain);
    drop(target);
    assert_eq!(plain.destroyed.load(SeqCst), 1, "no thread of the migration has the machine");
}

#[test]
fn settle_of_a_migration_that_failed_says_why() {
    let (target, settings) = (Machine::new(), Settings::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &settings);
    // SAFETY: the handle is valid.
    done(|e| unsafe { sterna_incoming_cancel(incoming.0, e) });

    // SAFETY: as in the test above.
    let settled = tried(|e| unsafe { sterna_incoming_settle(std::mem::ManuallyDrop::new(incoming).0, 1, e) });

    assert_eq!(settled.expect_err("cancelled").code, STERNA_ERROR_FAILED);
    // SAFETY: NULL is refused.
    let none = tried(|e| unsafe { sterna_incoming_settle(null_mut(), 1, e) });
    assert_eq!(none.expect_err("NULL").code, STERNA_ERROR_NULL);
}
