//! Tests of [`VfioDevice`] with a port that can be made to fail.

mod toy;

use sterna::RemainingState;

use super::VfioDevice;
use crate::vfio::{MigState, MigrationPort};
use toy::Toy;

fn device(toy: Toy) -> VfioDevice<Toy> {
    VfioDevice::new(toy).expect("a state")
}

/// A device that is being saved. Its state has `size` bytes, of which `readable` can be read while it runs.
fn saving(size: u64, readable: u64) -> VfioDevice<Toy> {
    let device = device(Toy::default());
    device.port().set_sizes(size, readable);
    device.begin_save().expect("PRE_COPY");
    device
}

fn read_all(device: &VfioDevice<Toy>) -> u64 {
    let mut buffer = [0; 64];
    let reads = std::iter::from_fn(|| Some(device.read(&mut buffer).expect("a good read") as u64));
    reads.take_while(|read| *read > 0).sum()
}

#[test]
fn pending_of_a_device_that_tells_no_parts_counts_what_comes_after_a_pause_as_readable() {
    let device = saving(1000, 600);
    let first = device.remaining().unwrap();

    assert_eq!(read_all(&device), 600);
    let idle = device.remaining().unwrap();
    device.port().set_sizes(450, 50);
    let more = device.remaining().unwrap();
    assert_eq!(read_all(&device), 50);
    let idle_again = device.remaining().unwrap();

    assert_eq!(first, RemainingState { dirty_bytes: 1000, ..RemainingState::default() });
    assert_eq!(idle, RemainingState { stopped_bytes: 400, ..RemainingState::default() });
    assert_eq!(more, RemainingState { dirty_bytes: 50, stopped_bytes: 400, ..RemainingState::default() });
    assert_eq!(idle_again, idle);
}

#[test]
fn pending_after_a_pause_counts_from_the_least_size_since() {
    let device = saving(1000, 600);
    read_all(&device);
    device.remaining().unwrap();

    device.port().set_sizes(300, 0);
    let less = device.remaining().unwrap();
    device.port().set_sizes(320, 20);
    let more = device.remaining().unwrap();

    assert_eq!(less, RemainingState { stopped_bytes: 300, ..RemainingState::default() });
    assert_eq!(more, RemainingState { dirty_bytes: 20, stopped_bytes: 300, ..RemainingState::default() });
}

/// A device in the middle of a load that cannot be reset.
fn half_loaded(toy: Toy) -> VfioDevice<Toy> {
    let device = device(toy);
    device.begin_load().expect("RESUMING");
    device.write(b"half of the old").expect("a good write");
    device.port().set_can_reset(false);
    device
}

#[test]
fn load_after_one_whose_end_failed_begins_with_its_own_first_byte() {
    let device = half_loaded(Toy::default());
    let ended = device.end_load().expect_err("no reset").to_string();
    assert!(ended.contains("toy"), "{ended}");
    assert!(device.run().is_err(), "half a device runs");

    device.begin_load().expect("a new session");
    device.write(b"the new").expect("a good write");
    device.finish_load(&[]).expect("all came");

    assert_eq!(device.port().loaded(), b"the new");
}

#[test]
fn load_after_one_that_nobody_ended_begins_with_its_own_first_byte() {
    let device = half_loaded(Toy::default());

    device.begin_load().expect("a new session");
    device.write(b"the new").expect("a good write");
    device.finish_load(&[]).expect("all came");

    assert_eq!(device.port().loaded(), b"the new");
}

#[test]
fn end_load_of_a_device_that_cannot_be_reset_leaves_resuming() {
    let device = half_loaded(Toy::default());

    assert!(device.end_load().is_err());

    assert_eq!(device.port().state().unwrap(), MigState::Stop);
    assert!(device.write(b"more").is_err(), "nobody writes on");
}

#[test]
fn load_after_a_half_one_that_the_device_takes_for_a_failure_resets_it() {
    let device = half_loaded(Toy::that_checks());
    assert!(device.end_load().is_err());
    assert_eq!(device.state(), MigState::Error);
    assert!(device.begin_load().is_err(), "only a reset repairs it");
    device.port().set_can_reset(true);

    device.begin_load().expect("a new session");
    device.write(Toy::WHOLE).expect("a good write");
    device.finish_load(&[]).expect("all came");

    assert_eq!(device.port().loaded(), Toy::WHOLE);
}

/// A device that was loaded and has run.
fn arrived() -> VfioDevice<Toy> {
    let device = device(Toy::default());
    device.begin_load().expect("RESUMING");
    device.write(b"the old").expect("a good write");
    device.finish_load(&[]).expect("all came");
    device.run().expect("a good start");
    device
}

#[test]
fn end_load_of_a_device_that_ran_and_was_stopped_resets_it_once() {
    let device = arrived();
    device.quiesce().expect("a good change");
    device.stop().expect("a good stop");

    device.end_load().expect("a reset");
    device.end_load().expect("nothing");

    assert_eq!(device.port().resets(), 1);
    assert_eq!(device.state(), MigState::Running);
}

#[test]
fn end_load_of_a_device_that_runs_or_ran_on_or_is_saved_leaves_it() {
    let runs = arrived();
    let ran_on = arrived();
    ran_on.stop().expect("a good stop");
    ran_on.run().expect("a good start");
    let saved = arrived();
    saved.begin_save().expect("PRE_COPY");
    saved.stop().expect("a good stop");

    for device in [&runs, &ran_on, &saved] {
        device.end_load().expect("nothing");
        assert_eq!(device.port().resets(), 0);
    }
}
