//! A standby with a hand-made COLO primary: held checkpoints, promises, and takeovers.

mod differences;
mod golden;
mod heart;
mod primary;
mod protected;
mod summary;

use std::net::Shutdown;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::error::{Difference, Ending, ProtectionDifference};
use sterna::{Address, Capabilities, MigrationError, Parameters, SettingsError, StartError};
use sterna_image::{Image, MappedOptions};
use sterna_opaque::ImagePlan;
use sterna_standby::{
    HeldCheckpoint, OperatorsWord, Standby, StandbyOptions, StandbyState, TakeoverError, TakeoverPermission,
};
use sterna_wire::PAGE_SIZE;
use sterna_wire::colo::Message;
use tempfile::TempDir;

use crate::common::{multifd, parameters};
use primary::{BLOCKS, Page, Primary, blob, devices};

/// Settings for this number of lanes (0 for none).
fn settings(lanes: u8) -> (Parameters, Capabilities) {
    if lanes == 0 { (parameters(), Capabilities::default()) } else { multifd(lanes) }
}

fn options() -> StandbyOptions {
    StandbyOptions { insecure: true, ..StandbyOptions::default() }
}

fn listen(lanes: u8, options: &StandbyOptions) -> Standby {
    let (params, capabilities) = settings(lanes);
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    Standby::listen(&at, options, params, capabilities, Arc::new(())).expect("listening")
}

/// A standby, and a primary whose guest it has received.
fn pair(lanes: u8) -> (Standby, Primary) {
    let standby = listen(lanes, &options());
    let primary = Primary::seed(&standby.address(), lanes);
    (standby, primary)
}

fn plan(directory: &TempDir) -> ImagePlan {
    ImagePlan { path: directory.path().join("image"), options: MappedOptions::default(), convert: None }
}

