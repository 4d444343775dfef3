//! A lost connection is made anew, and precopy goes on over it (specs/extension.md §13).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_proto::source::{Event as Fed, Source};
use sterna_transport::CancelFlag;
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::{Control, setup};
use crate::error::MigrationError;
use crate::events::Event;
use crate::interruption::Break;
use crate::outgoing::return_path;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::params::Parameters;
use crate::precopy::{Begun, FIXED_DOWNTIME, Input};
use crate::reconnect::{DialError, Dialled, Dialling, Missing, Unconfirmed, block_pages, give_up};
use crate::stats::Reconnection;
use crate::streams::Streamed;

/// One attempt takes no longer: a handshake whose first packet was lost is begun anew sooner than the kernel would.
const ATTEMPT: Duration = Duration::from_secs(5);
/// How long the destination is tried to be told that this side gives up.
const FAREWELL: Duration = Duration::from_secs(1);

impl Control {
    /// Says that this side comes back, if it will and the destination can wait for it.
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
            Streamed::of(&shared.vm.devices()).first().filter(|_| !shared.capabilities.multifd)
        {
            let why = format!(
                "x-sterna-reconnect-window has no effect, and a lost connection ends the migration: {device} has a stream, and \
                 that goes on over another connection only with multifd channels"
            );
            shared.tell(&Event::Warning(why));
            return Ok(());
        }
        let _ = shared.unconfirmed.set(Unconfirmed::new(&shared.ram));
        self.main()?.commands(&[Command::Ping(extension::RECONNECT_PING)])
    }

    /// Says that a lost connection will end the migration, if that is another than what an operator set.
    pub(super) fn warn_without_return(&self) {
        let shared = &self.shared;
        let peer = shared.driver.inspect(Source::peer);
        if !peer.sterna && !shared.params().reconnect_window.is_zero() && shared.can_dial_again() {
            shared.tell(&Event::Warning(why_not(Features(peer.features))));
        }
    }

    /// Waits until the destination has said that it waits for this side after a loss. From now on it may come.
    pub(super) fn await_promise(&mut self) -> Result<(), Break> {
        if self.shared.unconfirmed.get().is_none() {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let after = shared.params().limits.setup;
        let has_promised = || shared.is_waited_for.load(Ordering::Acquire).then_some(());
        match self.waits.at_most(after, has_promised)? {
            Some(()) => Ok(()),
            None => {
                let what = "the destination to say that it waits for a lost connection".to_owned();
                Err(MigrationError::Limit { what, after }.into())
            }
        }
    }

    /// Performs `BreakOff`: nobody sends or hears anything any more. What is known of pages stays.
    pub(super) fn break_off(&mut self) {
        self.shared.break_session();
        self.workers.join();
        self.reconnecting.streams = self.streams.take().and_then(DeviceStreams::suspend);
        *self.shared.streams.lock() = None;
        self.waits.keep_alive(None);
        self.main = None;
        self.multifd.clear();
        self.preempt = None;
        self.shared.drop_channels();
        self.unthrottle();
        self.hints.end();
        let why = self.shared.lost.lock().clone();
        let why = why.map_or_else(|| "the connection was lost".to_owned(), |error| error.to_string());
        let counts = self.shared.counters.now();
        self.shared.statistics.lock().lose_connection(counts, why.clone());
        self.shared.tell(&Event::ConnectionLost { why });
    }

    /// While the guest stands, a network that falls silent is to be noticed soon: the guest runs on then.
    pub(super) fn watch_closely(&self, on: bool) {
        if !self.shared.driver.inspect(Source::would_reconnect) && on {
            return;
        }
        let params = self.shared.params();
        if !params.reconnect_window.is_zero() {
            let limit = if on { params.downtime_limit.min(params.limits.stall) } else { params.limits.stall };
            let main = self.main.as_ref().and_then(|main| main.channel.as_ref());
            self.multifd.iter().chain(main).for_each(|channel| channel.probe_peer(limit));
        }
    }

    /// Performs `Reconnect`: one attempt.
    pub(super) fn reconnect(&mut self) {
        let shared = Arc::clone(&self.shared);
        let params = shared.params();
        self.reconnecting.session = shared.recovery.begin_session();
        let left = shared.driver.inspect(Source::deadline).map(|end| end.saturating_sub(shared.driver.now()));
        let limit = ATTEMPT.min(params.limits.setup).min(left.unwrap_or(ATTEMPT));
        let pages = block_pages(&shared.ram);
        let dialling = self.dialling(&params, &pages, limit, &shared.connecting);
        match dialling.dial(|channel| shared.adopt(channel)) {
            Ok(dialled) => {
                for channel in dialled.lanes.iter().chain([&dialled.main]) {
                    channel.set_stall_limit(Some(params.limits.stall));
                    channel.probe_peer(params.limits.stall);
                }
                self.reconnecting.dialled = Some(dialled);
                shared.report(Fed::Reconnected);
            }
            Err(DialError::Over) => {
                *shared.last_attempt.lock() = Some("the destination has given the migration up".to_owned());
                shared.drop_channels();
                shared.report(Fed::ReconnectRefused);
            }
            Err(DialError::Failed(error)) => {
                tracing::debug!(%error, "connecting again");
                *shared.last_attempt.lock() = Some(error.to_string());
                shared.drop_channels();
                shared.report(Fed::ReconnectFailed);
            }
        }
    }

    /// Performs `ResumePrecopy`: returns when the machine wants something else done.
    pub(super) fn resume_precopy(&mut self) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let Some(Dialled { session, main, lanes, holds }) = self.reconnecting.dialled.take() else {
            return Err(MigrationError::Internal("no session was dialled".to_owned()).into());
        };
        let missing = match shared.unconfirmed.get() {
            Some(unconfirmed) => unconfirmed.begin_session(session, &holds)?,
            None => {
                return Err(MigrationError::Internal("nothing is known of what was sent".to_owned()).into());
            }
        };
        // At once: this session may be lost, too, before its first page is sent.
        self.make_first_round(missing)?;
        shared.begin_session();
        let main = setup::main_channel(&shared, main);
        main.with(|stream| stream.greet(shared.guest_source.configuration()))?;
        self.main = Some(Arc::clone(&main));
        self.multifd = lanes;
        self.waits.keep_alive(Some(Arc::clone(&main)));
        if let Some(channel) = main.channel.clone() {
            let shared = Arc::clone(&shared);
            self.workers.spawn("return path", move || return_path::read(&shared, &channel, None))?;
        }
        main.commands(&[Command::OpenReturnPath])?;
        self.count_acknowledgements();
        self.advise_postcopy()?;
        self.streams = DeviceStreams::begin_again(&shared, &self.multifd, self.reconnecting.streams.take())?;
        if let Some(streams) = &self.streams {
            streams.start(&main, &mut self.workers)?;
        }
        let on_lanes = self.streams.as_ref().and_then(DeviceStreams::on_lanes);
        let writers = setup::writers(&shared, &main, (self.multifd.as_slice(), None, None))?;
        setup::start_lanes(&shared, writers, on_lanes, &mut self.workers)?;
        self.waits.until(|| shared.lanes.are_through(0).then_some(()))?;
        self.start_ram()?;
        self.begin_rounds_again()
    }

    /// The next round sends what is missing, and what was found dirty before and sent in no round.
    fn make_first_round(&mut self, missing: Missing) -> Result<(), MigrationError> {
        let rounds = self.rounds()?;
        rounds.leave_out_unused(&missing);
        let resent = rounds.sent_among(&missing.pages);
        rounds.make_resumed(missing);
        self.note_reconnection(resent);
        Ok(())
    }

    fn begin_rounds_again(&mut self) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        let rounds = self.rounds()?;
        rounds.publish_resumed();
        let number = rounds.round().number();
        rounds.tell();
        if let Some(streams) = &self.streams {
            streams.enter_round(number);
        }
        self.reconnecting.rounds_before = number - 1;
        let begun = Begun {
            settings: self.settings(),
            channels: shared.lanes.count() as u32,
            round_trip: self.round_trip,
            fixed_downtime: self.round_trip * 2 + FIXED_DOWNTIME,
        };
        let snapshot = self.rounds()?.snapshot();
        self.tell_policy(Input::Began(begun, snapshot));
        self.follow_policy(begun.settings)
    }

    fn note_reconnection(&mut self, resent_pages: u64) {
        *self.shared.lost.lock() = None;
        let counts = self.shared.counters.now();
        let reconnection = self.shared.statistics.lock().find_connection(counts, resent_pages);
        let Reconnection { took, resent_bytes, .. } = reconnection;
        self.shared.tell(&Event::Reconnected { took, resent_bytes });
    }

    /// The migration has ended without the destination's doing: it need not wait for this side.
    pub(super) fn say_farewell(&mut self) {
        if self.shared.unconfirmed.get().is_none() {
            return;
        }
        let params = self.shared.params();
        self.reconnecting.session = self.shared.recovery.begin_session();
        // The one of the migration ends every wait by now.
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
            to: &shared.to,
            tls: params.tls.as_ref(),
            identity: &shared.identity,
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
        use sterna_transport::Address;
        let is_network = matches!(self.to, Address::Tcp { .. } | Address::Unix { .. });
        is_network
            && self.guest_source.is_in_memory()
            && self.protecting.is_none()
            && self.params.lock().mode == MigrationMode::Normal
    }
}
