//! Reads what a source sends before the VM exists: the beginning of a stream, and the configuration.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_transport::Channel;
use sterna_wire::WireError;
use sterna_wire::extension::{
    CONFIGURATION_PING, ConfigurationRefusal, EXTENSION_PING, Features, SourceConfiguration,
};
use sterna_wire::main::{
    BodyKind, Command, Expectations, MainDecoder, MainItem, SectionKind, SectionKnowledge, Step,
};
use sterna_wire::return_path::ReturnMessage;

use crate::error::{
    BadConnection, ConfigurationDifference, Difference, Ending, Fault, MigrationError, Misbehaviour, Untimely,
};
use crate::incoming::reader::{More, Reader};
use crate::interruption::Break;

const CHANNEL: &str = "main channel";
/// How long a source that does not read may delay the answer that it is refused.
const LAST_WORD: Duration = Duration::from_secs(1);

/// The beginning of a source's main channel, up to the configuration's PING.
pub(super) struct Prologue {
    channel: Arc<Channel>,
    until: Instant,
    /// The stream's own configuration was read.
    has_begun: bool,
    /// The source has opened the return path.
    is_answered: bool,
    /// The source has sent its configuration, and understands a refusal of it.
    is_configured: bool,
}

impl Prologue {
    /// The beginning of `channel`, which may take `limit` in all.
    pub(super) fn new(channel: &Arc<Channel>, limit: Duration) -> Self {
        let until = Instant::now() + limit;
        Self {
            channel: Arc::clone(channel),
            until,
            has_begun: false,
            is_answered: false,
            is_configured: false,
        }
    }

    /// Reads up to the PING after the configuration, and answers what precedes it.
    pub(super) fn read(&mut self) -> Result<SourceConfiguration, MigrationError> {
        let mut decoder = MainDecoder::new(
            Box::new(Known),
            Expectations {
                device_state_bytes: SourceConfiguration::BODY_BYTES as u64,
                ..Expectations::default()
            },
        );
        let mut reader = Reader::new(Arc::clone(&self.channel));
        let (mut due, mut configuration) = (1, None);
        loop {
            if reader.bytes().len() < due {
                self.limit()?;
                match reader.more()? {
                    More::Bytes | More::Silence => continue,
                    More::End => {
                        let peer = self.channel.peer().to_owned();
                        return Err(Ending::BeforeGreeting { peer }.into());
                    }
                }
            }
            match decoder.next(reader.bytes()).map_err(|error| self.unfit(error))? {
                Step::NeedMore(count) => due = count,
                Step::Partial { consumed } => {
                    reader.consume(consumed);
                    due = 1;
                }
                Step::Item { item, consumed } => {
                    reader.consume(consumed);
                    due = 0;
                    if self.take(item, &mut configuration)? {
                        break;
                    }
                }
                Step::End => return Err(self.none_sent()),
            }
        }
        match configuration {
            // The source waits for the answer.
            Some(configuration) if reader.bytes().is_empty() => Ok(configuration),
            _ => Err(Untimely::Element.into()),
        }
    }

    /// Handles an item. True: it was the PING after the configuration.
    fn take(
        &mut self,
        item: MainItem,
        configuration: &mut Option<SourceConfiguration>,
    ) -> Result<bool, MigrationError> {
        match item {
            MainItem::Header => {}
            MainItem::Configuration(_) => self.has_begun = true,
            MainItem::Command(Command::OpenReturnPath) => self.is_answered = true,
            MainItem::Command(Command::Ping(CONFIGURATION_PING)) => return Ok(true),
            MainItem::Command(Command::Ping(value)) => {
                self.say(&ReturnMessage::Pong(value))?;
                if value == EXTENSION_PING {
                    self.say(&ReturnMessage::Pong(Features::CONFIGURATION.to_pong()))?;
                }
            }
            MainItem::Section { version, body, .. } => {
                self.is_configured = true;
                let decoded = SourceConfiguration::decode(version, &body);
                *configuration = Some(decoded.map_err(MigrationError::wire(CHANNEL))?);
            }
            _ => return Err(self.none_sent()),
        }
        Ok(false)
    }

    /// Tells the source that the VM is made.
    pub(super) fn accept(&self) -> Result<(), MigrationError> {
        self.say(&ACCEPTED)
    }

    /// Tells the source why no VM is made, if it can be told.
    pub(super) fn refuse(&self, error: &Break) {
        let Break::Failed(error) = error else { return };
        if !self.is_answered {
            return;
        }
        let message = match self.is_configured {
            true => ReturnMessage::ConfigurationRefused(refusal(error)),
            // A QEMU, or a source that sends something else.
            false => ReturnMessage::Shut(1),
        };
        self.channel.set_own_stall_limit(Some(LAST_WORD));
        if let Err(error) = self.say(&message) {
            tracing::debug!(%error, ?message, "return path");
        }
        // Closing a channel with unread bytes would break the source's connection before it has read the answer.
        let _ = self.channel.finish_writing();
        self.hear_the_source_out();
    }

    /// Drops what the source still sends, for a short time.
    fn hear_the_source_out(&self) {
        let until = Instant::now() + LAST_WORD;
        let mut dropped = [0; 4096];
        while Instant::now() < until && self.channel.read_some(&mut dropped).is_ok_and(|count| count > 0) {}
    }

    fn say(&self, message: &ReturnMessage) -> Result<(), MigrationError> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).map_err(MigrationError::wire("return path"))?;
        Ok(self.channel.write_all(&bytes)?)
    }

    /// Gives the next read the remaining time.
    fn limit(&self) -> Result<(), MigrationError> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let peer = self.channel.peer().to_owned();
            return Err(Misbehaviour::Connection { peer, why: BadConnection::Silent }.into());
        }
        self.channel.set_stall_limit(Some(left));
        Ok(())
    }

    /// The error for bytes that are no configuration.
    fn unfit(&self, error: WireError) -> MigrationError {
        match error.fault {
            // Another section comes first.
            Fault::PeerIncompatible if self.has_begun => self.none_sent(),
            _ => MigrationError::wire(CHANNEL)(error),
        }
    }

    fn none_sent(&self) -> MigrationError {
        ConfigurationDifference::NoneSent { peer: self.channel.peer().to_owned() }.into()
    }
}

/// The answer to a configuration from which the VM was made.
const ACCEPTED: ReturnMessage = ReturnMessage::Pong(CONFIGURATION_PING);

/// The text of a refusal for the source.
fn refusal(error: &MigrationError) -> ConfigurationRefusal {
    let text = |error: &dyn std::fmt::Display| error.to_string().replace('\0', "\u{fffd}");
    match error {
        MigrationError::PeerIncompatible(Difference::Configuration(ConfigurationDifference::Setting {
            setting,
            limit,
            ..
        })) => ConfigurationRefusal::Setting { name: setting.clone(), limit: limit.clone() },
        MigrationError::Vm(_) | MigrationError::Panicked { .. } => ConfigurationRefusal::Vm(text(error)),
        error => ConfigurationRefusal::Other(text(error)),
    }
}

/// Only the configuration is known before there is a VM.
struct Known;

impl SectionKnowledge for Known {
    fn body(&self, name: &str, _instance: u32, _version: u32, kind: SectionKind) -> BodyKind {
        if name == SourceConfiguration::SECTION_NAME && kind == SectionKind::Full {
            return BodyKind::LengthPrefixed { most: SourceConfiguration::BODY_BYTES };
        }
        BodyKind::Refuse(format!("section {name:?}, before the configuration"))
    }
}
