//! The preempt channel, which carries requested pages (specs/postcopy.md §4, specs/extension.md §12).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_ram::{PAGE_SHIFT, PAGE_SIZE};
use sterna_transport::{Channel, TransportError};
use sterna_wire::extension::PreemptHello;
use sterna_wire::ram::{BareRecord, BareRecordReader};

use crate::error::{Awaited, BadConnection, ChannelRole, Ending, MigrationError, Misbehaviour};
use crate::incoming::arriving::{ArrivingPages, Commands};
use crate::incoming::greeting::Greeting;
use crate::incoming::shared::Shared;

const CHANNEL: &str = "preempt channel";
/// Bytes of one read: 64 KiB, some pages.
const PIECE: usize = 64 << 10;
/// Interval at which the thread checks whether the source's secret has arrived.
const LOOK: Duration = Duration::from_millis(5);

/// Whether the next connection is the preempt channel of a source that is not a Sterna.
///
/// Its first bytes do not matter: such a channel sends no greeting, and may be silent for a long time.
pub(in crate::incoming) fn takes_any(shared: &Shared) -> bool {
    shared.capabilities.postcopy_preempt
        && shared.places.is_complete()
        && *shared.postcopy.commands.lock() >= Commands::Advised
        && shared.secret.lock().is_none()
        && shared.postcopy.preempt.lock().is_none()
        // While the migration is paused, the next connection is the main channel.
        && !shared.is_paused()
}

/// Takes a connection as the preempt channel. A hello, if there is one, must prove that it is the source's.
pub(in crate::incoming) fn take(
    shared: &Shared,
    greeting: &Greeting<'_>,
    says_hello: bool,
) -> Result<(), MigrationError> {
    let channel = greeting.channel;
    if says_hello {
        let mut bytes = [0; PreemptHello::BYTES];
        greeting.read_exact(&mut bytes)?;
        let decoded = PreemptHello::decode(&bytes).map_err(MigrationError::wire(CHANNEL))?;
        let Some((hello, _)) = decoded else {
            return Err(MigrationError::Internal("a hello of full length is incomplete".to_owned()));
        };
        check(shared, greeting, &hello)?;
        // The hello has no session number, so it is valid only for the channels of the first session.
        if session(shared) > 0 || shared.postcopy.arriving().is_some() {
            return Err(old(channel));
        }
    }
    put(shared, channel, 0)
}

fn old(channel: &Channel) -> MigrationError {
    refused(channel, BadConnection::OldPreempt)
}

fn refused(channel: &Channel, why: BadConnection) -> MigrationError {
    Misbehaviour::Connection { peer: channel.peer().to_owned(), why }.into()
}

/// The number of the current session: of precopy, or of a recovery, whose number is larger.
pub(super) fn session(shared: &Shared) -> u32 {
    shared.lobby.session().max(*shared.postcopy.recovered_session.lock())
}

/// Stores `channel` as the preempt channel of session `of`.
pub(super) fn put(shared: &Shared, channel: &Arc<Channel>, of: u32) -> Result<(), MigrationError> {
    if of != session(shared) || shared.lobby.is_open() {
        return Err(old(channel));
    }
    let mut place = shared.postcopy.preempt.lock();
    let there = place.as_ref().map(|(session, _)| *session);
    if there.is_some_and(|there| there > of) {
        return Err(old(channel));
    }
    if there == Some(of) {
        return Err(refused(channel, BadConnection::Taken { role: ChannelRole::Preempt }));
    }
    shared.begin_waiting_for(channel);
    // The replaced channel is one of an older session, which connected just when that session was lost.
    if let Some((_, lost)) = place.replace((of, Arc::clone(channel))) {
        lost.shutdown();
    }
    drop(place);
    shared.postcopy.preempt_came.notify_all();
    Ok(())
}

fn check(shared: &Shared, greeting: &Greeting<'_>, hello: &PreemptHello) -> Result<(), MigrationError> {
    let refused = |why| refused(greeting.channel, why);
    if !shared.capabilities.postcopy_preempt {
        return Err(refused(BadConnection::PreemptIsOff));
    }
    // The handover section with the secret may still be on its way, on the main channel.
    let until = Instant::now() + Greeting::limit_of(shared.params.limits.setup);
    loop {
        let secret = shared.secret.lock().clone();
        if let Some((id, secret)) = secret {
            let binding = greeting.channel.tls_binding();
            let is_ours = hello.migration_id == id.0 && hello.is_authentic(&secret, &binding);
            return if is_ours { Ok(()) } else { Err(refused(BadConnection::ForeignPreempt)) };
        }
        if Instant::now() >= until || shared.closing.is_cancelled() {
            return Err(refused(BadConnection::PreemptWithoutSecret));
        }
        std::thread::sleep(LOOK);
    }
}

