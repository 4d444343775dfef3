//! How a destination is reached, at first and again.

use std::time::Duration;

use parking_lot::Mutex;
use sterna_transport::{Address, CancelFlag, Channel, TransportError};

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The main channel of a destination that has nothing yet.
    First,
    /// The channel for requested pages.
    Preempt,
    /// The main channel of a destination whose connection broke.
    Again,
}

/// Opens the channels to one destination.
pub trait Link: Send + Sync {
    /// Opens a channel within `limit`.
    ///
    /// # Errors
    /// The transport's. For [`Purpose::Again`] it is tried again until the reconnect window is over.
    fn open(&self, purpose: Purpose, limit: Duration, cancel: &CancelFlag)
    -> Result<Channel, TransportError>;

    /// Where the destination is, for messages.
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

/// A destination that came to a listener of this side, and comes again through `next`.
pub struct Accepted<N> {
    first: Mutex<Option<Channel>>,
    next: N,
    name: String,
}

impl<N> Accepted<N>
where
    N: Fn(Duration, &CancelFlag) -> Result<Channel, TransportError> + Send + Sync,
{
    /// `first` is its connection. Should it break, `next` waits for another one.
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
