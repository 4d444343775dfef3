//! Replaces a lost connection, so that precopy continues over a new one (specs/extension.md §13).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_proto::source::{Event as Fed, Source, State};
use sterna_transport::{CancelFlag, Channel};
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::Control;
use crate::error::MigrationError;
use crate::events::Event;
use crate::interruption::Break;
use crate::outgoing::carrier::facts;
use crate::outgoing::carrier::interface::Carrier as _;
use crate::outgoing::carrier::sockets::Sockets;
use crate::outgoing::carrier::stream::main_channel;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::params::Parameters;
use crate::precopy::Input;
use crate::reconnect::{DialError, Dialled, Dialling, Missing, SILENCE, Unconfirmed, block_pages, give_up};
use crate::stats::Reconnection;
use crate::streams::Streamed;

/// The limit of one attempt. If a handshake's first packet was lost, a new attempt is sooner than the kernel's
/// retry.
const ATTEMPT: Duration = Duration::from_secs(5);
/// The limit of the attempt to tell the destination that this side gives up.
const FAREWELL: Duration = Duration::from_secs(1);

impl Control {
    /// Announces a reconnection after a loss, if it is enabled and the destination can wait.
    pub(super) fn announce_return(&mut self) -> Result<(), MigrationError> {
        let shared = &self.shared;
        let window = shared.params().reconnect_window;
        let peer = Features(shared.driver.inspect(Source::peer).features);
        if window.is_zero() || !shared.can_dial_again() {
            return Ok(());
        }
        if !peer.contains(Features::RECONNECT) {
            shared.tell(&Event::Warning(why_not(peer)));
            return Ok(());
        }
        if let Some(device) =
            Streamed::of(&shared.guest.vm.devices()).first().filter(|_| !shared.capabilities.multifd)
        {
            let why = format!(
                "x-sterna-reconnect-window has no effect, and a lost connection ends the migration: {device} has a stream, and \
                 that goes on over another connection only with multifd channels"
            );
            shared.tell(&Event::Warning(why));
            return Ok(());
        }
        let _ = shared.reconnection.unconfirmed.set(Unconfirmed::new(&shared.guest.ram));
        self.transfer.main()?.commands(&[Command::Ping(extension::RECONNECT_PING)])
    }

    /// Warns that a lost connection ends the migration, against the operator's setting.
    pub(super) fn warn_without_return(&self) {
        let shared = &self.shared;
        let peer = shared.driver.inspect(Source::peer);
        if !peer.sterna && !shared.params().reconnect_window.is_zero() && shared.can_dial_again() {
            shared.tell(&Event::Warning(why_not(Features(peer.features))));
        }
    }

