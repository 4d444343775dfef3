//! The main channel after the seeding: COLO's messages, and the checkpoints between them (`specs/colo.md`).

mod contacts;

use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_wire::colo::{Due, Message, MessageKind, OrderError, StandbyOrder};
use sterna_wire::main::MainItem;
use sterna_wire::replica::{CheckpointSummary, Output};
use sterna_wire::return_path::ReturnMessage;

pub(super) use contacts::contact_of;

use super::follower::Follower;
use super::loader::{CHANNEL, Loader, Read};
use super::reader::Filled;
use super::shared::Shared;
use crate::error::{BadRound, Ending, MigrationError};

/// Interval at which the thread checks whether the migration is stopping.
const PATIENCE: Duration = Duration::from_millis(50);
/// Bytes of a checkpoint's devices that one read takes. Buffers grow in pieces because the peer chooses the
/// total length.
const PIECE: usize = 256 << 10;

/// Sections that only images of checkpoints have: names, and the most bytes of a body. They describe output and pages
/// of that time.
pub(super) static SECTIONS: &[(&str, usize)] = &[
    (Output::SECTION_NAME, Output::MOST_BYTES),
    (CheckpointSummary::SECTION_NAME, CheckpointSummary::BODY_BYTES),
];

/// The row of [`SECTIONS`] for `name`.
pub(super) fn section(name: &str) -> Option<&'static (&'static str, usize)> {
    SECTIONS.iter().find(|(known, _)| *known == name)
}

/// Sends SHUT 0 and READY in one write, because the primary's guest is paused between them.
pub(super) fn begin(shared: &Shared, follower: &dyn Follower) {
    follower.begin();
    let mut bytes = Vec::new();
    let encoded = ReturnMessage::Shut(0).encode(&mut bytes);
    let encoded = encoded.and_then(|()| Message::CheckpointReady.encode(&mut bytes));
    let said = encoded.map_err(MigrationError::wire("return path"));
    if let Err(error) = said.and_then(|()| shared.write_main(&bytes)) {
        follower.lost(error);
    }
}

