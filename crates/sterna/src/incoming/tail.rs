//! Reads the part of the stream after RAM for an opaque machine. The bytes are kept unchanged, until [`Tail`]
//! detects the end (specs/stream.md §1.6).
//!
//! | source | sign of the end | this side's answer |
//! | --- | --- | --- |
//! | QEMU, return path | the description ends here, and the source waits | SHUT |
//! | QEMU, no return path | the description, or the source closes | none |
//! | QEMU with `suppress-vmdesc` | EOF after the last footer, and the source waits or closes | SHUT |
//! | Sterna | PING *prepare* after the last footer; EOF and description follow the answer | PONG, SHUT |

use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_proto::destination::{Event as Fed, State};
use sterna_wire::extension;
use sterna_wire::main::{Command, Tail, TailEnd};

use super::loader::{CHANNEL, Loader};
use super::reader::More;
use crate::error::{Awaited, Ending, MigrationError, Untimely};
use crate::events::Event;

/// How long a source must be silent after an EOF, until this side assumes that no description follows.
///
/// Such a source waits for SHUT with its guest stopped. The delay is downtime, and is therefore short. The
/// documentation of [`sterna_wire::main::Tail`] names the disadvantage.
const SILENCE: Duration = Duration::from_secs(2);
/// How long no byte must follow a description, or *prepare*, until it counts as the end. Device bytes at the
/// end of a read may look like one. Bytes that were sent together arrive within this time. The delay is
/// downtime as well.
const ONCE_MORE: Duration = Duration::from_millis(2);
/// The byte `06`, and a length of 4 bytes.
const DESCRIPTION_HEAD: usize = 5;

