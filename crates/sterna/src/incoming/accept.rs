//! Accepting connections and telling them apart by their first bytes (specs/stream.md §3.1).
//!
//! Every connection has a greeter thread of its own, so that one that sends nothing delays nobody. A
//! connection whose first bytes are none of ours (a port scanner's) is turned away with a warning; the
//! migration goes on waiting. One that belongs to a migration and does not fit this side's settings
//! fails it loudly: what the source believes would otherwise end in missing memory (§10).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_proto::destination::Event as Fed;
use sterna_proto::{MigrationId, Status};
use sterna_transport::{Channel, Listener, TlsEndpoint, TransportError};
use sterna_wire::extension::{self, StatusAnswer, StatusQuestion};
use sterna_wire::multifd::InitialPacket;

use super::shared::{Shared, lock};
use crate::error::MigrationError;
use crate::events::Event;

const MAIN_MAGIC: [u8; 4] = *b"QEVM";
const MULTIFD_MAGIC: [u8; 4] = [0x11, 0x22, 0x33, 0x44];
/// A TLS handshake's first bytes, whatever the version.
const TLS_MAGIC: [u8; 2] = [0x16, 3];
/// Connections that may be saying who they are at once; more are turned away.
const GREETINGS: usize = 300;
/// How long a connection has for all of its first bytes together.
const GREETING: Duration = Duration::from_secs(10);

/// Between two attempts to accept when the system refuses.
const RETRY: Duration = Duration::from_millis(200);

/// Starts the listener thread. The address is free when it has ended.
pub(super) fn spawn(shared: &Arc<Shared>, listener: Listener) -> std::io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name("listener".to_owned()).spawn(move || listen(&shared, &listener))
}

fn listen(shared: &Arc<Shared>, listener: &Listener) {
    let greetings = Arc::new(AtomicUsize::new(0));
    loop {
        match listener.accept(None, &shared.closing) {
            Ok(channel) if greetings.load(Ordering::Acquire) < GREETINGS => {
                greet(shared, channel, &greetings);
            }
            Ok(channel) => warn(shared, &format!("{}: too many connections at once", channel.peer())),
            Err(TransportError::Cancelled { .. }) => break,
            // Out of descriptors or memory for a moment: a question may still come later.
            Err(TransportError::System { source, .. }) if source.raw_os_error().is_some() => {
                warn(shared, &format!("cannot accept a connection now: {source}"));
                std::thread::sleep(RETRY);
            }
            Err(error) => {
                // An inherited, connected descriptor gives one channel and then no more.
                tracing::debug!(%error, "listener");
                break;
            }
        }
    }
}

fn greet(shared: &Arc<Shared>, channel: Channel, greetings: &Arc<AtomicUsize>) {
    greetings.fetch_add(1, Ordering::AcqRel);
    let channel = Arc::new(channel);
    lock(&shared.greeting).push(Arc::clone(&channel));
    // Dropped meanwhile: nobody would end it.
    if shared.closing.is_cancelled() {
        channel.shutdown();
    }
    let over = {
        let (shared, channel, greetings) = (Arc::clone(shared), Arc::clone(&channel), Arc::clone(greetings));
        move || {
            lock(&shared.greeting).retain(|other| !Arc::ptr_eq(other, &channel));
            greetings.fetch_sub(1, Ordering::AcqRel);
        }
    };
    let greeter = std::thread::Builder::new().name("greeter".to_owned());
    let spawned = greeter.spawn({
        let (shared, over) = (Arc::clone(shared), over.clone());
        move || {
            let sorted = sort(&shared, &channel);
            drop(channel);
            over();
            if let Err(error) = sorted {
                warn(&shared, &format!("connection turned away: {error}"));
            }
        }
    });
    if let Err(error) = spawned {
        over();
        warn(shared, &format!("connection turned away: no thread to greet it: {error}"));
    }
}

/// First bytes with one deadline for all of them, so that nobody holds a place byte by byte.
struct Greeting<'a> {
    channel: &'a Channel,
    until: Instant,
}

impl<'a> Greeting<'a> {
    fn new(shared: &Shared, channel: &'a Channel) -> Self {
        Self { channel, until: Instant::now() + GREETING.min(shared.params.limits.setup) }
    }

    /// The next call on the channel may take what is left.
    fn limit(&self) -> Result<(), MigrationError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let what = format!("{}: too slow to say what it is for", self.channel.peer());
            return Err(MigrationError::PeerMisbehaved { what });
        }
        self.channel.set_stall_limit(Some(left));
        Ok(())
    }

    fn magic(&self) -> Result<Vec<u8>, MigrationError> {
        let mut magic = Vec::new();
        for count in 1..=4 {
            self.limit()?;
            magic = self.channel.peek(count)?;
        }
        Ok(magic)
    }

    fn read_exact(&self, mut to: &mut [u8]) -> Result<(), MigrationError> {
        while !to.is_empty() {
            self.limit()?;
            let got = self.channel.read_some(to)?;
            if got == 0 {
                let what = format!("{}: closed before it had said what it is for", self.channel.peer());
                return Err(MigrationError::Transport(what, None));
            }
            to = &mut to[got..];
        }
        Ok(())
    }
}

