//! Who frees what, and when: handles of running migrations, observers, the VM's `destroy`.

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_capi::*;

use crate::plain::{Failed, Incoming, Machine, Migration, Settings, done, tried};

/// A source whose guest is stopped and which waits for its operator, and the destination.
fn waiting() -> (Machine, Migration, Machine, Incoming) {
    let (source, target) = (Machine::new(), Machine::new());
    let settings = Settings::new().on("pause-before-switchover");
    let incoming = target.listen("tcp:127.0.0.1:0", &settings);
    source.boot();
    let migration = source.start(&incoming.address(), &settings);
    migration.until(STERNA_STATUS_PRE_SWITCHOVER);
    (source, migration, target, incoming)
}

#[test]
fn second_start_is_refused_while_the_first_migration_runs() {
    let (source, migration, _target, incoming) = waiting();

    let failed = source.try_start(&incoming.address(), &Settings::new(), null()).err().expect("refused");

    assert!(failed.code == STERNA_ERROR_STATE && failed.text.contains("already"), "{failed:?}");
    assert_eq!(migration.status(), STERNA_STATUS_PRE_SWITCHOVER);
}

#[test]
fn wait_times_out_and_cancel_gives_the_guest_back() {
    let (source, migration, target, incoming) = waiting();
    assert!(!source.runs());

    assert_eq!(migration.wait(0).expect_err("it waits").code, STERNA_ERROR_TIMED_OUT);
    assert_eq!(incoming.wait(1).expect_err("it waits").code, STERNA_ERROR_TIMED_OUT);
    assert_eq!(migration.cancel(), Ok(()));

    assert_eq!(migration.wait(-1).expect_err("cancelled").code, STERNA_ERROR_CANCELLED);
    assert!(source.runs());
    assert_eq!(incoming.wait(-1).expect_err("cancelled").code, STERNA_ERROR_FAILED);
    assert!(!target.runs());
}

#[test]
fn running_migration_follows_live_parameters_and_refuses_others() {
    let (_source, migration, target, incoming) = waiting();

    assert_eq!(migration.set(c"max-bandwidth", c"2G"), Ok(()));
    let failed = migration.set(c"multifd-channels", c"9").expect_err("fixed");
    assert_eq!(failed.code, STERNA_ERROR_SETTINGS, "{failed:?}");
    assert_eq!(migration.set(c"max-bandwith", c"1").expect_err("unknown").code, STERNA_ERROR_NAME);
    // SAFETY: the handle is valid.
    let switched = tried(|e| unsafe { sterna_migration_start_postcopy(migration.0, e) });
    assert_eq!(switched.expect_err("off").code, STERNA_ERROR_STATE);
    // SAFETY: as above.
    let decided = tried(|e| unsafe { sterna_migration_decide(migration.0, 5, e) });
    assert_eq!(decided.expect_err("5").code, STERNA_ERROR_ARGUMENT);
    // SAFETY: as above.
    assert_eq!(tried(|e| unsafe { sterna_migration_continue(migration.0, e) }), Ok(()));

    assert_eq!(migration.wait(-1), Ok(()));
    assert_eq!(incoming.wait(-1), Ok(true));
    target.assert_guest();
    assert_eq!(migration.cancel().expect_err("it has ended").code, STERNA_ERROR_STATE);
}

