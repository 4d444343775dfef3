//! Reconnection with a window, and what the control thread keeps of a lost session.

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::source::{Event as Fed, Source, State};
use sterna_transport::{CancelFlag, Channel};
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::dialling::{ATTEMPT, FAREWELL, dialling};
use super::interface::Reconnection;
use super::watch;
use crate::error::{Awaited, MigrationError};
use crate::events::Event;
use crate::interruption::Break;
use crate::outgoing::carrier::interface::Carrier as _;
use crate::outgoing::carrier::sockets::Sockets;
use crate::outgoing::carrier::stream::main_channel;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::{DeviceStreams, Suspended};
use crate::outgoing::transfer::Transfer;
use crate::precopy::{Input, Settings};
use crate::reconnect::{DialError, Dialled, Missing, SILENCE, block_pages, give_up};
use crate::stats;
use crate::streams::Streamed;

pub(super) struct Enabled {
    shared: Arc<Shared>,
    /// Open channels of a session that has not begun.
    dialled: Option<Dialled>,
    /// Device streams of the lost session, if they can continue in the next one.
    streams: Option<Suspended>,
}

impl Reconnection for Enabled {
    fn announce(&self, transfer: &Transfer) -> Result<(), MigrationError> {
        let shared = &self.shared;
        let peer = Features(shared.driver.inspect(Source::peer).features);
        if !peer.contains(Features::RECONNECT) {
            shared.tell(&Event::Warning(why_not(peer)));
            return Ok(());
        }
        if let Some(device) =
            Streamed::of(&shared.guest.vm.devices()).first().filter(|_| !shared.capabilities.multifd)
        {
            let why = format!(
                "x-sterna-reconnect-window has no effect, and a lost connection ends the migration: {device} has a \
                 stream, which can continue over another connection only with multifd channels"
            );
            shared.tell(&Event::Warning(why));
            return Ok(());
        }
        shared.reconnection.begin(&shared.guest.ram);
        transfer.main()?.commands(&[Command::Ping(extension::RECONNECT_PING)])
    }

    fn peer_is_known(&self) {
        let shared = &self.shared;
        let peer = shared.driver.inspect(Source::peer);
        if !peer.sterna {
            shared.tell(&Event::Warning(why_not(Features(peer.features))));
        }
    }

