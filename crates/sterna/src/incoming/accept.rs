//! Accepts connections and identifies each one by its first bytes (specs/stream.md §3.1).
//!
//! Every connection has its own greeter thread, so a connection that sends nothing does not delay the others. A
//! refused connection causes a warning and never fails the migration, because anyone who reaches the port can
//! open one.
//! A connection gets a place only after its greeting fits this side ([`super::places`]). It waits for the other
//! channels at most for the setup limit.
//! A mismatch is reported here, to the destination's operator. The source only sees that its connection is
//! closed.
//!
//! If a source opens more multifd channels than this side expects, the refused channels carry pages.
//! [`Shared::check_that_all_came`] detects the missing pages when RAM has ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_proto::destination::Event as Fed;
use sterna_transport::{CancelFlag, Channel, Listener, TlsEndpoint, TransportError};
use sterna_wire::extension::{MemoryOffer, PreemptHello, ReconnectHello, StatusQuestion};
use sterna_wire::main::{MainDecoder, MainItem, Step};
use sterna_wire::multifd::{HEADER_BYTES, InitialPacket, PacketHeader};

use super::checkpoints;
use super::comeback;
use super::configuring;
use super::greeting::Greeting;
use super::memory_files;
use super::places::{Fate, Offer};
use super::postcopy::{preempt, recovery};
use super::questions;
use super::shared::Shared;
use super::shortage::Shortage;
use crate::error::{
    Awaited, BadConnection, ChannelRole, MigrationError, Misbehaviour, RefusedLane, SettingDifference,
};
use crate::events::Event;
use crate::interruption::Break;
use crate::threads::{self, ThreadRole, tried};

const MAIN_MAGIC: [u8; 4] = *b"QEVM";
const MULTIFD_MAGIC: [u8; 4] = [0x11, 0x22, 0x33, 0x44];
/// The first bytes of a TLS handshake, in every TLS version.
const TLS_MAGIC: [u8; 2] = [0x16, 3];
/// Delay between two attempts to accept after the system has refused one.
pub(super) const RETRY: Duration = Duration::from_millis(200);

/// Starts the listener thread. The address is released when the thread has ended.
pub(super) fn spawn(shared: &Arc<Shared>, listener: Listener) -> Result<JoinHandle<()>, MigrationError> {
    let (died, cancel) = (unless_begun(shared), shared.closing.clone());
    let shared = Arc::clone(shared);
    threads::spawn(ThreadRole::Listener, move || listen(&shared, &listener, &cancel), died)
}

/// As [`spawn`], at an additional address, until `cancel`.
pub(super) fn spawn_beside(
    shared: &Arc<Shared>,
    listener: Listener,
    cancel: CancelFlag,
) -> Result<JoinHandle<()>, MigrationError> {
    let (theirs, died) = (Arc::clone(shared), Arc::clone(shared));
    let died = move |error: MigrationError| warn(&died, &error.to_string());
    threads::spawn(ThreadRole::Listener, move || listen(&theirs, &listener, &cancel), died)
}

/// The error handler of a listener thread: a thread that dies ends the migration.
pub(super) fn unless_begun(shared: &Arc<Shared>) -> impl Fn(MigrationError) + Send + 'static {
    let shared = Arc::clone(shared);
    move |error: MigrationError| {
        let shared = shared.current();
        if !shared.end_before_it_began(error.clone()) {
            shared.fail(error);
        }
    }
}

fn listen(shared: &Arc<Shared>, listener: &Listener, cancel: &CancelFlag) {
    let mut shortage = Shortage::default();
    loop {
        let accepted = listener.accept(None, cancel);
        let shared = shared.current();
        match accepted {
            Ok(channel) => {
                shortage.is_over();
                greet(shared, Arc::new(channel));
            }
            Err(TransportError::Cancelled { .. }) => break,
            // The process lacks descriptors or memory at the moment. The listener continues, because a question
            // may still arrive.
            Err(TransportError::System { source, .. }) if source.raw_os_error().is_some() => {
                if let Some(text) = shortage.met(shared, &source) {
                    warn(shared, &text);
                }
                std::thread::sleep(RETRY);
            }
            Err(error) => {
                // An inherited, connected descriptor gives exactly one channel.
                tracing::debug!(%error, "listener");
                shared.no_more_come.store(true, Ordering::SeqCst);
                give_up_if_alone(shared, None);
                break;
            }
        }
    }
}

