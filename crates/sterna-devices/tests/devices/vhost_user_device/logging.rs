//! Tests that the back end's log contains every write at the last sync.

use std::sync::Arc;

use sterna::DeviceStream;
use sterna_devices::vhost_user::{VhostUserDevice, VhostUserLog, VhostUserOptions};
use sterna_ram::dirty::{DirtyBitmaps, DirtySource, VhostLog};
use sterna_ram::{GuestRam, PAGE_SIZE};
use tempfile::TempDir;

use super::half;
use super::machine::{self, ANSWERS, Machine, RAM_BYTES, RING, SHORT, SLOTS, whole};
use crate::back_end::{Fault, VERSION_1};
use crate::virtqueue::Virtqueue;

fn log_of(machine: &Machine) -> VhostUserLog {
    let log = VhostLog::new(&machine.ram, vec![whole()]).expect("a log");
    VhostUserLog::new(Arc::new(log), vec![Arc::clone(&machine.device)])
}

/// A copy of RAM that is updated only by dirty bits, like a destination's RAM.
struct Copy(Vec<u8>);

impl Copy {
    fn of(ram: &GuestRam) -> Self {
        let mut bytes = vec![0; RAM_BYTES as usize];
        ram.block(0).read(0, &mut bytes).expect("inside RAM");
        Self(bytes)
    }

    /// Syncs, copies the dirty pages, and returns their number.
    fn keep_up(&mut self, ram: &GuestRam, log: &VhostUserLog) -> u64 {
        let mut dirty = DirtyBitmaps::new(ram);
        log.sync(&mut dirty).expect("a sync");
        for page in 0..ram.block(0).pages() {
            if dirty.block(0).get(page) {
                let at = page as usize * PAGE_SIZE;
                ram.block(0).read(at as u64, &mut self.0[at..at + PAGE_SIZE]).expect("inside RAM");
            }
        }
        dirty.count()
    }

    /// The first page written by the back end that differs from `ram`. Such pages are the answers and the
    /// used ring.
    fn stale(&self, ram: &GuestRam) -> Option<u64> {
        let now = Self::of(ram);
        let used = 3 * PAGE_SIZE;
        let written = (used..used + PAGE_SIZE)
            .step_by(PAGE_SIZE)
            .chain((ANSWERS as usize..now.0.len()).step_by(PAGE_SIZE));
        written
            .into_iter()
            .find(|at| self.0[*at..at + PAGE_SIZE] != now.0[*at..at + PAGE_SIZE])
            .map(|at| at as u64)
    }
}

#[test]
fn pages_written_until_the_stop_are_all_in_the_last_sync() {
    let mut random = sterna_testing::random("pages_written_until_the_stop");
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", 4096, Fault::None);
    let log = log_of(&machine);
    let mut number = 0;
    let mut fill = |machine: &mut Machine| {
        while machine.queue.in_flight() < SLOTS {
            number += 1;
            let (answer, len) = (ANSWERS + random.u64(..RAM_BYTES - ANSWERS - 65_536), random.u64(..0x4000));
            assert!(machine.submit(number, answer & !7, (len as u32 & !7) + 8));
        }
    };
    // Written before the log starts, so the log does not contain it.
    machine.serve(0..20);

    for round in 0..5 {
        // Arrange: a migration that begins.
        log.start().expect("a good start");
        let mut copy = Copy::of(&machine.ram);
        // Act: the back end writes continuously, with syncs in between.
        for _ in 0..40 {
            fill(&mut machine);
            machine.wait_until_in_flight(SLOTS - 1);
            copy.keep_up(&machine.ram, &log);
            machine.wait_until_in_flight(SLOTS / 2);
        }
        // At least one of these requests is answered after the previous sync.
        machine.wait_until_in_flight(0);
        copy.keep_up(&machine.ram, &log);
        fill(&mut machine);
        machine.wait_until_in_flight(SLOTS - 1);
        machine.stop().expect("a good stop");
        let last = copy.keep_up(&machine.ram, &log);
        // Assert
        assert!(last > 0, "round {round}: the back end wrote nothing after the sync before");
        assert_eq!(copy.stale(&machine.ram), None, "round {round}: a page was written and not reported");
        assert_eq!(copy.keep_up(&machine.ram, &log), 0, "round {round}: a stopped back end writes");
        // The migration is undone.
        machine.device.end_save().expect("the end");
        machine.device.run().expect("a good start");
        log.stop().expect("a good end");
        machine.wait_until_in_flight(0);
    }
}

