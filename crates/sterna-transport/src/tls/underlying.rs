//! What a TLS session needs of the channel under it.

use std::io;

use sterna_ram::RamFault;

use super::problem::TlsProblem;
use crate::error::{Direction, TransportError};
use crate::group::Wait;

/// The channel under a TLS session: it moves records and makes the errors.
pub(crate) trait Underlying {
    /// Sends bytes on the socket itself: TLS records.
    fn send_raw(&self, bytes: &[u8]) -> Result<(), TransportError>;

    /// Receives TLS records from the socket, without waiting.
    fn receive_now(&self, to: &mut [u8]) -> io::Result<usize>;

    /// Waits until the socket is readable or at its end; at most the stall limit.
    fn wait_readable(&self) -> Result<(), TransportError>;

    /// Returns an error if the call must end, and `Ok` if it may be repeated.
    fn judge(&self, direction: Direction, error: io::Error, wait: &mut Wait) -> Result<(), TransportError>;

    /// Whether a thread of this side has ended the connection.
    fn is_shut_down(&self) -> bool;

    /// Plain bytes that reads have returned so far.
    fn bytes_read(&self) -> u64;

    fn cancelled(&self) -> TransportError;

    /// The error for a page of guest RAM that failed while this process copied it.
    fn failed_memory(&self, fault: RamFault) -> TransportError;

    fn tls_error(&self, problem: TlsProblem) -> TransportError;
}
