//! Wrong arguments, names and calls, and callbacks that fail.

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use sterna_capi::*;

use crate::plain::{Failed, Machine, Plain, Settings, block, callbacks, device, done, tried};

fn code(result: Result<(), Failed>) -> i32 {
    result.expect_err("an error").code
}

#[test]
fn null_is_refused_by_its_name() {
    let machine = Machine::new();
    let (mut vm, mut migration, mut incoming) = (null_mut(), null_mut(), null_mut());
    // SAFETY: NULL is what the functions refuse.
    unsafe {
        let calls: [(&str, Result<(), Failed>); 12] = [
            ("parameters", tried(|e| sterna_parameters_new(null_mut(), e))),
            ("name", tried(|e| sterna_parameters_set(null_mut(), null(), c"1".as_ptr(), e))),
            ("parameters", tried(|e| sterna_parameters_set(null_mut(), c"mode".as_ptr(), c"1".as_ptr(), e))),
            ("machine_type", tried(|e| sterna_vm_new(null(), null(), null(), &raw mut vm, e))),
            ("sterna_vm_callbacks", tried(|e| sterna_vm_new(c"m".as_ptr(), null(), null(), &raw mut vm, e))),
            ("vm", tried(|e| sterna_vm_add_ram(null_mut(), null(), e))),
            ("slots", tried(|e| sterna_vm_use_kvm_dirty_log(machine.vm, 0, null(), 1, e))),
            (
                "address",
                tried(|e| sterna_migration_start(machine.vm, null(), null(), null(), &raw mut migration, e)),
            ),
            ("migration", tried(|e| sterna_migration_wait(null_mut(), 0, e))),
            (
                "vm",
                tried(|e| {
                    sterna_incoming_listen(
                        null_mut(),
                        c"tcp:h:1".as_ptr(),
                        null(),
                        null(),
                        &raw mut incoming,
                        e,
                    )
                }),
            ),
            ("incoming", tried(|e| sterna_incoming_wait(null_mut(), 0, null_mut(), e))),
            (
                "incoming",
                tried(|e| {
                    sterna_incoming_listen(machine.vm, c"tcp:h:1".as_ptr(), null(), null(), null_mut(), e)
                }),
            ),
        ];
        for (name, result) in calls {
            let failed = result.expect_err(name);
            assert_eq!((failed.code, failed.text), (STERNA_ERROR_NULL, format!("{name} is NULL")));
        }
    }
}

#[test]
fn null_is_allowed_where_an_object_is_freed_or_asked() {
    // SAFETY: NULL is allowed.
    unsafe {
        sterna_error_free(null_mut());
        sterna_string_free(null_mut());
        sterna_parameters_free(null_mut());
        sterna_vm_free(null_mut());
        sterna_migration_free(null_mut());
        sterna_incoming_free(null_mut());
        assert_eq!(sterna_migration_status(null()), STERNA_STATUS_NONE);
        assert!(sterna_migration_statistics(null()).is_null());
        assert!(sterna_incoming_address(null()).is_null());
        assert!(!sterna_vm_may_run(null()));
        // The place for the error may be NULL.
        assert_eq!(sterna_parameters_new(null_mut(), null_mut()), STERNA_ERROR_NULL);
    }
    assert!(sterna_status_name(99).is_null());
}

#[test]
fn unknown_names_and_values_out_of_range_change_nothing() {
    let settings = Settings::new();

    for (name, value, expected) in [
        ("multifd-chanels", "4", STERNA_ERROR_NAME),
        ("tls-creds", "x", STERNA_ERROR_NAME),
        ("announce-rounds", "3", STERNA_ERROR_NAME),
        ("x-checkpoint-delay", "3", STERNA_ERROR_NAME),
        ("multifd-channels", "256", STERNA_ERROR_SETTINGS),
        ("multifd-channels", "four", STERNA_ERROR_SETTINGS),
        ("multifd-compression", "lzma", STERNA_ERROR_SETTINGS),
        ("max-cpu-throttle", "10", STERNA_ERROR_SETTINGS),
    ] {
        let failed = settings.try_set(name, value).expect_err(name);
        assert_eq!(failed.code, expected, "{failed:?}");
        assert!(failed.text.contains(name), "{failed:?}");
    }
    for (name, expected) in [
        ("multi-fd", STERNA_ERROR_NAME),
        ("x-colo", STERNA_ERROR_NAME),
        ("postcopy-preempt", STERNA_ERROR_SETTINGS),
        ("zero-copy-send", STERNA_ERROR_SETTINGS),
    ] {
        assert_eq!(code(settings.try_on(name)), expected, "{name}");
    }
    assert_eq!(settings.get("multifd-channels").as_deref(), Some("2"));
    assert_eq!(settings.get("nothing"), None);
}

