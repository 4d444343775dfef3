//! The role of a side in the handshake.

/// The end of a connection that credentials are for. The connecting side is the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsEndpoint {
    /// The connecting side: the source of a migration.
    Client,
    /// The listening side: the destination.
    Server,
}

impl TlsEndpoint {
    /// The role as QEMU spells it in `endpoint` and in file names.
    pub fn word(self) -> &'static str {
        match self {
            TlsEndpoint::Client => "client",
            TlsEndpoint::Server => "server",
        }
    }
}
