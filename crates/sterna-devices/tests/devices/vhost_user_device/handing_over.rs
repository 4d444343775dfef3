//! Tests of a back end that stays while its front end moves to another process. The other process is
//! represented by another device with other mappings of the same memory.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use sterna::{DeviceStream, HostDescriptors, RemainingState};
use sterna_devices::vhost_user::VhostUserDevice;
use sterna_ram::{Backing, GuestRam, RamBlock, TakenMemory};
use tempfile::TempDir;

use super::machine::{ANSWERS, Machine, RAM_BYTES, SHORT, options, ram, told, whole};
use crate::back_end::{Fault, VERSION_1};
use crate::virtqueue::Virtqueue;

const STATE_BYTES: usize = (1 << 20) + 4321;

/// The new process that receives the guest.
struct Heir {
    ram: GuestRam,
    device: Arc<VhostUserDevice>,
    memory: TakenMemory,
}

impl Heir {
    /// Prepares the new process like the engine, before the guest stops.
    fn of(source: &Machine) -> Self {
        let ram = awaiting();
        let device = VhostUserDevice::awaiting(options(&source.back_end, SHORT), &ram, &[whole()]).unwrap();
        let given = source.ram.block(0).sharable().unwrap();
        let memory = ram.block(0).take_memory(given.file.try_clone().unwrap(), given.offset).unwrap();
        device.take(source.device.give().unwrap()).unwrap();
        source.device.begin_hand_over().unwrap();
        Self { ram, device, memory }
    }

    /// Stops the source and loads its stream.
    fn load(&self, source: &Machine) {
        source.device.quiesce().unwrap();
        source.device.stop().unwrap();
        assert_eq!(source.device.remaining().unwrap(), RemainingState::default());
        assert_eq!(source.device.read(&mut [0; 64]).unwrap(), 0, "the back end keeps its state");
        self.device.begin_load().unwrap();
        self.device.finish_load(&source.device.configuration().unwrap()).unwrap();
    }

    /// Commits: the new process takes over the guest.
    fn start(mut self, source: Machine) -> Machine {
        self.memory.keep().unwrap();
        self.device.run().unwrap();
        source.device.let_go();
        source.device.end_save().unwrap();
        let Machine { back_end, queue, model, .. } = source;
        Machine { ram: self.ram, back_end, device: self.device, queue, model }
    }

    fn give_up(self, source: &Machine) {
        self.device.end_load().unwrap();
        self.device.let_go();
        drop(self);
        source.device.end_save().unwrap();
        source.device.run().unwrap();
    }
}

fn awaiting() -> GuestRam {
    GuestRam::new(vec![RamBlock::awaiting("ram", RAM_BYTES, Backing::Memfd).unwrap()]).unwrap()
}

fn running(directory: &TempDir) -> Machine {
    Machine::running(directory.path(), "socket", STATE_BYTES, Fault::None)
}

#[test]
fn back_end_goes_on_with_another_front_end_and_keeps_its_state() {
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    // The guest moves three times, because a process that gave its guest away can receive one again.
    for round in 0..3 {
        let at = round * 40;
        machine.serve(at..at + 20);
        let heir = Heir::of(&machine);
        machine.serve(at + 20..at + 25);
        // The answers to these requests are not read before the guest stops.
        for request in at + 25..at + 40 {
            assert!(machine.submit(request, ANSWERS + request % 64 * 8192, 64));
        }
        heir.load(&machine);
        let old = Arc::clone(&machine.device);
        machine = heir.start(machine);

        for request in at + 25..at + 40 {
            machine.expect(request, ANSWERS + request % 64 * 8192, 64);
        }
        assert_eq!(machine.queue.in_flight(), 0);
        assert!(old.is_awaited());
        let error = told(old.run().unwrap_err());
        assert!(error.contains("fs0") && error.contains("another process has the back end"), "{error}");
    }
}

#[test]
fn source_that_takes_its_guest_back_goes_on_with_the_same_back_end() {
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    machine.serve(0..10);

    // Once before anything has stopped, and once after everything is loaded.
    let heir = Heir::of(&machine);
    heir.give_up(&machine);
    machine.serve(10..20);
    let heir = Heir::of(&machine);
    for request in 20..30 {
        assert!(machine.submit(request, ANSWERS + request * 8192, 64));
    }
    heir.load(&machine);
    heir.give_up(&machine);
    (20..30).for_each(|request| machine.expect(request, ANSWERS + request * 8192, 64));
    machine.serve(30..40);

    // An ordinary migration afterwards transfers the state normally.
    let mut target = Machine::target(directory.path(), "other", Fault::None);
    machine.stop().unwrap();
    let state = machine.read_state().unwrap();
    assert!(state.len() > STATE_BYTES);
    target.load(&state, &machine.device.configuration().unwrap()).unwrap();
    target.take_guest(&machine);
    target.device.run().unwrap();
    target.serve(40..50);
}