impl Loader<'_> {
    /// Receives checkpoints until the primary closes the connection or this side stops.
    pub(super) fn follow(&mut self, follower: &dyn Follower) -> Result<(), MigrationError> {
        while !follower.has_begun() {
            if self.shared.stopping.load(Ordering::Acquire) {
                return Ok(());
            }
            follower.wait_until_begun(PATIENCE);
        }
        self.shared.wait_for_main();
        let mut order = StandbyOrder::new();
        // CHECKPOINT_READY was sent together with SHUT.
        order.say(MessageKind::CheckpointReady).map_err(broken)?;
        let mut is_first = true;
        let mut number = 0;
        while !self.shared.stopping.load(Ordering::Acquire) {
            match order.due() {
                Due::Hear(_) => {
                    let message = self.message(&order, is_first)?;
                    order.heard(&message).map_err(broken)?;
                }
                Due::Say(MessageKind::CheckpointReply) => {
                    follower.open()?;
                    order.say(MessageKind::CheckpointReply).map_err(broken)?;
                    self.say(&[Message::CheckpointReply])?;
                }
                Due::Ram => {
                    self.in_checkpoint = true;
                    number += 1;
                    self.checkpoint_ram().map_err(|error| of_checkpoint(number, error))?;
                    follower.close();
                    order.ram_came().map_err(broken)?;
                }
                Due::Devices { bytes } => {
                    let devices = self.device_state(bytes)?;
                    follower.hold(devices)?;
                    self.in_checkpoint = false;
                    is_first = false;
                    order.checkpoint_is_held().map_err(broken)?;
                }
                Due::Say(MessageKind::VmstateReceived) => {
                    order.say(MessageKind::VmstateReceived).map_err(broken)?;
                    order.say(MessageKind::VmstateLoaded).map_err(broken)?;
                    // Both go out in one write: nothing has to be loaded, and the primary's guest is paused
                    // until the primary has read both.
                    self.say(&[Message::VmstateReceived, Message::VmstateLoaded])?;
                    follower.apply()?;
                }
                due @ Due::Say(_) => {
                    return Err(MigrationError::Internal(format!("a standby never has {due:?} due")));
                }
            }
        }
        Ok(())
    }

    /// Reads the primary's next message. Between two checkpoints the primary may be silent without limit.
    fn message(&mut self, order: &StandbyOrder, is_first: bool) -> Result<Message, MigrationError> {
        loop {
            let decoded = Message::decode(self.reader.bytes()).map_err(MigrationError::wire(CHANNEL))?;
            if let Some((message, used)) = decoded {
                self.consume(used);
                return Ok(message);
            }
            let here = self.reader.bytes().len();
            match self.reader.fill_or_silence(here + 1)? {
                Filled::Full => {}
                Filled::Silence(_) if order.may_rest() && here == 0 => {}
                Filled::Silence(stalled) => return Err(stalled.into()),
                Filled::End => return Err(gone(order, is_first)),
            }
            if self.shared.stopping.load(Ordering::Acquire) {
                return Err(MigrationError::Cancelled);
            }
        }
    }

    /// Reads a checkpoint's RAM. Lanes receive pages in parallel, and are synchronised at its end.
    fn checkpoint_ram(&mut self) -> Result<(), MigrationError> {
        let shared = self.shared;
        let read = shared.places.main().map_or(0, |main| main.bytes_read());
        let position = read.saturating_sub(self.reader.bytes().len() as u64);
        self.begin_checkpoint(position)?;
        let mut has_flushed = false;
        loop {
            match self.read()? {
                Read::Item(MainItem::CheckpointRam) => break,
                // Only lanes react to the end of RAM.
                Read::Item(MainItem::RamEnd { .. }) => {}
                Read::Item(item) => {
                    has_flushed |= item == MainItem::MultifdFlush;
                    self.take(item)?;
                }
                Read::End | Read::Stopped => return Err(MigrationError::Cancelled),
            }
        }
        if shared.capabilities.multifd && !has_flushed {
            return Err(BadRound::NoFlush.into());
        }
        shared.rounds.complete()?;
        shared.check_that_all_came()
    }

    fn device_state(&mut self, bytes: u64) -> Result<Vec<u8>, MigrationError> {
        let mut devices = Vec::new();
        // The codec has already checked the length against its limit.
        let mut left = usize::try_from(bytes).unwrap_or(usize::MAX);
        while left > 0 {
            let piece = left.min(PIECE);
            if !self.reader.fill(piece)? {
                let came = bytes - left as u64;
                return Err(Ending::InsideDeviceState { came, bytes }.into());
            }
            devices.extend_from_slice(&self.reader.bytes()[..piece]);
            self.consume(piece);
            left -= piece;
        }
        Ok(devices)
    }

    fn say(&self, messages: &[Message]) -> Result<(), MigrationError> {
        let mut bytes = Vec::new();
        for message in messages {
            message.encode(&mut bytes).map_err(MigrationError::wire(CHANNEL))?;
        }
        self.shared.write_main(&bytes)
    }
}

/// Adds the checkpoint's number to an error about wrong bytes.
fn of_checkpoint(number: u64, error: MigrationError) -> MigrationError {
    match error {
        MigrationError::Wire { channel, error } => {
            MigrationError::Wire { channel: format!("{channel}, checkpoint {number}"), error }
        }
        other => other,
    }
}

fn broken(error: OrderError) -> MigrationError {
    MigrationError::wire(CHANNEL)(error.into())
}

/// The error for a main channel that the primary has closed.
fn gone(order: &StandbyOrder, is_first: bool) -> MigrationError {
    let ending = match order.may_rest() {
        true if is_first => Ending::NoCheckpoint,
        true => Ending::BetweenCheckpoints,
        false => Ending::InsideCheckpoint,
    };
    ending.into()
}
