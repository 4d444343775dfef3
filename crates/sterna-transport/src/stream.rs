//! The interface of byte streams other than sockets, so that a channel can run over RDMA.

use std::error::Error;
use std::fmt::Debug;
use std::time::Duration;

#[cfg(feature = "rdma")]
use crate::rdma::RdmaError;

/// Two directions of bytes over a transport other than a socket, for [`crate::Channel::over`].
///
/// An example is messages over a pair of RDMA connections. One thread may read while another thread writes, and a
/// third may end the stream.
pub trait ByteStream: Debug + Send + Sync {
    /// Reads the available bytes, at least one, and waits for at most `limit`. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// [`StreamError::Quiet`] if no byte arrived within the limit. Every other error ends the channel.
    fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError>;

    /// Writes the first bytes of `from`, at least one, and returns their count. Waits for at most `limit`.
    ///
    /// # Errors
    /// [`StreamError::Quiet`] if nothing could be written within the limit. Every other error ends the channel.
    fn write(&self, from: &[u8], limit: Option<Duration>) -> Result<usize, StreamError>;

    /// Closes the writing direction; the peer still reads all bytes that were written.
    ///
    /// # Errors
    /// As [`ByteStream::write`].
    fn finish_writing(&self) -> Result<(), StreamError>;

    /// Closes the reading direction: blocked and later reads return 0.
    fn finish_reading(&self);

    /// Closes both directions; every blocked call returns.
    fn shutdown(&self);

    /// Whether the peer has ended the connection. No further bytes arrive then; earlier ones may be unread.
    fn peer_has_closed(&self) -> bool;

    /// Bytes that were written and have not reached the peer.
    fn unsent_bytes(&self) -> u64;
}

/// The reason why a call of a [`ByteStream`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// No byte moved within the limit of the call.
    #[error("nothing moved")]
    Quiet,
    /// The connection, its adapter or its memory failed.
    #[cfg(feature = "rdma")]
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    /// A message broke a rule of the protocol. The error names the rule and the responsible side.
    #[error(transparent)]
    Protocol(Box<dyn Error + Send + Sync>),
}
