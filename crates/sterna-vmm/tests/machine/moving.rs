//! Tests that save state in one machine and load it in another. Both are in the same process. The guests must
//! continue without a gap.
#![allow(clippy::print_stderr, missing_docs)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{Console, copy_ram, flat, guests, kvm_or_skip, load, move_guest, save, target, wait_for};
use sterna::{RunState, SourceVm, TargetVm, Vm};
use sterna_ram::DirtyBitmaps;
use sterna_vmm::{KvmMachine, MachineConfig, PortDevice, PortRange};

const RAM: u64 = 64 << 20;

fn counter_machine(vcpus: u8) -> Arc<KvmMachine> {
    KvmMachine::new(MachineConfig { vcpus, guest: flat(&guests::counter()), ..MachineConfig::new("source") })
        .unwrap()
}

fn count(machine: &KvmMachine, vcpu: u64) -> u64 {
    machine.ram().block(0).read_u64(guests::COUNTERS + vcpu * 4096).unwrap()
}

#[test]
fn counter_moved_goes_on_where_it_stopped() {
    if !kvm_or_skip("counter_moved_goes_on_where_it_stopped") {
        return;
    }
    let (source, target) = (counter_machine(1), target(1, RAM, &Console::default()));
    source.resume().unwrap();
    wait_for("counting", || count(&source, 0) > 1000);

    move_guest(&source, &target);

    let stopped = count(&source, 0);
    wait_for("counting on", || count(&target, 0) > stopped + 1000);
    // The guest compares its register with memory at each step. If either were lost, the guest would have
    // ended.
    assert_eq!(target.ended(), None);
    assert_eq!(count(&source, 0), stopped);
    assert_eq!(SourceVm::run_state(&*target), RunState::Running);
}

#[test]
fn eight_vcpus_moved_all_go_on() {
    if !kvm_or_skip("eight_vcpus_moved_all_go_on") {
        return;
    }
    let (source, target) = (counter_machine(8), target(8, RAM, &Console::default()));
    source.resume().unwrap();
    wait_for("counting", || (0..8).all(|vcpu| count(&source, vcpu) > 100));

    move_guest(&source, &target);

    let stopped: Vec<_> = (0..8).map(|vcpu| count(&source, vcpu)).collect();
    wait_for("counting on", || (0..8).all(|vcpu| count(&target, vcpu) > stopped[vcpu as usize] + 100));
    assert_eq!(target.ended(), None);
}

#[test]
fn state_loaded_and_saved_again_is_the_same() {
    if !kvm_or_skip("state_loaded_and_saved_again_is_the_same") {
        return;
    }
    let (source, target) = (counter_machine(2), target(2, RAM, &Console::default()));
    source.resume().unwrap();
    wait_for("counting", || count(&source, 0) > 1000);
    source.stop();
    let before = save(&source);

    load(&target, &before);

    let after = save(&target);
    for ((device, before), after) in source.devices().iter().zip(&before).zip(&after) {
        let (before, after) = (without_time(before), without_time(after));
        assert_eq!(before, after, "{} {}", device.name(), device.instance());
    }
}

/// The fields of a body, without those that depend on time.
fn without_time(body: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut fields = Vec::new();
    let mut at = 0;
    while at < body.len() {
        let tag = String::from_utf8_lossy(&body[at..at + 4]).into_owned();
        let len = u32::from_le_bytes(body[at + 4..at + 8].try_into().unwrap()) as usize;
        let mut value = body[at + 8..at + 8 + len].to_vec();
        if tag == "pit2" {
            (0..3).for_each(|channel| value[channel * 24 + 16..channel * 24 + 24].fill(0)); // count_load_time
        }
        if !["tsc ", "real", "tsco", "clck"].contains(&tag.as_str()) {
            fields.push((tag, value));
        }
        at += 8 + len;
    }
    fields
}

/// Gives numbers in order and checks the numbers that it gets back. Records the strings that pass.
#[derive(Default)]
struct Sequence {
    given: AtomicU32,
    taken: AtomicU32,
    wrong: AtomicU32,
    strings: Mutex<Vec<u8>>,
    string_bytes_read: AtomicU32,
}

impl PortDevice for Sequence {
    fn read(&self, offset: u16, data: &mut [u8]) {
        match (offset, data.len()) {
            (0, 4) => data.copy_from_slice(&self.given.fetch_add(1, Ordering::SeqCst).to_le_bytes()),
            (9, 1) => data[0] = self.string_bytes_read.fetch_add(1, Ordering::SeqCst) as u8,
            _ => drop(self.wrong.fetch_add(1, Ordering::SeqCst)),
        }
    }

    fn write(&self, offset: u16, data: &[u8]) {
        match (offset, data.len()) {
            (4, 4) => {
                let expected = self.taken.fetch_add(1, Ordering::SeqCst);
                if data != expected.to_le_bytes() {
                    self.wrong.fetch_add(1, Ordering::SeqCst);
                }
            }
            (8, 1) => self.strings.lock().unwrap().push(data[0]),
            _ => drop(self.wrong.fetch_add(1, Ordering::SeqCst)),
        }
    }
}

