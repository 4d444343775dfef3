//! A connection of bytes that is not a socket.

use std::error::Error;
use std::fmt::Debug;
use std::time::Duration;

use crate::rdma::RdmaError;

/// Two directions of bytes over something that is not a socket, for [`crate::Channel::over`]: for example messages over a
/// pair of RDMA connections.
///
/// One thread may read while another writes; any third may end it.
pub trait ByteStream: Debug + Send + Sync {
    /// Reads what is there, at least a byte; 0 at the end of the stream. Waits `limit` at most.
    ///
    /// # Errors
    /// [`StreamError::Quiet`] if nothing came within the limit; all others break the channel.
    fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError>;

    /// Writes the beginning of `from`, at least a byte, and says how much. Waits `limit` at most.
    ///
    /// # Errors
    /// [`StreamError::Quiet`] if nothing could be written within the limit; all others break the channel.
    fn write(&self, from: &[u8], limit: Option<Duration>) -> Result<usize, StreamError>;

    /// Nothing more will be written; the peer reads to the end.
    ///
    /// # Errors
    /// As [`ByteStream::write`].
    fn finish_writing(&self) -> Result<(), StreamError>;

    /// Blocked and later reads find the end.
    fn finish_reading(&self);

    /// Ends both directions: every blocked call returns.
    fn shutdown(&self);

    /// Whether the peer has ended the connection: nothing more comes than what has come.
    fn peer_has_closed(&self) -> bool;

    /// Bytes that were written and have not reached the peer.
    fn unsent_bytes(&self) -> u64;
}

/// What ends a call of a [`ByteStream`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Nothing moved within the limit.
    #[error("nothing moved")]
    Quiet,
    /// The connection, its adapter or its memory failed.
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    /// A message broke a rule; the error says which and whose fault it is.
    #[error(transparent)]
    Protocol(Box<dyn Error + Send + Sync>),
}
