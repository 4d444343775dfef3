//! Opens channels to a destination, for the first time and after a lost connection.

use std::time::Duration;

use parking_lot::Mutex;
use sterna_transport::{Address, CancelFlag, Channel, TransportError};

/// The purpose of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The main channel of a destination that has no part of the guest yet.
    First,
    /// The channel for requested pages.
    Preempt,
    /// The main channel of a destination whose connection broke.
    Again,
}

/// Opens the channels to one destination.
pub trait Link: Send + Sync {
    /// Opens a channel. Gives up after `limit`.
    ///
    /// # Errors
    /// The transport's error. For [`Purpose::Again`] the call is repeated until the reconnect window ends.
    fn open(&self, purpose: Purpose, limit: Duration, cancel: &CancelFlag)
    -> Result<Channel, TransportError>;

    /// The destination's address, for messages.
    fn name(&self) -> String;
}

/// A destination that listens, as every QEMU does.
#[derive(Debug, Clone)]
pub struct Dial(pub Address);

impl Link for Dial {
    fn open(&self, _: Purpose, limit: Duration, cancel: &CancelFlag) -> Result<Channel, TransportError> {
        Channel::connect(&self.0, limit, cancel)
    }

    fn name(&self) -> String {
        self.0.to_string()
    }
}

/// A destination that has connected to a listener of this side, and reconnects through `next`.
pub struct Accepted<N> {
    first: Mutex<Option<Channel>>,
    next: N,
    name: String,
}

impl<N> Accepted<N>
where
    N: Fn(Duration, &CancelFlag) -> Result<Channel, TransportError> + Send + Sync,
{
    /// Uses `first` as the first connection. If it breaks, `next` waits for another one.
    pub fn new(first: Channel, next: N) -> Self {
        Self { name: first.peer().to_owned(), first: Mutex::new(Some(first)), next }
    }
}

impl<N> Link for Accepted<N>
where
    N: Fn(Duration, &CancelFlag) -> Result<Channel, TransportError> + Send + Sync,
{
    fn open(
        &self,
        purpose: Purpose,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Channel, TransportError> {
        match (purpose, self.first.lock().take()) {
            (Purpose::First, Some(first)) => Ok(first),
            _ => (self.next)(limit, cancel),
        }
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
