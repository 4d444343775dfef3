//! Answers a source's question about the result of the migration (specs/extension.md §6).
//!
//! Only a source that proves that it knows the migration's secret gets an answer. Any other peer receives no
//! data.

use std::time::Instant;

use sterna_proto::destination::Event as Fed;
use sterna_proto::{MigrationId, Status};
use sterna_wire::extension::{self, StatusAnswer, StatusQuestion};

use super::greeting::Greeting;
use super::shared::Shared;
use crate::error::{BadQuestion, MigrationError, Misbehaviour, Unproven};
use crate::params::StatusQuestions;

/// Bytes of magic and version. They are checked first, so that a question of another version fails without
/// waiting for the rest.
const HEAD: usize = 8;

pub(super) fn answer(shared: &Shared, greeting: &Greeting<'_>) -> Result<(), MigrationError> {
    let refuse = |why| -> MigrationError {
        Misbehaviour::Question { peer: greeting.channel.peer().to_owned(), why }.into()
    };
    let wire = || MigrationError::wire("status question");
    let mut bytes = [0; StatusQuestion::BYTES];
    let (head, rest) = bytes.split_at_mut(HEAD);
    greeting.read_exact(head)?;
    StatusQuestion::decode(head).map_err(wire())?;
    greeting.read_exact(rest)?;
    let Some((question, _)) = StatusQuestion::decode(&bytes).map_err(wire())? else {
        return Err(MigrationError::Internal("a status question of full length is incomplete".to_owned()));
    };
    if shared.params.status_questions == StatusQuestions::Operator {
        return Err(refuse(BadQuestion::LeftToOperator));
    }
    let binding = greeting.channel.tls_binding();
    if shared.params.tls.is_some() && binding.is_none() {
        return Err(refuse(Unproven::UnidentifiedSession.into()));
    }
    let id = MigrationId(question.migration_id);
    let secret =
        shared.secret.lock().as_ref().filter(|(known, _)| *known == id).map(|(_, secret)| secret.clone());
    let Some(secret) = secret else {
        return Err(refuse(Unproven::UnknownMigration.into()));
    };
    if !question.is_authentic(&secret, &binding) {
        return Err(refuse(Unproven::NoProof.into()));
    }
    // A source that asks does not reconnect.
    shared.comes_no_more(Fed::StatusAsked(id));
    shared.is_asked_while_starting(id);
    *shared.asked.lock() = Some(Instant::now());
    let status = match shared.answer(id) {
        Status::Committed => extension::Status::Committed,
        Status::Incomplete => extension::Status::Incomplete,
        Status::Never => extension::Status::Never,
        Status::Pending => extension::Status::Pending,
        Status::Unknown => return Err(refuse(BadQuestion::UnknownMigration)),
    };
    let mut answer = Vec::new();
    StatusAnswer::new(status, &question, &secret, &binding).encode(&mut answer);
    greeting.limit()?;
    Ok(greeting.channel.write_all(&answer)?)
}
