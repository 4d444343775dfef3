//! The migration stream over RDMA (`specs/rdma.md`): a pair of connections that looks like one channel.
//!
//! The source writes the stream on the main connection and reads the return path on the second one; the destination does
//! it the other way round. [`SourceStream`] and [`DestinationStream`] are the two ends. As
//! [`ByteStream`](sterna_transport::ByteStream)s they go into a [`Channel`](sterna_transport::Channel), and everything
//! that writes and reads the stream works over them as it does over a socket. Each write is one or more FILE messages; a
//! read is the READY that invites one message, if nothing of the last one is left.
//!
//! Guest memory does not travel in the stream. A *phase* is the time after a hook of RAM in the stream, in which the source
//! sends other commands and writes the destination's memory: [`SourceStream::begin_phase`],
//! [`DestinationStream::begin_phase`].
//!
//! Between two Sternas each lane has a connection of its own, [`LaneSourceStream`] and [`LaneDestinationStream`]: packets go
//! one way on credit, and pages are written before the packet that names them.
//!
//! Who may send when is decided by the machines in [`sterna_wire::rdma::session`]; what a command holds is checked by
//! whoever carries it out.

mod commands;
mod destination;
mod lane;
mod leftover;
mod on_demand;
mod question;
mod return_path;
mod sizes;
mod source;

pub use commands::StreamFailure;
pub use destination::DestinationStream;
pub use lane::{LaneDestinationStream, LaneSourceStream};
pub(crate) use on_demand::{register, register_on_demand};
pub use question::QuestionStream;
pub use source::{SourceStream, Written};
