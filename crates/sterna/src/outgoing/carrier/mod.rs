//! Carriers: the ways in which a guest's data are transported or stored.
//!
//! The control thread asks a [`Carrier`](interface::Carrier) for steps and knows no carrier by its name. Each carrier has a folder:
//!
//! | carrier | transports the guest |
//! | --- | --- |
//! | [`Sockets`](sockets::Sockets) | over a main channel and, with multifd, over channels for the lanes; within one host with descriptors of the memory |
//! | [`SaveFile`](super::file::SaveFile) | into a file |
//! | [`SavePipe`](super::pipe::SavePipe) | as a stream into a pipe, whose reader stores it |
//! | `RdmaCarrier` (outgoing/rdma) | over RDMA |
//!
//! Another transport is an address, a folder with a [`Transport`] and a carrier, and two lines here: the module and its row in [`of`].

pub(super) mod facts;
pub(super) mod interface;
pub(super) mod sockets;
pub(super) mod stream;
pub(super) mod transport;
pub(super) mod writers;

use sterna_transport::Address;

use transport::Transport;

/// The transport to addresses of the kind of `address`.
pub(super) fn of(address: &Address) -> &'static Transport {
    match address {
        Address::Tcp { .. } | Address::Unix(_) => &sockets::NETWORK,
        Address::File { .. } => &crate::outgoing::file::TRANSPORT,
        at if at.is_pipe() => &crate::outgoing::pipe::TRANSPORT,
        #[cfg(feature = "rdma")]
        Address::Rdma { .. } => &crate::outgoing::rdma::TRANSPORT,
        _ => &sockets::DESCRIPTOR,
    }
}