fn greet(shared: &Arc<Shared>, channel: Arc<Channel>) {
    enter(shared, &channel);
    let greeter = {
        let (shared, channel) = (Arc::clone(shared), Arc::clone(&channel));
        move || greet_with(&shared, channel, sort)
    };
    // A panic inside the greeter is caught by `greet_with`, so only the VMM's hook for new threads can panic.
    let died = {
        let (shared, channel) = (Arc::clone(shared), Arc::clone(&channel));
        move |error| end_greeting(&shared, channel, Some(error))
    };
    if let Err(error) = threads::spawn(ThreadRole::Greeter, greeter, died) {
        end_greeting(shared, channel, Some(error));
    }
}

/// Registers a connection whose greeting has not been read yet.
pub(super) fn enter(shared: &Shared, channel: &Arc<Channel>) {
    if let Some(gone) = shared.greetings.enter(channel) {
        gone.shutdown();
        warn(shared, &format!("{}: refused for a newer connection, because too many are open", gone.peer()));
    }
    // If the `Incoming` was dropped meanwhile, no other code would close this channel.
    if shared.closing.is_cancelled() {
        channel.shutdown();
    }
}

/// Reads the greeting of a registered connection with `sort`.
pub(super) fn greet_with(
    shared: &Arc<Shared>,
    channel: Arc<Channel>,
    sort: impl FnOnce(&Arc<Shared>, &Arc<Channel>) -> Result<(), Break>,
) {
    let sorted = tried("the greeting of a connection", || Break::failure(sort(shared, &channel)));
    end_greeting(shared, channel, sorted.err());
}

/// Removes a connection whose greeting was read or has failed, and reports the error.
fn end_greeting(shared: &Shared, channel: Arc<Channel>, error: Option<MigrationError>) {
    shared.greetings.leave(&channel);
    drop(channel);
    if let Some(error) = &error {
        warn(shared, &format!("connection refused: {error}"));
    }
    give_up_if_alone(shared, error);
}

/// Fails the migration if the last connection was refused and no further one is possible.
fn give_up_if_alone(shared: &Shared, error: Option<MigrationError>) {
    if shared.successor().is_some() {
        // The VM was made, and its own connections decide.
        return;
    }
    let mut last = shared.last_refusal.lock();
    if error.is_some() {
        *last = error;
    }
    let is_alone = shared.no_more_come.load(Ordering::SeqCst)
        && shared.greetings.is_empty()
        && !shared.places.is_complete()
        && !shared.places.has_candidates();
    let Some(error) = last.take_if(|_| is_alone) else { return };
    drop(last);
    if shared.configuring.is_some() {
        shared.end_before_it_began(error);
    } else if shared.begin().is_some() {
        shared.fail(error);
    }
}

