//! Tests of back ends that die, hang or refuse, and of invalid states. Each must give an error that names the
//! device, and the source continues.

use sterna::DeviceStream;
use sterna_devices::vhost_user::{VhostUserDevice, VhostUserError, VhostUserOptions};
use tempfile::TempDir;

use super::machine::{Machine, SHORT, TARGET_BYTES, ram, refused, told, whole};
use crate::back_end::{BackEnd, Fault};
use crate::model::Model;

const STATE_BYTES: usize = 3 << 20;

/// Checks that the error of a failed call names the device and contains `words`.
#[track_caller]
fn names(error: &str, words: &[&str]) {
    for word in ["fs0"].iter().chain(words) {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

#[test]
fn stop_of_a_back_end_that_hangs_names_the_request_and_is_undone_when_it_wakes_up() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running_within(directory.path(), "source", STATE_BYTES, Fault::None, SHORT);
    machine.serve(0..5);
    machine.back_end.freeze();

    let error = told(machine.stop().expect_err("nobody answers"));
    let undone = machine.device.end_save().and_then(|()| machine.device.run());

    names(&error, &["did not answer", "GET_VRING_BASE"]);
    names(&told(undone.expect_err("nobody answers")), &["did not answer"]);
    machine.back_end.thaw();
    machine.serve(5..10);
}

#[test]
fn load_into_a_back_end_that_hangs_is_forgotten_and_the_next_one_works_when_it_wakes_up() {
    let directory = TempDir::new().expect("a directory");
    let mut source = Machine::running(directory.path(), "source", STATE_BYTES, Fault::None);
    let mut target = Machine::waiting(directory.path(), "target", 64, Fault::None, SHORT);
    source.serve(0..5);
    source.stop().expect("a good stop");
    let state = source.read_state().expect("all of it");
    let configuration = source.device.configuration().expect("a record");
    target.back_end.freeze();

    let error = told(target.device.begin_load().expect_err("nobody answers"));

    names(&error, &["did not answer SET_DEVICE_STATE_FD"]);
    target.device.end_load().expect("the end");
    target.back_end.thaw();
    target.load(&state, &configuration).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");
    target.serve(5..10);
}

#[test]
fn run_in_the_middle_of_a_save_is_told_to_who_reads_and_the_source_runs_on() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", STATE_BYTES, Fault::None);
    machine.serve(0..5);

    // The save was only announced, so nothing is lost.
    machine.device.begin_save().expect("a good beginning");
    machine.device.run().expect("it runs");
    machine.device.remaining().expect("an amount");
    machine.device.stop().expect("a good stop");
    machine.read_state().expect("all of it");
    machine.device.run().expect("a good start");

    names(
        &told(machine.device.remaining().map(drop).expect_err("another's state")),
        &["interrupted the save"],
    );
    names(&told(machine.read_state().map(drop).expect_err("another's state")), &["interrupted the save"]);
    machine.serve(5..10);
    machine.device.end_save().expect("the end");
    machine.stop().expect("a good stop");
    machine.read_state().expect("all of it");
}

#[test]
fn stop_of_a_back_end_that_died_names_the_device() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", STATE_BYTES, Fault::None);
    machine.device.begin_save().expect("a good beginning");
    machine.back_end.kill();

    let error = told(machine.device.stop().expect_err("nobody answers"));

    names(&error, &["closed the connection", "GET_VRING_BASE"]);
    names(
        &told(machine.device.begin_save().expect_err("nobody is there")),
        &["fs0", "closed the connection"],
    );
    names(&told(machine.device.run().and_then(|()| machine.stop()).expect_err("dead")), &["closed"]);
}

#[test]
fn state_that_the_back_end_says_it_could_not_save_is_an_error_and_the_source_runs_on() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", STATE_BYTES, Fault::SaveFails);
    machine.serve(0..5);

    machine.stop().expect("a good stop");
    let error = told(machine.read_state().expect_err("half of it"));

    names(&error, &["saving", "failed"]);
    assert!(machine.device.read(&mut [0; 16]).is_err(), "a broken state has no end");
    machine.device.end_save().expect("the end");
    machine.device.run().expect("a good start");
    machine.serve(5..10);
}

#[test]
fn state_that_stands_still_is_an_error_and_the_source_runs_on() {
    let directory = TempDir::new().expect("a directory");
    let mut machine =
        Machine::running_within(directory.path(), "source", STATE_BYTES, Fault::SaveHangs, SHORT);
    machine.serve(0..5);

    machine.stop().expect("a good stop");
    let error = told(machine.read_state().expect_err("half of it"));

    names(&error, &["saving", "no progress", "bytes"]);
    machine.device.end_save().expect("the end");
    machine.device.run().expect("a good start");
    machine.serve(5..10);
}

