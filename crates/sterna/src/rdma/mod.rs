//! The migration stream over RDMA (`specs/rdma.md`): a pair of connections that is used as one channel.
//!
//! The source writes the stream on the main connection, and reads the return path on the second one. The
//! destination does the reverse. [`SourceStream`] and [`DestinationStream`] are the two ends. They implement
//! [`ByteStream`](sterna_transport::ByteStream), and a [`Channel`](sterna_transport::Channel) is created over
//! them. The code that writes and reads the stream therefore works as over a socket. Each write is one or more
//! FILE messages. A read sends the READY that invites one message, unless bytes of the last message are left.
//!
//! Guest memory is not part of the stream. A *phase* is the time after a hook of RAM in the stream. In a phase
//! the source sends other commands and writes the destination's memory: [`SourceStream::begin_phase`],
//! [`DestinationStream::begin_phase`].
//!
//! Between two Sterna processes each lane has a separate connection, [`LaneSourceStream`] and
//! [`LaneDestinationStream`]. Packets are sent in one direction on credit, and pages are written before the
//! packet that names them.
//!
//! The state machines in [`sterna_wire::rdma::session`] decide which side may send at which time. The code that
//! performs a command checks its content.

mod commands;
mod destination;
mod fault;
mod lane_streams;
mod leftover;
mod on_demand;
mod parameters;
mod question;
mod return_path;
mod sizes;
mod source;

pub use commands::StreamFailure;
pub use destination::DestinationStream;
pub(crate) use fault::fault;
pub use lane_streams::{LaneDestinationStream, LaneSourceStream};
pub(crate) use on_demand::{register, register_on_demand};
pub use parameters::RdmaParameters;
pub use question::QuestionStream;
pub use source::{SourceStream, Written};
