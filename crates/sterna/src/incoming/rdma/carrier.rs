//! RDMA as the transport of an incoming migration.

use std::sync::Arc;
use std::time::Duration;

use sterna_proto::MigrationId;
use sterna_transport::Channel;

use super::phase::Phases;
use super::state::Rdma;
use crate::error::MigrationError;
use crate::incoming::carrier::{Carrier, Hooks, Receiver};
use crate::stats::IncomingRdmaStatistics;

/// The carrier of a migration over RDMA.
pub(in crate::incoming) struct RdmaCarrier(pub(in crate::incoming) Arc<Rdma>);

impl Carrier for RdmaCarrier {
    fn writes_pages(&self) -> bool {
        true
    }

    fn session(&self) -> Option<MigrationId> {
        self.0.introduction().map(|introduction| MigrationId(introduction.session))
    }

    fn hooks<'a>(
        &'a self,
        receiver: &'a dyn Receiver,
        channel: &Arc<Channel>,
    ) -> Option<Box<dyn Hooks + 'a>> {
        Some(Box::new(Phases::new(receiver, &self.0, Arc::clone(channel))))
    }

    fn await_return_path(&self, limit: Duration) -> Result<(), MigrationError> {
        self.0.await_return_path(limit)
    }

    fn end_writes(&self, tell: &dyn Fn(&str)) -> Result<(), MigrationError> {
        self.0.end_writes(tell)
    }

    fn say_error(&self) {
        self.0.say_error();
    }

    fn close(&self) {
        self.0.close();
    }

    fn statistics(&self) -> Option<IncomingRdmaStatistics> {
        Some(self.0.statistics())
    }
}
