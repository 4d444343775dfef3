//! The connection between primary and standby of a protected guest: bytes and authentication.

use crate::common::hex;
use sterna_wire::Fault;
use sterna_wire::PAGE_SIZE;
use sterna_wire::extension::{ChannelBinding, MigrationSecret};
use sterna_wire::replica::{
    ArbiterIdentity, ArbiterStore, CheckpointSummary, Hello, Message, PageSums, Role, Session, Terms, Welcome,
};

const BINDING: ChannelBinding = Some([0x33; 32]);
const TERMS: Terms = Terms {
    heartbeat_us: 200_000,
    lease_us: 2_000_000,
    margin_us: 500_000,
    claim_interval_us: 1_000_000,
    drift_per_mille: 10,
};
const OF_PRIMARY: [Message; 4] = [Message::Heartbeat(9), Message::Unprotect, Message::Give, Message::Gone];
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
    // Another implementation of HMAC-SHA-256 computed the MACs.
    let mut bytes = Vec::new();
    hello().encode(&mut bytes);
    let head = format!(
        "53544e5200000002{}000000000000000300000001{}{}",
        "11".repeat(16),
        "00030d40001e84800007a120000f42400000000a",
        "22".repeat(16)
    );
    assert_eq!(
        hex(&bytes),
        format!("{head}c396376b7e77b0a33f06a68e17debd195b451c80dac65ab6b32844abde17243c")
    );
    bytes.clear();
    welcome().encode(&mut bytes);
    assert_eq!(
        hex(&bytes),
        format!(
            "53544e5200000002{}b20e27a67201e51031ced2e2d66be7fb41e61b6b5efb54de8c57cf84dd8ec81d",
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
    let mut bytes = Vec::new();
    session(Role::Primary).seal_arbiter(&arbiter(), &mut bytes).expect("short");
    let body = "000c011066696c653a2f636c61696d7330313233343536373839616263646566";
    assert_eq!(
        hex(&bytes),
        format!("{body}67becb99ce55866ff75a4a3525a7071700de4e0af8a50df7449c0e72ac2e1482")
    );
}

fn arbiter() -> ArbiterIdentity {
    identity("file:/claims", token("0123456789abcdef"))
}

fn identity(name: &str, store: ArbiterStore) -> ArbiterIdentity {
    ArbiterIdentity { name: name.to_owned(), store }
}

fn token(text: &str) -> ArbiterStore {
    ArbiterStore::Token(text.to_owned())
}

#[test]
fn arbiter_is_read_as_it_was_said_and_only_at_its_place_and_unchanged() {
    for identity in [
        arbiter(),
        identity("ask", ArbiterStore::Nothing),
        identity("", ArbiterStore::OutOfReach("no route".to_owned())),
        identity(&"n".repeat(1024), token(&"t".repeat(255))),
    ] {
        let mut bytes = Vec::new();
        session(Role::Primary).seal_arbiter(&identity, &mut bytes).expect("not too long");
        let mut reader = session(Role::Standby);
        for length in 0..bytes.len() {
            assert_eq!(reader.open_arbiter(&bytes[..length]), Ok(None));
        }
        let head = bytes[..ArbiterIdentity::HEAD_BYTES].try_into().expect("four bytes");
        let rest = ArbiterIdentity::rest_bytes(head).expect("permitted");
        assert_eq!(rest, bytes.len() - ArbiterIdentity::HEAD_BYTES);
        assert_eq!(reader.open_arbiter(&bytes), Ok(Some((identity, bytes.len()))));
        assert!(reader.open_arbiter(&bytes).is_err(), "twice");
        assert!(session(Role::Primary).open_arbiter(&bytes).is_err(), "its own");
    }
    let mut bytes = Vec::new();
    session(Role::Primary).seal_arbiter(&arbiter(), &mut bytes).expect("short");
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let read = session(Role::Standby).open_arbiter(&changed);
        assert!(!matches!(read, Ok(Some(_))), "bit {bit}");
    }
}

#[test]
fn arbiter_that_breaks_a_rule_is_refused_by_name() {
    for long in [identity(&"n".repeat(1025), ArbiterStore::Nothing), identity("", token(&"t".repeat(256)))] {
        let error = session(Role::Primary).seal_arbiter(&long, &mut Vec::new()).expect_err("too long");
        assert_eq!(error.fault, Fault::Local);
    }
    for (head, what) in [
        ([4, 1, 0, 0], "name of 1025 bytes"),
        ([0, 1, 3, 0], "kind 3"),
        ([0, 1, 0, 1], "stores nothing has no token"),
        ([0, 1, 1, 0], "any other arbiter has one"),
    ] {
        let error = ArbiterIdentity::rest_bytes(head).expect_err("refused");
        assert_eq!(error.fault, Fault::PeerMisbehaved);
        assert!(error.to_string().contains(what), "{error}");
        let read = session(Role::Standby).open_arbiter(&[&head[..], &[b'n'; 4096]].concat());
        assert_eq!(read, Err(error));
    }
    let read = session(Role::Standby).open_arbiter(&[0, 2, 0, 0, b'a', 0]);
    assert!(read.expect_err("NUL").to_string().contains("NUL"));
}

