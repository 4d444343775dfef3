//! What the device does with a port that can be told to misbehave.

mod toy;

use sterna::PendingState;

use super::VfioDevice;
use toy::Toy;

fn device(toy: Toy) -> VfioDevice<Toy> {
    VfioDevice::new(toy).expect("a state")
}

/// A device that is being saved, of whose `size` bytes `readable` can be read while it runs.
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
    let first = device.pending().unwrap();

    assert_eq!(read_all(&device), 600);
    let idle = device.pending().unwrap();
    device.port().set_sizes(450, 50);
    let more = device.pending().unwrap();
    assert_eq!(read_all(&device), 50);
    let idle_again = device.pending().unwrap();

    assert_eq!(first, PendingState { dirty_bytes: 1000, ..PendingState::default() });
    assert_eq!(idle, PendingState { stopped_bytes: 400, ..PendingState::default() });
    assert_eq!(more, PendingState { dirty_bytes: 50, stopped_bytes: 400, ..PendingState::default() });
    assert_eq!(idle_again, idle);
}

#[test]
fn pending_after_a_pause_counts_from_the_least_size_since() {
    let device = saving(1000, 600);
    read_all(&device);
    device.pending().unwrap();

    device.port().set_sizes(300, 0);
    let less = device.pending().unwrap();
    device.port().set_sizes(320, 20);
    let more = device.pending().unwrap();

    assert_eq!(less, PendingState { stopped_bytes: 300, ..PendingState::default() });
    assert_eq!(more, PendingState { dirty_bytes: 20, stopped_bytes: 300, ..PendingState::default() });
}
