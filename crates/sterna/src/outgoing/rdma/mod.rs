//! The source over RDMA: the destination's memory is written where it is (`specs/rdma.md §6`).
//!
//! Three threads share the [`Work`]:
//!
//! | thread | does |
//! | --- | --- |
//! | the lane ([`RdmaLane`]) | takes pages, posts WRITEs as soon as their memory is registered on both sides, opens and closes phases |
//! | `rdma windows` ([`ask`]) | sends the commands of a phase: windows to register or to give back, ranges that are all zero |
//! | `rdma memory` ([`register`]) | registers this side's memory, and deregisters it below a limit |
//!
//! So both sides register at the same time, ahead of the WRITEs, and neither waits for the other.
//!
//! With multifd between two Sternas each lane is a [`PacketLane`] with a connection of its own. The main connection is left to
//! `rdma windows`, which opens and closes phases itself ([`ask_for_lanes`]), and to the stream. The next paragraph is about the
//! single [`RdmaLane`].
//!
//! A phase is open while a round's pages move; it is renewed when somebody else wants to write the stream, and once a
//! second. A round's end is the end of its phase: every WRITE is complete and every command carried out then. The next
//! round begins after that, so no page can overtake itself.
//!
//! An adapter with on-demand paging pins nothing: each block is registered as a whole when its first pages come, and stays
//! so. Otherwise windows are registered.
//!
//! Memory stays registered until the migration ends, unless there is a limit. [`RdmaSource::destroy`] ends the adapter's
//! access before anything is deregistered.

mod blocks;
mod connect;
pub(super) mod counts;
mod gather;
mod lane;
mod memory;
mod packet_lane;
mod source;
mod used_blocks;
mod windows;
mod work;

pub(super) use connect::connect;
pub(super) use lane::RdmaLane;
pub(super) use memory::register;
pub(super) use packet_lane::PacketLane;
pub(super) use source::RdmaSource;
pub(super) use windows::{ask, ask_for_lanes};
pub(super) use work::Work;
