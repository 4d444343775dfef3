//! Tests that move a statebank's state through `DeviceStream`, with and without a protocol.

use super::support::{Chunks, Plan, alone, migrate, serve};
use sterna::DeviceStream;
use sterna_devices::statebank::{StateBankConfig, Verdict};
use sterna_devices::vfio::MigState;

fn config() -> StateBankConfig {
    // The length is no multiple of a block or of a word.
    StateBankConfig { state_bytes: (9 << 20) + 12_345, seed: 77, ..StateBankConfig::default() }
}

fn target() -> StateBankConfig {
    StateBankConfig { seed: 5, ..config() }
}

#[test]
fn migrate_in_process_brings_every_byte() {
    let ((source, from), (target, to)) = (alone(config()), alone(target()));
    assert_ne!(from.status().digest, to.status().digest);

    let moved = migrate(&source, &target, Plan::plain()).unwrap();

    assert!(moved > config().state_bytes, "{moved}");
    assert_eq!(from.status().digest, to.status().digest);
    assert_eq!(to.status().loaded, Verdict::Good);
    assert_eq!((source.state(), target.state()), (MigState::Stop, MigState::Running));
}

#[test]
fn migrate_between_servers_brings_every_byte() {
    let (source, target) = (serve(config()), serve(target()));

    migrate(&source.device, &target.device, Plan::plain()).unwrap();

    assert_eq!(source.bank().status().digest, target.bank().status().digest);
    assert_eq!(target.bank().status().loaded, Verdict::Good);
}

#[test]
fn migrate_in_chunks_of_a_few_bytes_brings_every_byte() {
    let small = |seed| StateBankConfig { state_bytes: 200_001, seed, ..StateBankConfig::default() };
    let ((source, from), (target, to)) = (alone(small(3)), alone(small(4)));

    migrate(&source, &target, Plan { chunks: Chunks::up_to(97), ..Plan::plain() }).unwrap();

    assert_eq!(from.status().digest, to.status().digest);
}

#[test]
fn migrate_with_precopy_reads_the_share_before_the_stop_and_what_changed_again() {
    let changing = |seed| StateBankConfig {
        precopy_percent: 75,
        // Fast enough to change blocks between any two reads.
        dirty_rate: 20 << 30,
        seed,
        ..config()
    };
    let (source, target) = (serve(changing(1)), serve(changing(2)));

    let plan = Plan { chunks: Chunks::up_to(200_000), running_reads: 150, stopped: &|| {} };
    let moved = migrate(&source.device, &target.device, plan).unwrap();

    let (from, to) = (source.bank().status(), target.bank().status());
    assert!(from.changed_blocks > 0);
    assert!(moved > config().state_bytes * 5 / 4, "nothing was read twice: {moved}");
    assert_eq!(to.loaded, Verdict::Good);
    // The target already runs and changes blocks itself, so the digests may differ.
}

#[test]
fn read_while_running_gives_only_the_share() {
    let (source, _) = alone(StateBankConfig { precopy_percent: 50, ..config() });
    let mut buffer = vec![0; 1 << 20];
    source.begin_save().unwrap();
    let before = source.remaining().unwrap();

    let mut read = 0;
    loop {
        match source.read(&mut buffer).unwrap() {
            0 => break,
            more => read += more as u64,
        }
    }
    let after = source.remaining().unwrap();

    // The 32 bytes of the stream's head are not counted.
    assert_eq!(read, before.initial_bytes + 32);
    assert!(read > config().state_bytes * 45 / 100 && read < config().state_bytes * 51 / 100, "{read}");
    assert_eq!((after.initial_bytes, after.dirty_bytes), (0, 0));
    assert_eq!(before.total_bytes(), after.stopped_bytes + read);
    source.quiesce().unwrap();
    source.stop().unwrap();
    let stopped = source.remaining().unwrap().stopped_bytes;
    let mut rest = 0;
    loop {
        match source.read(&mut buffer).unwrap() {
            0 => break,
            more => rest += more as u64,
        }
    }
    assert_eq!(rest, stopped);
    assert_eq!(source.remaining().unwrap().total_bytes(), 0);
}

#[test]
fn read_without_precopy_gives_nothing_until_it_has_stopped() {
    let source = serve(config());
    let mut buffer = vec![0; 4096];
    source.device.begin_save().unwrap();

    assert_eq!(source.device.read(&mut buffer).unwrap(), 0);
    assert!(source.device.remaining().unwrap().stopped_bytes > config().state_bytes);
    source.device.stop().unwrap();
    assert_eq!(source.device.read(&mut buffer).unwrap(), 4096);
}

#[test]
fn quiesce_goes_to_p2p_where_there_is_p2p() {
    for (p2p, precopy_percent, expected) in [
        (true, 0, MigState::RunningP2p),
        (true, 50, MigState::PreCopyP2p),
        (false, 0, MigState::Running),
        (false, 50, MigState::PreCopy),
    ] {
        let (device, _) = alone(StateBankConfig { p2p, precopy_percent, ..config() });
        device.begin_save().unwrap();
        device.quiesce().unwrap();
        assert_eq!(device.state(), expected);
        device.stop().unwrap();
        assert_eq!(device.state(), MigState::StopCopy);
        device.end_save().unwrap();
        assert_eq!(device.state(), MigState::Stop);
        device.run().unwrap();
        assert_eq!(device.state(), MigState::Running);
    }
}

