//! Postcopy while precopy moves pages: announces the switch, and requests it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::{Cause, Event as Fed, Refusal, Source};
use sterna_ram::{DirtyBitmaps, PAGE_SIZE};
use sterna_transport::Channel;
use sterna_wire::extension::{Features, PreemptHello, ReconnectChannel};
use sterna_wire::main::Command;

use super::interface::Postcopy;
use super::recovery::say_hello;
use super::sender::PageSender;
use crate::error::{MigrationError, NoConvergence, SettingDifference};
use crate::events::Event;
use crate::identity;
use crate::interruption::Break;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::DeviceStreams;
use crate::outgoing::switchover::Switchover;
use crate::outgoing::transfer::Transfer;
use crate::params::{NonConvergence, Parameters};
use crate::postcopy::page_sizes;
use crate::threads::call;
use crate::vm::RunState;

/// After this time an operator is informed why the guest has not been switched.
const LONG_AWAITED: Duration = Duration::from_secs(5);

/// Postcopy with the capability, and the state of the switch.
pub(super) struct Enabled {
    pub(super) shared: Arc<Shared>,
    /// The channel of requested pages.
    pub(super) preempt: Option<Arc<Channel>>,
    /// The devices' sections, until they are sent.
    pub(super) package: Vec<u8>,
    /// The pages that the destination was told to drop before the guest stopped.
    pub(super) dropped: Option<DirtyBitmaps>,
    pub(super) page_sender: Option<PageSender>,
    /// Time since which the switch has been waiting for devices, and whether the warning about that was emitted.
    awaited_since: Option<Instant>,
    is_told: bool,
}

impl Postcopy for Enabled {
    fn takes_hints(&self) -> bool {
        // In postcopy every page that is not sent would have to follow.
        false
    }

    fn advise(&self, transfer: &Transfer) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let peer = shared.driver.inspect(Source::peer);
        if peer.sterna {
            check_peer(Features(peer.features), shared.capabilities.postcopy_preempt)?;
        }
        let sizes = page_sizes(&shared.guest.ram);
        transfer.main()?.commands(&[Command::PostcopyAdvise(Some((sizes, PAGE_SIZE as u64)))])
    }

    fn switch(&mut self, transfer: &mut Transfer) -> Result<bool, Break> {
        let shared = Arc::clone(&self.shared);
        self.want_if_due();
        if !shared.postcopy.is_wanted() {
            return Ok(false);
        }
        if let Some(device) = transfer.streams.as_ref().and_then(DeviceStreams::unread) {
            self.tell_what_is_awaited(&device);
            return Ok(false);
        }
        transfer.pacing.hints.stop();
        if shared.capabilities.postcopy_preempt && self.preempt.is_none() {
            self.preempt = Some(connect_preempt(&shared)?);
        }
        let guest_running = call("SourceVm::run_state", || shared.guest.vm.run_state()) == RunState::Running;
        match shared.feed(Fed::PostcopyRequested { guest_running }) {
            Ok(()) => {
                // Lanes stop after their current chunk, before the guest stops.
                shared.session.limiter.open();
                transfer.rounds()?.latest().iter().for_each(|round| round.abandon());
                Ok(true)
            }
            // Precopy continues until the destination is ready.
            Err(Refusal::AcknowledgementsMissing { .. }) => Ok(false),
            Err(refusal) => Err(MigrationError::Internal(refusal.to_string()).into()),
        }
    }

    fn takes_over(&self, why: &NoConvergence) -> bool {
        let postcopy = &self.shared.postcopy;
        if self.shared.params().non_convergence != NonConvergence::Postcopy {
            return false;
        }
        // The switch may wait for a device.
        if !postcopy.is_wanted() {
            let text = format!("precopy does not converge ({why}): the migration switches to postcopy");
            self.shared.tell(&Event::Warning(text));
            postcopy.want();
        }
        true
    }

    fn is_awaited(&self) -> bool {
        self.shared.postcopy.is_wanted()
    }

    fn switchover(&mut self) -> Option<&mut dyn Switchover> {
        self.shared.driver.inspect(Source::is_postcopy).then_some(self as &mut dyn Switchover)
    }

    fn send_pages(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        self.send_all(transfer)
    }

    fn recover(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        self.open_again(transfer)
    }

    fn report_paused(&self, cause: Cause) {
        if matches!(cause, Cause::OperatorPaused | Cause::DestinationFailed(_)) {
            // Errors of threads at the channels are only consequences of `cause`.
            self.shared.forget_error();
            self.shared.note_cause(cause);
        }
        let why = self.shared.error().map_or_else(|| format!("{cause:?}"), |error| error.to_string());
        self.shared.measures.statistics.lock().pause_postcopy(&why);
        let left = self.shared.postcopy.left_bytes() / PAGE_SIZE as u64;
        let text = format!(
            "postcopy-paused: the guest runs at the destination, and the connection broke ({why}). The guest waits \
             there when it needs a page that has not arrived; {left} pages were not sent, and some sent pages may be \
             lost. Keep this process, because only it has these pages. 'migrate' with 'resume' here continues the \
             migration; if the destination must listen at another address, use 'migrate-recover' there first. The \
             guest does not run here any more. If it is complete there ('query-migrate' shows completed), this side \
             completes when the destination answers its question. If the destination does not answer, or the guest is \
             lost, decide destination-runs"
        );
        self.shared.tell(&Event::Warning(text));
    }

    fn session_lost(&mut self) {
        self.preempt = None;
    }

    fn close(&mut self) {
        self.shared.postcopy.pause();
        self.page_sender = None;
        self.preempt = None;
    }
}