#[test]
fn port_loop_moved_two_hundred_times_loses_and_doubles_nothing() {
    if !kvm_or_skip("port_loop_moved_two_hundred_times_loses_and_doubles_nothing") {
        return;
    }
    let seed = sterna_testing::seed("port_loop_moved_two_hundred_times");
    let mut random = fastrand::Rng::with_seed(seed);
    let device = Arc::new(Sequence::default());
    let machine = |incoming| {
        let ports =
            vec![PortRange { first: 0x500, count: 16, device: Arc::clone(&device) as Arc<dyn PortDevice> }];
        let guest = flat(&guests::port_loop());
        KvmMachine::new(MachineConfig { guest, incoming, ports, ..MachineConfig::new("ports") }).unwrap()
    };
    let mut here = machine(false);
    here.resume().unwrap();
    wait_for("the first port access", || device.taken.load(Ordering::SeqCst) > 8);

    for round in 0..200 {
        let before = device.taken.load(Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_micros(random.u64(..2000)));
        let there = machine(true);
        move_guest(&here, &there);
        here = there;
        wait_for("port accesses after the move", || {
            assert_eq!(here.ended(), None, "round {round}, seed {seed}");
            device.taken.load(Ordering::SeqCst) > before
        });
    }

    here.stop();
    assert_eq!(here.ended(), None, "seed {seed}");
    assert_eq!(device.wrong.load(Ordering::SeqCst), 0, "seed {seed}");
    let (given, taken) = (device.given.load(Ordering::SeqCst), device.taken.load(Ordering::SeqCst));
    assert!(given == taken || given == taken + 1, "{given} given, {taken} taken, seed {seed}");
    let strings = device.strings.lock().unwrap();
    for (index, string) in strings.chunks_exact(8).enumerate() {
        assert_eq!(
            u64::from_le_bytes(string.try_into().unwrap()),
            (index as u64 + 1) * 8,
            "string {index}, seed {seed}"
        );
    }
    assert!(!strings.is_empty());
    let read = device.string_bytes_read.load(Ordering::SeqCst) as usize;
    let (whole, begun) = (strings.len() / 8, strings.len().div_ceil(8));
    assert!(
        read >= whole.saturating_sub(1) * 5 && read <= begun * 5,
        "{read} bytes of {whole} strings, seed {seed}"
    );
}

#[test]
fn writes_of_the_guest_are_all_in_the_dirty_log() {
    if !kvm_or_skip("writes_of_the_guest_are_all_in_the_dirty_log") {
        return;
    }
    let source = counter_machine(2);
    source.resume().unwrap();
    wait_for("counting", || count(&source, 1) > 100);
    let log = SourceVm::dirty_source(&*source);
    let mut dirty = DirtyBitmaps::new(source.ram());
    log.start().unwrap();
    log.sync(&mut dirty).unwrap();
    let all = source.ram().block(0).pages();
    let synced = sterna_ram::PageBitmap::new(all);
    synced.set_all();
    log.rearm(0, 0, all, &synced).unwrap();
    dirty.clear_all();
    let before = [count(&source, 0), count(&source, 1)];
    wait_for("counting under the log", || count(&source, 0) > before[0] && count(&source, 1) > before[1]);

    source.stop();
    log.sync(&mut dirty).unwrap();
    log.stop().unwrap();

    let page = guests::COUNTERS / 4096;
    assert!(dirty.block(0).get(page) && dirty.block(0).get(page + 1));
    assert!(dirty.count() < 16, "{} pages for a guest that writes two", dirty.count());
}

#[test]
fn target_reset_after_a_part_of_the_state_takes_another_guest() {
    if !kvm_or_skip("target_reset_after_a_part_of_the_state_takes_another_guest") {
        return;
    }
    let (source, target) = (counter_machine(1), target(1, RAM, &Console::default()));
    source.resume().unwrap();
    wait_for("counting", || count(&source, 0) > 1000);
    source.stop();
    let bodies = save(&source);
    for (device, body) in target.devices().iter().zip(&bodies).take(3) {
        device.load(1, body).unwrap();
    }
    assert!(Vm::hooks(&*target)[0].acquire().is_err());
    assert!(TargetVm::start(&*target).is_err());

    target.reset();
    copy_ram(&source, &target);
    load(&target, &bodies);
    TargetVm::start(&*target).unwrap();

    let stopped = count(&source, 0);
    wait_for("counting on", || count(&target, 0) > stopped);
}

#[test]
fn machine_dropped_leaves_no_thread_and_no_descriptor() {
    if !kvm_or_skip("machine_dropped_leaves_no_thread_and_no_descriptor") {
        return;
    }
    // Other tests of this process create and drop machines, so only mappings with this machine's mark count.
    let mark = format!("{}", RAM + (37 << 12));
    let machine = KvmMachine::new(MachineConfig {
        vcpus: 3,
        ram_bytes: RAM + (37 << 12),
        guest: flat(&guests::counter()),
        ..MachineConfig::new("gone")
    })
    .unwrap();
    let devices = machine.devices();
    machine.resume().unwrap();
    machine.quit();
    let weak = Arc::downgrade(&devices[0]);

    drop(devices);
    drop(machine);

    assert!(weak.upgrade().is_none(), "the machine's parts live on");
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let sizes =
        files.filter_map(|file| std::fs::metadata(file.path()).ok()).map(|data| data.len().to_string());
    assert!(sizes.filter(|size| *size == mark).count() == 0, "its memory is still open");
}
