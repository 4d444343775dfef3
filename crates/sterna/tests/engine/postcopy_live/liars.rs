//! Peers that misbehave in a recovery, on either side: they get no data and change no state, and the correct peer is
//! accepted after them.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use sterna::{Address, Arrival, Outcome, RunState, Status, Vm};
use sterna_guests::process::ProcessGuest;
use sterna_wire::extension::{
    ChannelBinding, Holds, MigrationSecret, ReconnectAnswer, ReconnectAnswerHead, ReconnectChannel,
    ReconnectHello,
};
use sterna_wire::main::{Command, FileHeader, MainItem};
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::return_path::ReturnMessage;

use super::peer::{HandMadeDestination, HandMadeSource, ID, SECRET};
use super::recovery::Split;
use super::{capabilities, destination, source};
use crate::common;
use crate::support::{eventually, port, until_status};

/// A played destination, whose answers the source uses.
struct Played {
    peer: HandMadeDestination,
    /// Number of pages of each block.
    pages: Vec<u64>,
    names: Vec<String>,
}

impl Played {
    fn new(peer: HandMadeDestination, guest: &ProcessGuest) -> Self {
        let ram = guest.ram();
        let pages = ram.blocks().iter().map(|block| block.pages()).collect();
        let names = ram.blocks().iter().map(|block| block.name().to_owned()).collect();
        Self { peer, pages, names }
    }

    /// Reads until the source has asked for every bitmap.
    fn is_asked(&mut self) {
        for name in &self.names {
            let asks = |item: &MainItem| matches!(item, MainItem::Command(Command::ReceivedBitmap(asked)) if asked == name);
            self.peer.until(asks);
        }
    }

    fn names_block(&mut self, block: &str) {
        self.peer.say(&ReturnMessage::ReceivedBitmap { block: block.to_owned() });
    }

    /// Sends the bitmap of this block: no page has arrived, except for `lie`.
    fn says_bitmap(&mut self, block: usize, lie: Option<u64>) {
        let mut received = ReceivedPages::none(self.pages[block]);
        lie.into_iter().for_each(|page| received.add(page));
        self.names_block(&self.names[block].clone());
        let mut bytes = Vec::new();
        received.encode(&mut bytes);
        self.peer.say_bytes(&bytes);
    }

    fn is_told_to_resume(&mut self) {
        self.peer.until(|item| matches!(item, MainItem::Command(Command::PostcopyResume)));
    }
}

type Lie = (&'static str, fn(&mut Played), &'static str);

const LIES: &[Lie] = &[
    (
        "a bitmap of another size",
        |played| {
            played.names_block("ram.low");
            let mut bytes = Vec::new();
            ReceivedPages::none(64).encode(&mut bytes);
            played.peer.say_bytes(&bytes);
        },
        "bytes for a block of",
    ),
    (
        "a bitmap without its end mark",
        |played| {
            played.names_block("ram.low");
            let mut bytes = Vec::new();
            ReceivedPages::none(played.pages[0]).encode(&mut bytes);
            *bytes.last_mut().unwrap() ^= 1;
            played.peer.say_bytes(&bytes);
        },
        "end mark",
    ),
    ("a bitmap of a block that is not there", |played| played.names_block("vga"), "\"vga\""),
    (
        "a bitmap twice",
        |played| {
            played.says_bitmap(0, None);
            played.says_bitmap(0, None);
        },
        "had not asked for it",
    ),
    (
        "a page that was never sent",
        |played| {
            played.says_bitmap(0, None);
            played.says_bitmap(1, Some(played.pages[1] - 1));
        },
        "never sent",
    ),
    (
        "a request before it was told to go on",
        |played| played.peer.say(&source::request(Some("ram.high"), 0, 4096)),
        "before the recovery",
    ),
    (
        "that it goes on, before it was told to",
        |played| played.peer.say(&ReturnMessage::ResumeAck(1)),
        "had not sent POSTCOPY_RESUME",
    ),
    (
        "another value in its answer",
        |played| {
            played.says_bitmap(0, None);
            played.says_bitmap(1, None);
            played.is_told_to_resume();
            played.peer.say_bytes(&[0, 6, 0, 4, 0, 0, 0, 2]);
        },
        "RESUME_ACK",
    ),
    ("that it has everything", |played| played.peer.say(&ReturnMessage::Shut(0)), ""),
];