/// Waits until the standby receives no more checkpoints.
fn lost(standby: &Standby) -> MigrationError {
    let begin = Instant::now();
    loop {
        match standby.state() {
            StandbyState::Lost(why) | StandbyState::Failed(why) => return why,
            state => assert!(begin.elapsed() < Duration::from_secs(30), "{state:?}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Takes over, and compares the image with the primary's state at that checkpoint.
fn assert_takes_over(standby: &Standby, number: u64, ram: &[Vec<u8>], state: u8) {
    let directory = tempfile::tempdir().unwrap();
    let taken = standby.takeover(&plan(&directory), &OperatorsWord).expect("taken over");
    assert_eq!(taken.checkpoint.number, number);
    assert_image(&taken.path, ram, state);
    assert!(matches!(standby.state(), StandbyState::TakenOver));
    assert!(matches!(standby.takeover(&plan(&directory), &OperatorsWord), Err(TakeoverError::Done)));
}

/// Compares an image with the primary's state.
fn assert_image(path: &Path, ram: &[Vec<u8>], state: u8) {
    let image = Image::open(path).expect("an image");
    for (index, (_, pages)) in BLOCKS.iter().enumerate() {
        let mut bytes = vec![0; pages * PAGE_SIZE];
        image.mapped().unwrap().read(index, 0, &mut bytes).unwrap();
        let differs = bytes.iter().zip(&ram[index]).position(|(ours, theirs)| ours != theirs);
        assert_eq!(differs.map(|at| at / PAGE_SIZE), None, "block {index}");
    }
    let shape = image.shape();
    let bodies = devices(state);
    assert_eq!(shape.run_state().as_deref(), Some("running"));
    let holds = |bytes: &[u8], body: &[u8]| bytes.windows(body.len()).any(|window| window == body);
    assert!(holds(&shape.early, &bodies[0].2) && holds(&shape.devices, &bodies[1].2));
    assert!(shape.description.is_some() && shape.has_end && shape.has_eof);
}

/// Pages of checkpoint `number`: some are new, some zero, some are in several consecutive checkpoints.
fn pages(number: usize) -> Vec<Page> {
    let filled = (0..12).map(|index| (0, (number * 7 + index * 5) % 64, (number + index) as u8 | 1));
    let mut pages: Vec<Page> = filled.collect();
    pages.sort_unstable_by_key(|page| page.1);
    pages.dedup_by_key(|page| page.1);
    pages.push((1, number % 8, if number.is_multiple_of(3) { 0 } else { 9 }));
    pages
}

#[test]
fn checkpoints_are_held_and_the_last_one_becomes_an_image() {
    for lanes in [0, 1, 2, 4, 16] {
        let (standby, mut primary) = pair(lanes);
        for number in 1..=40 {
            primary.checkpoint(&pages(number), number as u8);
        }
        assert!(matches!(standby.state(), StandbyState::Following));
        let statistics = standby.statistics();
        assert_eq!((statistics.checkpoints, statistics.last_normal_pages), (40, 13), "{lanes} lanes");
        drop((primary.lanes.drain(..), primary.main.shutdown(Shutdown::Both)));

        let why = lost(&standby);

        assert!(matches!(why, MigrationError::Ended(Ending::BetweenCheckpoints)), "{why}");
        assert_takes_over(&standby, 40, &primary.ram, 40);
    }
}

#[test]
fn checkpoint_without_pages_brings_devices_alone() {
    for lanes in [0, 2] {
        let (standby, mut primary) = pair(lanes);
        primary.checkpoint(&[], 7);

        assert_takes_over(&standby, 1, &primary.ram, 7);
    }
}

#[test]
fn seeding_alone_can_be_taken_over() {
    for lanes in [0, 2] {
        let (standby, primary) = pair(lanes);

        assert_takes_over(&standby, 0, &primary.ram, 1);
    }
}

#[test]
fn checkpoint_that_is_cut_off_anywhere_is_dropped_whole() {
    // The primary's messages of a second checkpoint, up to a point.
    type Cut = (&'static str, fn(&mut Primary));
    let cuts: [Cut; 7] = [
        ("REQUEST", |primary| primary.say(Message::CheckpointRequest)),
        ("SEND", |primary| primary.begin_checkpoint()),
        ("END of RAM", |primary| {
            primary.begin_checkpoint();
            primary.write(&[3, 0]);
        }),
        ("RAM", |primary| {
            primary.begin_checkpoint();
            primary.send_ram(&[(0, 3, 99), (0, 4, 0)]);
        }),
        ("SIZE", |primary| {
            primary.begin_checkpoint();
            primary.send_ram(&[(0, 3, 99)]);
            primary.write(&[0]);
            primary.say(Message::VmstateSize { bytes: 100 });
        }),
        ("devices", |primary| {
            primary.begin_checkpoint();
            primary.send_ram(&[(0, 3, 99)]);
            primary.write(&[0]);
            let devices = blob(99);
            primary.say(Message::VmstateSize { bytes: devices.len() as u64 });
            primary.write(&devices[..devices.len() - 1]);
        }),
        ("pages on lanes", |primary| {
            primary.begin_checkpoint();
            if !primary.lanes.is_empty() {
                primary.send_on_lanes(&[(0, 3, 99), (0, 5, 98)]);
            }
        }),
    ];
    for lanes in [0, 2] {
        for (place, cut) in &cuts {
            let (standby, mut primary) = pair(lanes);
            primary.checkpoint(&pages(1), 2);
            let ram = primary.ram.clone();
            cut(&mut primary);
            let _ = primary.main.shutdown(Shutdown::Write);
            primary.lanes.clear();

            let why = lost(&standby);

            assert!(why.fault().is_none() || lanes > 0, "{place}: {why}");
            assert_eq!(standby.held().unwrap().number, 1, "{place}");
            assert_takes_over(&standby, 1, &ram, 2);
        }
    }
}

#[test]
fn received_is_not_said_before_the_last_byte_of_the_devices() {
    let (_standby, mut primary) = pair(2);
    primary.begin_checkpoint();
    primary.send_ram(&pages(1));
    assert!(primary.hears_nothing());
    primary.write(&[0]);
    let devices = blob(5);
    primary.say(Message::VmstateSize { bytes: devices.len() as u64 });
    primary.write(&devices[..devices.len() - 1]);
    assert!(primary.hears_nothing());
    primary.write(&[0]);
    primary.hear("00000005 00000006");
}

#[test]
fn end_of_ram_waits_for_the_sync_of_every_channel() {
    let (standby, mut primary) = pair(2);
    primary.begin_checkpoint();
    // The main channel is at its end, and a lane's page and SYNC arrive late.
    primary.write(&[3, 0, 0, 0, 2]);
    primary.write(&0x200u64.to_be_bytes());
    primary.write(&0x10u64.to_be_bytes());
    primary.write(&[0x7e, 0, 0, 0, 2, 0]);
    let devices = blob(5);
    primary.say(Message::VmstateSize { bytes: devices.len() as u64 });
    primary.write(&devices);
    assert!(primary.hears_nothing());
    primary.send_on_lanes(&[(0, 3, 99), (0, 4, 98)]);
    assert!(primary.hears_nothing());
    primary.sync();
    primary.hear("00000005 00000006");
    for (page, fill) in [(3, 99), (4, 98)] {
        primary.ram[0][page * PAGE_SIZE..(page + 1) * PAGE_SIZE].fill(fill);
    }

    assert_takes_over(&standby, 1, &primary.ram, 5);
}

#[test]
fn pages_that_come_before_their_checkpoint_is_asked_for_belong_to_it() {
    let (standby, mut primary) = pair(2);
    primary.checkpoint(&[(0, 1, 11)], 2);
    let before = primary.ram.clone();
    // A lane that is far ahead of the main channel.
    primary.send_on_lanes(&[(0, 1, 77), (0, 2, 78)]);
    assert!(primary.hears_nothing());
    primary.main.shutdown(Shutdown::Write).unwrap();

    lost(&standby);

    assert_takes_over(&standby, 1, &before, 2);
}

#[test]
fn what_breaks_a_rule_ends_the_following_by_name_and_the_last_checkpoint_stays() {
    type Lie = (&'static str, fn(&mut Primary));
    let lies: [Lie; 12] = [
        ("message 9; only 0 to 6 are known", |primary| primary.write(&[0, 0, 0, 9])),
        ("VMSTATE_LOADED instead of CHECKPOINT_REQUEST", |primary| primary.say(Message::VmstateLoaded)),
        ("CHECKPOINT_REQUEST instead of VMSTATE_SEND", |primary| {
            primary.say(Message::CheckpointRequest);
            primary.hear("00000002");
            primary.say(Message::CheckpointRequest);
        }),
        ("02 instead of the END section", |primary| {
            primary.begin_checkpoint();
            primary.write(&[2, 0, 0, 0, 2]);
        }),
        ("VMSTATE_SIZE of 9223372036854775808 bytes", |primary| {
            primary.begin_checkpoint();
            primary.send_ram(&[(0, 3, 99)]);
            primary.write(&[0, 0, 0, 0, 4, 0x80, 0, 0, 0, 0, 0, 0, 0]);
        }),
        ("is missing", |primary| send_devices(primary, &[0])),
        ("does not end with EOF", |primary| send_devices(primary, &[7; 40])),
        ("has no end", |primary| {
            let mut devices = blob(3);
            let length = devices.len();
            devices.truncate(length - 20);
            devices.push(0);
            send_devices(primary, &devices);
        }),
        ("main channel, checkpoint 2: XBZRLE delta", |primary| {
            // The second pair extends past the end of the page.
            primary.begin_checkpoint();
            primary.send_deltas(&[(0, 3, &[0, 1, 7, 0xff, 0x1f, 2, 7, 7])]);
        }),
        ("page 0x5000 of block \"pc.ram\"", |primary| {
            // The pair of the second page writes no bytes.
            primary.begin_checkpoint();
            primary.send_deltas(&[(0, 3, &[4, 1, 1]), (0, 5, &[4, 0])]);
        }),
        ("a delta of 0 bytes", |primary| {
            primary.begin_checkpoint();
            let mut bytes = vec![3, 0, 0, 0, 2];
            bytes.extend_from_slice(&(0x3000u64 | 0x40).to_be_bytes());
            bytes.extend_from_slice(b"\x06pc.ram\x01\0\0");
            primary.write(&bytes);
        }),
        ("is beyond block", |primary| {
            primary.begin_checkpoint();
            let mut bytes = vec![3, 0, 0, 0, 2];
            bytes.extend_from_slice(&((1u64 << 30) | 2).to_be_bytes());
            bytes.extend_from_slice(b"\x06pc.ram\x00");
            primary.write(&bytes);
        }),
    ];
    for (words, lie) in lies {
        let (standby, mut primary) = pair(0);
        primary.checkpoint(&pages(1), 2);
        let ram = primary.ram.clone();
        lie(&mut primary);

        let why = lost(&standby);

        assert!(why.to_string().contains(words), "{words}: {why}");
        assert_eq!(why.fault(), Some(sterna::Fault::PeerMisbehaved), "{why}");
        assert_takes_over(&standby, 1, &ram, 2);
    }
}

#[test]
fn differences_are_to_what_came_last_in_this_checkpoint_or_before() {
    let (standby, mut primary) = pair(0);
    primary.checkpoint(&[(0, 3, 9), (1, 2, 0)], 2);
    for number in 3..6 {
        primary.begin_checkpoint();
        // Differences from pages of the previous checkpoint, a zero page, the seeding, and the same checkpoint.
        primary.send_deltas(&[
            (0, 3, &[number, 1, number]),
            (1, 2, &[0xff, 0x1f, 1, number]),
            (0, 7, &[0, 2, 1, number]),
            (0, 3, &[0, 1, number, 0x80, 1, 1, number]),
        ]);
        primary.send_rest(number);
        primary.hear("00000005 00000006");
    }
    assert_eq!(standby.statistics().last_normal_pages, 4);

    let ram = primary.ram.clone();
    assert_eq!((ram[0][3 * PAGE_SIZE], ram[0][3 * PAGE_SIZE + 129]), (5, 5));
    assert_takes_over(&standby, 4, &ram, 5);
}

fn send_devices(primary: &mut Primary, devices: &[u8]) {
    primary.begin_checkpoint();
    primary.send_ram(&[(0, 3, 99)]);
    primary.write(&[0]);
    primary.say(Message::VmstateSize { bytes: devices.len() as u64 });
    primary.write(devices);
}

#[test]
fn end_without_flush_and_packets_behind_the_last_one_are_refused() {
    type Lie = (&'static str, fn(&mut Primary));
    let lies: [Lie; 2] = [
        ("without MULTIFD_FLUSH", |primary| {
            primary.write(&[3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 0]);
        }),
        ("ended before its SYNC", |primary| {
            primary.write(&[3, 0, 0, 0, 2]);
            primary.lanes.clear();
            primary.write(&0x200u64.to_be_bytes());
        }),
    ];
    for (words, lie) in lies {
        let (standby, mut primary) = pair(2);
        primary.checkpoint(&pages(1), 2);
        let ram = primary.ram.clone();
        primary.begin_checkpoint();
        lie(&mut primary);

        let why = lost(&standby);

        assert!(why.to_string().contains(words), "{words}: {why}");
        assert_takes_over(&standby, 1, &ram, 2);
    }
}

#[test]
fn checkpoint_larger_than_the_journal_is_dropped_whole() {
    for lanes in [0, 2] {
        let small = StandbyOptions { journal_limit_bytes: 5 * PAGE_SIZE as u64, ..options() };
        let standby = listen(lanes, &small);
        let mut primary = Primary::seed(&standby.address(), lanes);
        primary.checkpoint(&[(0, 1, 1), (0, 2, 2), (0, 3, 3), (0, 5, 4), (0, 7, 5)], 2);
        let ram = primary.ram.clone();
        primary.begin_checkpoint();
        primary.send_ram(&[(0, 1, 9), (0, 2, 9), (0, 3, 9), (0, 5, 9), (0, 7, 9), (0, 9, 9)]);

        let why = lost(&standby);

        assert!(matches!(why, MigrationError::JournalFull { limit_bytes: 0x5000 }), "{why}");
        assert_takes_over(&standby, 1, &ram, 2);
    }
}

#[test]
fn refused_permission_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (standby, mut primary) = pair(2);
    primary.checkpoint(&pages(1), 2);
    primary.begin_checkpoint();
    let asked = |held: &HeldCheckpoint| Err(format!("no, not {}", held.number));

    let refused = standby.takeover(&plan(&directory), &asked).expect_err("refused");

    assert!(matches!(&refused, TakeoverError::Refused(why) if why == "no, not 1"), "{refused}");
    assert!(matches!(standby.state(), StandbyState::Following));
    primary.send_checkpoint(&pages(2), 3);
    primary.hear("00000005 00000006");
    assert_takes_over(&standby, 2, &primary.ram, 3);
}

/// Sends a complete checkpoint of the primary, and checks whether it is promised.
struct Meanwhile(parking_lot::Mutex<Primary>);

impl TakeoverPermission for Meanwhile {
    fn ask(&self, held: &HeldCheckpoint) -> Result<(), String> {
        let mut primary = self.0.lock();
        primary.begin_checkpoint();
        primary.send_checkpoint(&pages(2), 3);
        assert!(primary.hears_nothing(), "a checkpoint was promised that would be lost");
        assert_eq!(held.number, 1);
        Ok(())
    }
}

#[test]
fn checkpoint_that_comes_while_the_permission_is_asked_for_is_not_promised() {
    let (standby, mut primary) = pair(2);
    primary.checkpoint(&pages(1), 2);
    let ram = primary.ram.clone();
    let directory = tempfile::tempdir().unwrap();
    let meanwhile = Meanwhile(parking_lot::Mutex::new(primary));

    let taken = standby.takeover(&plan(&directory), &meanwhile).expect("taken over");

    assert_eq!(taken.checkpoint.number, 1);
    let image = Image::open(&taken.path).unwrap();
    let mut bytes = vec![0; 64 * PAGE_SIZE];
    image.mapped().unwrap().read(0, 0, &mut bytes).unwrap();
    let differs =
        bytes.chunks(PAGE_SIZE).zip(ram[0].chunks(PAGE_SIZE)).position(|(ours, theirs)| ours != theirs);
    assert_eq!(differs, None, "page that is none of checkpoint 1");
}

#[test]
fn image_that_could_not_be_made_may_be_tried_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let (standby, mut primary) = pair(0);
    primary.checkpoint(&pages(1), 2);
    std::fs::write(directory.path().join("image"), b"taken").unwrap();

    let failed = standby.takeover(&plan(&directory), &OperatorsWord).expect_err("a file is there");

    assert!(matches!(failed, TakeoverError::Image(_)), "{failed}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left beside it");
    assert_takes_over(&standby, 1, &primary.ram, 2);
}

#[test]
fn nothing_is_taken_over_before_the_seeding_is_held() {
    let directory = tempfile::tempdir().unwrap();
    let standby = listen(0, &options());
    assert!(matches!(standby.state(), StandbyState::Waiting));

    let error = standby.takeover(&plan(&directory), &OperatorsWord).expect_err("nothing is there");

    assert!(matches!(error, TakeoverError::NothingHeld), "{error}");
}

#[test]
fn primary_without_return_path_is_refused_while_its_guest_runs() {
    let standby = listen(0, &options());
    let mut primary = Primary::connect(&standby.address(), 0);
    primary.send_seeding(false);

    let why = lost(&standby);

    let MigrationError::PeerIncompatible(Difference::Protection(difference)) = &why else { panic!("{why}") };
    assert!(matches!(difference, ProtectionDifference::NoReturnPath), "{why}");
    assert!(matches!(standby.state(), StandbyState::Failed(_)) && standby.held().is_none());
}

#[test]
fn primary_that_closes_without_any_checkpoint_may_have_let_go_of_its_guest() {
    let (standby, primary) = pair(0);
    primary.main.shutdown(Shutdown::Both).unwrap();

    let why = lost(&standby);

    assert!(matches!(why, MigrationError::Ended(Ending::NoCheckpoint)), "{why}");
    assert_takes_over(&standby, 0, &primary.ram, 1);
}

#[test]
fn standby_that_anybody_could_reach_is_refused() {
    let (params, capabilities) = settings(0);
    let listen = |at: &str, options: &StandbyOptions, capabilities: Capabilities| {
        let at: Address = at.parse().unwrap();
        let refused = Standby::listen(&at, options, params.clone(), capabilities, Arc::new(())).err();
        refused.and_then(|error| if let StartError::Settings(why) = error { Some(why) } else { None })
    };
    let careful = StandbyOptions::default();
    assert_eq!(listen("tcp:127.0.0.1:0", &careful, capabilities), Some(SettingsError::OpenStandby));
    for address in ["tcp:0.0.0.0:0", "tcp::0", "tcp:192.0.2.1:0"] {
        assert_eq!(listen(address, &options(), capabilities), Some(SettingsError::OpenStandby), "{address}");
    }
    assert_eq!(listen("tcp:127.0.0.1:0", &options(), capabilities), None);
    let nothing = StandbyOptions { journal_limit_bytes: 10, ..options() };
    assert_eq!(listen("tcp:127.0.0.1:0", &nothing, capabilities), Some(SettingsError::NoJournal));
    assert_eq!(listen("rdma:127.0.0.1:9", &options(), capabilities), Some(SettingsError::NoStandbyThere));
}