#[test]
fn paused_source_that_takes_its_guest_back_can_migrate_at_once() {
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    machine.serve(0..10);
    machine.device.stop().unwrap();
    let heir = Heir::of(&machine);
    heir.load(&machine);
    heir.device.end_load().unwrap();
    heir.device.let_go();
    machine.device.end_save().unwrap();

    let mut target = Machine::target(directory.path(), "other", Fault::None);
    machine.stop().unwrap();
    let state = machine.read_state().unwrap();
    target.load(&state, &machine.device.configuration().unwrap()).unwrap();
    target.take_guest(&machine);
    target.device.run().unwrap();
    target.serve(10..20);
}

#[test]
fn destination_that_cannot_start_its_guest_gives_it_back_with_what_was_served_meanwhile() {
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    machine.serve(0..10);
    let mut heir = Heir::of(&machine);
    heir.load(&machine);
    for request in 10..20 {
        assert!(machine.submit(request, ANSWERS + request * 8192, 64));
    }
    heir.memory.keep().unwrap();
    heir.device.run().unwrap();
    // The back end serves requests at the destination; then the vCPUs do not start.
    let mut seen = machine.queue.clone();
    for _ in 10..20 {
        seen.wait(&heir.ram, &heir.device, 0);
    }
    heir.device.quiesce().unwrap();
    heir.device.stop().unwrap();
    heir.give_up(&machine);

    // Each request is served once. A device that served one twice would give different answers.
    (10..20).for_each(|request| machine.expect(request, ANSWERS + request * 8192, 64));
    machine.serve(20..40);
}

#[test]
fn guest_that_arrives_paused_is_introduced_and_migrates_on() {
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    machine.serve(0..10);
    for introduces in [false, true, false] {
        let mut heir = Heir::of(&machine);
        heir.load(&machine);
        heir.memory.keep().unwrap();
        if introduces {
            heir.device.introduce().unwrap();
        }
        assert_eq!(heir.device.is_awaited(), !introduces);
        machine.device.let_go();
        machine.device.end_save().unwrap();
        let Machine { back_end, queue, model, .. } = machine;
        machine = Machine { ram: heir.ram, back_end, device: heir.device, queue, model };
    }
    machine.device.run().unwrap();
    machine.serve(10..20);
}

/// A connection whose other end belongs to the test.
fn heard() -> (OwnedFd, UnixStream) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    (theirs.into(), ours)
}