#[test]
fn values_are_text_in_qmp_units() {
    let settings = Settings::new();
    assert_eq!(settings.get("max-bandwidth").as_deref(), Some("0"), "a library does not limit its user");

    let settings = settings.set("max-bandwidth", "1000").set("direct-io", "on").set("mode", "cpr-transfer");
    assert_eq!(settings.get("max-bandwidth").as_deref(), Some("1000"));
    assert_eq!(settings.get("direct-io").as_deref(), Some("on"));
    assert_eq!(settings.get("mode").as_deref(), Some("cpr-transfer"));
    let settings = settings.set("max-bandwidth", "1.5G");
    assert_eq!(settings.get("max-bandwidth").as_deref(), Some("1610612736"));
}

#[test]
fn texts_that_are_not_utf8_and_wrong_addresses_are_refused() {
    let machine = Machine::new();
    let mut migration = null_mut();
    for address in [c"carrier-pigeon:coop", c"tcp:host", c"tcp:\xff:1"] {
        // SAFETY: valid pointers.
        let failed = tried(|e| unsafe {
            sterna_migration_start(machine.vm, address.as_ptr(), null(), null(), &raw mut migration, e)
        });
        assert_eq!(code(failed), STERNA_ERROR_ARGUMENT, "{address:?}");
    }
    assert!(migration.is_null());
}

#[test]
fn structures_of_other_versions_are_read_as_far_as_they_go() {
    #[repr(C)]
    struct Newer(sterna_ram_block, u64);
    let machine = Machine::new();
    let older = sterna_ram_block { size: 8, ..block(&machine.plain) };
    let named = sterna_ram_block { name: c"second".as_ptr(), ..block(&machine.plain) };
    let newer = |last| Newer(sterna_ram_block { size: size_of::<Newer>(), ..named }, last);
    let add = |block: *const sterna_ram_block| {
        // SAFETY: valid for its size.
        tried(|e| unsafe { sterna_vm_add_ram(machine.vm, block, e) })
    };

    assert_eq!(code(add(&raw const older)), STERNA_ERROR_ARGUMENT);
    let unknown = newer(1);
    let failed = add((&raw const unknown).cast()).expect_err("a member that would be ignored");
    assert!(failed.text.contains("newer libsterna"), "{failed:?}");
    let known = newer(0);
    assert_eq!(add((&raw const known).cast()), Ok(()));
}

#[test]
fn machine_without_a_needed_callback_is_refused_and_not_destroyed() {
    let plain = Plain::new();
    let mut vm = null_mut();
    let given = sterna_vm_callbacks { stop: None, ..callbacks(&plain) };

    // SAFETY: valid pointers.
    let failed = tried(|e| unsafe { sterna_vm_new(c"m".as_ptr(), null(), &raw const given, &raw mut vm, e) });

    let failed = failed.expect_err("refused");
    assert_eq!((failed.code, &*failed.text), (STERNA_ERROR_NULL, "sterna_vm_callbacks.stop is NULL"));
    assert_eq!(Arc::strong_count(&plain), 2, "the program still owns `user`");
    // SAFETY: the count of `callbacks`.
    drop(unsafe { Arc::from_raw(given.user.cast::<Plain>()) });
}

#[test]
fn memory_that_contradicts_itself_is_refused() {
    let machine = Machine::new();
    let good = sterna_ram_block { name: c"other".as_ptr(), ..block(&machine.plain) };
    let wrong = [
        sterna_ram_block { length: 4097, ..good },
        sterna_ram_block { address: null_mut(), ..good },
        sterna_ram_block { address: machine.plain.memory.wrapping_add(1).cast(), ..good },
        sterna_ram_block { flags: 1 << 20, ..good },
        sterna_ram_block { name: c"".as_ptr(), ..good },
        sterna_ram_block { flags: STERNA_RAM_READ_ONLY | STERNA_RAM_MAY_DISCARD, ..good },
    ];

    for (index, block) in wrong.iter().enumerate() {
        // SAFETY: the library refuses the description, and does not touch the memory.
        let failed = tried(|e| unsafe { sterna_vm_add_ram(machine.vm, block, e) });
        assert_eq!(code(failed), STERNA_ERROR_ARGUMENT, "{index}");
    }
}

