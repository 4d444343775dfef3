//! The destination of a postcopy, with a source that the test plays: in QEMU's form, and with misbehaviour.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use sterna::ram::PAGE_SIZE;
use sterna::{Arrival, Capabilities, Incoming, RunState, Status, Vm};
use sterna_guests::process::ProcessGuest;
use sterna_wire::main::{Command, encode_end};
use sterna_wire::ram::RamRecordWriter;
use sterna_wire::return_path::ReturnMessage;

use super::peer::HandMadeSource;
use super::{capabilities, config, slow};
use crate::common;
use crate::support::{eventually, wait_for};

const PAGES: u64 = PAGE_SIZE as u64;

/// A waiting destination, and a played source whose guest is stopped.
pub(super) fn begun(
    preempt: bool,
) -> Option<(Arc<ProcessGuest>, Arc<ProcessGuest>, Incoming, HandMadeSource)> {
    let capabilities = capabilities(preempt)?;
    let (source, target) = common::pair(&config());
    assert!(source.wait_progress(20, Duration::from_secs(20)));
    let incoming = common::listen(&target, &slow(), capabilities);
    let played = HandMadeSource::of(&source, &incoming.address());
    Some((source, target, incoming, played))
}

#[test]
fn guest_of_a_qemu_runs_at_run_and_asks_for_its_pages() {
    for preempt in [false, true] {
        let Some((_source, target, incoming, mut played)) = begun(preempt) else { return };
        played.open(PAGES);
        played.hear_pong(0x10);
        let mut channel = preempt.then(|| played.preempt());
        played.discard_all();
        let devices = played.devices();
        played.package(&devices, &[Command::Ping(3), Command::Ping(0x42), Command::PostcopyRun]);

        // Four writers wait for one page each, no two for the same page. These pages are sent first.
        let mut asked: Vec<(usize, u64)> = Vec::new();
        let mut last = None;
        while asked.len() < 4 {
            match played.hear().expect("it goes on") {
                ReturnMessage::RequestPages { block, start, length } => {
                    let blocks = target.ram();
                    let named =
                        block.map(|name| blocks.blocks().iter().position(|b| b.name() == name).unwrap());
                    last = named.or(last);
                    let place = (last.expect("the first request names its block"), start / PAGES);
                    assert_eq!(length, 4096);
                    assert!(!asked.contains(&place), "asked for twice");
                    asked.push(place);
                }
                ReturnMessage::Pong(_) => {}
                other => panic!("{other:?}"),
            }
        }
        let mut writer = RamRecordWriter::new();
        let mut records = Vec::new();
        asked.iter().for_each(|(block, page)| played.record(&mut writer, *block, *page, &mut records));
        match &mut channel {
            Some(channel) => channel.write_all(&records).unwrap(),
            None => played.pages(asked.iter().copied()),
        }
        // Pages that are requested meanwhile are among the others, on either channel.
        let others: Vec<_> = played.every_page().into_iter().filter(|page| !asked.contains(page)).collect();
        others.chunks(64).for_each(|pages| played.pages(pages.iter().copied()));
        played.end();

        let shut = std::iter::from_fn(|| played.hear())
            .find_map(|message| if let ReturnMessage::Shut(code) = message { Some(code) } else { None });
        assert_eq!(shut, Some(0));
        drop(played);
        let arrival = incoming.wait();
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
        common::assert_lives_on(&target);
    }
}

/// A source's misbehaviour before RUN: the destination refuses, runs no guest and keeps no state.
fn refused(what: &str, word: &str, preempt: bool, acts: impl FnOnce(&mut HandMadeSource)) {
    let Some((_source, target, incoming, mut played)) = begun(preempt) else { return };
    acts(&mut played);
    played.hear_refusal();
    drop(played);
    let arrival = incoming.wait();
    let Arrival::Failed(error) = arrival else { panic!("{what}: {arrival:?}") };
    assert!(error.to_string().contains(word), "{what}: {error}");
    assert!(!target.has_guest(), "{what}");
    let resident: u64 = target.ram().blocks().iter().map(|block| block.resident_bytes().unwrap()).sum();
    assert_eq!(resident, 0, "{what}: bytes left");
}

