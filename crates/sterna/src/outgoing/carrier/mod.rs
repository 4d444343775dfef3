//! Carriers: the ways in which a guest's data are transported or stored.
//!
//! The control thread asks a [`Carrier`](interface::Carrier) for steps and knows no carrier by its name. Each carrier has a folder:
//!
//! | carrier | transports the guest |
//! | --- | --- |
//! | [`Sockets`](sockets::Sockets) | over a main channel and, with multifd, over channels for the lanes; within one host with descriptors of the memory |
//! | [`SaveFile`](super::file::SaveFile) | into a file |
//! | [`RdmaCarrier`](super::rdma::carrier::RdmaCarrier) | over RDMA |
//!
//! Another transport is another folder with an implementation, an address, and a line in [`open`](opening::open) and in [`facts::of`].

pub(super) mod facts;
pub(super) mod interface;
pub(super) mod opening;
pub(super) mod sockets;
pub(super) mod stream;
pub(super) mod writers;
