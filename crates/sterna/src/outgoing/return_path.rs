//! Reads the return path, and feeds the destination's messages to the handover machine.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_proto::source::{Event as Fed, Peer, State};
use sterna_transport::{Channel, TransportError};
use sterna_wire::extension::{self, Features};
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::return_path::ReturnMessage;

use super::configuration;
use super::shared::Shared;
use crate::error::{BadAnswer, BadGrant, Ending, MigrationError};
use crate::events::Event;
#[cfg(feature = "postcopy")]
use crate::postcopy::answers::LOADED_PING;

const CHANNEL: &str = "return path";

/// Reads until the destination closes or breaks the protocol, or until a shutdown.
///
/// `cause` may give a better reason for the end than the channel's error.
pub(super) fn read(shared: &Shared, channel: &Arc<Channel>, cause: &dyn Fn() -> Option<MigrationError>) {
    let mut reader = Reader { shared, channel, features: None, is_colo: false, bitmap: None, silent: 0 };
    if let Err(error) = reader.run() {
        shared.fail(cause().unwrap_or(error));
    }
}

struct Reader<'a> {
    shared: &'a Shared,
    channel: &'a Channel,
    features: Option<Features>,
    /// The seeding is acknowledged, so COLO's messages follow.
    is_colo: bool,
    /// The consecutive limits on silence without a message, although keepalives were due.
    silent: u32,
    /// The block whose bitmap follows.
    bitmap: Option<usize>,
}

