//! The question about a migration's result, after a lost acknowledgement (specs/extension.md §6).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_proto::Status;
use sterna_proto::source::{Source, State};
use sterna_transport::Channel;
use sterna_wire::extension::{self, StatusAnswer, StatusQuestion};

use super::asking::Asking;
use super::carrier;
use super::carrier::transport::Question;
use super::shared::Shared;
use crate::error::{BadAnswer, Ending, MigrationError, SettingDifference, Tls12Use};
use crate::events::Event;
use crate::identity;
use crate::limits::machine_limits;
use crate::params::StatusQuestions;

const CHANNEL: &str = "status question";

/// Asks the destination over a separate connection. Ends early when an operator decides meanwhile.
///
/// With a descriptor as the address, a second connection is impossible.
pub(super) fn status(shared: &Shared) -> Result<Status, MigrationError> {
    if !carrier::of(&shared.reconnection.recovery.to()).facts.can_ask {
        return Err(Ending::DescriptorNotAsked.into());
    }
    if shared.params().status_questions == StatusQuestions::Operator {
        return Err(Ending::QuestionLeftToOperator.into());
    }
    // The migration's own flag is not used, because it is cancelled when its channels are given up.
    let question = Asking::default();
    *shared.handover.asking.lock() = Some(question.clone());
    // An operator may have decided before the question could be cancelled. Then it need not begin.
    if !matches!(shared.driver.inspect(Source::state), State::Undecided | State::PostcopyPaused) {
        return Err(MigrationError::Cancelled);
    }
    let answer = ask(shared, &question);
    *shared.handover.asking.lock() = None;
    answer
}

fn ask(shared: &Shared, asking: &Asking) -> Result<Status, MigrationError> {
    let params = shared.params();
    let limit = machine_limits(&params.limits).ask;
    let tls = params.tls.as_ref();
    let adopt = |channel| {
        let channel: Arc<Channel> = Arc::new(channel);
        channel.set_stall_limit(Some(limit));
        *asking.channel.lock() = Some(Arc::clone(&channel));
        if asking.connecting.is_cancelled() {
            channel.shutdown();
        }
        channel
    };
    let to = shared.reconnection.recovery.to();
    let cancel = &asking.connecting;
    let question = Question { shared, to: &to, limit, cancel, adopt: &adopt };
    let channel = (carrier::of(&to).ask)(&question)?;
    let binding = channel.tls_binding();
    if tls.is_some() && binding.is_none() {
        return Err(SettingDifference::Tls12(Tls12Use::StatusQuestion).into());
    }
    let secret = &shared.handover.identity.secret;
    let question = StatusQuestion::new(shared.handover.identity.id, identity::nonce()?, secret, &binding);
    let mut bytes = Vec::new();
    question.encode(&mut bytes);
    channel.write_all(&bytes)?;
    let mut answer = [0; StatusAnswer::BYTES];
    channel.read_exact(&mut answer)?;
    let decoded = StatusAnswer::decode(&answer).map_err(MigrationError::wire(CHANNEL))?;
    let Some((answer, _)) = decoded else {
        return Err(MigrationError::Internal("a status answer of full length is incomplete".to_owned()));
    };
    if !answer.is_authentic(&question, secret, &binding) {
        let why = BadAnswer::NoProofOfStatus { address: to.to_string() };
        if !shared.handover.told_of_forgery.swap(true, Ordering::Relaxed) {
            shared.tell(&Event::Warning(why.to_string()));
        }
        return Err(why.into());
    }
    Ok(match answer.status {
        extension::Status::Committed => Status::Committed,
        extension::Status::Incomplete => Status::Incomplete,
        extension::Status::Never => Status::Never,
        extension::Status::Pending => Status::Pending,
    })
}
