//! The greeting, with which a contact begins.

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::replica as proto;
use sterna_transport::Channel;
use sterna_wire::extension::MigrationSecret;
use sterna_wire::replica::{self as wire, Hello, Role, Session, Welcome};

use super::error::ContactError;
use super::link::Link;

/// Identifies one protection of one guest: its id and its generation.
pub type Protection = proto::Protection;
/// The times of a protection: heartbeat, lease, margin and others.
pub type Terms = proto::Terms;
/// A secret that only the two sides know. Without one, TLS must authenticate the peer.
pub type Secret = MigrationSecret;

/// Creates a protection of that generation, with a random id that no other protection has.
///
/// # Errors
/// The operating system provides no random bytes.
pub fn new_protection(generation: u64) -> Result<Protection, ContactError> {
    Ok(Protection { id: nonce()?, generation })
}

/// Properties of the primary that its greeting announces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Greeting {
    /// Whether the primary cannot stop its guest by itself, so that a fence is necessary.
    pub needs_fence: bool,
    /// Whether the primary sends pages as differences over multifd channels (`specs/extension.md §10`).
    pub sends_differences: bool,
}

/// The primary's part: sends the greeting, and checks the standby's answer.
pub(super) fn greet(
    channel: &Arc<Channel>,
    protection: Protection,
    terms: Terms,
    greeting: Greeting,
    secret: &Secret,
) -> Result<Link, ContactError> {
    terms.check()?;
    let (nonce, binding) = (nonce()?, channel.tls_binding());
    let Protection { id, generation } = protection;
    let mut hello =
        Hello::new(id, generation, greeting.needs_fence, to_wire(terms)?, nonce, secret, &binding);
    if greeting.sends_differences {
        hello = hello.announcing_differences(secret, &binding);
    }
    let mut bytes = Vec::with_capacity(Hello::BYTES);
    hello.encode(&mut bytes);
    channel.write_all(&bytes)?;
    let mut answer = [0; Welcome::BYTES];
    channel.read_exact(&mut answer)?;
    let Some((welcome, _)) = Welcome::decode(&answer)? else { return Err(stranger(channel)) };
    if !welcome.is_authentic(&hello, secret, &binding) {
        return Err(stranger(channel));
    }
    let session = Session::new(Role::Primary, secret, &hello, &welcome, &binding);
    Ok(Link::new(Arc::clone(channel), session))
}

/// The standby's part: checks the primary's greeting, and answers.
pub(super) fn welcome(
    channel: &Arc<Channel>,
    secret: &Secret,
) -> Result<(Link, Protection, Terms, Greeting), ContactError> {
    let mut bytes = [0; Hello::BYTES];
    channel.read_exact(&mut bytes)?;
    let Some((hello, _)) = Hello::decode(&bytes)? else { return Err(stranger(channel)) };
    let binding = channel.tls_binding();
    if !hello.is_authentic(secret, &binding) {
        return Err(stranger(channel));
    }
    let terms = from_wire(hello.terms);
    terms.check()?;
    let welcome = Welcome::new(nonce()?, &hello, secret, &binding);
    let mut answer = Vec::with_capacity(Welcome::BYTES);
    welcome.encode(&mut answer);
    channel.write_all(&answer)?;
    let session = Session::new(Role::Standby, secret, &hello, &welcome, &binding);
    let protection = Protection { id: hello.protection_id, generation: hello.generation };
    let greeting = Greeting { needs_fence: hello.needs_fence, sends_differences: hello.sends_differences };
    Ok((Link::new(Arc::clone(channel), session), protection, terms, greeting))
}

fn stranger(channel: &Channel) -> ContactError {
    ContactError::Stranger { peer: channel.peer().to_owned() }
}

fn nonce() -> Result<[u8; 16], ContactError> {
    sterna::internals::nonce().map_err(|error| ContactError::Random(error.to_string()))
}

fn to_wire(terms: Terms) -> Result<wire::Terms, ContactError> {
    let micros = |what, value: Duration| {
        u32::try_from(value.as_micros()).map_err(|_| ContactError::TooLong { what, value })
    };
    Ok(wire::Terms {
        heartbeat_us: micros("a heartbeat", terms.heartbeat)?,
        lease_us: micros("a lease", terms.lease)?,
        margin_us: micros("a margin", terms.margin)?,
        claim_interval_us: micros("an interval between claims", terms.claim_interval)?,
        drift_per_mille: terms.drift_per_mille,
    })
}

fn from_wire(terms: wire::Terms) -> Terms {
    let micros = |value: u32| Duration::from_micros(value.into());
    Terms {
        heartbeat: micros(terms.heartbeat_us),
        lease: micros(terms.lease_us),
        drift_per_mille: terms.drift_per_mille,
        margin: micros(terms.margin_us),
        claim_interval: micros(terms.claim_interval_us),
    }
}