#[test]
fn source_that_breaks_a_rule_before_run_is_refused_by_name() {
    refused("other pages", "same kind of memory", false, |played| played.open(PAGES | (2 << 20)));
    refused("discard without advise", "unknown", false, |played| {
        played.open(PAGES);
        played.write(|out| {
            let ranges = vec![(0, 4096)];
            Command::PostcopyDiscard { block: "unknown".into(), ranges }.encode(out).unwrap();
        });
    });
    refused("discard beyond the block", "drops", false, |played| {
        played.open(PAGES);
        played.write(|out| {
            let ranges = vec![(8 << 20, 4096)];
            Command::PostcopyDiscard { block: "ram.high".into(), ranges }.encode(out).unwrap();
        });
    });
    refused("run without listen", "POSTCOPY_RUN", false, |played| {
        played.open(PAGES);
        played.write(|out| Command::PostcopyRun.encode(out).unwrap());
    });
    refused("eof behind listen", "EOF", false, |played| {
        played.open(PAGES);
        played.discard_all();
        played.package(&[], &[]);
        played.every_page().chunks(64).for_each(|pages| played.pages(pages.iter().copied()));
        played.end();
    });
    refused("package without listen", "begins with", false, |played| {
        played.open(PAGES);
        let mut inner = Vec::new();
        Command::Ping(3).encode(&mut inner).unwrap();
        played.packaged(&inner);
    });
    refused("torn package", "inside an element", false, |played| {
        played.open(PAGES);
        played.packaged(&[8, 0, 4, 0]);
    });
    refused("package of another size", "package", false, |played| {
        played.open(PAGES);
        played.write(|out| Command::Packaged(200 << 20).encode(out).unwrap());
    });
    refused("no devices", "sent no state of device", false, |played| {
        played.open(PAGES);
        played.discard_all();
        played.package(&[], &[Command::PostcopyRun]);
    });
    refused("recovery", "at a wrong time", false, |played| {
        played.open(PAGES);
        played.write(|out| Command::PostcopyResume.encode(out).unwrap());
    });
    refused("a page twice", "came twice", false, |played| {
        played.open(PAGES);
        played.discard_all();
        played.package(&[], &[]);
        played.pages([(1, 5), (1, 6), (1, 5)].into_iter());
    });
    refused("a page that is there", "was not missing", false, |played| {
        played.open(PAGES);
        played.pages([(1, 5)].into_iter());
        played.write(|out| {
            let ranges = vec![(0, 4096)];
            Command::PostcopyDiscard { block: "ram.low".into(), ranges }.encode(out).unwrap();
        });
        played.package(&[], &[]);
        played.pages([(1, 5)].into_iter());
    });
    refused("connection that ends", "closed the main channel early", false, |played| {
        played.open(PAGES);
        played.discard_all();
        played.package(&[], &[]);
        played.main.shutdown(std::net::Shutdown::Write).unwrap();
    });
}

#[test]
fn bad_record_on_the_preempt_channel_is_refused() {
    for (bytes, word) in
        [(&b"\0\0\0\0\0\0\0\x40"[..], "not a page record"), (b"\0\0\0\0\0\0\0\x08\x02xx", "block list")]
    {
        refused("preempt", word, true, |played| {
            played.open(PAGES);
            played.hear_pong(0x10);
            let mut channel = played.preempt();
            played.discard_all();
            played.package(&[], &[]);
            channel.write_all(bytes).unwrap();
            // The destination reads the channel to its end.
            std::mem::forget(channel);
        });
    }
}

/// A source's misbehaviour after RUN: the guest waits, sees no other content, and is not started again.
fn paused(acts: impl FnOnce(&mut HandMadeSource)) {
    let Some((source, target, incoming, mut played)) = begun(false) else { return };
    played.hand_over();
    eventually("the guest", || target.has_guest());
    acts(&mut played);
    drop(played);
    eventually("the pause", || incoming.status() == Status::PostcopyPaused);
    assert!(incoming.cancel().is_err() && incoming.discard().is_err(), "it is not given up on one side");
    assert!(incoming.arrival().is_none());
    // The writers block in the kernel, because their pages never arrive. They end with the process.
    std::mem::forget((target, incoming, source));
}

#[test]
fn source_that_breaks_a_rule_after_run_leaves_the_guest_waiting() {
    paused(|played| played.pages([(1, 5), (1, 5)].into_iter()));
    paused(|played| played.write(|out| Command::PostcopyRun.encode(out).unwrap()));
    paused(|played| played.write(|out| out.extend_from_slice(b"garbage!")));
    paused(|_| {});
}

#[test]
fn stranger_is_no_preempt_channel_and_the_sources_own_takes_its_place() {
    let Some(capabilities) = capabilities(true) else { return };
    let (source, target) = common::pair(&config());
    let incoming = common::listen(&target, &slow(), capabilities);
    let to = incoming.address();
    let migration = common::start(&source, &to, &slow(), capabilities, Arc::new(()));
    wait_for("pages", || migration.statistics().rounds_begun > 0);
    // A hello in the correct form, from an unknown peer.
    let mut stranger = std::net::TcpStream::connect(("127.0.0.1", crate::support::port(&to))).unwrap();
    stranger.write_all(b"STNP\0\0\0\x01").unwrap();
    stranger.write_all(&[7; 48]).unwrap();
    migration.start_postcopy().unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    common::assert_arrived(&outcome, &arrival, &target);
}

#[test]
fn eof_without_listen_is_an_ordinary_end() {
    let Some((_source, _target, incoming, mut played)) = begun(false) else { return };
    played.open(PAGES);
    played.write(encode_end);
    played.hear_refusal();
    drop(played);
    // RAM's END is missing, which is also an error in precopy.
    assert!(matches!(incoming.wait(), Arrival::Failed(_)));
    let _ = Capabilities::default();
}
