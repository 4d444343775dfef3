//! The source of a postcopy, with a destination that the test plays: in QEMU's form, and with misbehaviour.

use std::sync::Arc;

use sterna::error::{BadAnswer, Misbehaviour};
use sterna::{Capabilities, Decision, Migration, MigrationError, Outcome, Status, Vm};
use sterna_guests::process::ProcessGuest;
use sterna_proto::source::Refusal;
use sterna_wire::extension::Features;
use sterna_wire::main::{Command, MainItem, SectionKind};
use sterna_wire::return_path::ReturnMessage;

use super::peer::HandMadeDestination;
use super::{config, slow};
use crate::common::{self, assert_lives_on};
use crate::support::{eventually, until_status};

const ON: fn(bool) -> Capabilities =
    |preempt| Capabilities { postcopy_ram: true, postcopy_preempt: preempt, ..Capabilities::default() };

/// A source that is about to switch, and the played destination.
pub(super) fn begun(preempt: bool) -> (Arc<ProcessGuest>, Migration, HandMadeDestination) {
    let (source, migration, destination) = in_precopy(preempt);
    migration.start_postcopy().unwrap();
    (source, migration, destination)
}

/// A source that does not switch yet.
fn in_precopy(preempt: bool) -> (Arc<ProcessGuest>, Migration, HandMadeDestination) {
    let (source, _) = common::pair(&config());
    let destination = HandMadeDestination::new();
    let migration = common::start(&source, &destination.address(), &slow(), ON(preempt), Arc::new(()));
    (source, migration, destination)
}

pub(super) fn request(block: Option<&str>, start: u64, length: u32) -> ReturnMessage {
    ReturnMessage::RequestPages { block: block.map(str::to_owned), start, length }
}

pub(super) fn is_run(item: &MainItem) -> bool {
    matches!(item, MainItem::Command(Command::PostcopyRun))
}

#[test]
fn stream_to_a_qemu_has_the_observed_elements_in_the_observed_order() {
    let (source, migration, mut destination) = begun(true);
    let mut seen = Vec::new();
    let mut preempt = None;
    loop {
        let item = destination.next().expect("it goes on to EOF");
        let word = match &item {
            MainItem::Command(Command::PostcopyDiscard { .. }) if seen.last() == Some(&"DISCARD") => continue,
            MainItem::Command(Command::PostcopyDiscard { .. }) => "DISCARD",
            MainItem::Command(Command::SwitchoverStart) => "SWITCHOVER_START",
            MainItem::Command(Command::PostcopyAdvise(Some((4096, 4096)))) => "ADVISE",
            MainItem::Command(Command::OpenReturnPath) => "OPEN_RETURN_PATH",
            MainItem::Command(Command::Ping(1)) => "PING 1",
            MainItem::Command(Command::Ping(2)) => "PING 2",
            MainItem::Command(Command::Ping(3)) => "PING 3",
            MainItem::Command(Command::Ping(0x42)) => "PING 42",
            // The PINGs for extension and fence, which every destination echoes.
            MainItem::Command(Command::Ping(_)) => continue,
            MainItem::Command(Command::Packaged(_)) => "PACKAGED",
            MainItem::Command(Command::PostcopyListen) => {
                // Accepted before the package is loaded.
                preempt = Some(destination.accept());
                "LISTEN"
            }
            MainItem::Command(Command::PostcopyRun) => "RUN",
            MainItem::Section { kind: SectionKind::Full, .. } if seen.last() == Some(&"FULL") => continue,
            MainItem::Section { kind: SectionKind::Full, .. } => "FULL",
            MainItem::RamStart(_) => "START ram",
            MainItem::RamEnd { kind: SectionKind::End } => "END ram",
            MainItem::RamEnd { .. } if seen.last() == Some(&"PART ram") => continue,
            MainItem::RamEnd { kind: SectionKind::Part } => "PART ram",
            MainItem::RamEnd { .. } => continue,
            MainItem::Header | MainItem::Configuration(_) => continue,
            MainItem::Eof => break,
            other => panic!("{other:?}"),
        };
        if word != "PART ram" || seen.contains(&"RUN") {
            seen.push(word);
        }
    }
    let wanted = [
        "OPEN_RETURN_PATH",
        "PING 1",
        "ADVISE",
        "START ram",
        "SWITCHOVER_START",
        "DISCARD",
        "PING 2",
        "PACKAGED",
        "LISTEN",
        "FULL",
        "PING 3",
        "PING 42",
        "RUN",
        "PART ram",
        "END ram",
    ];
    assert_eq!(seen, wanted);
    destination.say(&ReturnMessage::Shut(0));
    assert!(matches!(migration.wait(), Outcome::Completed));
    assert!(!source.ram().custody().may_run());
    drop(preempt);
    assert_every_page_came(&source, destination.pages);
}

