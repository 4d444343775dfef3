//! Postcopy continues over new channels after its connection was lost (specs/postcopy.md §5, specs/extension.md
//! §14).

use std::sync::Arc;
use std::time::Instant;

use sterna_proto::source::Source;
use sterna_transport::Channel;
use sterna_wire::extension::ReconnectChannel;
use sterna_wire::main::Command;

use super::enabled::Enabled;
use super::recovery::{hear_answer, left, say_hello};
use crate::error::MigrationError;
use crate::identity;
use crate::interruption::Break;
use crate::outgoing::asking::Asking;
use crate::outgoing::carrier::sockets::Sockets;
use crate::outgoing::carrier::stream::main_channel;
use crate::outgoing::shared::Shared;
use crate::outgoing::transfer::Transfer;

/// One attempt to recover.
struct Attempt<'a> {
    shared: &'a Shared,
    session: u32,
    until: Instant,
    /// Cancels the attempt from another thread.
    asking: Asking,
}

impl Enabled {
    pub(super) fn open_again(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        let shared = Arc::clone(&self.shared);
        shared.forget_error();
        let attempt = Attempt {
            shared: &shared,
            session: shared.reconnection.recovery.begin_session(),
            until: Instant::now() + shared.params().limits.setup,
            asking: Asking::default(),
        };
        *shared.handover.asking.lock() = Some(attempt.asking.clone());
        let opened = attempt.open(ReconnectChannel::Recovery);
        *shared.handover.asking.lock() = None;
        let channel = opened?;

        let main = main_channel(&shared, channel);
        transfer.carrier = Some(Box::new(Sockets::of(&shared, Arc::clone(&main), Vec::new())));
        transfer.waits.keep_alive(Some(Arc::clone(&main)));
        shared.reconnection.recovery.asks(&shared.guest.ram);
        transfer.read_return_path()?;
        for block in shared.guest.ram.blocks() {
            main.commands(&[Command::ReceivedBitmap(block.name().to_owned())])?;
        }
        let received = transfer.waits.until(|| shared.reconnection.recovery.take_received())?;
        let unsent_bytes = shared.postcopy.left_bytes();
        shared.postcopy.recover(&shared.guest.ram, &received)?;
        let left_bytes = shared.postcopy.left_bytes();
        shared.measures.statistics.lock().resend_in_postcopy(left_bytes.saturating_sub(unsent_bytes));
        tracing::debug!(session = attempt.session, left_bytes, "the destination has said what it has");

        if shared.capabilities.postcopy_preempt {
            self.preempt = Some(attempt.open(ReconnectChannel::Preempt)?);
        }
        self.answer_requests(transfer, &main)?;
        // Both calls come before the command, because the answer and requests may follow immediately.
        shared.reconnection.recovery.resumes();
        shared.postcopy.may_be_asked();
        main.commands(&[Command::PostcopyResume])?;
        transfer.waits.was_not_silent();
        Ok(())
    }
}

impl Attempt<'_> {
    /// Opens one connection. Two Sternas prove to each other to which migration it belongs.
    ///
    /// A QEMU assigns the connection to the channel that it waits for.
    fn open(&self, kind: ReconnectChannel) -> Result<Arc<Channel>, MigrationError> {
        let (shared, params) = (self.shared, self.shared.params());
        let (to, tls) = (shared.reconnection.recovery.to(), params.tls.as_ref());
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
            let identity = &shared.handover.identity;
            let hello = say_hello(&channel, identity, (self.session, kind), identity::nonce()?)?;
            if kind == ReconnectChannel::Recovery {
                hear_answer(&channel, identity, &hello)?;
            }
        }
        channel.set_stall_limit(Some(params.limits.stall));
        Ok(channel)
    }
}

/// Whether pages are sent over other channels than the first ones.
pub(super) fn has_recovered(shared: &Shared) -> bool {
    shared.reconnection.recovery.count() > 0
}