#[test]
fn arbiters_are_one_if_both_have_the_same_token_or_neither_has_one_and_their_names_are_equal() {
    let lost = || ArbiterStore::OutOfReach("no route".to_owned());
    for (one, other, is_same) in [
        (identity("file:/a", token("7")), identity("file:/b", token("7")), true),
        (identity("file:/a", token("7")), identity("file:/a", token("8")), false),
        (identity("file:/a", token("7")), identity("file:/a", ArbiterStore::Nothing), false),
        (identity("ask", ArbiterStore::Nothing), identity("ask", ArbiterStore::Nothing), true),
        (identity("exec:/a", ArbiterStore::Nothing), identity("exec:/b", ArbiterStore::Nothing), false),
        (identity("file:/a", lost()), identity("file:/a", lost()), false),
    ] {
        assert_eq!((one.is_same(&other), other.is_same(&one)), (is_same, is_same), "{one:?} {other:?}");
    }
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
    // An attacker on the connection cannot remove the flag.
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
    assert!(read(7, 1).to_string().contains("run the same Sterna on both sides"));
    assert!(read(31, 0).to_string().contains("at least 1"));
    assert!(read(35, 4).to_string().contains("only 1 and 2 are known"));
}

fn summary() -> CheckpointSummary {
    let mut pages = PageSums::default();
    pages.page(0, 7, &[0x55; PAGE_SIZE]);
    pages.page(1, 7, &std::array::from_fn::<u8, PAGE_SIZE, _>(|at| (at * 7 % 251) as u8));
    pages.zeros(1, 8, 3);
    CheckpointSummary::of(9, pages, b"sections")
}

#[test]
fn summary_of_a_checkpoint_has_the_bytes_of_the_specification_and_no_other_length() {
    let body = summary().encode();
    // Another implementation of XXH3 computed the digests.
    assert_eq!(
        hex(&body),
        "000000000000000900000000000000020000000000000003b4d637cce4dd2b0939db2078b7e877e6"
    );
    assert_eq!(body.len(), CheckpointSummary::BODY_BYTES);
    assert_eq!(CheckpointSummary::decode(&body), Ok(summary()));
    for length in 0..body.len() {
        let error = CheckpointSummary::decode(&body[..length]).unwrap_err();
        assert!(error.to_string().contains(&format!("it has {length} bytes, not 40")), "{error}");
        assert_eq!(error.fault, Fault::PeerMisbehaved);
    }
    assert!(CheckpointSummary::decode(&[&body[..], &[0]].concat()).is_err());
}

#[test]
fn digest_of_pages_depends_on_content_and_place_and_not_on_their_order_or_how_they_came() {
    let (a, b) = ([0x55; PAGE_SIZE], [0xaa; PAGE_SIZE]);
    let of = |pages: &[(usize, u64, &[u8])]| {
        let mut sums = PageSums::default();
        pages.iter().for_each(|(block, page, content)| sums.page(*block, *page, content));
        sums
    };
    let whole = of(&[(0, 1, &a), (0, 2, &b), (1, 1, &a)]);
    let mut lanes = of(&[(1, 1, &a)]);
    lanes.add(&of(&[(0, 2, &b), (0, 1, &a)]));
    assert_eq!(lanes, whole);
    let mut changed = a;
    changed[PAGE_SIZE - 1] ^= 1;
    let others: [&[(usize, u64, &[u8])]; 6] = [
        &[(0, 1, &changed), (0, 2, &b), (1, 1, &a)],
        // Pages with exchanged content, blocks or numbers.
        &[(0, 1, &b), (0, 2, &a), (1, 1, &a)],
        &[(1, 1, &a), (1, 2, &b), (0, 1, &a)],
        &[(0, 2, &a), (0, 1, &b), (1, 1, &a)],
        &[(0, 1, &a), (0, 2, &b), (2, 1, &a)],
        &[(0, 1, &a), (0, 2, &b), (0, 2, &b)],
    ];
    for other in others {
        let other = of(other);
        assert_eq!(other.normal_pages, 3);
        assert_ne!(other.digest, whole.digest);
    }
    let mut zeros = PageSums::default();
    zeros.zeros(0, 3, 2);
    let sent_whole = of(&[(0, 3, &[0; PAGE_SIZE]), (0, 4, &[0; PAGE_SIZE])]);
    assert_eq!(zeros.digest, sent_whole.digest);
    assert_ne!(zeros, sent_whole, "they are counted by how they came");
}

#[test]
fn first_field_of_a_summary_that_differs_is_named() {
    let said = summary();
    assert_eq!(said.difference(&said), None);
    let fields = [
        "number",
        "count of normal pages",
        "count of zero pages",
        "digest of the pages",
        "digest of the sections",
    ];
    for (at, field) in fields.into_iter().enumerate() {
        let mut body = said.encode();
        body[at * 8 + 7] ^= 1;
        let found = CheckpointSummary::decode(&body).unwrap();
        let differs = said.difference(&found).expect("one differs");
        assert_eq!((differs.field, differs.said ^ 1), (field, differs.found));
    }
}
