//! The messages between primary and standby of a protected guest, in addition to its state.

use sterna_wire::extension::MigrationSecret;
use sterna_wire::replica::{
    ArbiterIdentity, ArbiterStore, CheckpointSummary, Hello, Message, Role, Session, Terms, Welcome,
};

/// Decodes one input in three ways: as a greeting, as the summary of a checkpoint, and as messages of a
/// session. The session's messages are tried with a wrong MAC and with the correct one.
pub fn target(data: &[u8]) {
    let mut again = Vec::new();
    if let Ok(Some((hello, used))) = Hello::decode(data) {
        hello.encode(&mut again);
        assert_eq!(again, data[..used]);
        assert!(!hello.is_authentic(&secret(), &None), "nobody told the fuzzer the secret");
    }
    again.clear();
    if let Ok(Some((welcome, used))) = Welcome::decode(data) {
        welcome.encode(&mut again);
        assert_eq!(again, data[..used]);
    }
    if let Ok(summary) = CheckpointSummary::decode(data) {
        assert_eq!(summary.encode(), data);
        assert_eq!(summary.difference(&summary), None);
    }
    for reader in [Role::Primary, Role::Standby] {
        arbiter(data, reader);
        let (mut reads, mut sends) = (session(reader), session(other(reader)));
        for body in data.chunks_exact(Message::BYTES - 32) {
            let mut message = body.to_vec();
            message.extend_from_slice(&[0; 32]);
            assert!(!matches!(session(reader).open(&message), Ok(Some(_))), "accepted without a MAC");
            let Some(said) = said(body) else { continue };
            let mut sealed = Vec::new();
            if sends.seal(said, &mut sealed).is_ok() {
                assert_eq!(reads.open(&sealed), Ok(Some((said, sealed.len()))));
                assert!(reads.clone().open(&sealed).is_err(), "accepted twice");
            }
        }
    }
}

/// Decodes the identity of the peer's arbiter, first as received, then with a correct MAC.
fn arbiter(data: &[u8], reader: Role) {
    assert!(!matches!(session(reader).open_arbiter(data), Ok(Some(_))), "accepted without a MAC");
    let Some((head, rest)) = data.split_first_chunk() else { return };
    let Ok(length) = ArbiterIdentity::rest_bytes(*head) else {
        return assert!(session(reader).open_arbiter(data).is_err());
    };
    let text =
        |bytes: &[u8]| std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0')).map(str::to_owned);
    let name_bytes = usize::from(u16::from_be_bytes([head[0], head[1]]));
    let Some(both) = rest.get(..length - ArbiterIdentity::MAC_BYTES) else { return };
    let (name, token) = both.split_at(name_bytes);
    let (Some(name), Some(token)) = (text(name), text(token)) else { return };
    let store = match head[2] {
        0 => ArbiterStore::Nothing,
        1 => ArbiterStore::Token(token),
        _ => ArbiterStore::OutOfReach(token),
    };
    let identity = ArbiterIdentity { name, store };
    let mut sealed = Vec::new();
    session(other(reader)).seal_arbiter(&identity, &mut sealed).expect("not too long");
    let mut reads = session(reader);
    assert_eq!(reads.open_arbiter(&sealed), Ok(Some((identity, sealed.len()))));
    assert!(reads.open_arbiter(&sealed).is_err(), "accepted twice");
}

/// Builds a message from the type and values in `body`.
fn said(body: &[u8]) -> Option<Message> {
    let value = |at: usize| u64::from_be_bytes(body[at..at + 8].try_into().expect("8 bytes"));
    Some(match body[3] % 8 {
        0 => Message::Gone,
        1 => Message::Heartbeat(value(4)),
        2 => Message::Unprotect,
        3 => Message::Give,
        4 => Message::Answer { held: value(4), heartbeat: value(12) },
        5 => Message::Never,
        6 => Message::Runs,
        7 => Message::HandOver,
        _ => return None,
    })
}

fn secret() -> MigrationSecret {
    MigrationSecret::from_bytes([7; 32])
}

fn other(role: Role) -> Role {
    match role {
        Role::Primary => Role::Standby,
        Role::Standby => Role::Primary,
    }
}

fn session(role: Role) -> Session {
    let terms =
        Terms { heartbeat_us: 1, lease_us: 2, margin_us: 3, claim_interval_us: 4, drift_per_mille: 5 };
    let hello = Hello::new([1; 16], 1, false, terms, [2; 16], &secret(), &None);
    let welcome = Welcome::new([3; 16], &hello, &secret(), &None);
    Session::new(role, &secret(), &hello, &welcome, &None)
}
