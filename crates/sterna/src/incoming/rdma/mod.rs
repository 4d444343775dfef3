//! The destination of a migration over RDMA (specs/rdma.md).
//!
//! A listener thread decides on each connect request before a queue pair or memory is there for it ([`listen`]). The main
//! connection and the return path become one channel, on which everything goes on as over a socket ([`connect`]). At a hook
//! of the stream the loader carries out a phase ([`phase`]): it registers guest memory, which the source then writes
//! without this side's doing ([`windows`]).
//!
//! | when | what the source can do to guest memory |
//! | --- | --- |
//! | a phase has registered a window | write it, unseen |
//! | everything is loaded, before *prepare* is answered and before the guest starts | nothing any more: its right to write is taken from every queue pair ([`state::Rdma::end_writes`]) |
//! | the channels are closed | the queue pairs are gone, and then the registrations ([`state::Rdma::close`]) |

mod connect;
pub(super) mod listen;
pub(super) mod phase;
mod refusals;
mod source_chunk;
pub(super) mod state;
mod windows;