    fn await_promise(&self, transfer: &mut Transfer) -> Result<(), Break> {
        if self.shared.reconnection.unconfirmed().is_none() {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let after = shared.params().limits.setup;
        let has_promised = || shared.reconnection.is_waited_for().then_some(());
        match transfer.waits.at_most(after, has_promised)? {
            Some(()) => {
                watch::closely(transfer, false);
                Ok(())
            }
            None => Err(MigrationError::Limit { what: Awaited::Promise, after }.into()),
        }
    }

    fn pages_begin(&self) {
        if self.shared.reconnection.unconfirmed().is_some() {
            self.shared.report(Fed::MayReconnect);
        }
    }

    fn break_off(&mut self, transfer: &mut Transfer) -> Result<(), MigrationError> {
        let silent = self.silence(transfer);
        self.shared.break_session();
        transfer.workers.join();
        if self.shared.driver.inspect(Source::state) == State::Suspending {
            // A hook or a stop that failed after the loss is undone. It does not end the migration.
            self.shared.forget_error();
        }
        self.streams = transfer.streams.take().and_then(DeviceStreams::suspend);
        *self.shared.session.streams.lock() = None;
        transfer.waits.keep_alive(None);
        transfer.carrier = None;
        self.shared.drop_channels();
        transfer.unthrottle();
        transfer.pacing.hints.end();
        let why = self.shared.reconnection.lost.lock().clone();
        let why = why.map_or_else(|| "the connection was lost".to_owned(), |error| error.to_string());
        if let Some(rounds) = &mut transfer.rounds {
            rounds.leave_unfinished(silent);
        }
        let counts = self.shared.measures.counters.now();
        self.shared.measures.statistics.lock().lose_connection(counts, silent, why.clone());
        self.shared.tell(&Event::ConnectionLost { why });
        Ok(())
    }

    fn reconnect(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let params = shared.params();
        let session = shared.reconnection.recovery.begin_session();
        let left = shared.driver.inspect(Source::deadline).map(|end| end.saturating_sub(shared.driver.now()));
        let limit = ATTEMPT.min(params.limits.setup).min(left.unwrap_or(ATTEMPT));
        let pages = block_pages(&shared.guest.ram);
        let dialling = dialling(&shared, session, &params, (&pages, limit, &shared.session.connecting));
        match dialling.dial(|channel| shared.adopt(channel)) {
            Ok(dialled) => {
                for channel in dialled.lanes.iter().chain([&dialled.main]) {
                    channel.set_stall_limit(Some(params.limits.stall));
                    channel.probe_peer(SILENCE.min(params.limits.stall));
                }
                self.dialled = Some(dialled);
                shared.report(Fed::Reconnected);
            }
            Err(DialError::Over) => {
                *shared.reconnection.last_attempt.lock() =
                    Some("the destination has given the migration up".to_owned());
                shared.drop_channels();
                shared.report(Fed::ReconnectRefused);
            }
            Err(DialError::Failed(error)) => {
                tracing::debug!(%error, "connecting again");
                *shared.reconnection.last_attempt.lock() = Some(error.to_string());
                shared.drop_channels();
                shared.report(Fed::ReconnectFailed);
            }
        }
        Ok(())
    }

    fn enter_session(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let Some(Dialled { session, main, lanes, holds }) = self.dialled.take() else {
            return Err(MigrationError::Internal("no session was dialled".to_owned()).into());
        };
        let missing = match shared.reconnection.unconfirmed() {
            Some(unconfirmed) => unconfirmed.begin_session(session, &holds)?,
            None => {
                return Err(MigrationError::Internal("nothing is known of what was sent".to_owned()).into());
            }
        };
        // This is done immediately, because this session may also be lost before its first page is sent.
        self.make_first_round(transfer, missing)?;
        shared.begin_session();
        let main = main_channel(&shared, main);
        let sockets = Sockets::of(&shared, Arc::clone(&main), lanes);
        sockets.greet()?;
        transfer.carrier = Some(Box::new(sockets));
        transfer.waits.keep_alive(Some(Arc::clone(&main)));
        transfer.read_return_path()?;
        main.commands(&[Command::OpenReturnPath])?;
        Ok(())
    }

    fn send_again(&mut self, transfer: &mut Transfer) -> Result<Settings, Break> {
        let suspended = self.streams.take();
        transfer.streams =
            DeviceStreams::begin_again(&self.shared, transfer.carrier()?.multifd(), suspended)?;
        transfer.start_lanes()?;
        transfer.start_ram()?;
        begin_rounds_again(transfer)
    }

    fn close(&mut self) {
        if let Some(streams) = self.streams.take() {
            streams.end(&self.shared);
        }
    }

    fn say_farewell(&self) {
        if self.shared.reconnection.unconfirmed().is_none() {
            return;
        }
        let params = self.shared.params();
        let session = self.shared.reconnection.recovery.begin_session();
        // The migration's own flag is set by now and ends every wait.
        let cancel = CancelFlag::new();
        give_up(&dialling(&self.shared, session, &params, (&[], FAREWELL.min(params.limits.setup), &cancel)));
    }
}

impl Enabled {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, dialled: None, streams: None }
    }

    /// How long the peer had acknowledged nothing when the kernel gave the connection up.
    ///
    /// Zero if the connection was lost for another reason. Then nothing shows that the network failed earlier.
    fn silence(&self, transfer: &Transfer) -> Duration {
        let is_given_up =
            self.shared.reconnection.lost.lock().as_ref().is_some_and(MigrationError::is_timeout);
        let ago = |channel: &Arc<Channel>| Some(channel.delivery()?.acknowledged_ago);
        let shortest = transfer.channels().iter().filter_map(ago).min();
        shortest.filter(|_| is_given_up).unwrap_or_default()
    }

    /// Makes the first round of a session: missing pages and unsent dirty pages.
    fn make_first_round(&self, transfer: &mut Transfer, missing: Missing) -> Result<(), MigrationError> {
        let rounds = transfer.rounds()?;
        rounds.leave_out_unused(&missing);
        let resent = rounds.sent_among(&missing.pages);
        rounds.make_resumed(missing);
        self.note_reconnection(resent);
        Ok(())
    }

    fn note_reconnection(&self, resent_pages: u64) {
        *self.shared.reconnection.lost.lock() = None;
        let counts = self.shared.measures.counters.now();
        let reconnection = self.shared.measures.statistics.lock().find_connection(counts, resent_pages);
        let stats::Reconnection { took, resent_bytes, .. } = reconnection;
        self.shared.tell(&Event::Reconnected { took, resent_bytes });
    }
}

/// Begins the first round of a session, and the policy with it.
fn begin_rounds_again(transfer: &mut Transfer) -> Result<Settings, Break> {
    let rounds = transfer.rounds()?;
    rounds.publish_resumed();
    let number = rounds.round().number();
    rounds.tell();
    if let Some(streams) = &transfer.streams {
        streams.enter_round(number);
    }
    let begun = transfer.begun();
    let snapshot = transfer.rounds()?.snapshot();
    transfer.tell_policy(Input::Began(begun, snapshot));
    Ok(begun.settings)
}

fn why_not(peer: Features) -> String {
    let why = match peer.contains(Features::HANDOVER) {
        true => "set x-sterna-reconnect-window there, too",
        false => "it is a QEMU or an older Sterna",
    };
    format!(
        "x-sterna-reconnect-window has no effect, and a lost connection ends the migration: the destination cannot wait for this side ({why})"
    )
}
