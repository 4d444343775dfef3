//! What the engine asks of a transport before anything is open.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::{Address, CancelFlag, Channel};

use super::facts::Facts;
use super::interface::Carrier;
use crate::error::MigrationError;
use crate::outgoing::shared::Shared;

/// A carrier, unless it could not be opened.
pub(in crate::outgoing) type Opened = Result<Box<dyn Carrier>, MigrationError>;

/// A way to an address of one kind.
pub(in crate::outgoing) struct Transport {
    pub facts: Facts,
    /// Opens every channel.
    pub open: fn(&Arc<Shared>) -> Opened,
    /// Opens another connection, for a status question.
    pub ask: fn(&Question<'_>) -> Result<Arc<Channel>, MigrationError>,
}

/// A connection for a status question.
pub(in crate::outgoing) struct Question<'a> {
    pub shared: &'a Shared,
    pub to: &'a Address,
    pub limit: Duration,
    pub cancel: &'a CancelFlag,
    /// Registers the channel as soon as it exists, so that another thread can shut it down.
    pub adopt: &'a dyn Fn(Channel) -> Arc<Channel>,
}
