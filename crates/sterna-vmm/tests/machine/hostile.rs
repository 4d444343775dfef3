//! Tests of invalid bodies and records. Each must end in an error that names the fault, never in a panic.
#![allow(clippy::print_stderr, missing_docs)]

use std::sync::Arc;

use crate::common::{Console, copy_ram, flat, guests, kvm_or_skip, load, save, target, wait_for};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use sterna::{SourceVm, TargetVm};
use sterna_vmm::{KvmMachine, MachineConfig};

const RAM: u64 = 64 << 20;

fn stopped_source() -> Arc<KvmMachine> {
    let config = MachineConfig { guest: flat(&guests::counter()), ..MachineConfig::new("source") };
    let source = KvmMachine::new(config).unwrap();
    source.resume().unwrap();
    wait_for("counting", || source.ram().block(0).read_u64(guests::COUNTERS).unwrap() > 100);
    source.stop();
    source
}

/// Resets the target, loads the devices before `index`, then loads `body` into device `index`.
fn load_one(target: &KvmMachine, good: &[Vec<u8>], index: usize, body: &[u8]) -> Result<(), sterna::VmError> {
    target.reset();
    let devices = target.devices();
    for (device, body) in devices.iter().zip(good).take(index) {
        device.load(1, body).unwrap();
    }
    devices[index].load(1, body)
}

/// Random changes of a body: bytes to overwrite, and the length to cut it to.
fn garbling() -> impl Strategy<Value = (usize, Vec<(usize, u8)>, Option<usize>)> {
    let edits = proptest::collection::vec((any::<usize>(), any::<u8>()), 0..6);
    (any::<usize>(), edits, proptest::option::of(any::<usize>()))
}

#[test]
fn garbled_body_loaded_is_an_error_or_a_value_and_never_a_panic() {
    if !kvm_or_skip("garbled_body_loaded_is_an_error_or_a_value_and_never_a_panic") {
        return;
    }
    let (source, target) = (stopped_source(), target(1, RAM, &Console::default()));
    let good = save(&source);
    let seed = sterna_testing::seed("garbled_body_loaded");
    let mut runner = TestRunner::new(Config {
        cases: 400,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed),
        ..Config::default()
    });

    let result = runner.run(&garbling(), |(device, edits, cut)| {
        let device = device % good.len();
        let mut body = good[device].clone();
        for (at, value) in edits {
            let at = at % body.len();
            body[at] = value;
        }
        let cut = cut.map(|cut| cut % body.len());
        body.truncate(cut.unwrap_or(body.len()));
        let loaded = load_one(&target, &good, device, &body);
        prop_assert!(cut.is_none() || loaded.is_err(), "a truncated body was taken");
        Ok(())
    });

    result.unwrap();
    // After all failed loads, the machine loads the valid guest and runs it.
    target.reset();
    copy_ram(&source, &target);
    load(&target, &good);
    TargetVm::start(&*target).unwrap();
    let count = || target.ram().block(0).read_u64(guests::COUNTERS).unwrap();
    let stopped = source.ram().block(0).read_u64(guests::COUNTERS).unwrap();
    wait_for("counting on", || count() > stopped + 100);
    assert_eq!(target.ended(), None);
}

/// The body with a changed value of one field.
fn edited(body: &[u8], tag: &[u8; 4], edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let at = body.windows(4).position(|window| window == tag).unwrap();
    let len = u32::from_le_bytes(body[at + 4..at + 8].try_into().unwrap()) as usize;
    let mut value = body[at + 8..at + 8 + len].to_vec();
    edit(&mut value);
    let mut new = body[..at + 4].to_vec();
    new.extend((value.len() as u32).to_le_bytes());
    new.extend(value);
    new.extend(&body[at + 8 + len..]);
    new
}

