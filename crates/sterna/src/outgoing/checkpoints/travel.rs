//! Checkpoints in flight, which are sent in the order of taking (`specs/colo.md §3`).
//!
//! Each one is sent after the standby holds the previous one.
//!
//! No function here waits, so that the control thread can take the next checkpoint meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_wire::colo::{Message, MessageKind};

use super::checkpointing::Checkpointing;
use super::service::Service;
use crate::error::MigrationError;
use crate::order::RoundPages;
use crate::outgoing::main_stream::collector::CollectedDevices;
use crate::outgoing::protection::Protecting;
use crate::outgoing::shared::Shared;

/// A checkpoint that was taken.
pub(super) struct Taken {
    pub(super) round: Arc<RoundPages>,
    pub(super) number: u64,
    /// The number of pages that were not copied before the pause.
    pub(super) late_pages: u64,
    /// The sections of the devices.
    pub(super) devices: CollectedDevices,
    /// The pages are copied. False: the guest is paused until they are sent.
    pub(super) is_copied: bool,
    /// The time at which the checkpoint was complete on this side.
    pub(super) at: Instant,
}

impl Taken {
    /// The number of pages, and of bytes of device state.
    pub(super) fn brought(&self) -> (u64, u64) {
        (self.round.pages(), self.devices.sections.len() as u64)
    }
}

/// Checkpoints that were taken and are not held, and the state of the oldest.
#[derive(Default)]
pub(super) struct Travel {
    taken: VecDeque<Taken>,
    step: Step,
    /// The time at which the standby was last asked for room.
    asked_at: Option<Instant>,
    /// An estimate of the link's time per checkpoint.
    service: Service,
}

/// The next step of the oldest checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Step {
    /// Ask the standby for room.
    #[default]
    Ask,
    /// Wait for the standby's REPLY.
    Reply,
    /// Begin to send the oldest checkpoint.
    Send,
    /// Wait until lanes have sent its pages.
    Pages,
    Received,
    Loaded,
}

impl Travel {
    /// The number of checkpoints in flight.
    pub(super) fn count(&self) -> usize {
        self.taken.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// Bytes of device state of the checkpoints in flight.
    pub(super) fn device_bytes(&self) -> u64 {
        self.taken.iter().map(|taken| taken.devices.sections.len() as u64).sum()
    }

    /// Whether the link could have sent all of them by now, according to the estimate. If so, it has become
    /// slower.
    pub(super) fn could_be_through(&self) -> bool {
        let pages = self.taken.iter().map(|taken| taken.round.pages());
        self.service.could_have_sent(pages, self.oldest_since().elapsed())
    }

    /// The link's time for so many pages; `None` before the first checkpoint was held.
    pub(super) fn needs(&self, pages: u64) -> Option<Duration> {
        self.service.needs(pages)
    }

    /// The time at which the link could begin with the oldest checkpoint.
    fn oldest_since(&self) -> Instant {
        let taken = self.taken.front().map(|taken| taken.at);
        taken.max(self.asked_at).unwrap_or_else(Instant::now)
    }

    /// Whether the standby has room for a checkpoint that is not taken yet.
    pub(super) fn is_granted(&self) -> bool {
        self.step == Step::Send
    }

    pub(super) fn push(&mut self, taken: Taken) {
        self.taken.push_back(taken);
    }

    /// Whether [`Checkpointing::advance`] may have something to do.
    pub(super) fn has_news(&self, shared: &Shared, protecting: &Protecting) -> bool {
        match self.step {
            Step::Ask | Step::Send => !self.taken.is_empty(),
            Step::Pages => {
                let round = self.taken.front().map_or(0, |taken| taken.round.number());
                shared.session.lanes.are_through(round) || protecting.inbox.error().is_some()
            }
            Step::Reply | Step::Received | Step::Loaded => protecting.inbox.has_news(),
        }
    }
}

impl Checkpointing<'_> {
    /// Asks the standby for room, unless it was already asked.
    pub(super) fn ask_for_room(&mut self, travel: &mut Travel) -> Result<(), MigrationError> {
        if travel.step == Step::Ask {
            self.say(&[Message::CheckpointRequest])?;
            travel.step = Step::Reply;
            travel.asked_at = Some(Instant::now());
        }
        Ok(())
    }

    /// Performs all steps that need no waiting.
    pub(super) fn advance(&mut self, travel: &mut Travel) -> Result<(), MigrationError> {
        let protecting = self.protecting;
        loop {
            let next = match (travel.step, travel.taken.front()) {
                (Step::Ask, Some(_)) => {
                    self.ask_for_room(travel)?;
                    continue;
                }
                (Step::Send, Some(taken)) => {
                    self.begin_sending(taken)?;
                    Step::Pages
                }
                (Step::Pages, Some(taken)) => {
                    if let Some(error) = protecting.inbox.error() {
                        return Err(error);
                    }
                    if !self.transfer.shared.session.lanes.are_through(taken.round.number()) {
                        return Ok(());
                    }
                    self.end_sending(taken)?;
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
                    let since = travel.oldest_since();
                    if let Some(taken) = travel.taken.front() {
                        travel.service.took(taken.round.pages(), since.elapsed());
                    }
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

    fn begin_sending(&mut self, taken: &Taken) -> Result<(), MigrationError> {
        let protecting = self.protecting;
        if taken.is_copied {
            protecting.staging.send_next()?;
        } else {
            protecting.staging.clear();
        }
        protecting.sent.begin();
        self.say(&[Message::VmstateSend])?;
        self.transfer.main()?.with(|stream| stream.begin_checkpoint())?;
        self.transfer.shared.session.lanes.queue.publish(Arc::clone(&taken.round));
        Ok(())
    }

    /// Ends the sending of a checkpoint after its pages were written.
    fn end_sending(&mut self, taken: &Taken) -> Result<(), MigrationError> {
        let protecting = self.protecting;
        let shared = Arc::clone(&self.transfer.shared);
        let main = self.transfer.main()?;
        main.with(|stream| stream.end_checkpoint(shared.capabilities.multifd))?;
        shared.session.lanes.queue.flushed(taken.round.number());
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
        self.transfer.waits.was_not_silent();
        self.transfer
            .main()?
            .with(|stream| stream.send(|out| messages.iter().try_for_each(|message| message.encode(out))))
    }
}

/// Whether the message `due` has arrived.
fn heard(protecting: &Protecting, due: MessageKind) -> Result<bool, MigrationError> {
    protecting.inbox.take(due).transpose().map(|taken| taken.is_some())
}
