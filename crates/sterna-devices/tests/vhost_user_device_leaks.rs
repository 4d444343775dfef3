//! Tests that successful and failed migrations leak no descriptor. A separate program, so that no other test
//! opens descriptors.

#[path = "support/back_end.rs"]
mod back_end;
#[path = "devices/vhost_user_device/machine.rs"]
mod machine;
#[path = "support/model.rs"]
mod model;
#[path = "support/virtqueue.rs"]
mod virtqueue;

use std::path::Path;

use back_end::Fault;
use machine::{Machine, SHORT, told};
use sterna::{DeviceStream, HostDescriptors};
use sterna_devices::vhost_user::VhostUserDevice;
use tempfile::TempDir;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fn good(directory: &Path) {
    let mut source = Machine::running(directory, "good-source", 1 << 20, Fault::None);
    let mut target = Machine::target(directory, "good-target", Fault::None);
    source.serve(0..5);
    source.stop().expect("a good stop");
    let state = source.read_state().expect("all of it");
    target.load(&state, &source.device.configuration().expect("a record")).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");
    target.serve(5..10);
}

fn bad(directory: &Path, fault: Fault) {
    let name = format!("{fault:?}");
    let machine = Machine::waiting(directory, &name, 1 << 20, fault, SHORT);
    let failed = match fault {
        Fault::LoadHangs | Fault::LoadDies => {
            let failed = machine.load(&vec![0; 4 << 20], &[]);
            machine.device.end_load().expect("the end");
            failed
        }
        _ => {
            let failed = machine.stop().and_then(|()| machine.read_state().map(drop));
            machine.device.end_save().expect("the end");
            failed
        }
    };
    assert!(told(failed.expect_err("a fault")).contains("fs0"));
}

/// Hands the back end over to another front end. Depending on `end`, the back end is returned or dies on the
/// way.
fn handed_over(directory: &Path, name: &str, end: &str) {
    let mut source = Machine::running(directory, name, 1 << 20, Fault::None);
    source.serve(0..5);
    let options = machine::options(&source.back_end, SHORT);
    let heir = VhostUserDevice::awaiting(options, &source.ram, &[machine::whole()]).expect("a device");
    heir.take(source.device.give().expect("a descriptor")).expect("a connection");
    source.device.begin_hand_over().expect("a device that runs");
    source.device.stop().expect("a good stop");
    heir.begin_load().expect("a device that waits");
    let loaded = heir.finish_load(&source.device.configuration().expect("a record"));
    loaded.expect("a good record");
    match end {
        "arrives" => {
            heir.run().expect("a good start");
            source.device.let_go();
            source.device.end_save().expect("the end");
            let old = std::mem::replace(&mut source.device, heir);
            source.serve(5..10);
            drop(old);
        }
        "comes back" => {
            heir.end_load().expect("the end");
            heir.let_go();
            source.device.end_save().expect("the end");
            source.device.run().expect("a good start");
            source.serve(5..10);
        }
        _ => {
            source.back_end.kill();
            assert!(told(heir.run().expect_err("a fault")).contains("fs0"));
        }
    }
}

#[test]
fn back_end_runs_for_another_test() {
    back_end::run_if_asked();
}

#[test]
fn descriptors_after_good_and_bad_migrations_are_as_many_as_before() {
    if std::env::args().any(|argument| argument == back_end::RUNS) {
        return;
    }
    let directory = TempDir::new().expect("a directory");
    let before = descriptors();

    good(directory.path());
    let faults = [Fault::SaveFails, Fault::SaveHangs, Fault::SaveDies, Fault::LoadHangs, Fault::LoadDies];
    faults.into_iter().for_each(|fault| bad(directory.path(), fault));
    for (index, end) in ["arrives", "comes back", "dies"].into_iter().enumerate() {
        handed_over(directory.path(), &format!("handed{index}"), end);
    }

    assert_eq!(descriptors(), before);
}