/// Finds out what a connection is for. An error turns it away and leaves the migration alone.
fn sort(shared: &Arc<Shared>, channel: &Arc<Channel>) -> Result<(), MigrationError> {
    if let Some(tls) = &shared.params.tls {
        let limit = GREETING.min(shared.params.limits.setup);
        channel.start_tls(tls, TlsEndpoint::Server, None, limit, &shared.closing)?;
        if let Some(name) = channel.tls_peer() {
            tracing::info!(name, "{}: the client's certificate is verified", channel.peer());
        }
    }
    let greeting = Greeting::new(shared, channel);
    let magic = greeting.magic()?;
    if magic == StatusQuestion::MAGIC {
        return answer(shared, &greeting);
    }
    if magic == MAIN_MAGIC {
        adopt(
            shared,
            |channels, channel| {
                if channels.main.is_some() {
                    return Err(
                        "a second main channel connected; is another source migrating here?".to_owned()
                    );
                }
                channels.main = Some(channel);
                Ok(())
            },
            channel,
        );
        return Ok(());
    }
    if magic == MULTIFD_MAGIC {
        return multifd(shared, channel, &greeting);
    }
    if magic.starts_with(&TLS_MAGIC) {
        let what =
            format!("{}: it speaks TLS and this side has no tls-creds: set them here too", channel.peer());
        return Err(MigrationError::PeerIncompatible { what });
    }
    Err(MigrationError::PeerMisbehaved {
        what: format!("{}: its first bytes {magic:02x?} begin no channel of a migration", channel.peer()),
    })
}

fn multifd(
    shared: &Arc<Shared>,
    channel: &Arc<Channel>,
    greeting: &Greeting<'_>,
) -> Result<(), MigrationError> {
    let expected = lock(&shared.channels).multifd.len();
    if expected == 0 {
        shared.begin();
        shared.fail(MigrationError::PeerIncompatible {
            what: "the source opens multifd channels and multifd is off here: switch it on, or off there"
                .into(),
        });
        return Ok(());
    }
    let mut bytes = [0; InitialPacket::BYTES];
    greeting.read_exact(&mut bytes)?;
    let name = format!("multifd connection from {}", channel.peer());
    let checked = InitialPacket::decode(&bytes).and_then(|hello| match hello {
        Some((hello, _)) => {
            let uuid = shared.target.uuid().unwrap_or(hello.uuid);
            hello.check(&uuid, expected).map(|()| Some(hello))
        }
        None => Ok(None),
    });
    let hello = match checked {
        Ok(Some(hello)) => hello,
        Ok(None) => {
            let what = "an initial packet of full length is incomplete";
            return Err(MigrationError::Internal(what.to_owned()));
        }
        // With these first bytes it is no port scanner's: loud, or the source would wait for us.
        Err(error) => {
            shared.begin();
            shared.fail(MigrationError::wire(&name)(error));
            return Ok(());
        }
    };
    adopt(
        shared,
        |channels, channel| {
            if channels.multifd[usize::from(hello.id)].is_some() {
                return Err(format!("multifd channel {} connected twice", hello.id));
            }
            // A target that takes any UUID takes one only.
            if *channels.uuid.get_or_insert(hello.uuid) != hello.uuid {
                return Err(format!("multifd channel {} states another UUID than those before it", hello.id));
            }
            channels.multifd[usize::from(hello.id)] = Some(channel);
            Ok(())
        },
        channel,
    );
    Ok(())
}

/// Takes a channel of the migration in; starts the migration with the first, and loading with the last.
fn adopt(
    shared: &Arc<Shared>,
    place: impl FnOnce(&mut super::shared::Channels, Arc<Channel>) -> Result<(), String>,
    channel: &Arc<Channel>,
) {
    shared.begin_waiting_for(channel);
    let mut channels = lock(&shared.channels);
    if channels.complete || shared.arrival().is_some() {
        drop(channels);
        // Too late to belong to this migration, or one channel too many.
        if shared.arrival().is_none() {
            shared.fail(MigrationError::PeerIncompatible {
                what: "a further channel connected after all had come: set multifd-channels alike".to_owned(),
            });
        }
        return;
    }
    if shared.begin().is_none() {
        return;
    }
    let placed = place(&mut channels, Arc::clone(channel));
    let all = channels.main.is_some() && channels.multifd.iter().all(Option::is_some);
    if let Err(what) = placed {
        drop(channels);
        shared.fail(MigrationError::PeerMisbehaved { what });
        return;
    }
    if all {
        channels.complete = true;
        drop(channels);
        shared.report(Fed::ChannelsReady);
    }
}

fn answer(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), MigrationError> {
    let mut bytes = [0; StatusQuestion::BYTES];
    greeting.read_exact(&mut bytes)?;
    let question = StatusQuestion::decode(&bytes).map_err(MigrationError::wire("status question"))?;
    let Some((question, _)) = question else {
        return Err(MigrationError::Internal("a status question of full length is incomplete".to_owned()));
    };
    let status = match shared.answer(MigrationId(question.migration_id)) {
        Status::Committed => extension::Status::Committed,
        Status::Never => extension::Status::Never,
        Status::Pending => extension::Status::Pending,
        Status::Unknown => extension::Status::Unknown,
    };
    let mut answer = Vec::new();
    StatusAnswer { status }.encode(&mut answer);
    greeting.limit()?;
    Ok(greeting.channel.write_all(&answer)?)
}

fn warn(shared: &Shared, text: &str) {
    tracing::warn!("{text}");
    shared.tell(&Event::Warning(text.to_owned()));
}