/// Reads the bytes that were sent to the back end.
fn said(mut ours: &UnixStream) -> Vec<u8> {
    let mut bytes = [0; 1 << 10];
    match ours.read(&mut bytes) {
        Ok(count) => bytes[..count].to_vec(),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

/// A device whose guest has not arrived sends no request to the back end. Requests of two processes at the
/// same time would mix their messages.
#[test]
fn device_that_waits_says_nothing_before_its_guest_runs() {
    let directory = TempDir::new().unwrap();
    let machine = running(&directory);
    machine.device.stop().unwrap();
    let record = machine.device.configuration().unwrap();
    let ring = Virtqueue::new(super::machine::RING, 8).ring();
    let memory = ram();
    let device = VhostUserDevice::awaiting(options(&machine.back_end, SHORT), &memory, &[whole()]).unwrap();
    for round in 0..2 {
        let (theirs, ours) = heard();
        let other = theirs.try_clone().unwrap();
        device.take(vec![theirs]).unwrap();
        device.begin_load().unwrap();
        let refused = told(device.write(b"state").unwrap_err());
        assert!(
            refused.contains("the source sends a state for it, but the back end already has its state"),
            "{refused}"
        );
        device.finish_load(&record).unwrap();
        for asked in [device.start(VERSION_1, &[ring]), device.serve(VERSION_1, &[ring]), device.reset()] {
            let error = asked.unwrap_err().to_string();
            assert!(error.contains("another process has the back end"), "{error}");
        }
        device.rings().unwrap();
        device.quiesce().unwrap();
        device.stop().unwrap();
        device.end_load().unwrap();
        assert_eq!(said(&ours), b"");

        // Proves that the test can see requests: the first one, which gets no answer here.
        if round == 1 {
            assert!(told(device.run().unwrap_err()).contains("GET_FEATURES"));
            assert_eq!(said(&ours)[..4], 1u32.to_ne_bytes());
        }
        device.let_go();
        // The connection is unchanged.
        (&ours).write_all(b"still there").unwrap();
        drop(other);
    }
}

#[test]
fn source_says_nothing_from_its_stop_on_and_leaves_the_connection_alone() {
    let directory = TempDir::new().unwrap();
    let machine = running(&directory);
    let kept = machine.device.give().unwrap();
    machine.device.begin_hand_over().unwrap();
    machine.device.stop().unwrap();
    let asked = [machine.device.reset(), machine.device.start(VERSION_1, &[machine.queue.ring()])];
    for error in asked.map(|asked| asked.unwrap_err().to_string()) {
        assert!(error.contains("another process has the back end"), "{error}");
    }
    // As if the old process ended before it learns that the guest has moved.
    let Machine { ram, device, back_end, queue, model } = machine;
    drop(device);

    let heir = VhostUserDevice::awaiting(options(&back_end, SHORT), &ram, &[whole()]).unwrap();
    heir.take(kept).unwrap();
    heir.introduce().unwrap();
    heir.start(VERSION_1, &[queue.ring()]).unwrap();
    let mut alive = Machine { ram, back_end, device: heir, queue, model };
    alive.serve(0..5);
    let Machine { device, mut back_end, .. } = alive;
    drop(device);
    back_end.wait();
}

#[test]
fn what_is_no_back_end_of_this_device_is_refused() {
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    let memory = ram();
    let device = VhostUserDevice::awaiting(options(&machine.back_end, SHORT), &memory, &[whole()]).unwrap();
    let datagram: OwnedFd = std::os::unix::net::UnixDatagram::unbound().unwrap().into();
    let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let ended: OwnedFd = UnixStream::pair().unwrap().0.into();
    let cases = [
        (vec![], "0 descriptors arrived"),
        (vec![heard().0, heard().0], "2 descriptors arrived"),
        (vec![datagram], "not a connection over a Unix socket"),
        (vec![file], "not a connection over a Unix socket"),
        (vec![ended], "closed the connection"),
    ];
    for (descriptors, says) in cases {
        let error = told(device.take(descriptors).unwrap_err());
        assert!(error.contains("fs0") && error.contains(says), "{error}");
        device.let_go();
        assert!(device.is_awaited());
    }
    let without = [device.give().map(drop), device.begin_save(), device.run()];
    for error in without.map(|result| told(result.unwrap_err())) {
        assert!(error.contains("--same-host"), "{error}");
    }
    device.begin_load().unwrap();
    let error = told(device.finish_load(&[]).unwrap_err());
    assert!(error.contains("--same-host"), "one that does not come is missed before the commit: {error}");
    device.end_load().unwrap();
    // A device with its own back end keeps it.
    let error = told(machine.device.take(vec![heard().0]).unwrap_err());
    assert!(error.contains("already connected to a back end"), "{error}");
    machine.device.let_go();
    machine.serve(0..5);
}

#[test]
fn back_end_that_dies_is_named_before_the_commit_and_after_it() {
    let directory = TempDir::new().unwrap();
    // First while the guest runs.
    let mut machine = running(&directory);
    machine.serve(0..3);
    let heir = Heir::of(&machine);
    machine.back_end.kill();
    let error = told(machine.device.stop().unwrap_err());
    assert!(error.contains("fs0"), "{error}");
    heir.device.let_go();

    // Then after the source has stopped it: the destination notices before the commit.
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    let heir = Heir::of(&machine);
    machine.device.stop().unwrap();
    heir.device.begin_load().unwrap();
    machine.back_end.kill();
    let error = told(heir.device.finish_load(&machine.device.configuration().unwrap()).unwrap_err());
    assert!(error.contains("fs0") && error.contains("closed the connection"), "{error}");
    heir.device.end_load().unwrap();

    // Then after the commit.
    let directory = TempDir::new().unwrap();
    let mut machine = running(&directory);
    let mut heir = Heir::of(&machine);
    heir.load(&machine);
    heir.memory.keep().unwrap();
    machine.back_end.kill();
    let error = told(heir.device.run().unwrap_err());
    assert!(error.contains("fs0") && error.contains("closed the connection"), "{error}");
}
