//! Replaces a lost connection by a new one (specs/postcopy.md §5, specs/extension.md §14).
//!
//! Only a source that proves that it knows the migration's secret receives data or changes state. A source that
//! has sent no secret is not a Sterna and cannot prove anything. In this case the first connection is taken
//! whose first bytes are those of a recovery.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::MigrationId;
use sterna_proto::destination::{Destination, Event as Fed, State};
use sterna_transport::Channel;
use sterna_wire::extension::{Holds, MigrationSecret, ReconnectAnswer, ReconnectChannel, ReconnectHello};
use sterna_wire::return_path::ReturnMessage;

use super::{preempt, receive_requested};
use crate::error::{BadComeback, Ending, MigrationError, Misbehaviour, Untimely, UntimelyCommand};
use crate::incoming::greeting::Greeting;
use crate::incoming::shared::Shared;

/// The first byte of a recovery: the type of a command element.
const COMMAND: u8 = 8;
/// Interval at which the thread checks whether a source can be accepted.
const LOOK: Duration = Duration::from_millis(10);

impl Shared {
    /// Whether pages are missing and no connection carries them.
    pub(in crate::incoming) fn is_paused(&self) -> bool {
        self.driver().is_some_and(|driver| driver.inspect(Destination::state) == State::PostcopyPaused)
    }

    /// Handles a question of the source while the guest starts in postcopy. A source that asks has closed its
    /// channels. It relies on the machine's answer from then on.
    pub(in crate::incoming) fn is_asked_while_starting(&self, id: MigrationId) {
        if !self.driver().is_some_and(|driver| driver.inspect(Destination::starts_in_postcopy)) {
            return;
        }
        if !self.is_paused() {
            self.note_error(Ending::SourceAsks.into());
        }
        self.report(Fed::StatusAsked(id));
    }

    fn is_recovering(&self) -> bool {
        self.driver().is_some_and(|driver| driver.inspect(Destination::state) == State::PostcopyRecover)
    }
}

/// Whether these first bytes are those of a recovery by a source that cannot prove its identity.
pub(in crate::incoming) fn is_unproven(shared: &Shared, magic: &[u8]) -> bool {
    magic.first() == Some(&COMMAND) && shared.secret.lock().is_none() && shared.is_paused()
}

/// Takes the main channel of a source that cannot prove its identity.
pub(in crate::incoming) fn take_unproven(
    shared: &Shared,
    greeting: &Greeting<'_>,
) -> Result<(), MigrationError> {
    let until = Instant::now() + shared.params.limits.setup;
    wait_until_free(shared, greeting.channel, None, until)?;
    begin(shared, greeting.channel, None)
}

/// Takes a connection of a recovery, or the preempt channel of a later precopy session. Its hello has been
/// authenticated.
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
        // The preempt channel of the first session has another hello.
        None => hello.session > 0 && await_session(shared, hello.session),
    };
    if !shared.capabilities.postcopy_preempt || !is_due() {
        return Err(refused(channel, BadComeback::UnexpectedPreempt));
    }
    preempt::put(shared, channel, hello.session)
}

/// Whether this precopy session is current. The hello of its preempt channel may arrive before the hellos of
/// its multifd channels.
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

fn refused(channel: &Channel, why: BadComeback) -> MigrationError {
    Misbehaviour::Comeback { peer: channel.peer().to_owned(), why }.into()
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
        return Err(refused(channel, BadComeback::LacksNoPages));
    }
    if !shared.lobby.supersede(hello.session) {
        return Err(refused(channel, BadComeback::OldNumber));
    }
    if !shared.is_paused() {
        // The source has abandoned a connection that this side may still consider open.
        shared.note_error(Ending::SourceReconnects.into());
        shared.report(Fed::Superseded);
    }
    wait_until_free(shared, channel, Some(hello.session), until)?;
    let mut bytes = Vec::new();
    let holds = Holds { session: hello.session, rounds: 0, pages: Vec::new() };
    ReconnectAnswer::Holds(holds).encode(hello, secret, &channel.tls_binding(), &mut bytes);
    channel.write_all(&bytes)?;
    begin(shared, channel, Some(hello.session))
}

/// Waits until all threads of the lost channels have ended.
fn wait_until_free(
    shared: &Shared,
    channel: &Channel,
    session: Option<u32>,
    until: Instant,
) -> Result<(), MigrationError> {
    loop {
        let Some(driver) = shared.driver() else { return Err(refused(channel, BadComeback::TooEarly)) };
        let (may, lacks) = driver.inspect(|machine| (machine.may_recover(), machine.lacks_pages()));
        let is_newest = session.is_none_or(|session| shared.lobby.last() == session);
        if !lacks || !is_newest || shared.closing.is_cancelled() {
            return Err(refused(channel, BadComeback::SupersededOrComplete));
        }
        if may {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(refused(channel, BadComeback::NotInTime));
        }
        std::thread::sleep(LOOK);
    }
}

/// Makes this connection the main channel.
fn begin(shared: &Shared, channel: &Arc<Channel>, session: Option<u32>) -> Result<(), MigrationError> {
    // Under a lock, so that only the first of several connections is accepted.
    let mut begun = shared.postcopy.recovered_session.lock();
    let may = shared.driver().is_some_and(|driver| driver.inspect(Destination::may_recover));
    if !may || session.is_some_and(|session| shared.lobby.last() != session) {
        return Err(refused(channel, BadComeback::Superseded));
    }
    *begun = session.unwrap_or_default();
    shared.begin_waiting_for(channel);
    shared.places.put_main(channel);
    shared.feed(Fed::RecoveryBegun).map_err(|refusal| {
        channel.shutdown();
        refused(channel, BadComeback::Refused(refusal))
    })
}

/// Handles RECV_BITMAP: sends which pages of a block are in place.
pub(in crate::incoming) fn say_received(
    shared: &Shared,
    block: Option<usize>,
    name: &str,
) -> Result<(), MigrationError> {
    check_state(shared, UntimelyCommand::ReceivedBitmap)?;
    let (Some(block), Some(arriving)) = (block, shared.postcopy.arriving()) else {
        let command = UntimelyCommand::ReceivedBitmap;
        return Err(Untimely::UnknownBlock { command, block: name.to_owned() }.into());
    };
    let mut bytes = Vec::new();
    let message = ReturnMessage::ReceivedBitmap { block: name.to_owned() };
    message.encode(&mut bytes).map_err(MigrationError::wire("return path"))?;
    arriving.received(block).encode(&mut bytes);
    shared.write_main(&bytes)
}

/// Handles POSTCOPY_RESUME: pages arrive again.
pub(in crate::incoming) fn resume(shared: &Arc<Shared>) -> Result<(), MigrationError> {
    check_state(shared, UntimelyCommand::Resume)?;
    if shared.capabilities.postcopy_preempt
        && let Some(arriving) = shared.postcopy.arriving()
    {
        let channel = preempt::await_channel(shared)?;
        receive_requested(shared, channel, Arc::clone(arriving))?;
    }
    shared.report(Fed::ResumeRead);
    Ok(())
}

fn check_state(shared: &Shared, command: UntimelyCommand) -> Result<(), MigrationError> {
    if shared.is_recovering() {
        return Ok(());
    }
    Err(Untimely::Postcopy(command).into())
}

/// Tells the source that this side has resumed, and repeats the requests for missing pages.
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
