//! After a lost acknowledgement: what became of the migration? (specs/extension.md §6)

use sterna_proto::Status;
use sterna_transport::Channel;
use sterna_wire::extension::{self, StatusAnswer, StatusQuestion};

use super::shared::Shared;
use crate::error::MigrationError;

const CHANNEL: &str = "status question";

/// Asks the destination over a connection of its own.
pub(super) fn status(shared: &Shared) -> Result<Status, MigrationError> {
    let limit = sterna_proto::Limits::default().ask;
    // Not the migration's own flag: that one is cancelled, since its channels are given up.
    let cancel = sterna_transport::CancelFlag::new();
    let channel = Channel::connect(&shared.to, limit, &cancel)?;
    channel.set_stall_limit(Some(limit));
    let mut question = Vec::new();
    StatusQuestion { migration_id: shared.migration_id }.encode(&mut question);
    channel.write_all(&question)?;
    let mut answer = [0; StatusAnswer::BYTES];
    channel.read_exact(&mut answer)?;
    let decoded = StatusAnswer::decode(&answer).map_err(MigrationError::wire(CHANNEL))?;
    let Some((answer, _)) = decoded else {
        return Err(MigrationError::Internal("a status answer of full length is incomplete".to_owned()));
    };
    Ok(match answer.status {
        extension::Status::Committed => Status::Committed,
        extension::Status::Never => Status::Never,
        extension::Status::Pending => Status::Pending,
        extension::Status::Unknown => Status::Unknown,
    })
}
