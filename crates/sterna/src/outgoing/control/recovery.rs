//! Postcopy goes on over other channels than those that were lost (specs/postcopy.md §5, specs/extension.md §14).

use std::sync::Arc;
use std::time::Instant;

use sterna_proto::source::Source;
use sterna_transport::Channel;
use sterna_wire::extension::ReconnectChannel;
use sterna_wire::main::Command;

use super::Control;
use crate::error::MigrationError;
use crate::identity;
use crate::interruption::Break;
use crate::outgoing::asking::Asking;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::{MainStream, Sink};
use crate::outgoing::postcopy::recovery::{hear_answer, left, say_hello};
use crate::outgoing::postcopy::sender::PageSender;
use crate::outgoing::return_path;
use crate::outgoing::shared::Shared;

/// One attempt.
struct Attempt<'a> {
    shared: &'a Shared,
    session: u32,
    until: Instant,
    /// Ends it from another thread.
    asking: Asking,
}

impl Control {
    /// Performs `Recover`: learns which pages the destination has, and tells it to go on.
    pub(super) fn recover(&mut self) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        shared.forget_error();
        let attempt = Attempt {
            shared: &shared,
            session: shared.recovery.begin_session(),
            until: Instant::now() + shared.params().limits.setup,
            asking: Asking::default(),
        };
        *shared.asking.lock() = Some(attempt.asking.clone());
        let opened = attempt.open(ReconnectChannel::Recovery);
        *shared.asking.lock() = None;
        let channel = opened?;

        let sink: Arc<dyn Sink> = Arc::clone(&channel) as _;
        let stream = MainStream::new(sink, Arc::clone(&shared.counters), shared.guest_source.section_ids());
        let main = MainChannel::new(Some(Arc::clone(&channel)), stream);
        self.main = Some(Arc::clone(&main));
        self.waits.keep_alive(Some(Arc::clone(&main)));
        shared.recovery.asks(&shared.ram);
        let theirs = Arc::clone(&shared);
        self.workers.spawn("return path", move || return_path::read(&theirs, &channel, None))?;
        for block in shared.ram.blocks() {
            main.commands(&[Command::ReceivedBitmap(block.name().to_owned())])?;
        }
        let received = self.waits.until(|| shared.recovery.take_received())?;
        let unsent_bytes = shared.postcopy.left_bytes();
        shared.postcopy.recover(&shared.ram, &received)?;
        let left_bytes = shared.postcopy.left_bytes();
        shared.statistics.lock().resend_in_postcopy(left_bytes.saturating_sub(unsent_bytes));
        tracing::debug!(session = attempt.session, left_bytes, "the destination has said what it has");

        if shared.capabilities.postcopy_preempt {
            self.preempt = Some(attempt.open(ReconnectChannel::Preempt)?);
        }
        let counters = Arc::clone(&shared.counters);
        let sender = PageSender::new(shared.ram.clone(), counters, &main, self.preempt.clone());
        let (answering, theirs) = (sender.clone(), Arc::clone(&shared));
        self.workers.spawn("requested pages", move || {
            if let Err(error) = answering.answer(&theirs.postcopy) {
                theirs.fail(error);
            }
        })?;
        self.page_sender = Some(sender);
        // Both before the command: the answer and requests may come at once.
        shared.recovery.resumes();
        shared.postcopy.may_be_asked();
        main.commands(&[Command::PostcopyResume])?;
        self.waits.was_not_silent();
        Ok(())
    }

    /// Whether pages follow over other channels than at first.
    pub(super) fn has_recovered(&self) -> bool {
        self.shared.recovery.count() > 0
    }
}

impl Attempt<'_> {
    /// One connection. A Sterna is told whose it is, and tells whose it is itself; a QEMU takes it for what it awaits.
    fn open(&self, kind: ReconnectChannel) -> Result<Arc<Channel>, MigrationError> {
        let (shared, params) = (self.shared, self.shared.params());
        let (to, tls) = (shared.recovery.to(), params.tls.as_ref());
        let adopt = |channel: Channel| {
            channel.set_stall_limit(Some(left(self.until)));
            let channel = shared.adopt_again(channel);
            if kind == ReconnectChannel::Recovery {
                *self.asking.channel.lock() = Some(Arc::clone(&channel));
            }
            if self.asking.connecting.is_cancelled() {
                channel.shutdown();
            }
            channel
        };
        let channel = Channel::connect_with(&to, tls, left(self.until), &self.asking.connecting, adopt)?;
        if shared.driver.inspect(Source::peer).sterna {
            let identity = &shared.identity;
            let hello = say_hello(&channel, identity, (self.session, kind), identity::nonce()?)?;
            if kind == ReconnectChannel::Recovery {
                hear_answer(&channel, identity, &hello)?;
            }
        }
        channel.set_stall_limit(Some(params.limits.stall));
        Ok(channel)
    }
}