#[test]
fn cpuid_that_differs_is_refused_with_leaf_register_and_bit() {
    if !kvm_or_skip("cpuid_that_differs_is_refused_with_leaf_register_and_bit") {
        return;
    }
    let (source, target) = (stopped_source(), target(1, RAM, &Console::default()));
    let record = source.compatibility().save().unwrap();
    // Leaf 1, ecx, bit 12 (FMA): an entry has seven words, and ecx is the sixth.
    let other = edited(&record, b"cpid", |entries| {
        let leaf_1 =
            entries.chunks_exact_mut(28).find(|entry| entry[..8] == [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        leaf_1[20 + 1] ^= 1 << 4;
    });

    let refusal = target.compatibility().load(1, &other).unwrap_err().to_string();

    assert!(refusal.contains("leaf 0x1 subleaf 0x0 ecx, bits 12"), "{refusal}");
    target.compatibility().load(1, &record).unwrap();
}

#[test]
fn cpuid_leaf_missing_here_or_there_is_refused() {
    if !kvm_or_skip("cpuid_leaf_missing_here_or_there_is_refused") {
        return;
    }
    let (source, target) = (stopped_source(), target(1, RAM, &Console::default()));
    let record = source.compatibility().save().unwrap();
    let fewer = edited(&record, b"cpid", |entries| drop(entries.drain(28..56)));
    let more = edited(&record, b"cpid", |entries| {
        let mut entry = vec![0; 28];
        entry[..4].copy_from_slice(&0x4000_0099u32.to_le_bytes());
        entries.extend(entry);
    });

    for other in [fewer, more] {
        let refusal = target.compatibility().load(1, &other).unwrap_err().to_string();
        assert!(refusal.contains("CPUID leaf"), "{refusal}");
    }
}

#[test]
fn other_ram_vcpus_and_frequency_are_refused() {
    if !kvm_or_skip("other_ram_vcpus_and_frequency_are_refused") {
        return;
    }
    let record = stopped_source().compatibility().save().unwrap();
    let refusal = |machine: &KvmMachine, record: &[u8]| {
        machine.compatibility().load(1, record).unwrap_err().to_string()
    };
    let same = target(1, RAM, &Console::default());

    assert!(refusal(&target(2, RAM, &Console::default()), &record).contains("vCPUs"));
    assert!(refusal(&target(1, 2 * RAM, &Console::default()), &record).contains("RAM layout"));
    let slow = edited(&record, b"tkhz", |khz| *khz = 0u64.to_le_bytes().to_vec());
    assert!(refusal(&same, &slow).contains("TSC frequency"));
}

#[test]
fn section_out_of_order_or_twice_is_refused() {
    if !kvm_or_skip("section_out_of_order_or_twice_is_refused") {
        return;
    }
    let (source, target) = (stopped_source(), target(1, RAM, &Console::default()));
    let good = save(&source);
    let devices = target.devices();

    let early = devices[2].load(1, &good[2]).unwrap_err().to_string();
    devices[0].load(1, &good[0]).unwrap();
    let twice = devices[0].load(1, &good[0]).unwrap_err().to_string();

    assert!(early.contains("before section kvm-clock"), "{early}");
    assert!(twice.contains("twice"), "{twice}");
    assert!(SourceVm::resume(&*target).is_err());
}

#[test]
fn unknown_duplicate_and_long_fields_are_named() {
    if !kvm_or_skip("unknown_duplicate_and_long_fields_are_named") {
        return;
    }
    let (source, target) = (stopped_source(), target(1, RAM, &Console::default()));
    let good = save(&source);
    let refusal = |index: usize, body: &[u8]| load_one(&target, &good, index, body).unwrap_err().to_string();
    let with = |body: &[u8], extra: &[u8]| [body, extra].concat();

    assert!(refusal(0, &with(&good[0], b"what\x00\x00\x00\x00")).contains("\"what\" is unknown"));
    assert!(refusal(0, &with(&good[0], b"real\x00\x00\x00\x00")).contains("\"real\" occurs twice"));
    assert!(refusal(0, &edited(&good[0], b"clck", |clock| clock.push(0))).contains("\"clck\" has 49 bytes"));
    assert!(
        refusal(1, &edited(&good[1], b"fifo", |fifo| fifo.resize(65, 0))).contains("\"fifo\" has 65 bytes")
    );
    assert!(refusal(2, &edited(&good[2], b"mpst", |state| state[0] = 9)).contains("9 is not a run state"));
}
