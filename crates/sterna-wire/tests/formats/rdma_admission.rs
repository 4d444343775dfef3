//! The connect requests that a destination accepts, and the parts that it assigns.

use sterna_wire::rdma::{Admission, ChunkSize, ConnectReply, ConnectRequest, Introduction, Part};
use sterna_wire::{Fault, WireError};

fn of(session: u8, part: Part) -> Vec<u8> {
    flagged(session, part, false)
}

fn flagged(session: u8, part: Part, pin_all: bool) -> Vec<u8> {
    let (version, chunk, session) = (1, ChunkSize::LEAST, [session; 16]);
    let own = Introduction { version, part, lanes: 4, chunk, session, nonce: [9; 16] };
    ConnectRequest { pin_all, introduction: Some(own) }.to_bytes()
}

/// A QEMU's private data as the connection manager delivers it, padded.
fn qemu(pin_all: bool) -> Vec<u8> {
    let mut bytes = ConnectRequest { pin_all, introduction: None }.to_bytes();
    bytes.resize(56, 0);
    bytes
}

fn admission() -> Admission {
    Admission::new(3, ChunkSize::MOST)
}

fn refused(result: Result<(Part, ConnectReply), WireError>, at: u64, words: &str) {
    let error = result.expect_err(words);
    assert_eq!((error.offset, error.fault), (at, Fault::PeerIncompatible), "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn first_connection_of_a_qemu_is_main_and_the_second_the_return_path() {
    for pin_all in [false, true] {
        let mut admission = admission();
        let plain = ConnectReply { pin_all, introduction: None, pinned_limit: None };
        assert_eq!(admission.request(&qemu(pin_all)), Ok((Part::Main, plain)));
        assert!(admission.has(Part::Main) && !admission.has(Part::ReturnPath));
        assert_eq!(admission.introduction(), None);
        assert_eq!(admission.request(&qemu(pin_all)), Ok((Part::ReturnPath, plain)));
        refused(admission.request(&qemu(pin_all)), 8, "the return path exists already");
    }
}

#[test]
fn connections_of_a_sterna_take_the_places_that_they_name() {
    let mut admission = admission();
    let (part, reply) = admission.request(&of(1, Part::Main)).unwrap();
    let reply = reply.introduction.unwrap();
    assert_eq!((part, reply.lanes, reply.chunk), (Part::Main, 3, ChunkSize::MOST));
    assert_eq!(admission.introduction().map(|own| own.session), Some([1; 16]));
    for part in [Part::Lane(2), Part::ReturnPath, Part::Lane(0)] {
        assert_eq!(admission.request(&of(1, part)).unwrap().0, part);
        assert!(admission.has(part));
        refused(admission.request(&of(1, part)), 8, "exists already");
    }
    refused(admission.request(&of(1, Part::Main)), 8, "the main connection exists already");
    refused(admission.request(&of(1, Part::Lane(3))), 20, "this side accepts 3");
    assert!(!admission.has(Part::Lane(1)) && !admission.has(Part::Lane(3)));
}

#[test]
fn connections_that_do_not_belong_to_the_main_one_are_refused_and_change_nothing() {
    for part in [Part::ReturnPath, Part::Lane(0)] {
        refused(admission().request(&of(1, part)), 8, "without a main connection");
        let mut sterna = admission();
        sterna.request(&of(1, Part::Main)).unwrap();
        refused(sterna.request(&of(2, part)), 24, "of another migration");
        refused(sterna.request(&flagged(1, part, true)), 4, "other flags");
        refused(sterna.request(&qemu(false)), 24, "of another migration");
        assert!(sterna.request(&of(1, part)).is_ok());
        let mut plain = admission();
        plain.request(&qemu(false)).unwrap();
        refused(plain.request(&of(1, part)), 24, "of another migration");
        refused(plain.request(&of(1, Part::Main)), 8, "exists already");
        refused(plain.request(&qemu(true)), 4, "other flags");
        assert!(plain.request(&qemu(false)).is_ok());
    }
    let mut admission = admission();
    assert!(admission.request(&[0; 56]).is_err() && admission.request(&[]).is_err());
    assert!(!admission.has(Part::Main));
}

#[test]
fn question_is_admitted_at_any_time_and_takes_no_place() {
    let mut admission = admission();
    for _ in 0..2 {
        for session in 1..4 {
            let (part, reply) = admission.request(&of(session, Part::Question)).unwrap();
            assert_eq!((part, reply.introduction.unwrap().session), (Part::Question, [session; 16]));
        }
        if !admission.has(Part::Main) {
            admission.request(&of(7, Part::Main)).unwrap();
        }
    }
    assert!(!admission.has(Part::Question));
}

#[test]
fn place_of_a_connection_that_ended_is_free_and_all_are_without_the_main_one() {
    let mut admission = admission();
    admission.request(&of(1, Part::Main)).unwrap();
    for part in [Part::ReturnPath, Part::Lane(0)] {
        admission.request(&of(1, part)).unwrap();
    }
    admission.ended(Part::Lane(0));
    assert!(admission.has(Part::ReturnPath) && !admission.has(Part::Lane(0)));
    assert!(admission.request(&of(1, Part::Lane(0))).is_ok());

    // The next source may be any kind of peer.
    admission.ended(Part::Main);
    assert!(![Part::Main, Part::ReturnPath, Part::Lane(0)].iter().any(|part| admission.has(*part)));
    refused(admission.request(&of(1, Part::Lane(0))), 8, "without a main connection");
    assert_eq!(admission.request(&qemu(true)).unwrap().0, Part::Main);
    assert_eq!(admission.request(&qemu(true)).unwrap().0, Part::ReturnPath);
}