impl Enabled {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            preempt: None,
            package: Vec::new(),
            dropped: None,
            page_sender: None,
            awaited_since: None,
            is_told: false,
        }
    }

    /// Requests the switch after the operator's limit of time or rounds for precopy.
    fn want_if_due(&self) {
        let shared = &self.shared;
        if shared.postcopy.is_wanted() {
            return;
        }
        let Parameters { postcopy_after: time, postcopy_after_rounds: rounds, .. } = shared.params();
        let (clock, begun) = {
            let statistics = shared.measures.statistics.lock();
            (statistics.clock(), statistics.rounds_begun)
        };
        if !time.is_zero() && clock >= time || rounds > 0 && begun > u64::from(rounds) {
            shared.postcopy.want();
        }
    }

    /// Warns once if the switch has waited long for `device`.
    ///
    /// The device is read while the guest runs, to keep the pause short.
    fn tell_what_is_awaited(&mut self, device: &str) {
        let began = *self.awaited_since.get_or_insert_with(Instant::now);
        if !self.is_told && began.elapsed() >= LONG_AWAITED {
            self.is_told = true;
            let text = format!(
                "the switch to postcopy waits: {device} is still being read while the guest runs, and would stand in the pause"
            );
            self.shared.tell(&Event::Warning(text));
        }
    }
}

/// Checks that a Sterna destination has the settings that postcopy needs.
fn check_peer(features: Features, wants_preempt: bool) -> Result<(), MigrationError> {
    if !features.contains(Features::POSTCOPY) {
        return Err(SettingDifference::PostcopyIsOffThere.into());
    }
    match (wants_preempt, features.contains(Features::PREEMPT)) {
        (true, false) => Err(SettingDifference::Preempt { is_on_here: true }.into()),
        (false, true) => Err(SettingDifference::Preempt { is_on_here: false }.into()),
        _ => Ok(()),
    }
}

/// Opens the channel of requested pages.
///
/// This side names the migration and the channel's session to a Sterna. Therefore the Sterna does not accept a
/// late channel of an earlier session as the present one.
fn connect_preempt(shared: &Shared) -> Result<Arc<Channel>, MigrationError> {
    let params = shared.params();
    let setup = params.limits.setup;
    let channel = Channel::connect_with(
        &shared.session.to,
        params.tls.as_ref(),
        setup,
        &shared.session.connecting,
        |channel| {
            channel.set_stall_limit(Some(params.limits.stall));
            shared.adopt(channel)
        },
    )?;
    let identity = &shared.handover.identity;
    let session = shared.reconnection.recovery.session();
    if session > 0 {
        say_hello(&channel, identity, (session, ReconnectChannel::Preempt), identity::nonce()?)?;
    } else if shared.driver.inspect(Source::peer).sterna {
        let mut hello = Vec::new();
        PreemptHello::new(identity.id, &identity.secret, &channel.tls_binding()).encode(&mut hello);
        channel.write_all(&hello)?;
    }
    Ok(channel)
}
