//! The connection between primary and standby of a protected guest: bytes, and what passes for authentic.

use crate::common::hex;
use sterna_wire::Fault;
use sterna_wire::extension::{ChannelBinding, MigrationSecret};
use sterna_wire::replica::{Hello, Message, Role, Session, Terms, Welcome};

const BINDING: ChannelBinding = Some([0x33; 32]);
const TERMS: Terms = Terms {
    heartbeat_us: 200_000,
    lease_us: 2_000_000,
    margin_us: 500_000,
    claim_interval_us: 1_000_000,
    drift_per_mille: 10,
};
const OF_PRIMARY: [Message; 3] = [Message::Heartbeat(9), Message::Unprotect, Message::Give];
const OF_STANDBY: [Message; 4] =
    [Message::Answer { held: 3, heartbeat: 9 }, Message::Never, Message::Runs, Message::HandOver];

fn secret() -> MigrationSecret {
    MigrationSecret::from_bytes(std::array::from_fn(|at| at as u8))
}

fn hello() -> Hello {
    Hello::new([0x11; 16], 3, true, TERMS, [0x22; 16], &secret(), &BINDING)
}

fn welcome() -> Welcome {
    Welcome::new([0x44; 16], &hello(), &secret(), &BINDING)
}

fn session(role: Role) -> Session {
    Session::new(role, &secret(), &hello(), &welcome(), &BINDING)
}

fn sealed(session: &mut Session, message: Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    session.seal(message, &mut bytes).expect("one of this side");
    bytes
}

#[test]
fn bytes_are_those_of_the_specification() {
    // MACs computed with another implementation of HMAC-SHA-256.
    let mut bytes = Vec::new();
    hello().encode(&mut bytes);
    let head = format!(
        "53544e5200000001{}000000000000000300000001{}{}",
        "11".repeat(16),
        "00030d40001e84800007a120000f42400000000a",
        "22".repeat(16)
    );
    assert_eq!(
        hex(&bytes),
        format!("{head}c34292aa10b5d7dc492f1b52a033bb9600f8cda82438cceb9f8d247349a3737e")
    );
    bytes.clear();
    welcome().encode(&mut bytes);
    assert_eq!(
        hex(&bytes),
        format!(
            "53544e5200000001{}18ad9a175537eb7b7bb3f5d9f5c0d0313de9cc90a2f675b9735501ab8b3d62d3",
            "44".repeat(16)
        )
    );
    let answer = sealed(&mut session(Role::Standby), OF_STANDBY[0]);
    let body = "0000001000000000000000030000000000000009";
    assert_eq!(
        hex(&answer),
        format!("{body}8305c38350ffefb1af61335e048e32d40e0b3689a17f6dac03e365bb21a504dc")
    );
    assert_eq!((bytes.len(), answer.len()), (Welcome::BYTES, Message::BYTES));
}

#[test]
fn changed_greeting_is_not_authentic() {
    let mut bytes = Vec::new();
    hello().encode(&mut bytes);
    assert_eq!(bytes.len(), Hello::BYTES);
    for at in (8..bytes.len()).filter(|at| !(24..36).contains(at)) {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        let (read, _) = Hello::decode(&changed).expect("well formed").expect("whole");
        assert!(!read.is_authentic(&secret(), &BINDING), "byte {at}");
    }
    assert!(hello().is_authentic(&secret(), &BINDING));
    assert!(!hello().is_authentic(&secret(), &None), "without TLS");
    assert!(!hello().is_authentic(&MigrationSecret::from_bytes([9; 32]), &BINDING), "another secret");
    let other = Hello::new([0x11; 16], 3, true, TERMS, [0x23; 16], &secret(), &BINDING);
    assert!(welcome().is_authentic(&hello(), &secret(), &BINDING));
    assert!(!welcome().is_authentic(&other, &secret(), &BINDING), "another hello");
}

#[test]
fn differences_are_announced_beside_the_fence_and_change_the_proof() {
    let announcing = hello().announcing_differences(&secret(), &BINDING);
    let mut bytes = Vec::new();
    announcing.encode(&mut bytes);
    assert_eq!(bytes[32..36], [0, 0, 0, 3]);
    let (read, _) = Hello::decode(&bytes).expect("well formed").expect("whole");
    assert!(read.sends_differences && read.needs_fence && read.is_authentic(&secret(), &BINDING));
    // Nobody on the way takes it back.
    bytes[35] = 1;
    let (read, _) = Hello::decode(&bytes).expect("well formed").expect("whole");
    assert!(!read.sends_differences && !read.is_authentic(&secret(), &BINDING));
}

#[test]
fn every_message_arrives_and_only_at_its_place() {
    let (mut primary, mut standby) = (session(Role::Primary), session(Role::Standby));
    for message in OF_PRIMARY {
        let bytes = sealed(&mut primary, message);
        for length in 0..bytes.len() {
            assert_eq!(standby.open(&bytes[..length]), Ok(None));
        }
        assert_eq!(standby.open(&bytes), Ok(Some((message, bytes.len()))));
        assert!(standby.open(&bytes).is_err(), "{message:?} counted twice");
    }
    for message in OF_STANDBY {
        let bytes = sealed(&mut standby, message);
        assert_eq!(primary.open(&bytes), Ok(Some((message, bytes.len()))));
    }
    let _left_out = sealed(&mut standby, Message::Never);
    let next = sealed(&mut standby, Message::Runs);
    assert!(primary.open(&next).is_err(), "one was left out");
}

#[test]
fn message_of_another_session_or_side_or_with_a_changed_bit_is_refused() {
    let bytes = sealed(&mut session(Role::Standby), OF_STANDBY[0]);
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let error = session(Role::Primary).open(&changed).expect_err("changed");
        assert_eq!(error.fault, Fault::PeerMisbehaved, "bit {bit}");
    }
    assert!(session(Role::Standby).open(&bytes).is_err(), "its own");
    let nonce = Welcome::new([0x45; 16], &hello(), &secret(), &BINDING);
    let mut other = Session::new(Role::Primary, &secret(), &hello(), &nonce, &BINDING);
    assert!(other.open(&bytes).is_err(), "another connection's");
    let error = session(Role::Primary).seal(Message::Never, &mut Vec::new()).expect_err("the standby's");
    assert_eq!(error.fault, Fault::Local);
}

#[test]
fn greeting_of_another_version_or_with_unknown_flags_says_so() {
    let mut bytes = Vec::new();
    hello().encode(&mut bytes);
    let read = |at: usize, value: u8| {
        let mut changed = bytes.clone();
        changed[at] = value;
        Hello::decode(&changed).expect_err("refused")
    };
    assert!(read(0, 0).to_string().contains("STNR"));
    assert!(read(7, 2).to_string().contains("run the same Sterna on both sides"));
    assert!(read(31, 0).to_string().contains("at least 1"));
    assert!(read(35, 4).to_string().contains("only 1 and 2 are known"));
}