/// Identifies the purpose of a connection. An error refuses the connection and leaves the migration unchanged.
fn sort(shared: &Arc<Shared>, channel: &Arc<Channel>) -> Result<(), Break> {
    let setup = shared.params.limits.setup;
    if let Some(tls) = &shared.params.tls {
        // The handshake may take the whole setup limit, as at the source: the first handshake of a process takes
        // seconds on a busy host.
        shared.greetings.set_shaking_hands(channel, true);
        channel.start_tls(tls, TlsEndpoint::Server, None, setup, &shared.closing)?;
        shared.greetings.set_shaking_hands(channel, false);
        if let Some(name) = channel.tls_peer() {
            tracing::info!(name, "{}: the client's certificate is verified", channel.peer());
        }
    }
    let greeting = match shared.places.lanes() {
        0 if shared.configuring.is_none() => Greeting::new(channel, setup),
        _ => Greeting::among(channel, setup, &shared.greetings),
    };
    if preempt::takes_any(shared) {
        return Ok(preempt::take(shared, &greeting, false)?);
    }
    let magic = greeting.peek(0, 4)?;
    if recovery::is_unproven(shared, &magic) {
        return Ok(recovery::take_unproven(shared, &greeting)?);
    }
    if magic == PreemptHello::MAGIC {
        return Ok(preempt::take(shared, &greeting, true)?);
    }
    if magic == StatusQuestion::MAGIC {
        return Ok(questions::answer(shared, &greeting)?);
    }
    if let Some(take) = checkpoints::contact_of(&magic) {
        return take(shared, &greeting);
    }
    if magic == MemoryOffer::MAGIC {
        return Ok(memory_files::take(shared, &greeting)?);
    }
    if magic == ReconnectHello::MAGIC {
        return comeback::take(shared, &greeting);
    }
    if let Some(waiting) = &shared.configuring {
        match magic.first_chunk() {
            Some(&MAIN_MAGIC) => {
                return configuring::main_channel(shared, waiting, &greeting, &|made| {
                    greet_again(made, channel, main_channel)
                });
            }
            Some(&MULTIFD_MAGIC) => {
                return configuring::multifd(shared, waiting, &greeting, &|made| {
                    greet_again(made, channel, multifd)
                });
            }
            _ => {}
        }
    }
    if magic == MAIN_MAGIC {
        return main_channel(shared, &greeting);
    }
    if magic == MULTIFD_MAGIC {
        return multifd(shared, &greeting);
    }
    if magic.starts_with(&TLS_MAGIC) {
        let peer = channel.peer().to_owned();
        return Err(MigrationError::from(SettingDifference::NoTlsHere { peer }).into());
    }
    Err(refused(channel, BadConnection::UnknownMagic { first: magic.to_vec() }).into())
}