#[test]
fn log_that_is_not_started_is_not_filled_and_not_synced() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", 4096, Fault::None);
    let log = log_of(&machine);
    let mut dirty = DirtyBitmaps::new(&machine.ram);

    assert!(log.sync(&mut dirty).is_err());
    log.start().expect("a good start");
    log.start().expect("a good start, twice");
    machine.serve(0..5);
    log.stop().expect("a good end");
    log.stop().expect("a good end, twice");
    machine.serve(5..10);
    log.start().expect("a good start");

    log.sync(&mut dirty).expect("a sync");
    assert_eq!(dirty.block(0).count_range(ANSWERS / PAGE_SIZE as u64, 64), 0, "what was before came again");
    machine.serve(10..11);
    log.sync(&mut dirty).expect("a sync");
    assert!(dirty.block(0).get((ANSWERS + 10 * 8192) / PAGE_SIZE as u64));
}

#[test]
fn used_rings_are_synced_from_a_back_end_that_does_not_log_them_and_no_ring_is_stopped_for_it() {
    let directory = TempDir::new().expect("a directory");
    let path = directory.path().join("silent");
    let asked = half::listen(&path, None);
    let ram = machine::ram();
    let device = VhostUserDevice::connect(VhostUserOptions::new("fs0", &path), &ram, &[whole()]);
    let device = device.expect("a device");
    let log = Arc::new(VhostLog::new(&ram, vec![whole()]).expect("a log"));
    let log = VhostUserLog::new(log, vec![Arc::clone(&device)]);
    let ring = Virtqueue::new(RING, SLOTS).ring();
    device.start(VERSION_1, &[ring]).expect("a good start");
    let sync = || {
        let mut dirty = DirtyBitmaps::new(&ram);
        let report = log.sync(&mut dirty).expect("a sync");
        assert_eq!(report.newly_dirty, dirty.count());
        (dirty.count(), dirty.block(0).get(ring.used / PAGE_SIZE as u64))
    };

    log.start().expect("a good start");
    assert_eq!(sync(), (0, false), "a ring that runs would be dirty for ever");
    log.stop().expect("a good end");
    let stops = asked.try_iter().filter(|asked| asked.0 == half::GET_VRING_BASE).count();
    assert_eq!(stops, 0, "the guest waits for its device");
    log.start().expect("a good start");
    device.begin_save().expect("it listens");
    device.stop().expect("a good stop");
    assert_eq!([sync(), sync()], [(1, true), (0, false)], "it was written before the stop, and no more");
}

#[test]
fn log_of_a_back_end_that_died_does_not_start_and_names_the_device() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running(directory.path(), "source", 4096, Fault::None);
    let log = log_of(&machine);
    machine.back_end.kill();

    let error = log.start().expect_err("nobody answers").to_string();

    assert!(error.contains("fs0") && error.contains("SET_LOG_BASE"), "{error}");
    assert!(log.sync(&mut DirtyBitmaps::new(&machine.ram)).is_err(), "it is started");
}

#[test]
fn log_of_a_back_end_that_hangs_does_not_start_and_the_device_runs_on_when_it_wakes_up() {
    let directory = TempDir::new().expect("a directory");
    let mut machine = Machine::running_within(directory.path(), "source", 4096, Fault::None, SHORT);
    let log = log_of(&machine);
    machine.serve(0..5);
    machine.back_end.freeze();

    let error = log.start().expect_err("nobody answers").to_string();

    assert!(error.contains("fs0") && error.contains("did not answer SET_LOG_BASE"), "{error}");
    machine.back_end.thaw();
    machine.serve(5..10);
    machine.device.begin_save().expect("it listens");
    log.start().expect("it listens");
}
