//! Whose fault a problem of TLS is.

/// The side that must change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsFault {
    /// The settings or files of this side.
    Ours,
    /// The two sides do not match, or the peer's files are wrong.
    Setup,
    /// The peer sends bytes that are not valid TLS.
    Peer,
    /// This side cannot tell which side is responsible.
    Nobody,
}