#[test]
fn what_a_sterna_drops_is_mostly_named_before_the_guest_stops_and_each_page_once() {
    let (source, _) = common::pair(&config());
    let mut destination = HandMadeDestination::sterna(Features(Features::HANDOVER.0 | Features::POSTCOPY.0));
    let migration = common::start(&source, &destination.address(), &slow(), ON(false), Arc::new(()));
    while destination.pages.len() < 1000 {
        destination.next().expect("it goes on");
    }
    migration.start_postcopy().unwrap();
    let (mut ahead, mut stopped) = (Vec::new(), None);
    loop {
        match destination.next().expect("it goes on to the package") {
            // The source sends it when the guest is stopped.
            MainItem::Command(Command::SwitchoverStart) => stopped = Some(Vec::new()),
            MainItem::Command(Command::PostcopyDiscard { block, ranges }) => {
                let pages = ranges.iter().flat_map(|&(start, bytes)| (start..start + bytes).step_by(4096));
                let named = stopped.as_mut().unwrap_or(&mut ahead);
                named.extend(pages.map(|page| (block.clone(), page)));
            }
            MainItem::Command(Command::Packaged(_)) => break,
            _ => {}
        }
    }
    let afterwards = stopped.expect("the guest stands before its devices are sent");
    assert!(ahead.len() > afterwards.len(), "{} pages ahead, {} afterwards", ahead.len(), afterwards.len());
    let mut once = std::collections::HashSet::new();
    for page in ahead.iter().chain(&afterwards) {
        assert!(once.insert(page), "{page:?} was named twice");
    }
    let before = destination.pages.len();
    destination.until(|item| matches!(item, MainItem::Eof));
    destination.say(&ReturnMessage::Shut(0));
    assert!(matches!(migration.wait(), Outcome::Completed));
    assert_eq!(destination.pages.len() - before, once.len(), "what was dropped follows, and nothing else");
    assert_every_page_came(&source, destination.pages);
}

/// Asserts that every page has arrived, and that its last content is the source's.
pub(super) fn assert_every_page_came(source: &ProcessGuest, pages: Vec<(usize, u64, Vec<u8>)>) {
    let ram = source.ram();
    let total: u64 = ram.blocks().iter().map(|block| block.pages()).sum();
    let mut last = std::collections::HashMap::new();
    for (block, offset, content) in pages {
        last.insert((block, offset), content);
    }
    assert_eq!(last.len() as u64, total);
    for ((block, offset), content) in last {
        let mut ours = vec![0; content.len()];
        ram.block(block).read(offset, &mut ours).unwrap();
        assert_eq!(ours, content, "{offset:#x} of block {block}");
    }
}

#[test]
fn requested_pages_go_first_and_each_page_goes_once() {
    let (source, migration, mut destination) = begun(false);
    destination.until(is_run);
    let before = destination.pages.len();
    let high = |page: u64| page << 12;
    destination.say(&request(Some("ram.high"), high(1000), 4096));
    destination.say(&request(None, high(1001), 8192));
    destination.say(&request(None, high(1000), 4096));
    eventually("requests", || migration.statistics().postcopy_requests == 3);
    destination.until(|item| matches!(item, MainItem::Eof));
    destination.say(&ReturnMessage::Shut(0));
    assert!(matches!(migration.wait(), Outcome::Completed));

    let following = &destination.pages[before..];
    let mut once = std::collections::HashSet::new();
    for (block, offset, _) in following {
        assert!(once.insert((*block, *offset)), "{offset:#x} of block {block} came twice");
    }
    let at = |page: u64| following.iter().position(|(block, offset, _)| (*block, *offset) == (1, high(page)));
    let total = following.len();
    for page in 1000..1003 {
        assert!(at(page).unwrap() < total / 2, "page {page} came with the others");
    }
    // A slow host has started precopy before it switches.
    assert_every_page_came(&source, destination.pages);
}