#[test]
fn save_undone_at_any_place_leaves_it_running_and_able_to_be_saved() {
    let moving = |seed| StateBankConfig { precopy_percent: 50, seed, ..config() };
    let (source, target) = (serve(moving(1)), serve(moving(2)));
    let device = &source.device;
    let mut buffer = vec![0; 100_000];

    for place in 0..5 {
        device.begin_save().unwrap();
        if place > 0 {
            device.read(&mut buffer).unwrap();
        }
        if place > 1 {
            device.quiesce().unwrap();
        }
        if place > 2 {
            device.stop().unwrap();
        }
        if place > 3 {
            device.read(&mut buffer).unwrap();
        }
        device.end_save().unwrap();
        device.end_save().unwrap();
        device.run().unwrap();
        assert_eq!(source.bank().status().state, MigState::Running, "place {place}");
    }

    migrate(device, &target.device, Plan::plain()).unwrap();
    assert_eq!(source.bank().status().digest, target.bank().status().digest);
}

#[test]
fn load_undone_leaves_it_able_to_be_loaded() {
    let (source, target) = (serve(config()), serve(target()));
    target.device.begin_load().unwrap();
    source.device.begin_save().unwrap();
    source.device.stop().unwrap();
    let mut buffer = vec![0; 100_000];
    source.device.read(&mut buffer).unwrap();
    target.device.write(&buffer).unwrap();

    target.device.end_load().unwrap();
    target.device.end_load().unwrap();
    assert!(target.device.write(&buffer).is_err());
    source.device.end_save().unwrap();
    source.device.run().unwrap();

    migrate(&source.device, &target.device, Plan::plain()).unwrap();
    assert_eq!(source.bank().status().digest, target.bank().status().digest);
}

#[test]
fn load_of_a_stream_with_one_wrong_byte_is_refused_wherever_it_is() {
    let small = StateBankConfig { state_bytes: 130_000, ..StateBankConfig::default() };
    let (source, _) = alone(small.clone());
    source.begin_save().unwrap();
    source.stop().unwrap();
    let mut stream = vec![0; 200_000];
    let len = source.read(&mut stream).unwrap();
    stream.truncate(len);
    assert_eq!(source.read(&mut [0; 8]).unwrap(), 0);

    // Every byte in and near the heads and the end, and some bytes of the content.
    let places = (0..len).filter(|at| *at < 200 || at % 997 == 0 || *at > len - 90);
    let mut refused = 0;
    for at in places {
        let (target, bank) = alone(small.clone());
        stream[at] ^= 1;
        target.begin_load().unwrap();
        let loaded = target.write(&stream).and_then(|()| target.finish_load(&[]));
        stream[at] ^= 1;
        assert!(loaded.is_err(), "byte {at}");
        assert_eq!(bank.status().loaded, Verdict::Bad, "byte {at}");
        refused += 1;
    }
    assert!(refused > 300);
}

#[test]
fn load_of_records_lost_swapped_or_cut_is_refused() {
    let small = StateBankConfig { state_bytes: 5 << 16, ..StateBankConfig::default() };
    let (source, _) = alone(small.clone());
    source.begin_save().unwrap();
    source.stop().unwrap();
    let mut stream = vec![0; 400_000];
    let len = source.read(&mut stream).unwrap();
    stream.truncate(len);
    let record = 32 + (1 << 16);
    let block = |index: usize| 32 + index * record..32 + (index + 1) * record;

    let lost = [&stream[..block(2).start], &stream[block(2).end..]].concat();
    let mut swapped = stream.clone();
    swapped[block(1)].copy_from_slice(&stream[block(2)]);
    swapped[block(2)].copy_from_slice(&stream[block(1)]);
    let twice = [&stream[..block(2).end], &stream[block(2).start..]].concat();
    let cut = stream[..len - 1].to_vec();
    let longer = [&stream[..], &[0]].concat();
    let empty = Vec::new();

    for (what, bytes) in [
        ("lost", lost),
        ("swapped", swapped),
        ("twice", twice),
        ("cut", cut),
        ("longer", longer),
        ("empty", empty),
    ] {
        let (target, _) = alone(small.clone());
        target.begin_load().unwrap();
        let loaded = target.write(&bytes).and_then(|()| target.finish_load(&[]));
        assert!(loaded.is_err(), "{what}");
    }
    let (target, _) = alone(small);
    target.begin_load().unwrap();
    target.write(&stream).and_then(|()| target.finish_load(&[])).unwrap();
}

#[test]
fn finish_load_with_configuration_is_refused() {
    let (source, target) = (serve(config()), serve(target()));
    source.device.begin_save().unwrap();
    source.device.stop().unwrap();
    target.device.begin_load().unwrap();

    let error = target.device.finish_load(b"what?").unwrap_err();

    assert!(error.to_string().contains("5 bytes of configuration"), "{error}");
}

#[test]
fn run_before_the_load_is_finished_is_refused() {
    let target = serve(target());
    target.device.begin_load().unwrap();

    let error = target.device.run().unwrap_err();

    assert!(error.to_string().contains("not finished"), "{error}");
}