impl Loader<'_> {
    /// Reads everything after RAM.
    pub(super) fn tail(&mut self) -> Result<(), MigrationError> {
        let shared = self.shared;
        let Some(mut tail) = shared.target.tail() else {
            return Err(MigrationError::Internal("a tail, where every device is known".to_owned()));
        };
        // A source without devices has already requested *prepare*.
        if self.was_asked {
            return self.behind_prepare();
        }
        shared.look_up_from_main_after(SILENCE);
        let mut silence = shared.group.watch();
        loop {
            let came = self.reader.bytes().len();
            tail.push(self.reader.bytes()).map_err(MigrationError::wire(CHANNEL))?;
            self.consume(came);
            let described = tail.described();
            let asked = if self.is_sterna { tail.asks(extension::PREPARE_PING) } else { None };
            if described.is_some() || asked.is_some() {
                if matches!(self.look_once_more()?, More::Bytes) {
                    continue;
                }
                if let Some(end) = described {
                    return self.ended(&tail, &end);
                }
            }
            if let Some(devices_bytes) = asked {
                let end = TailEnd { devices_bytes, has_eof: false, description: None };
                shared.target.devices_came(&tail, &end)?;
                self.was_asked = true;
                shared.report(Fed::PrepareRead);
                return self.behind_prepare();
            }
            match self.reader.more()? {
                More::Bytes => {}
                More::End if shared.stopping.load(Ordering::Acquire) => return Ok(()),
                More::End if self.has_return_path => {
                    return Err(Ending::BeforeAcknowledgement.into());
                }
                More::End => {
                    let end = tail.closed().map_err(|error| closed_early(&error))?;
                    return self.ended(&tail, &end);
                }
                More::Silence => {
                    if let Some(end) = tail.bare_end() {
                        return self.ended(&tail, &end);
                    }
                    let limit = shared.params.limits.stall;
                    if silence.silent_for() >= limit {
                        return Err(MigrationError::Limit { what: Awaited::Description, after: limit });
                    }
                }
            }
            if shared.stopping.load(Ordering::Acquire) {
                return Ok(());
            }
        }
    }

    /// Whether more bytes arrive within [`ONCE_MORE`].
    fn look_once_more(&mut self) -> Result<More, MigrationError> {
        self.shared.look_up_from_main_after(ONCE_MORE);
        let more = self.reader.more();
        self.shared.look_up_from_main_after(SILENCE);
        more
    }

    /// Everything has arrived. The source has committed, or assumes so: it waits for SHUT, or has closed.
    fn ended(&mut self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        let shared = self.shared;
        if end.description.is_none() {
            shared.tell(&Event::Warning(
                "the source sent no description of its devices (suppress-vmdesc=on?): the end of their state was \
                 found by section footers"
                    .to_owned(),
            ));
        }
        shared.target.devices_came(tail, end)?;
        shared.report(Fed::EofRead);
        self.listen_until_over()?;
        match shared.target.follower() {
            Some(follower) => self.follow(follower),
            None => Ok(()),
        }
    }

    /// Listens to the channel while this side makes its copy durable. If the source dies meanwhile, it still
    /// has its guest, or gets no answer. Both cases must be detected.
    fn listen_until_over(&mut self) -> Result<(), MigrationError> {
        loop {
            let over = |state: State| state >= State::Committed;
            if self.shared.stopping.load(Ordering::Acquire)
                || self.shared.driver().is_none_or(|driver| over(driver.inspect(|machine| machine.state())))
            {
                return Ok(());
            }
            match self.reader.more()? {
                More::Silence => {}
                // The primary's first message, or the end of its channel.
                More::Bytes | More::End if self.shared.is_followed() => return Ok(()),
                More::Bytes => {
                    return Err(Untimely::AfterEnd.into());
                }
                // Without a return path the source waits for no answer, and may close after its last byte.
                More::End if !self.has_return_path => return Ok(()),
                More::End => {
                    return Err(Ending::BeforeAcknowledgement.into());
                }
            }
        }
    }

    /// Waits for the commit after *prepare* was requested. The source may send keep-alive messages. EOF is the
    /// commit.
    fn behind_prepare(&mut self) -> Result<(), MigrationError> {
        self.shared.wait_for_main();
        loop {
            if !self.reader.fill(1)? {
                if self.shared.stopping.load(Ordering::Acquire) {
                    return Ok(());
                }
                return Err(Ending::BeforeCommit.into());
            }
            if self.reader.bytes()[0] == 0 {
                break;
            }
            let decoded = Command::decode(self.reader.bytes()).map_err(MigrationError::wire(CHANNEL))?;
            match decoded {
                Some((Command::Ping(value), used)) => {
                    self.consume(used);
                    self.pong(value)?;
                }
                Some((other, _)) => {
                    return Err(Untimely::AfterPrepare(Box::new(other)).into());
                }
                None => {
                    let more = self.reader.bytes().len() + 1;
                    self.reader.fill(more)?;
                }
            }
        }
        self.consume(1);
        // EOF is the commit. The description after it is useful, but decides nothing.
        let description = self.description();
        self.shared.target.end_came(description);
        self.shared.report(Fed::EofRead);
        Ok(())
    }

    fn description(&mut self) -> Option<Vec<u8>> {
        if !self.reader.fill(DESCRIPTION_HEAD).ok()? {
            return None;
        }
        let head = &self.reader.bytes()[..DESCRIPTION_HEAD];
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if head[0] != 6 || length > sterna_wire::limits::VM_DESCRIPTION_BYTES {
            return None;
        }
        if !self.reader.fill(DESCRIPTION_HEAD + length).ok()? {
            return None;
        }
        let text = self.reader.bytes()[DESCRIPTION_HEAD..DESCRIPTION_HEAD + length].to_vec();
        self.consume(DESCRIPTION_HEAD + length);
        Some(text)
    }
}

/// The error for a channel that closed early. No rule was broken as far as this side can tell: the source died,
/// or cancelled (specs/stream.md §5.2).
fn closed_early(error: &sterna_wire::WireError) -> MigrationError {
    Ending::EarlyEnd { message: error.message, offset: error.offset }.into()
}