/// Returns the result of `act`, which must end by itself.
#[track_caller]
fn ends<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(act()));
    told.recv_timeout(crate::virtqueue::PATIENCE).expect("it waits for ever")
}

#[test]
fn state_pipe_of_the_back_end_that_blocks_and_never_ends_is_given_up_and_the_source_runs_on() {
    let directory = TempDir::new().expect("a directory");
    let mut machine =
        Machine::running_within(directory.path(), "source", STATE_BYTES, Fault::OwnPipeHangs, SHORT);
    machine.serve(0..5);

    machine.stop().expect("a good stop");
    machine.back_end.wait_until_its_pipe_blocks();
    let device = std::sync::Arc::clone(&machine.device);
    let error = told(ends(move || device.read(&mut [0; 4096])).expect_err("nothing comes"));

    names(&error, &["saving", "no progress"]);
    machine.device.end_save().expect("the end");
    machine.device.run().expect("a good start");
    machine.serve(5..10);
}

#[test]
fn state_pipe_of_the_back_end_that_blocks_and_is_never_read_is_given_up() {
    let directory = TempDir::new().expect("a directory");
    let machine = Machine::waiting(directory.path(), "target", 64, Fault::OwnPipeHangs, SHORT);

    machine.device.begin_load().expect("a good beginning");
    machine.back_end.wait_until_its_pipe_blocks();
    let device = std::sync::Arc::clone(&machine.device);
    let error = told(ends(move || device.write(&vec![0; 4 << 20])).expect_err("nobody reads"));

    names(&error, &["loading", "no progress"]);
    machine.device.end_load().expect("the end");
}

#[test]
fn state_pipe_of_the_back_end_itself_brings_the_state() {
    let directory = TempDir::new().expect("a directory");
    let mut source = Machine::running(directory.path(), "source", STATE_BYTES, Fault::OwnPipe);
    let mut target = Machine::target(directory.path(), "target", Fault::OwnPipe);
    source.serve(0..5);
    source.stop().expect("a good stop");

    let state = source.read_state().expect("all of it");
    let configuration = source.device.configuration().expect("a record");
    target.load(&state, &configuration).expect("a good state");

    assert!(state.len() > STATE_BYTES / 2, "{}", state.len());
    target.take_guest(&source);
    target.device.run().expect("a good start");
    target.serve(5..10);
}

#[test]
fn state_in_what_is_no_pipe_is_refused_and_the_source_runs_on() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", STATE_BYTES, Fault::OwnDevice);
    machine.serve(0..5);

    let error = told(machine.stop().expect_err("it has no end"));

    names(&error, &["SET_DEVICE_STATE_FD", "not a pipe"]);
    machine.device.end_save().expect("the end");
    machine.device.run().expect("a good start");
    machine.serve(5..10);
}

#[test]
fn back_end_that_dies_while_it_saves_is_no_end_of_the_state() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", STATE_BYTES, Fault::SaveDies);
    machine.serve(0..5);

    let error =
        told(machine.stop().map(|()| machine.read_state().map(drop)).and_then(|r| r).expect_err("dead"));

    names(&error, &["closed the connection"]);
    machine.device.end_save().expect("the end");
    names(&told(machine.device.run().expect_err("dead")), &["closed the connection"]);
}

#[test]
fn back_end_that_reads_no_state_is_an_error() {
    let directory = TempDir::new().expect("a directory");
    let machine = Machine::waiting(directory.path(), "target", 64, Fault::LoadHangs, SHORT);

    machine.device.begin_load().expect("a good beginning");
    let error = told(machine.device.write(&vec![0; 4 << 20]).expect_err("nobody reads"));

    names(&error, &["loading", "no progress"]);
    machine.device.end_load().expect("the end");
    machine.device.end_load().expect("the end, twice");
}

#[test]
fn back_end_that_dies_while_it_loads_is_an_error() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::waiting(directory.path(), "target", 64, Fault::LoadDies, SHORT);

    let begun = machine.device.begin_load();
    machine.back_end.wait();
    let loaded =
        begun.and_then(|()| machine.device.write(&[0; 100])).and_then(|()| machine.device.finish_load(&[]));

    names(&told(loaded.expect_err("dead")), &[]);
    machine.device.end_load().expect("the end");
}