#[test]
fn destination_that_lies_in_a_recovery_is_left_and_the_next_attempt_goes_on() {
    if capabilities(false).is_none() {
        return;
    }
    let (guest, migration, mut peer) = source::begun(false);
    let address = peer.address();
    peer.until(source::is_run);
    until_status(&migration, Status::PostcopyActive);
    peer.lose();
    until_status(&migration, Status::PostcopyPaused);
    let mut played = Played::new(peer, &guest);
    for (what, lies, word) in LIES {
        migration.resume(&address).unwrap();
        played.is_asked();
        assert_eq!(migration.status(), Status::PostcopyRecover, "{what}");
        lies(&mut played);
        eventually(what, || migration.status() == Status::PostcopyPaused);
        let error = migration.statistics().error.unwrap_or_default();
        assert!(error.contains(word), "{what}: {error}");
        assert!(!guest.ram().custody().may_run(), "{what}");
        played.peer.lose();
    }
    migration.resume(&address).unwrap();
    played.is_asked();
    played.peer.pages.clear();
    played.says_bitmap(1, None);
    played.says_bitmap(0, None);
    played.is_told_to_resume();
    played.peer.say(&ReturnMessage::ResumeAck(1));
    played.peer.until(|item| matches!(item, MainItem::Eof));
    played.peer.say(&ReturnMessage::Shut(0));
    assert!(matches!(migration.wait(), Outcome::Completed));
    source::assert_every_page_came(&guest, std::mem::take(&mut played.peer.pages));
}

/// Answers one hello at the returned address.
fn answering(answer: impl FnOnce(&[u8; ReconnectHello::BYTES]) -> Vec<u8> + Send + 'static) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:127.0.0.1:{}", listener.local_addr().unwrap().port()).parse().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; ReconnectHello::BYTES];
        stream.read_exact(&mut hello).unwrap();
        let _ = stream.write_all(&answer(&hello));
        // Until the source closes the connection.
        let _ = stream.read(&mut [0]);
    });
    address
}

/// Answer of the destination at that port to a hello of another connection.
fn overheard(at: u16, hello: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(("127.0.0.1", at)).unwrap();
    stream.write_all(hello).unwrap();
    let mut answer = vec![0; ReconnectAnswerHead::BYTES];
    stream.read_exact(&mut answer).unwrap();
    answer
}

#[test]
fn destination_that_cannot_prove_that_it_has_the_guest_gets_no_page() {
    let Some(split) = Split::plain(false) else { return };
    split.cable.cut();
    split.paused();
    let at = port(&split.incoming.address());
    let holds = |session| ReconnectAnswer::Holds(Holds { session, rounds: 0, pages: Vec::new() });
    let strange = move |hello: &[u8; ReconnectHello::BYTES], answer: ReconnectAnswer| {
        let (hello, _) = ReconnectHello::decode(hello).unwrap().unwrap();
        let mut bytes = Vec::new();
        let secret = MigrationSecret::from_bytes([1; 32]);
        answer.encode(&hello, &secret, &ChannelBinding::default(), &mut bytes);
        bytes
    };
    let (tell, old) = std::sync::mpsc::channel();
    let stranger = "does not know the migration's secret";
    let attempts = [
        ("another secret", answering(move |hello| strange(hello, holds(1))), stranger),
        (
            "no guest, by another secret",
            answering(move |hello| strange(hello, ReconnectAnswer::Over)),
            stranger,
        ),
        ("no answer of this kind", answering(|_| vec![7; ReconnectAnswerHead::BYTES]), "reconnect answer"),
        (
            "an answer with another byte",
            answering(move |hello| {
                let answer = overheard(at, hello);
                tell.send(answer.clone()).unwrap();
                let mut changed = answer;
                changed[15] ^= 4;
                changed
            }),
            stranger,
        ),
        ("the answer to an older hello", answering(move |_| old.recv().unwrap()), stranger),
    ];
    for (what, address, word) in attempts {
        let before = split.migration.statistics().postcopy_bytes;
        let pauses = || split.told(0).iter().filter(|status| **status == Status::PostcopyPaused).count();
        let paused = pauses();
        split.migration.resume(&address).unwrap();
        eventually(what, || pauses() > paused);
        let error = split.migration.statistics().error.unwrap_or_default();
        assert!(error.contains(word), "{what}: {error}");
        assert_eq!(split.migration.statistics().postcopy_bytes, before, "{what}");
        assert!(!split.source.ram().custody().may_run(), "{what}");
    }
    eventually("the pause", || split.incoming.status() == Status::PostcopyPaused);
    split.resume();
    split.arrives();
}