#[test]
fn free_of_a_running_migration_cancels_it_and_waits() {
    let (source, migration, _target, incoming) = waiting();

    drop(migration);

    assert!(source.runs(), "the guest is back when the call returns");
    assert_eq!(incoming.wait(-1).expect_err("cancelled").code, STERNA_ERROR_FAILED);
    let plain = source.plain.clone();
    assert_eq!(plain.destroyed.load(SeqCst), 0);
    drop(source);
    // A thread of the migration may still be at its last step.
    while plain.destroyed.load(SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(plain.destroyed.load(SeqCst), 1);
}

#[test]
fn free_of_an_incoming_migration_ends_it_and_releases_the_address() {
    let (source, migration, target, incoming) = waiting();
    let address = incoming.address();

    drop(incoming);

    assert_eq!(migration.wait(-1).expect_err("the peer is gone").code, STERNA_ERROR_FAILED);
    assert!(source.runs() && !target.runs());
    assert!(target.plain.reset.load(SeqCst) > 0, "the destination's devices were reset");
    drop(migration);
    let other = Machine::new();
    let again = other.listen(&address, &Settings::new());
    source.start(&address, &Settings::new()).wait(-1).expect("completed");
    assert_eq!(again.wait(-1), Ok(true));
}

#[test]
fn destroy_comes_after_the_vm_and_every_migration_were_freed() {
    let (source, migration, _target, _incoming) = waiting();
    let plain = source.plain.clone();

    drop(source);
    assert_eq!(plain.destroyed.load(SeqCst), 0, "the migration still has the VM");
    drop(migration);

    // The control thread drops its share when it ends, which may be after the outcome.
    while plain.destroyed.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(plain.destroyed.load(SeqCst), 1);
}

/// What an observer has seen.
#[derive(Default)]
struct Seen {
    statuses: Mutex<Vec<String>>,
    destroyed: AtomicUsize,
    /// A migration that the callback waits for.
    migration: Mutex<usize>,
    refused: Mutex<Option<Failed>>,
}

unsafe extern "C" fn see(user: *mut c_void, event: *const sterna_event) {
    // SAFETY: the observer of a test, and an event.
    let (seen, event) = unsafe { (&*user.cast::<Seen>(), &*event) };
    // SAFETY: texts of the event.
    let (text, json) = unsafe { (CStr::from_ptr(event.text), CStr::from_ptr(event.json)) };
    let json: serde_json::Value = serde_json::from_slice(json.to_bytes()).expect("JSON");
    if event.kind == STERNA_EVENT_STATUS {
        assert_eq!(json["status"], text.to_str().expect("UTF-8"));
        // SAFETY: a static text.
        assert_eq!(unsafe { CStr::from_ptr(sterna_status_name(event.status)) }, text);
        seen.statuses.lock().push(text.to_str().expect("UTF-8").to_owned());
    }
    let migration = *seen.migration.lock() as *mut sterna_migration;
    if !migration.is_null() {
        // SAFETY: the test frees the handle after the end.
        *seen.refused.lock() = tried(|e| unsafe { sterna_migration_wait(migration, -1, e) }).err();
    }
}

unsafe extern "C" fn destroyed(user: *mut c_void) {
    // SAFETY: the observer of a test.
    unsafe { &*user.cast::<Seen>() }.destroyed.fetch_add(1, SeqCst);
}

fn observer(seen: &Seen) -> sterna_observer {
    sterna_observer {
        size: size_of::<sterna_observer>(),
        user: std::ptr::from_ref(seen).cast_mut().cast(),
        event: Some(see),
        destroy: Some(destroyed),
    }
}

#[test]
fn observer_sees_every_status_and_is_destroyed_once() {
    let seen: &'static Seen = Box::leak(Box::default());
    let (source, target) = (Machine::new(), Machine::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &Settings::new());
    source.boot();
    let migration =
        source.try_start(&incoming.address(), &Settings::new(), &observer(seen)).expect("started");

    migration.wait(-1).expect("completed");
    drop(migration);

    while seen.destroyed.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(*seen.statuses.lock(), ["setup", "active", "device", "completed"]);
    assert_eq!(seen.destroyed.load(SeqCst), 1);
}

#[test]
fn observer_of_a_start_that_fails_is_not_destroyed() {
    let seen: &'static Seen = Box::leak(Box::default());
    let (source, _migration, _target, incoming) = waiting();

    let started = source.try_start(&incoming.address(), &Settings::new(), &observer(seen));

    assert!(started.is_err());
    drop(source);
    assert_eq!(seen.destroyed.load(SeqCst), 0);
}

#[test]
fn wait_in_a_callback_is_refused() {
    let seen: &'static Seen = Box::leak(Box::default());
    let (source, target) = (Machine::new(), Machine::new());
    let settings = Settings::new().on("pause-before-switchover");
    let incoming = target.listen("tcp:127.0.0.1:0", &settings);
    source.boot();
    let migration = source.try_start(&incoming.address(), &settings, &observer(seen)).expect("started");
    migration.until(STERNA_STATUS_PRE_SWITCHOVER);
    *seen.migration.lock() = migration.0 as usize;

    assert_eq!(migration.cancel(), Ok(()));
    assert_eq!(migration.wait(-1).expect_err("cancelled").code, STERNA_ERROR_CANCELLED);

    let refused = seen.refused.lock().take().expect("an event came after the handle was known");
    assert!(refused.code == STERNA_ERROR_STATE && refused.text.contains("another thread"), "{refused:?}");
    assert!(incoming.wait(-1).is_err());
}

#[test]
fn restore_from_a_file_that_does_not_exist_fails_and_leaves_the_vm_usable() {
    let target = Machine::new();
    let home = tempfile::tempdir().expect("a directory");
    let address =
        std::ffi::CString::new(format!("file:{}", home.path().join("none").display())).expect("no NUL");
    let mut incoming = null_mut();

    // SAFETY: valid pointers.
    let listened = tried(|e| unsafe {
        sterna_incoming_listen(target.vm, address.as_ptr(), null(), null(), &raw mut incoming, e)
    });
    let failed = listened.and_then(|()| Incoming(incoming).wait(-1).map(drop)).expect_err("no such file");

    assert!(failed.text.contains("none"), "{failed:?}");
    let source = Machine::new();
    source.boot();
    let again = target.listen("tcp:127.0.0.1:0", &Settings::new());
    source.start(&again.address(), &Settings::new()).wait(-1).expect("completed");
    assert_eq!(again.wait(-1), Ok(true));
}

#[test]
fn descriptor_of_a_migration_is_readable_after_its_events() {
    let (_source, migration, _target, incoming) = waiting();
    let (mut fd, mut same, mut other) = (-1, -1, -1);
    // SAFETY: valid pointers.
    unsafe {
        done(|e| sterna_migration_event_fd(migration.0, &raw mut fd, e));
        done(|e| sterna_migration_event_fd(migration.0, &raw mut same, e));
        done(|e| sterna_incoming_event_fd(incoming.0, &raw mut other, e));
    }
    assert!(fd >= 0 && fd == same && other >= 0 && other != fd);
    read_events(fd);

    migration.cancel().expect("it runs");

    loop {
        let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one descriptor.
        assert_eq!(unsafe { libc::poll(&raw mut polled, 1, -1) }, 1);
        read_events(fd);
        match migration.wait(0).expect_err("it ends cancelled").code {
            STERNA_ERROR_TIMED_OUT => {}
            code => return assert_eq!(code, STERNA_ERROR_CANCELLED),
        }
    }
}

/// Makes an eventfd unreadable until the next event.
fn read_events(fd: i32) {
    let mut count = 0u64;
    // SAFETY: eight bytes of this function.
    let read = unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
    assert!(read == 8 && count > 0);
}

#[test]
fn thread_hook_runs_on_each_thread_with_its_role_and_is_destroyed_at_the_end() {
    unsafe extern "C" fn hook(user: *mut c_void, role: *const std::ffi::c_char) {
        // SAFETY: the record of this test, and a text.
        let (seen, role) = unsafe { (&*user.cast::<Seen>(), CStr::from_ptr(role)) };
        seen.statuses.lock().push(role.to_str().expect("UTF-8").to_owned());
    }
    let seen: &'static Seen = Box::leak(Box::default());
    let (source, target) = (Machine::new(), Machine::new());
    let settings = Settings::new().on("multifd").set("multifd-channels", "2");
    let incoming = target.listen("tcp:127.0.0.1:0", &settings);
    source.boot();
    let user = std::ptr::from_ref(seen).cast_mut().cast();
    // SAFETY: valid pointers; the record is never freed.
    done(|e| unsafe { sterna_parameters_set_thread_hook(settings.0, Some(hook), user, Some(destroyed), e) });

    source.start(&incoming.address(), &settings).wait(-1).expect("completed");

    let roles = seen.statuses.lock().clone();
    let count = |role| roles.iter().filter(|seen| *seen == role).count();
    assert!(count("migration") == 1 && count("lane") >= 2, "{roles:?}");
    assert_eq!(seen.destroyed.load(SeqCst), 0, "the settings still have the hook");
    drop(settings);
    while seen.destroyed.load(SeqCst) == 0 {
        std::thread::yield_now();
    }
}
