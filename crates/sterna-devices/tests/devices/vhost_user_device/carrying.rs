//! Tests of state that moves from one back end to another, or stays.

use sterna::{Device, DeviceStream, RemainingState};
use sterna_devices::vhost_user::VhostUserSection;
use tempfile::TempDir;

use super::machine::{ANSWERS, Machine};
use crate::back_end::Fault;

/// Large enough to fill the pipe several times, and an odd number.
const STATE_BYTES: usize = (5 << 20) + 12_345;

#[test]
fn state_in_another_back_end_answers_as_the_first_would_have() {
    // Arrange
    let directory = TempDir::new().expect("a directory");
    let mut source = Machine::running(directory.path(), "source", STATE_BYTES, Fault::None);
    let mut target = Machine::target(directory.path(), "target", Fault::None);
    source.serve(0..50);

    // Act
    source.stop().expect("a good stop");
    let state = source.read_state().expect("all of it");
    let configuration = source.device.configuration().expect("a record");
    source.device.end_save().expect("the end");
    target.load(&state, &configuration).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");

    // Assert
    assert!(state.len() > STATE_BYTES);
    target.serve(50..100);
}

#[test]
fn requests_that_nobody_served_before_the_stop_are_served_by_the_other_back_end_once() {
    let directory = TempDir::new().expect("a directory");
    let mut source = Machine::running(directory.path(), "source", 4096, Fault::None);
    let mut target = Machine::target(directory.path(), "target", Fault::None);
    source.serve(0..7);

    source.stop().expect("a good stop");
    for request in 7..20 {
        assert!(source.submit(request, ANSWERS + request * 4096, 64));
    }
    let state = source.read_state().expect("all of it");
    target.load(&state, &source.device.configuration().expect("a record")).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");

    for request in 7..20 {
        target.expect(request, ANSWERS + request * 4096, 64);
    }
    assert_eq!(target.queue.in_flight(), 0);
    target.serve(20..30);
}

#[test]
fn state_of_a_guest_that_arrives_paused_goes_on_before_it_has_run() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "first", STATE_BYTES, Fault::None);
    machine.serve(0..20);
    for name in ["second", "third"] {
        machine.stop().expect("a good stop");
        let state = machine.read_state().expect("all of it");
        let configuration = machine.device.configuration().expect("a record");
        machine.device.end_save().expect("the end");
        let mut target = Machine::target(directory.path(), name, Fault::None);
        target.load(&state, &configuration).expect("a good state");
        target.take_guest(&machine);
        machine = target;
    }

    machine.device.run().expect("a good start");

    machine.serve(20..40);
}

#[test]
fn state_of_a_running_device_cannot_be_read_and_is_expected_to_be_as_large_as_was_said() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", 4096, Fault::None);
    machine.device.begin_save().expect("a good beginning");

    let read = machine.device.read(&mut [0; 4096]).expect("nothing");
    let remaining = machine.device.remaining().expect("an estimate");

    assert_eq!(read, 0);
    assert_eq!(remaining, RemainingState::default());
    machine.serve(0..5);
}

#[test]
fn save_undone_half_way_leaves_the_device_running_and_the_next_save_whole() {
    let directory = TempDir::new().expect("a directory");
    let mut source = Machine::running(directory.path(), "source", STATE_BYTES, Fault::None);
    let mut target = Machine::target(directory.path(), "target", Fault::None);
    source.serve(0..10);

    source.stop().expect("a good stop");
    let mut some = vec![0; 4096];
    assert!(source.device.read(&mut some).expect("some of it") > 0);
    source.device.end_save().expect("the end");
    source.device.end_save().expect("the end, twice");
    source.device.run().expect("a good start");

    source.serve(10..20);
    source.stop().expect("a good stop");
    let state = source.read_state().expect("all of it");
    target.load(&state, &source.device.configuration().expect("a record")).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");
    target.serve(20..30);
}

#[test]
fn device_that_no_driver_started_moves_too() {
    let directory = TempDir::new().expect("a directory");
    let source =
        Machine::waiting(directory.path(), "source", 9000, Fault::None, std::time::Duration::from_secs(60));
    let mut target = Machine::target(directory.path(), "target", Fault::None);

    source.stop().expect("nothing to stop");
    let state = source.read_state().expect("all of it");
    target.load(&state, &source.device.configuration().expect("a record")).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("nothing to start");

    target.device.start(crate::back_end::VERSION_1, &[target.queue.ring()]).expect("a good ring");
    target.serve(0..5);
}

#[test]
fn loaded_device_that_runs_can_be_saved_again() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "0", 70_000, Fault::None);

    for hop in 1..4 {
        machine.serve(hop * 10..hop * 10 + 10);
        let mut next = Machine::target(directory.path(), &hop.to_string(), Fault::None);
        machine.stop().expect("a good stop");
        let state = machine.read_state().expect("all of it");
        next.load(&state, &machine.device.configuration().expect("a record")).expect("a good state");
        next.take_guest(&machine);
        next.device.run().expect("a good start");
        machine = next;
    }

    machine.serve(100..110);
}

#[test]
fn section_of_the_device_is_empty_and_has_its_stream() {
    let directory = TempDir::new().expect("a directory");
    let machine = Machine::running(directory.path(), "source", 64, Fault::None);

    let section = VhostUserSection(machine.device.clone());

    assert_eq!(section.name(), "vhost-user/fs0");
    assert!(section.save().expect("nothing").is_empty());
    assert!(section.load(1, &[]).is_ok());
    assert!(section.load(1, &[0]).is_err());
    assert!(section.stream().is_some());
}