fn hello(session: u32, channel: ReconnectChannel, id: [u8; 16], secret: [u8; 32]) -> ReconnectHello {
    let secret = MigrationSecret::from_bytes(secret);
    ReconnectHello::new(id, (session, channel), [3; 16], &secret, &ChannelBinding::default())
}

fn of_session(session: u32) -> ReconnectHello {
    hello(session, ReconnectChannel::Recovery, ID, SECRET)
}

fn asks(played: &mut HandMadeSource, commands: &[Command]) {
    played.write(|out| commands.iter().for_each(|command| command.encode(out).unwrap()));
}

#[test]
fn source_that_misbehaves_in_a_recovery_is_left_and_the_right_one_is_let_in() {
    let Some((_source, target, incoming, mut played)) = destination::begun(false) else { return };
    played.hand_over_as_sterna();
    played.lose();
    let paused = || eventually("the pause", || incoming.status() == Status::PostcopyPaused);
    paused();
    use ReconnectChannel::{GivesUp, Lane, Main, Preempt, Recovery};
    for refused in [
        hello(1, Recovery, ID, [7; 32]),
        hello(1, Recovery, [8; 16], SECRET),
        hello(1, Main, ID, SECRET),
        hello(1, Lane(0), ID, SECRET),
        hello(1, GivesUp, ID, SECRET),
        hello(1, Preempt, ID, SECRET),
    ] {
        assert!(!played.comes_back(&refused), "{refused:?}");
        assert_eq!(incoming.status(), Status::PostcopyPaused);
    }
    let bitmap = |name: &str| Command::ReceivedBitmap(name.to_owned());
    let wrong: [(u32, &str, &[Command]); 4] = [
        (5, "no such block", &[bitmap("vga")]),
        (7, "the guest runs already", &[Command::PostcopyRun]),
        (8, "twice", &[Command::PostcopyResume, Command::PostcopyResume]),
        (9, "too late", &[Command::PostcopyResume, bitmap("ram.low")]),
    ];
    for (session, what, commands) in wrong {
        assert!(played.comes_back(&of_session(session)), "{what}");
        asks(&mut played, commands);
        paused();
        // A used session number, and an older one, are rejected.
        for old in [session, session - 1] {
            assert!(!played.comes_back(&of_session(old)), "{what}: session {old}");
        }
    }
    // Another stream, from its beginning.
    assert!(played.comes_back(&of_session(20)));
    played.write(|out| FileHeader.encode(out));
    paused();

    assert!(played.comes_back(&of_session(21)));
    asks(&mut played, &[bitmap("ram.high"), bitmap("ram.low")]);
    let (high, low) = (played.hear_bitmap(1), played.hear_bitmap(0));
    asks(&mut played, &[Command::PostcopyResume]);
    let missing = played.every_page().into_iter().filter(|(block, page)| ![&low, &high][*block].has(*page));
    let missing: Vec<_> = missing.collect();
    assert!(missing.len() as u64 == low.missing() + high.missing() && !missing.is_empty());
    missing.chunks(64).for_each(|pages| played.pages(pages.iter().copied()));
    played.end();
    let shut = std::iter::from_fn(|| played.hear())
        .find_map(|message| if let ReturnMessage::Shut(code) = message { Some(code) } else { None });
    assert_eq!(shut, Some(0));
    drop(played);
    let arrival = incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
    common::assert_lives_on(&target);
}
