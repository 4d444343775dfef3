//! The greeting of a carrier over its channel (`specs/relay.md §2`).

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use sterna_transport::{Channel, TransportError};

use super::error::RelayError;
use crate::frame::{
    Answer, Binding, Confirm, Hello, Offer, Purpose, RouteName, SessionId, SessionKey, Status,
};

/// What the dialer says about itself.
#[derive(Debug, Clone)]
pub(super) struct Introduction {
    pub(super) session: SessionId,
    pub(super) purpose: Purpose,
    pub(super) lane: u8,
    pub(super) lanes: u8,
    pub(super) attempt: u32,
    pub(super) share: [u8; SessionKey::SHARE_BYTES],
    pub(super) route: RouteName,
    /// Whether compression is offered.
    pub(super) offer: Option<Offer>,
}

/// The dialer's side. Returns the status, and what is accepted; after *welcome* the carrier is accepted.
pub(super) fn introduce(
    channel: &Channel,
    who: Introduction,
    key: &SessionKey,
) -> Result<(Status, Option<Offer>), RelayError> {
    let binding: Binding = channel.tls_binding();
    let Introduction { session, purpose, lane, lanes, attempt, share, route, offer } = who;
    let share = if purpose == Purpose::Open { share } else { [0; SessionKey::SHARE_BYTES] };
    let nonce = random()?;
    let hello =
        Hello::new(session, purpose, (lane, lanes), attempt, nonce, share, route, offer, key, &binding);
    let mut bytes = Vec::new();
    hello.encode(&mut bytes);
    channel.write_all(&bytes)?;
    let mut bytes = [0; Answer::BYTES];
    channel.read_exact(&mut bytes).map_err(|error| match error {
        TransportError::Closed { .. } | TransportError::Reset { .. } => {
            RelayError::Silent { peer: channel.peer().to_owned() }
        }
        error => error.into(),
    })?;
    let answer = Answer::decode(&bytes).map_err(|source| greeting(channel, source))?;
    let needs_no_proof = matches!(answer.status, Status::UnknownSession | Status::OtherVersion);
    if !needs_no_proof && !answer.is_authentic(&hello, key, &binding) {
        return Err(RelayError::Unproved { peer: channel.peer().to_owned() });
    }
    if answer.status == Status::Welcome {
        channel.write_all(&Confirm::new(&hello, &answer, key, &binding).to_bytes())?;
    }
    // An acceptor answers in the version of the hello.
    match offer.is_some() == answer.accepts.is_some() || answer.status != Status::Welcome {
        true => Ok((answer.status, answer.accepts)),
        false => Err(RelayError::Unproved { peer: channel.peer().to_owned() }),
    }
}

/// The acceptor's side: reads a hello. `None`: the peer has another version, which it was told.
pub(super) fn read_hello(channel: &Channel) -> Result<Option<Hello>, RelayError> {
    let mut bytes = vec![0; Hello::HEAD_BYTES];
    channel.read_exact(&mut bytes)?;
    let mut head = [0; Hello::HEAD_BYTES];
    head.copy_from_slice(&bytes);
    let length = match Hello::length(&head) {
        Ok(length) => length,
        Err(error) if matches!(error.rule, crate::frame::Rule::Version(_)) => {
            say(channel, &Answer::without_proof(Status::OtherVersion))?;
            return Ok(None);
        }
        Err(error) => return Err(greeting(channel, error)),
    };
    bytes.resize(length, 0);
    channel.read_exact(&mut bytes[Hello::HEAD_BYTES..])?;
    let hello = Hello::decode(&bytes).map_err(|source| greeting(channel, source))?;
    Ok(hello.map(|(hello, _)| hello))
}

/// The acceptor's side: refuses a hello, or welcomes it and checks the confirmation.
pub(super) fn answer(
    channel: &Channel,
    hello: &Hello,
    status: Status,
    accepts: Offer,
    key: &SessionKey,
) -> Result<(), RelayError> {
    let binding: Binding = channel.tls_binding();
    let answer = Answer::new(status, accepts, random()?, hello, key, &binding);
    say(channel, &answer)?;
    if status != Status::Welcome {
        return Ok(());
    }
    let mut bytes = [0; Confirm::BYTES];
    channel.read_exact(&mut bytes)?;
    match Confirm::from_bytes(bytes).is_authentic(hello, &answer, key, &binding) {
        true => Ok(()),
        false => Err(RelayError::Unproved { peer: channel.peer().to_owned() }),
    }
}

pub(super) fn say(channel: &Channel, answer: &Answer) -> Result<(), RelayError> {
    let mut bytes = Vec::new();
    answer.encode(&mut bytes);
    Ok(channel.write_all(&bytes)?)
}

/// Random bytes of the operating system, not all zero.
pub(super) fn random<const N: usize>() -> Result<[u8; N], RelayError> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(RelayError::System { what: "random bytes", source: error.into() }),
        }
    }
    Ok(bytes)
}

fn greeting(channel: &Channel, source: crate::frame::FrameError) -> RelayError {
    RelayError::Greeting { peer: channel.peer().to_owned(), source }
}