/// A machine with a saved device, a machine that waits, state, and configuration. The first machine's device
/// has worked before it was saved.
fn saved(directory: &std::path::Path) -> (Machine, Machine, Vec<u8>, Vec<u8>) {
    let mut source = Machine::running(directory, "source", STATE_BYTES, Fault::None);
    let target = Machine::target(directory, "target", Fault::None);
    source.serve(0..5);
    source.stop().expect("a good stop");
    let state = source.read_state().expect("all of it");
    let configuration = source.device.configuration().expect("a record");
    (source, target, state, configuration)
}

#[test]
fn state_that_was_damaged_is_refused_and_the_next_one_taken() {
    let directory = TempDir::new().expect("a directory");
    let (source, mut target, state, configuration) = saved(directory.path());
    let mut torn = state.clone();
    torn[STATE_BYTES / 2] ^= 1;

    for bad in [&torn[..], &state[..state.len() - 1], &[]] {
        let error = told(target.load(bad, &configuration).expect_err("a bad state"));
        names(&error, &["loading", "failed"]);
        assert!(target.device.run().is_err(), "half a device runs");
        target.device.end_load().expect("the end");
    }

    target.load(&state, &configuration).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");
    target.serve(5..10);
}

#[test]
fn load_undone_after_a_device_ran_forgets_it_and_the_next_one_works() {
    let directory = TempDir::new().expect("a directory");
    let (source, mut target, state, configuration) = saved(directory.path());
    target.load(&state, &configuration).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");
    target.device.end_load().expect("nothing: it runs");
    target.serve(5..10);

    // The load is undone, as if another device could not start.
    target.device.quiesce().expect("nothing to do");
    target.device.stop().expect("a good stop");
    target.device.end_load().expect("the end");

    target.stop().expect("nothing runs");
    assert!(target.read_state().expect("all of it") == Model::new(TARGET_BYTES).save(), "it was kept");
    target.device.end_save().expect("the end");
    target.load(&state, &configuration).expect("a good state");
    target.take_guest(&source);
    target.device.run().expect("a good start");
    target.serve(5..10);
}

#[test]
fn record_of_rings_that_cannot_be_is_refused() {
    let directory = TempDir::new().expect("a directory");
    let mut source = Machine::running(directory.path(), "source", 4096, Fault::None);
    let target = Machine::target(directory.path(), "target", Fault::None);
    source.serve(0..5);
    source.stop().expect("a good stop");
    let state = source.read_state().expect("all of it");
    let good = source.device.configuration().expect("a record");
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    // Wrong version; a feature that the back end lacks; two rings; a size of 129; descriptors after the end
    // of RAM.
    let two_rings = [with(12, 2), good[14..].to_vec()].concat();
    let bad = [with(0, 9), with(4, 1), two_rings, with(14, 129), with(14 + 4 + 7, 1), Vec::new()];

    for bad in bad {
        let error = told(target.load(&state, &bad).expect_err("a bad record"));
        names(&error, &[]);
        target.device.end_load().expect("the end");
    }
    target.load(&state, &good).expect("a good one");
}

#[test]
fn calls_in_an_order_that_makes_no_sense_are_refused() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", 4096, Fault::None);

    let refused = [
        machine.device.begin_load(),
        machine.device.write(&[0]),
        machine.device.finish_load(&[]),
        machine.device.read(&mut [0]).map(drop),
        machine.device.configuration().map(drop),
    ];

    for refused in refused {
        names(&told(refused.expect_err("out of order")), &["is not possible now"]);
    }
    machine.serve(0..5);
}

#[test]
fn connect_to_a_back_end_that_cannot_move_its_state_says_what_is_missing() {
    let directory = TempDir::new().expect("a directory");
    let back_end = BackEnd::start(directory.path(), "old", 64, Fault::NoDeviceState);

    let error = refused(&back_end);

    assert!(matches!(error, VhostUserError::Lacks { .. }), "{error}");
    names(&error.to_string(), &["DEVICE_STATE"]);
}

#[test]
fn connect_to_nobody_says_where() {
    let directory = TempDir::new().expect("a directory");
    let options = VhostUserOptions::new("fs0", directory.path().join("nobody"));

    let error = VhostUserDevice::connect(options, &ram(), &[whole()]).expect_err("nobody listens");

    assert!(matches!(error, VhostUserError::Connect { .. }), "{error}");
    names(&error.to_string(), &["nobody"]);
}