    /// Waits until the destination has promised to wait for this side after a loss. The promise may arrive from
    /// now on.
    pub(super) fn await_promise(&mut self) -> Result<(), Break> {
        if self.shared.reconnection.unconfirmed.get().is_none() {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let after = shared.params().limits.setup;
        let has_promised = || shared.reconnection.is_waited_for.load(Ordering::Acquire).then_some(());
        match self.transfer.waits.at_most(after, has_promised)? {
            Some(()) => {
                self.watch_closely(false);
                Ok(())
            }
            None => {
                let what = "the destination to say that it waits for a lost connection".to_owned();
                Err(MigrationError::Limit { what, after }.into())
            }
        }
    }

    /// Makes a lost connection replaceable from now on.
    ///
    /// Call it before the first page can be sent and lost. The caller must not return between this call and the
    /// moment at which the rounds are known.
    pub(super) fn may_reconnect(&self) {
        if self.shared.reconnection.unconfirmed.get().is_some() {
            self.shared.report(Fed::MayReconnect);
        }
    }

    /// Performs `BreakOff`: ends all sending and receiving of the session. Knowledge about pages is kept.
    pub(super) fn break_off(&mut self) {
        let silent = self.silence();
        self.shared.break_session();
        self.transfer.workers.join();
        if self.shared.driver.inspect(Source::state) == State::Suspending {
            // A hook or a stop that failed after the loss is undone. It does not end the migration.
            self.shared.forget_error();
        }
        self.reconnecting.streams = self.transfer.streams.take().and_then(DeviceStreams::suspend);
        *self.shared.session.streams.lock() = None;
        self.transfer.waits.keep_alive(None);
        self.switch.preempt = None;
        self.transfer.carrier = None;
        self.shared.drop_channels();
        self.transfer.unthrottle();
        self.transfer.pacing.hints.end();
        let why = self.shared.reconnection.lost.lock().clone();
        let why = why.map_or_else(|| "the connection was lost".to_owned(), |error| error.to_string());
        if let Some(rounds) = &mut self.transfer.rounds {
            rounds.leave_unfinished(silent);
        }
        let counts = self.shared.measures.counters.now();
        self.shared.measures.statistics.lock().lose_connection(counts, silent, why.clone());
        self.shared.tell(&Event::ConnectionLost { why });
    }

    /// How long the peer had acknowledged nothing when the kernel gave the connection up.
    ///
    /// Zero if the connection was lost for another reason. Then nothing shows that the network failed earlier.
    fn silence(&self) -> Duration {
        let is_given_up =
            self.shared.reconnection.lost.lock().as_ref().is_some_and(MigrationError::is_timeout);
        let ago = |channel: &Arc<Channel>| Some(channel.delivery()?.acknowledged_ago);
        let shortest = self.transfer.channels().iter().filter_map(ago).min();
        shortest.filter(|_| is_given_up).unwrap_or_default()
    }

    /// Detects a silent network sooner while the guest is paused.
    ///
    /// The guest can then resume.
    pub(super) fn watch_closely(&self, on: bool) {
        if !self.shared.driver.inspect(Source::would_reconnect) && on {
            return;
        }
        let params = self.shared.params();
        if !params.reconnect_window.is_zero() {
            let limit = if on { params.downtime_limit } else { SILENCE }.min(params.limits.stall);
            self.transfer.channels().iter().for_each(|channel| channel.probe_peer(limit));
        }
    }

    /// Performs `Reconnect`: one attempt.
    pub(super) fn reconnect(&mut self) {
        let shared = Arc::clone(&self.shared);
        let params = shared.params();
        self.reconnecting.session = shared.reconnection.recovery.begin_session();
        let left = shared.driver.inspect(Source::deadline).map(|end| end.saturating_sub(shared.driver.now()));
        let limit = ATTEMPT.min(params.limits.setup).min(left.unwrap_or(ATTEMPT));
        let pages = block_pages(&shared.guest.ram);
        let dialling = self.dialling(&params, &pages, limit, &shared.session.connecting);
        match dialling.dial(|channel| shared.adopt(channel)) {
            Ok(dialled) => {
                for channel in dialled.lanes.iter().chain([&dialled.main]) {
                    channel.set_stall_limit(Some(params.limits.stall));
                    channel.probe_peer(SILENCE.min(params.limits.stall));
                }
                self.reconnecting.dialled = Some(dialled);
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
    }

    /// Performs `ResumePrecopy`: returns when the machine has another action.
    pub(super) fn resume_precopy(&mut self) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let Some(Dialled { session, main, lanes, holds }) = self.reconnecting.dialled.take() else {
            return Err(MigrationError::Internal("no session was dialled".to_owned()).into());
        };
        let missing = match shared.reconnection.unconfirmed.get() {
            Some(unconfirmed) => unconfirmed.begin_session(session, &holds)?,
            None => {
                return Err(MigrationError::Internal("nothing is known of what was sent".to_owned()).into());
            }
        };
        // This is done immediately, because this session may also be lost before its first page is sent.
        self.make_first_round(missing)?;
        shared.begin_session();
        let main = main_channel(&shared, main);
        let sockets = Sockets::of(&shared, Arc::clone(&main), lanes);
        sockets.greet()?;
        self.transfer.carrier = Some(Box::new(sockets));
        self.transfer.waits.keep_alive(Some(Arc::clone(&main)));
        self.transfer.read_return_path()?;
        main.commands(&[Command::OpenReturnPath])?;
        self.transfer.count_acknowledgements();
        self.advise_postcopy()?;
        let suspended = self.reconnecting.streams.take();
        self.transfer.streams =
            DeviceStreams::begin_again(&shared, self.transfer.carrier()?.multifd(), suspended)?;
        self.transfer.start_lanes()?;
        self.transfer.start_ram()?;
        self.begin_rounds_again()
    }

    /// Makes the first round of a session: missing pages and unsent dirty pages.
    fn make_first_round(&mut self, missing: Missing) -> Result<(), MigrationError> {
        let rounds = self.transfer.rounds()?;
        rounds.leave_out_unused(&missing);
        let resent = rounds.sent_among(&missing.pages);
        rounds.make_resumed(missing);
        self.note_reconnection(resent);
        Ok(())
    }

    fn begin_rounds_again(&mut self) -> Result<(), Break> {
        let rounds = self.transfer.rounds()?;
        rounds.publish_resumed();
        let number = rounds.round().number();
        rounds.tell();
        if let Some(streams) = &self.transfer.streams {
            streams.enter_round(number);
        }
        self.reconnecting.rounds_before = number - 1;
        let begun = self.transfer.begun();
        let snapshot = self.transfer.rounds()?.snapshot();
        self.transfer.tell_policy(Input::Began(begun, snapshot));
        self.follow_policy(begun.settings)
    }

    fn note_reconnection(&mut self, resent_pages: u64) {
        *self.shared.reconnection.lost.lock() = None;
        let counts = self.shared.measures.counters.now();
        let reconnection = self.shared.measures.statistics.lock().find_connection(counts, resent_pages);
        let Reconnection { took, resent_bytes, .. } = reconnection;
        self.shared.tell(&Event::Reconnected { took, resent_bytes });
    }

    /// Tells the destination that it need not wait for this side any more.
    ///
    /// The migration has ended without the destination.
    pub(super) fn say_farewell(&mut self) {
        if self.shared.reconnection.unconfirmed.get().is_none() {
            return;
        }
        let params = self.shared.params();
        self.reconnecting.session = self.shared.reconnection.recovery.begin_session();
        // The migration's own flag is set by now and ends every wait.
        let cancel = CancelFlag::new();
        give_up(&self.dialling(&params, &[], FAREWELL.min(params.limits.setup), &cancel));
    }

    fn dialling<'a>(
        &'a self,
        params: &'a Parameters,
        pages: &'a [u64],
        limit: Duration,
        cancel: &'a CancelFlag,
    ) -> Dialling<'a> {
        let shared = &self.shared;
        Dialling {
            to: &shared.session.to,
            tls: params.tls.as_ref(),
            identity: &shared.handover.identity,
            session: self.reconnecting.session,
            lanes: if shared.capabilities.multifd { params.multifd_channels } else { 0 },
            block_pages: pages,
            limit,
            cancel,
        }
    }
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

impl Shared {
    /// Whether another connection to the destination can be made.
    pub(in crate::outgoing) fn can_dial_again(&self) -> bool {
        use crate::params::MigrationMode;
        facts::of(&self.session.to).can_reconnect
            && self.guest.source.is_in_memory()
            && self.protecting.is_none()
            && self.params.lock().mode == MigrationMode::Normal
    }
}
