//! Question and answer after a lost acknowledgement: bytes and authentication.

use crate::common::hex;
use sterna_wire::Fault;
use sterna_wire::extension::{Handover, MigrationSecret, Status, StatusAnswer, StatusQuestion};

const ID: [u8; 16] = [0x11; 16];
const NONCE: [u8; 16] = [0x22; 16];
const BINDING: Option<[u8; 32]> = Some([0x33; 32]);

fn secret() -> MigrationSecret {
    MigrationSecret::from_bytes(std::array::from_fn(|at| at as u8))
}

fn question() -> StatusQuestion {
    StatusQuestion::new(ID, NONCE, &secret(), &BINDING)
}

#[test]
fn bytes_are_those_of_the_specification() {
    // Another implementation of HMAC-SHA-256 computed the MACs.
    let mut bytes = Vec::new();
    question().encode(&mut bytes);
    let head = format!("53544e5100000002{}{}", "11".repeat(16), "22".repeat(16));
    let mac = "d7610716bac3783bb2ef44f20f4a09d936b50c4722a93073d4636e2d8e9de7c7";
    assert_eq!(hex(&bytes), format!("{head}{mac}"));

    bytes.clear();
    StatusQuestion::new(ID, NONCE, &secret(), &None).encode(&mut bytes);
    let mac = "6492dc843eaa89f2316b6ab06eb810926370ebcaf7086f0a68832fae1c52328d";
    assert_eq!(hex(&bytes), format!("{head}{mac}"));

    bytes.clear();
    StatusAnswer::new(Status::Never, &question(), &secret(), &BINDING).encode(&mut bytes);
    let mac = "cc7653c51b416f7f4593515f6745194c1f1fab604b561eec562269886aa1cff5";
    assert_eq!(hex(&bytes), format!("53544e510000000200000002{mac}"));
}

#[test]
fn changed_question_is_not_authentic() {
    let mut bytes = Vec::new();
    question().encode(&mut bytes);
    let read = |bytes: &[u8]| StatusQuestion::decode(bytes).unwrap().unwrap().0;
    assert!(read(&bytes).is_authentic(&secret(), &BINDING));
    for at in 8..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        assert!(!read(&changed).is_authentic(&secret(), &BINDING), "byte {at}");
    }
    assert!(!question().is_authentic(&MigrationSecret::from_bytes([9; 32]), &BINDING), "another secret");
    assert!(!question().is_authentic(&secret(), &Some([0x34; 32])), "another TLS session");
    assert!(!question().is_authentic(&secret(), &None), "without TLS");
}

#[test]
fn answer_holds_for_its_question_only() {
    for status in [Status::Committed, Status::Never, Status::Pending] {
        let answer = StatusAnswer::new(status, &question(), &secret(), &BINDING);
        assert!(answer.is_authentic(&question(), &secret(), &BINDING));
        let other_nonce = StatusQuestion::new(ID, [0x23; 16], &secret(), &BINDING);
        assert!(!answer.is_authentic(&other_nonce, &secret(), &BINDING));
        let other_migration = StatusQuestion::new([0x12; 16], NONCE, &secret(), &BINDING);
        assert!(!answer.is_authentic(&other_migration, &secret(), &BINDING));
        assert!(!answer.is_authentic(&question(), &secret(), &None), "without TLS");

        // Another status with this answer's MAC, and every other changed byte.
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        for at in 11..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            let Ok(Some((read, _))) = StatusAnswer::decode(&changed) else { continue };
            assert!(!read.is_authentic(&question(), &secret(), &BINDING), "byte {at}");
        }
    }
}

#[test]
fn question_reflected_as_an_answer_is_not_authentic() {
    let mut asked = Vec::new();
    question().encode(&mut asked);
    // The question's MAC with the head of each answer.
    for status in 1..=3_u8 {
        let mut bytes = b"STNQ\0\0\0\x02\0\0\0".to_vec();
        bytes.push(status);
        bytes.extend_from_slice(&asked[40..]);
        let (answer, _) = StatusAnswer::decode(&bytes).unwrap().unwrap();
        assert!(!answer.is_authentic(&question(), &secret(), &BINDING));
    }
}

#[test]
fn version_1_is_refused() {
    let mut old = b"STNQ\0\0\0\x01".to_vec();
    old.extend_from_slice(&ID);
    assert_eq!(StatusQuestion::decode(&old).unwrap_err().fault, Fault::PeerIncompatible);
    let old = b"STNQ\0\0\0\x01\0\0\0\x02";
    assert_eq!(StatusAnswer::decode(old).unwrap_err().fault, Fault::PeerIncompatible);
}

#[test]
fn labels_and_lengths_are_authenticated() {
    let secret = secret();
    let mac = secret.mac("one", &[b"ab", b"c"]);
    assert!(secret.verify("one", &[b"ab", b"c"], &mac));
    assert!(!secret.verify("two", &[b"ab", b"c"], &mac));
    assert!(!secret.verify("one", &[b"a", b"bc"], &mac));
    assert!(!secret.verify("one", &[b"abc"], &mac));
    assert!(!secret.verify("one", &[b"ab", b"c", b""], &mac));
    assert!(!secret.verify("oneab", &[b"c"], &mac));
}

#[test]
fn secret_does_not_show_itself() {
    let text =
        format!("{:?}", Handover { migration_id: ID, secret: Some(MigrationSecret::from_bytes([77; 32])) });
    assert!(!text.contains("77"), "{text}");
}

#[test]
fn handover_has_the_length_of_its_version() {
    let both = Handover { migration_id: ID, secret: Some(secret()) }.encode();
    assert_eq!((both.0, both.1.len()), (2, 48));
    assert!(Handover::decode(2, &both.1).unwrap().secret.is_some());
    assert!(Handover::decode(1, &ID).unwrap().secret.is_none());
    for (version, body) in [(1, &both.1[..]), (2, &ID[..]), (2, &both.1[..47]), (1, &[]), (2, &[0; 48])] {
        assert_eq!(Handover::decode(version, body).unwrap_err().fault, Fault::PeerMisbehaved, "{version}");
    }
    for version in [0, 3] {
        assert_eq!(Handover::decode(version, &both.1).unwrap_err().fault, Fault::PeerIncompatible);
    }
}
