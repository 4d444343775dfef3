//! A connection takes the place of the one that was lost (specs/postcopy.md §5, specs/extension.md §14).
//!
//! Only a source that proves that it knows the migration's secret gets a byte, or changes anything. One that has sent no secret is no
//! Sterna, and cannot prove anything: the first connection is taken that begins as its recovery does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::destination::{Destination, Event as Fed, State};
use sterna_transport::Channel;
use sterna_wire::extension::{Holds, MigrationSecret, ReconnectAnswer, ReconnectChannel, ReconnectHello};
use sterna_wire::return_path::ReturnMessage;

use super::{preempt, receive_requested};
use crate::error::MigrationError;
use crate::incoming::greeting::Greeting;
use crate::incoming::shared::Shared;

/// The element that a recovery begins with: a command.
const COMMAND: u8 = 8;
/// How often it is looked whether a source can be let in.
const LOOK: Duration = Duration::from_millis(10);

impl Shared {
    /// Whether pages are missing and no connection brings them.
    pub(in crate::incoming) fn is_paused(&self) -> bool {
        self.driver().is_some_and(|driver| driver.inspect(Destination::state) == State::PostcopyPaused)
    }

    fn is_recovering(&self) -> bool {
        self.driver().is_some_and(|driver| driver.inspect(Destination::state) == State::PostcopyRecover)
    }
}

/// Whether a connection that begins so is the main channel of a source that cannot prove who it is.
pub(in crate::incoming) fn is_unproven(shared: &Shared, magic: &[u8]) -> bool {
    magic.first() == Some(&COMMAND) && shared.secret.lock().is_none() && shared.is_paused()
}

/// Takes such a connection.
pub(in crate::incoming) fn take_unproven(
    shared: &Shared,
    greeting: &Greeting<'_>,
) -> Result<(), MigrationError> {
    let until = Instant::now() + shared.params.limits.setup;
    wait_until_free(shared, greeting.channel, None, until)?;
    begin(shared, greeting.channel, None)
}

/// Takes a connection whose hello says that it belongs to a recovery, or is the preempt channel of a session of precopy that is not
/// the first, and proves it.
pub(in crate::incoming) fn take(
    shared: &Shared,
    channel: &Arc<Channel>,
    hello: &ReconnectHello,
    secret: &MigrationSecret,
) -> Result<(), MigrationError> {
    if hello.channel != ReconnectChannel::Preempt {
        return take_main(shared, channel, hello, secret);
    }
    let is_due = || match shared.postcopy.arriving() {
        Some(_) => shared.is_recovering() && hello.session == preempt::session(shared),
        // The channel of the first session has a hello of its own.
        None => hello.session > 0 && await_session(shared, hello.session),
    };
    if !shared.capabilities.postcopy_preempt || !is_due() {
        return Err(refuse(channel, "brings a preempt channel that no session waits for"));
    }
    preempt::put(shared, channel, hello.session)
}

/// Whether this session of precopy is read. The hello of its preempt channel may overtake those of its multifd channels.
fn await_session(shared: &Shared, session: u32) -> bool {
    let until = Instant::now() + Greeting::limit_of(shared.params.limits.setup);
    loop {
        match shared.lobby.is_read(session) {
            Some(is_read) => return is_read,
            None if Instant::now() >= until || shared.closing.is_cancelled() => return false,
            None => std::thread::sleep(LOOK),
        }
    }
}

fn refuse(channel: &Channel, why: &str) -> MigrationError {
    let what = format!("a source that claims to come back from {} {why}", channel.peer());
    MigrationError::PeerMisbehaved { what }
}

fn take_main(
    shared: &Shared,
    channel: &Arc<Channel>,
    hello: &ReconnectHello,
    secret: &MigrationSecret,
) -> Result<(), MigrationError> {
    let until = Instant::now() + shared.params.limits.setup;
    let lacks =
        |shared: &Shared| shared.driver().is_some_and(|driver| driver.inspect(Destination::lacks_pages));
    if !lacks(shared) {
        return Err(refuse(channel, "wants to go on in postcopy, and no guest lacks pages here"));
    }
    if !shared.lobby.supersede(hello.session) {
        return Err(refuse(channel, "has an old number: its connection is an old one, or comes twice"));
    }
    if !shared.is_paused() {
        // The source has given up what this side may still take for a connection.
        let what = "the source has noticed that the connection is lost, and connects again";
        shared.note_error(MigrationError::Transport(what.to_owned(), None));
        shared.report(Fed::Superseded);
    }
    wait_until_free(shared, channel, Some(hello.session), until)?;
    let mut bytes = Vec::new();
    let holds = Holds { session: hello.session, rounds: 0, pages: Vec::new() };
    ReconnectAnswer::Holds(holds).encode(hello, secret, &channel.tls_binding(), &mut bytes);
    channel.write_all(&bytes)?;
    begin(shared, channel, Some(hello.session))
}

