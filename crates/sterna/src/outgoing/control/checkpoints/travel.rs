//! Checkpoints on their way: each is sent when the standby holds the one before, in the order in which they were taken (`specs/colo.md §3`).
//!
//! Nothing here waits: the control thread may take the next checkpoint meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use sterna_wire::colo::{Message, MessageKind};

use super::super::Control;
use crate::error::MigrationError;
use crate::order::RoundPages;
use crate::outgoing::main_stream::CollectedDevices;
use crate::outgoing::protection::Protecting;
use crate::outgoing::shared::Shared;

/// A checkpoint that was taken.
pub(super) struct Taken {
    pub(super) round: Arc<RoundPages>,
    pub(super) number: u64,
    /// Pages that were not copied before the guest stood.
    pub(super) late_pages: u64,
    /// Devices' sections.
    pub(super) devices: CollectedDevices,
    /// Its pages are copied; otherwise the guest stands until they are sent.
    pub(super) is_copied: bool,
    /// When it was all there.
    pub(super) at: Instant,
}

impl Taken {
    /// Pages, and bytes of devices.
    pub(super) fn brought(&self) -> (u64, u64) {
        (self.round.pages(), self.devices.sections.len() as u64)
    }
}

/// Those that were taken, and how far the oldest has come.
#[derive(Default)]
pub(super) struct Travel {
    taken: VecDeque<Taken>,
    step: Step,
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Step {
    /// To ask for room.
    #[default]
    Ask,
    /// REPLY.
    Reply,
    /// To begin with the oldest checkpoint.
    Send,
    /// Lanes send its pages.
    Pages,
    Received,
    Loaded,
}

impl Travel {
    /// How many are on their way.
    pub(super) fn count(&self) -> usize {
        self.taken.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// What they bring of devices.
    pub(super) fn device_bytes(&self) -> u64 {
        self.taken.iter().map(|taken| taken.devices.sections.len() as u64).sum()
    }

    /// Whether the standby has room for one that is not taken yet.
    pub(super) fn is_granted(&self) -> bool {
        self.step == Step::Send
    }

    pub(super) fn push(&mut self, taken: Taken) {
        self.taken.push_back(taken);
    }

    /// Whether [`Control::advance`] may do something.
    pub(super) fn has_news(&self, shared: &Shared, protecting: &Protecting) -> bool {
        match self.step {
            Step::Ask | Step::Send => !self.taken.is_empty(),
            Step::Pages => {
                let round = self.taken.front().map_or(0, |taken| taken.round.number());
                shared.lanes.are_through(round) || protecting.inbox.error().is_some()
            }
            Step::Reply | Step::Received | Step::Loaded => protecting.inbox.has_news(),
        }
    }
}

impl Control {
    /// Asks the standby for room, unless that is done.
    pub(super) fn ask_for_room(&mut self, travel: &mut Travel) -> Result<(), MigrationError> {
        if travel.step == Step::Ask {
            self.say(&[Message::CheckpointRequest])?;
            travel.step = Step::Reply;
        }
        Ok(())
    }

    /// Does what can be done without waiting.
    pub(super) fn advance(
        &mut self,
        protecting: &Protecting,
        travel: &mut Travel,
    ) -> Result<(), MigrationError> {
        loop {
            let next = match (travel.step, travel.taken.front()) {
                (Step::Ask, Some(_)) => {
                    self.ask_for_room(travel)?;
                    continue;
                }
                (Step::Send, Some(taken)) => {
                    self.begin_sending(protecting, taken)?;
                    Step::Pages
                }
                (Step::Pages, Some(taken)) => {
                    if let Some(error) = protecting.inbox.error() {
                        return Err(error);
                    }
                    if !self.shared.lanes.are_through(taken.round.number()) {
                        return Ok(());
                    }
                    self.end_sending(protecting, taken)?;
                    Step::Received
                }
                (Step::Reply, _) => match heard(protecting, MessageKind::CheckpointReply)? {
                    true => Step::Send,
                    false => return Ok(()),
                },
                (Step::Received, _) => match heard(protecting, MessageKind::VmstateReceived)? {
                    true => Step::Loaded,
                    false => return Ok(()),
                },
                (Step::Loaded, _) => {
                    if !heard(protecting, MessageKind::VmstateLoaded)? {
                        return Ok(());
                    }
                    protecting.staging.clear();
                    let mut counts = protecting.counts.lock();
                    counts.received += 1;
                    counts.last_transfer =
                        travel.taken.pop_front().map(|taken| taken.at.elapsed()).unwrap_or_default();
                    Step::Ask
                }
                (Step::Ask | Step::Send | Step::Pages, None) => return Ok(()),
            };
            travel.step = next;
        }
    }

    fn begin_sending(&mut self, protecting: &Protecting, taken: &Taken) -> Result<(), MigrationError> {
        if taken.is_copied {
            protecting.staging.send_next()?;
        } else {
            protecting.staging.clear();
        }
        protecting.sent.begin();
        self.say(&[Message::VmstateSend])?;
        self.main()?.with(|stream| stream.begin_checkpoint())?;
        self.shared.lanes.queue.publish(Arc::clone(&taken.round));
        Ok(())
    }

    /// Its pages are out.
    fn end_sending(&mut self, protecting: &Protecting, taken: &Taken) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let main = self.main()?;
        main.with(|stream| stream.end_checkpoint(shared.capabilities.multifd))?;
        shared.lanes.queue.flushed(taken.round.number());
        let sections = &taken.devices.sections;
        let end = taken.devices.end(taken.number, protecting.sent.end())?;
        let size = Message::VmstateSize { bytes: (sections.len() + end.len()) as u64 };
        main.with(|stream| {
            stream.send(|out| {
                size.encode(out)?;
                out.extend_from_slice(sections);
                out.extend_from_slice(&end);
                Ok(())
            })
        })
    }

    pub(super) fn say(&mut self, messages: &[Message]) -> Result<(), MigrationError> {
        self.waits.was_not_silent();
        self.main()?
            .with(|stream| stream.send(|out| messages.iter().try_for_each(|message| message.encode(out))))
    }
}

/// Whether what is due has come.
fn heard(protecting: &Protecting, due: MessageKind) -> Result<bool, MigrationError> {
    protecting.inbox.take(due).transpose().map(|taken| taken.is_some())
}