impl Reader<'_> {
    fn run(&mut self) -> Result<(), MigrationError> {
        let mut buffer = Vec::with_capacity(2 * ReturnMessage::MAX_BYTES);
        let mut position = 0;
        loop {
            let mut chunk = [0; 4096];
            let count = match self.channel.read_some(&mut chunk) {
                Err(TransportError::Stalled { .. }) => {
                    self.check_silence()?;
                    continue;
                }
                other => other?,
            };
            self.silent = 0;
            if count == 0 {
                return Err(Ending::ReturnPath { offset: position, is_tls: self.channel.is_tls() }.into());
            }
            buffer.extend_from_slice(&chunk[..count]);
            while !self.is_colo
                && let Some(used) = self.take_first(&buffer, position)?
            {
                buffer.drain(..used);
                position += used as u64;
            }
            if let Some(protecting) = self.shared.protecting.as_ref().filter(|_| self.is_colo) {
                let taken = protecting.take_messages(&mut buffer, position)?;
                position += taken;
                if taken > 0 {
                    self.shared.driver.nudge();
                }
            }
        }
    }

    /// Fails if the destination answers no keepalives while the guest is paused.
    ///
    /// This is so only if this side would reconnect.
    ///
    /// Otherwise silence is no fault: the machine limits the time of an answer. A paused guest need not wait for
    /// an answer that cannot arrive if the connection can be replaced. This side sends only keepalives then, and
    /// they are answered immediately.
    fn check_silence(&mut self) -> Result<(), MigrationError> {
        use sterna_proto::source::Source;
        let is_asked = |machine: &Source| {
            machine.would_reconnect() && matches!(machine.state(), State::Preparing | State::PreSwitchover)
        };
        self.silent = if self.shared.driver.inspect(is_asked) { self.silent + 1 } else { 0 };
        // In the first interval, the destination may not have been asked yet.
        if self.silent < 2 {
            return Ok(());
        }
        Err(Ending::NoKeepAlive.into())
    }

    /// Takes one message or bitmap from the front of `bytes`. Gives its size; `None` if it is incomplete.
    fn take_first(&mut self, bytes: &[u8], position: u64) -> Result<Option<usize>, MigrationError> {
        let wire = |error: sterna_wire::WireError| MigrationError::wire(CHANNEL)(error.at(position));
        if let Some(block) = self.bitmap {
            let pages = self.shared.guest.ram.block(block).pages();
            let Some((received, used)) = ReceivedPages::decode(bytes, pages).map_err(wire)? else {
                return Ok(None);
            };
            self.bitmap = None;
            self.shared.reconnection.recovery.received(block, received);
            self.shared.driver.nudge();
            return Ok(Some(used));
        }
        let Some((message, used)) = ReturnMessage::decode(bytes).map_err(wire)? else { return Ok(None) };
        self.take(message)?;
        Ok(Some(used))
    }

    fn take(&mut self, message: ReturnMessage) -> Result<(), MigrationError> {
        match message {
            ReturnMessage::Pong(value) => self.pong(value),
            ReturnMessage::SwitchoverAck => {
                self.shared.report(Fed::SwitchoverAck);
                Ok(())
            }
            ReturnMessage::Shut(code) => {
                if code != 0 {
                    self.shared.note_error(MigrationError::DestinationFailed(code));
                }
                self.shared
                    .measures
                    .statistics
                    .lock()
                    .acknowledged
                    .get_or_insert_with(std::time::Instant::now);
                self.is_colo = code == 0 && self.shared.protecting.is_some();
                self.shared.report(Fed::Shut(code));
                Ok(())
            }
            // QEMU ignores page requests of a known block in precopy. No destination sends them.
            ReturnMessage::RequestPages { .. } if !self.shared.capabilities.postcopy_ram => {
                Err(BadAnswer::RequestWithoutPostcopy.into())
            }
            ReturnMessage::RequestPages { block, start, length } => {
                let ram = &self.shared.guest.ram;
                self.shared.postcopy.request(ram, block.as_deref(), start, u64::from(length))
            }
            ReturnMessage::ReceivedBitmap { .. } if !self.shared.reconnection.recovery.is_under_way() => {
                Err(BadAnswer::NoRecovery(Box::new(message)).into())
            }
            // A QEMU ignores it, too.
            ReturnMessage::ResumeAck(_) if !self.shared.reconnection.recovery.is_under_way() => Ok(()),
            message @ ReturnMessage::ReceivedBitmap { .. } => {
                self.bitmap = self.shared.reconnection.recovery.take(message)?;
                Ok(())
            }
            message @ ReturnMessage::ResumeAck(_) => {
                self.shared.reconnection.recovery.take(message)?;
                self.shared.reconnection.recovery.is_done();
                self.shared.report(Fed::ResumeAcknowledged);
                Ok(())
            }
            ReturnMessage::Grant { device, instance, bytes } => match &*self.shared.session.streams.lock() {
                Some(streams) => streams.grant(&device, instance, bytes),
                None => Err(BadGrant::NoStreams.into()),
            },
            ReturnMessage::ConfigurationRefused(refusal) => {
                match self.shared.driver.inspect(sterna_proto::source::Source::state) {
                    State::Configuring => Err(configuration::refused(self.shared, refusal)),
                    _ => Err(BadAnswer::Unasked.into()),
                }
            }
        }
    }

    fn wants_configuration(&self) -> bool {
        self.features.is_some_and(|features| features.contains(Features::CONFIGURATION))
    }

    fn pong(&mut self, value: u32) -> Result<(), MigrationError> {
        let state = self.shared.driver.inspect(sterna_proto::source::Source::state);
        match value {
            extension::FENCE_PING if state == State::Identifying && self.wants_configuration() => {
                // The destination names its features again when it has its VM.
                self.features = None;
                self.shared.report(Fed::ConfigurationWanted);
            }
            extension::CONFIGURATION_PING if state == State::Configuring => {
                self.shared.report(Fed::ConfigurationAccepted);
            }
            extension::FENCE_PING if state == State::Identifying => {
                let features = self.features.unwrap_or_default();
                let peer = Peer { sterna: features.contains(Features::HANDOVER), features: features.0 };
                if self.features.is_some() && !peer.sterna {
                    self.shared.tell(&Event::Warning(
                        "the destination is an older Sterna, which accepts no secret: it is treated like a QEMU, and if \
                         the acknowledgement is lost it cannot be asked"
                            .to_owned(),
                    ));
                }
                self.shared.report(Fed::PeerIdentified(peer));
            }
            extension::COMPATIBILITY_PING if state == State::Comparing => {
                self.shared.report(Fed::CompatibilityAccepted);
            }
            extension::PREPARE_PING if state == State::Preparing => {
                // This is the commit. A page may have failed while the streams and devices were saved.
                MigrationError::check_memory(&self.shared.guest.ram)?;
                self.shared.report(Fed::PrepareAcknowledged);
            }
            extension::PREPARE_PING if !state.is_final() => {
                return Err(BadAnswer::Prepare(state).into());
            }
            extension::POSTCOPY_STARTED_PING => self.shared.destination_started()?,
            #[cfg(feature = "postcopy")]
            // A QEMU has loaded the devices: from now on it keeps the guest when the connection breaks.
            LOADED_PING
                if self.shared.driver.inspect(|machine| machine.is_postcopy() && !machine.peer().sterna) =>
            {
                self.shared.destination_started()?;
            }
            extension::KEEPALIVE_PING => {
                self.shared.measures.probes.lock().answered();
                self.shared.driver.nudge();
            }
            extension::RECONNECT_PING => {
                self.shared.reconnection.is_promised();
                self.shared.driver.nudge();
            }
            extension::ROUND_PING => {
                self.shared.reconnection.round_is_confirmed()?;
            }
            extension::MEMORY_PING => {
                self.shared.session.memory_is_expected.store(true, Ordering::Release);
                self.shared.driver.nudge();
            }
            extension::DEVICE_STREAMS_PING | extension::STREAMS_ANEW_PING => {
                if let Some(streams) = &*self.shared.session.streams.lock() {
                    streams.all_granted()?;
                }
            }
            _ => {
                if let (Some(features), State::Identifying) = (Features::from_pong(value), state) {
                    self.features = Some(features);
                }
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Handles the destination's report that it has started the guest.
    ///
    /// A Sterna reports it when asked, a QEMU when the devices are loaded.
    fn destination_started(&self) -> Result<(), MigrationError> {
        let is_due = self.driver.inspect(|machine| machine.is_postcopy() && machine.state().is_committed());
        if !is_due {
            return Err(BadAnswer::Started.into());
        }
        self.measures.statistics.lock().acknowledged.get_or_insert_with(std::time::Instant::now);
        self.report(Fed::DestinationStarted);
        Ok(())
    }
}