/// Greets a connection of the migration whose VM was made meanwhile.
fn greet_again(
    made: &Arc<Shared>,
    channel: &Arc<Channel>,
    greet: fn(&Shared, &Greeting<'_>) -> Result<(), Break>,
) -> Result<(), Break> {
    enter(made, channel);
    let greeted = greet(made, &Greeting::among(channel, made.params.limits.setup, &made.greetings));
    made.greetings.leave(channel);
    greeted
}

pub(super) fn main_channel(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), Break> {
    let channel = greeting.channel;
    shared.target.admits_stream(channel)?;
    shared.check_only_main(channel)?;
    read_configuration(shared, greeting)?;
    shared.begin_waiting_for(channel);
    let others = || shared.greetings.has_others_than(channel);
    let offer = shared.places.offer_main(channel, &others);
    shared.greetings.place(channel);
    follow(shared, offer, channel, ChannelRole::Main)?;
    let setup = shared.params.limits.setup;
    match shared.places.wait_main(channel, setup, &others) {
        Fate::Completes => follow(shared, Offer::Completes, channel, ChannelRole::Main),
        Fate::Taken | Fate::Over => Ok(()),
        Fate::Displaced => Err(refused(channel, BadConnection::Displaced).into()),
        Fate::Alone(missing) => Err(too_late(channel, &missing, setup).into()),
    }
}

/// Peeks at header and configuration, without consuming bytes, until both are known to fit this side.
fn read_configuration(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), MigrationError> {
    let expect = shared.expectations();
    let mut decoder = MainDecoder::new(shared.target.knowledge(), expect);
    let (mut bytes, mut position) = (greeting.peek(0, 4)?, 0);
    loop {
        match decoder.next(&bytes[position..]).map_err(MigrationError::wire(super::loader::CHANNEL))? {
            Step::NeedMore(count) => bytes = greeting.peek(bytes.len(), position + count)?,
            Step::Partial { consumed } => position += consumed,
            Step::Item { item: MainItem::Configuration(_), consumed } => {
                position += consumed;
                break;
            }
            Step::Item { consumed, .. } => position += consumed,
            Step::End => break,
        }
    }
    // The byte after the configuration begins an element, and must be valid too.
    decoder.next(&bytes[position..]).map(drop).map_err(MigrationError::wire(super::loader::CHANNEL))
}

pub(super) fn multifd(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), Break> {
    let channel = greeting.channel;
    shared.target.admits_stream(channel)?;
    let mut bytes = [0; InitialPacket::BYTES];
    greeting.read_exact(&mut bytes)?;
    let name = format!("multifd connection from {}", channel.peer());
    let decoded = InitialPacket::decode(&bytes).map_err(MigrationError::wire(&name))?;
    let Some((hello, _)) = decoded else {
        let what = "an initial packet of full length is incomplete";
        return Err(MigrationError::Internal(what.to_owned()).into());
    };
    let uuid = shared.target.uuid().unwrap_or(hello.uuid);
    let expected = shared.places.lanes();
    if expected == 0 && hello.uuid == uuid {
        shared.note_unplaced(RefusedLane::MultifdIsOff);
        let peer = channel.peer().to_owned();
        return Err(MigrationError::from(SettingDifference::MultifdIsOffHere { peer }).into());
    }
    if let Err(error) = hello.check(&uuid, expected) {
        if hello.uuid == uuid {
            shared.note_unplaced(RefusedLane::Hello(error.clone()));
        }
        return Err(MigrationError::wire(&name)(error).into());
    }
    let id = usize::from(hello.id);
    let role = ChannelRole::Multifd(id);
    let others = || shared.greetings.has_others_than(channel);
    let offer = shared.places.offer_lane(id, hello.uuid, channel, &others);
    shared.greetings.place(channel);
    if offer != Offer::TooLate {
        shared.greetings.lane_came();
    }
    follow(shared, offer, channel, role)?;
    if let Err(error) = wait_for_packet(shared, channel, role) {
        shared.places.drop_lane(id, channel, &error);
        return match () {
            () if shared.places.is_over() => Ok(()),
            () if shared.places.is_taken(id) => Err(taken(channel, role).into()),
            () => Err(error.into()),
        };
    }
    shared.begin_waiting_for(channel);
    if shared.places.take_lane(id, channel) || shared.places.is_over() {
        Ok(())
    } else {
        Err(taken(channel, role).into())
    }
}

/// Waits for the first packet. Once all channels are connected, the source may send it at any time.
fn wait_for_packet(shared: &Shared, channel: &Channel, role: ChannelRole) -> Result<(), MigrationError> {
    let setup = shared.params.limits.setup;
    let mut header = Vec::new();
    channel.set_stall_limit(Some(setup));
    while header.len() < HEADER_BYTES {
        match channel.peek(header.len() + 1) {
            Ok(bytes) => header = bytes,
            Err(TransportError::Stalled { .. }) if header.is_empty() && shared.places.is_complete() => {}
            Err(TransportError::Stalled { .. }) if header.is_empty() => {
                return Err(too_late(channel, &shared.places.missing(), setup));
            }
            Err(error) => return Err(error.into()),
        }
    }
    PacketHeader::peek(&header)
        .map_err(|error| MigrationError::wire(&role.to_string())(error.at(InitialPacket::BYTES as u64)))?;
    // A source that waits for no answer sends immediately, so a packet may arrive before all channels are
    // connected.
    if shared.places.wait_for_all(setup) {
        return Ok(());
    }
    Err(too_late(channel, &shared.places.missing(), setup))
}

/// Acts on the result of an offer: the last channel begins the migration. Returns `Interrupted` if the
/// migration is over.
fn follow(shared: &Shared, offer: Offer, channel: &Channel, role: ChannelRole) -> Result<(), Break> {
    match offer {
        Offer::Waits => {}
        Offer::Completes => match shared.begin() {
            Some(_) => shared.report(Fed::ChannelsReady),
            // The migration was cancelled meanwhile.
            None => shared.places.end(),
        },
        Offer::TooLate if shared.places.is_over() => return Err(Break::Interrupted),
        Offer::TooLate => return Err(taken(channel, role).into()),
    }
    Ok(())
}

fn taken(channel: &Channel, role: ChannelRole) -> MigrationError {
    refused(channel, BadConnection::Taken { role })
}

fn refused(channel: &Channel, why: BadConnection) -> MigrationError {
    Misbehaviour::Connection { peer: channel.peer().to_owned(), why }.into()
}

fn too_late(channel: &Channel, missing: &str, after: Duration) -> MigrationError {
    let what = Awaited::Channels { peer: channel.peer().to_owned(), missing: missing.to_owned() };
    MigrationError::Limit { what, after }
}

pub(super) fn warn(shared: &Shared, text: &str) {
    tracing::warn!("{text}");
    shared.tell(&Event::Warning(text.to_owned()));
}