/// Waits until nothing of the lost channels is left.
fn wait_until_free(
    shared: &Shared,
    channel: &Channel,
    session: Option<u32>,
    until: Instant,
) -> Result<(), MigrationError> {
    loop {
        let Some(driver) = shared.driver() else { return Err(refuse(channel, "is too early")) };
        let (may, lacks) = driver.inspect(|machine| (machine.may_recover(), machine.lacks_pages()));
        let is_newest = session.is_none_or(|session| shared.lobby.last() == session);
        if !lacks || !is_newest || shared.closing.is_cancelled() {
            return Err(refuse(channel, "is too late: a newer connection has come, or no page is missing"));
        }
        if may {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(refuse(channel, "could not be let in in time"));
        }
        std::thread::sleep(LOOK);
    }
}

/// From now on this is the main channel.
fn begin(shared: &Shared, channel: &Arc<Channel>, session: Option<u32>) -> Result<(), MigrationError> {
    // One after the other: what comes first is let in.
    let mut begun = shared.postcopy.recovered_session.lock();
    let may = shared.driver().is_some_and(|driver| driver.inspect(Destination::may_recover));
    if !may || session.is_some_and(|session| shared.lobby.last() != session) {
        return Err(refuse(channel, "is too late: another connection has come"));
    }
    *begun = session.unwrap_or_default();
    shared.begin_waiting_for(channel);
    shared.places.put_main(channel);
    shared.feed(Fed::RecoveryBegun).map_err(|refusal| {
        channel.shutdown();
        refuse(channel, &refusal.to_string())
    })
}

/// RECV_BITMAP: answers which pages of a block are here.
pub(in crate::incoming) fn say_received(
    shared: &Shared,
    block: Option<usize>,
    name: &str,
) -> Result<(), MigrationError> {
    check_state(shared, "RECV_BITMAP")?;
    let (Some(block), Some(arriving)) = (block, shared.postcopy.arriving()) else {
        let what = format!("the source asks for the pages of block {name:?}, and there is none");
        return Err(MigrationError::PeerMisbehaved { what });
    };
    let mut bytes = Vec::new();
    let message = ReturnMessage::ReceivedBitmap { block: name.to_owned() };
    message.encode(&mut bytes).map_err(MigrationError::wire("return path"))?;
    arriving.received(block).encode(&mut bytes);
    shared.write_main(&bytes)
}

/// POSTCOPY_RESUME: pages come again.
pub(in crate::incoming) fn resume(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    check_state(shared, "POSTCOPY_RESUME")?;
    if shared.capabilities.postcopy_preempt
        && let Some(arriving) = shared.postcopy.arriving()
    {
        let channel = preempt::await_channel(shared)?;
        receive_requested(shared, channel, Arc::clone(arriving))?;
    }
    shared.report(Fed::ResumeRead);
    Ok(())
}

fn check_state(shared: &Shared, what: &str) -> Result<(), MigrationError> {
    if shared.is_recovering() {
        return Ok(());
    }
    let what = format!(
        "the source sent {what} at a wrong time: it comes first on a connection in place of one that was lost (specs/postcopy.md §5)"
    );
    Err(MigrationError::PeerMisbehaved { what })
}

/// Tells the source that this side goes on, and asks for what is still waited for.
pub(in crate::incoming) fn say_resumed(shared: &Shared) -> Result<(), MigrationError> {
    let mut asking = shared.postcopy.asking.lock();
    asking.open();
    let mut bytes = Vec::new();
    ReturnMessage::ResumeAck(1).encode(&mut bytes).map_err(MigrationError::wire("return path"))?;
    let wanted = shared.postcopy.arriving().map_or_else(Vec::new, |arriving| arriving.wanted());
    let asked = wanted.len() as u64;
    for (block, first, count) in wanted {
        let name = shared.layout()?.table.name(block);
        asking.encode((block, name), (first, count), &mut bytes)?;
    }
    shared.write_main(&bytes)?;
    shared.postcopy.has_asked(asked);
    Ok(())
}