#[test]
fn destination_that_asks_for_what_is_not_there_never_gets_the_guest_back_to_the_source_once_it_may_run() {
    for bad in [
        request(Some("ram.high"), 8 << 20, 4096),
        request(Some("ram.high"), 1, 4096),
        request(Some("ram.high"), 0, 0),
        request(Some("vga"), 0, 4096),
        request(None, 0, 4096),
        ReturnMessage::Shut(0),
        ReturnMessage::ReceivedBitmap { block: "ram.high".into() },
    ] {
        let (source, migration, mut destination) = begun(false);
        destination.until(is_run);
        destination.say(&bad);
        eventually("the end of the connection", || {
            matches!(migration.status(), Status::PostcopyPaused | Status::Undecided)
        });
        assert!(migration.cancel().is_err());
        assert!(!source.ram().custody().may_run(), "{bad:?}");
        if migration.status() == Status::Undecided {
            // The first decision keeps the pages.
            migration.decide(Decision::DestinationRuns).unwrap();
            until_status(&migration, Status::PostcopyPaused);
        }
        migration.decide(Decision::DestinationRuns).unwrap();
        assert!(matches!(migration.wait(), Outcome::Completed));
    }
}

#[test]
fn failure_before_the_package_leaves_the_guest_running_at_the_source() {
    let early = |item: &MainItem| matches!(item, MainItem::Command(Command::PostcopyAdvise(_)));
    let (source, migration, mut destination) = in_precopy(false);
    destination.until(early);
    destination.say(&request(Some("ram.high"), 0, 4096));
    let outcome = migration.wait();
    let Outcome::Failed { error: MigrationError::PeerMisbehaved(why), held: false } = &outcome else {
        panic!("{outcome:?}")
    };
    assert!(matches!(why, Misbehaviour::Answer(BadAnswer::EarlyRequest)), "{why}");
    assert_lives_on(&source);

    let (source, migration, mut destination) = in_precopy(false);
    destination.until(early);
    destination.main = None;
    drop(destination);
    assert!(matches!(migration.wait(), Outcome::Failed { held: false, .. }));
    assert_lives_on(&source);
}

#[test]
fn connection_that_breaks_once_the_guest_runs_there_pauses_and_keeps_all_memory() {
    let (source, migration, mut destination) = begun(false);
    destination.until(is_run);
    // The source needs the answer to PING 42, which is in transit.
    until_status(&migration, Status::PostcopyActive);
    drop(destination);
    until_status(&migration, Status::PostcopyPaused);
    assert!(matches!(migration.decide(Decision::SourceRuns), Err(Refusal::RanElsewhere)));
    assert!(!source.ram().custody().may_run());
    let resident: u64 = source.ram().blocks().iter().map(|block| block.resident_bytes().unwrap()).sum();
    assert!(resident > 0, "its memory is kept");
    migration.decide(Decision::DestinationRuns).unwrap();
    assert!(matches!(migration.wait(), Outcome::Completed));
}

#[test]
fn destination_that_never_reads_does_not_make_this_side_grow() {
    let (_source, migration, mut destination) = begun(false);
    destination.until(is_run);
    // A million requests, without reading any answer.
    for _ in 0..1000 {
        let mut bytes = Vec::new();
        for page in 0..1000 {
            request(Some("ram.high"), page << 12, 4096).encode(&mut bytes).unwrap();
        }
        use std::io::Write;
        if destination.main.as_mut().unwrap().write_all(&bytes).is_err() {
            break;
        }
    }
    eventually("requests", || migration.statistics().postcopy_requests >= 1_000_000);
    drop(destination);
    until_status(&migration, Status::PostcopyPaused);
    migration.decide(Decision::DestinationRuns).unwrap();
    migration.wait();
}