#[test]
fn machine_without_memory_or_dirty_source_does_not_migrate() {
    let plain = Plain::new();
    let (mut vm, mut migration) = (null_mut(), null_mut());
    let given = callbacks(&plain);
    // SAFETY: valid pointers.
    unsafe {
        done(|e| sterna_vm_new(c"m".as_ptr(), null(), &raw const given, &raw mut vm, e));
        let mut start = || {
            tried(|e| sterna_migration_start(vm, c"tcp:h:1".as_ptr(), null(), null(), &raw mut migration, e))
        };

        let failed = start().expect_err("no memory");
        assert!(failed.code == STERNA_ERROR_STATE && failed.text.contains("sterna_vm_add_ram"), "{failed:?}");
        let block = block(&plain);
        done(|e| sterna_vm_add_ram(vm, &raw const block, e));
        let failed = start().expect_err("no dirty source");
        assert!(failed.code == STERNA_ERROR_STATE && failed.text.contains("dirty"), "{failed:?}");
        let device = device(&plain);
        let failed = tried(|e| sterna_vm_add_device(vm, &raw const device, e)).expect_err("too late");
        assert_eq!(failed.code, STERNA_ERROR_STATE, "{failed:?}");
        sterna_vm_free(vm);
    }
    assert_eq!(plain.destroyed.load(std::sync::atomic::Ordering::SeqCst), 1);
}

#[test]
fn failure_of_a_callback_ends_the_migration_with_its_text() {
    let (source, target) = (Machine::new(), Machine::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &Settings::new());
    source.boot();
    *source.plain.stop_fails.lock() = Some(CString::new("vCPU 3 does not answer").expect("no NUL"));

    let failed = source.start(&incoming.address(), &Settings::new()).wait(-1).expect_err("failed");

    assert_eq!((failed.code, failed.fault), (STERNA_ERROR_FAILED, STERNA_FAULT_LOCAL));
    assert!(failed.text.contains("stop the guest: vCPU 3 does not answer"), "{failed:?}");
    assert!(source.runs());
}

#[test]
fn failure_of_a_load_is_the_destinations_and_the_guest_continues() {
    let (source, target) = (Machine::new(), Machine::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &Settings::new());
    source.boot();
    *target.plain.load_fails.lock() = Some(CString::new("no such counter").expect("no NUL"));

    let migration = source.start(&incoming.address(), &Settings::new());

    assert_eq!(migration.wait(-1).expect_err("failed").code, STERNA_ERROR_FAILED);
    let failed = incoming.wait(-1).expect_err("failed");
    assert!(failed.text.contains("load counter: no such counter"), "{failed:?}");
    assert!(source.runs() && !target.runs());
}

#[test]
fn operators_act_runs_only_while_no_migration_has_the_guest() {
    unsafe extern "C" fn count(user: *mut c_void) {
        // SAFETY: the counter of this test.
        unsafe { *user.cast::<u32>() += 1 };
    }
    let (source, target) = (Machine::new(), Machine::new());
    let incoming = target.listen("tcp:127.0.0.1:0", &Settings::new());
    source.boot();
    let mut calls = 0u32;
    let mut act = |machine: &Machine| {
        // SAFETY: valid pointers.
        tried(|e| unsafe { sterna_vm_while_free(machine.vm, Some(count), (&raw mut calls).cast(), e) })
    };

    assert_eq!(act(&source), Ok(()));
    source.start(&incoming.address(), &Settings::new()).wait(-1).expect("completed");
    let failed = act(&source).expect_err("the guest is elsewhere");

    assert_eq!((failed.code, calls), (STERNA_ERROR_STATE, 1), "{failed:?}");
    // SAFETY: the handle is valid.
    done(|e| unsafe { sterna_vm_has_no_guest(source.vm, e) });
}