/// Waits for the preempt channel. The source connects it before it sends the package.
pub(super) fn await_channel(shared: &Shared) -> Result<Arc<Channel>, MigrationError> {
    let limit = shared.params.limits.setup;
    let until = Instant::now() + limit;
    let now_read = session(shared);
    let mut place = shared.postcopy.preempt.lock();
    loop {
        if let Some((_, channel)) = place.as_ref().filter(|(session, _)| *session == now_read) {
            return Ok(Arc::clone(channel));
        }
        if shared.is_stopping() {
            return Err(MigrationError::Cancelled);
        }
        let now = Instant::now();
        if now >= until {
            return Err(MigrationError::Limit { what: Awaited::PreemptChannel, after: limit });
        }
        shared.postcopy.preempt_came.wait_for(&mut place, (until - now).min(Duration::from_millis(50)));
    }
}

/// Places pages from the channel until the source closes it.
pub(super) fn receive(
    shared: &Shared,
    channel: &Channel,
    arriving: &ArrivingPages,
) -> Result<(), MigrationError> {
    let table = &shared.layout()?.table;
    let mut records = BareRecordReader::new();
    let (mut buffer, mut piece) = (Vec::with_capacity(2 * PIECE), vec![0; PIECE]);
    let mut position = 0;
    loop {
        let mut at = 0;
        while let Some(used) = take_record(shared, arriving, table, &mut records, &buffer[at..])
            .map_err(|error| error.at(position + at as u64))?
        {
            at += used;
        }
        buffer.drain(..at);
        position += at as u64;
        let count = match channel.read_some(&mut piece) {
            // Silence is allowed: a guest that lacks no page requests nothing.
            Err(TransportError::Stalled { .. }) if !shared.is_stopping() => continue,
            Err(_) if shared.is_stopping() => return Ok(()),
            other => other?,
        };
        shared.received_bytes.fetch_add(count as u64, Ordering::Relaxed);
        if count == 0 {
            return match buffer.is_empty() {
                // A later check finds out whether all requested pages have arrived.
                true => Ok(()),
                false => Err(Ending::InsideRecord { offset: position }.into()),
            };
        }
        buffer.extend_from_slice(&piece[..count]);
    }
}

/// Why a record could not be taken.
enum Bad {
    Wire(sterna_wire::WireError),
    Other(MigrationError),
}

impl Bad {
    fn at(self, position: u64) -> MigrationError {
        match self {
            Self::Wire(error) => MigrationError::wire(CHANNEL)(error.at(position)),
            Self::Other(error) => error,
        }
    }
}

/// Takes one record from the front of `bytes`. Returns its length, or `None` if it is incomplete.
fn take_record(
    shared: &Shared,
    arriving: &ArrivingPages,
    table: &sterna_wire::multifd::BlockTable,
    records: &mut BareRecordReader,
    bytes: &[u8],
) -> Result<Option<usize>, Bad> {
    let mut next = records.clone();
    let Some((record, used)) = next.decode(table, bytes).map_err(Bad::Wire)? else { return Ok(None) };
    let used = match record {
        BareRecord::Zero { block, offset } => {
            arriving.zero(block, offset >> PAGE_SHIFT).map_err(Bad::Other)?;
            shared.zero_pages.fetch_add(1, Ordering::Relaxed);
            used
        }
        BareRecord::Page { block, offset } => {
            let Some(content) = bytes.get(used..used + PAGE_SIZE) else { return Ok(None) };
            arriving.page(block, offset >> PAGE_SHIFT, content).map_err(Bad::Other)?;
            shared.normal_pages.fetch_add(1, Ordering::Relaxed);
            used + PAGE_SIZE
        }
        BareRecord::End => used,
    };
    *records = next;
    if arriving.left() == 0 {
        shared.nudge();
    }
    Ok(Some(used))
}
