//! The source over RDMA: it writes pages directly into the destination's memory (`specs/rdma.md §6`).
//!
//! Three threads share the [`Work`](work::Work):
//!
//! | thread | does |
//! | --- | --- |
//! | the lane ([`RdmaLane`](write_lane::RdmaLane)) | takes pages, posts WRITEs as soon as their memory is registered on both sides, opens and closes phases |
//! | `rdma windows` ([`ask`](windows::ask)) | sends the commands of a phase: windows to register or to give back, ranges that are all zero |
//! | `rdma memory` ([`register`](registering::register)) | registers this side's memory, and deregisters it below a limit |
//!
//! Therefore both sides register in parallel, ahead of the WRITEs, and neither waits for the other.
//!
//! With multifd between two Sternas each lane is a [`PacketLane`](packet_lane::PacketLane) with a connection of its own. The main connection is left to
//! `rdma windows`, which opens and closes phases itself ([`ask_for_lanes`](windows::ask_for_lanes)), and to the stream. The next paragraph is about the
//! single [`RdmaLane`](write_lane::RdmaLane).
//!
//! A phase is open while a round's pages are sent. The lane renews it when another thread wants to write the
//! stream, and once per second. A round ends with the end of its phase: then every WRITE is complete, and every
//! command has been carried out. The next round begins after that, so that an older copy of a page never arrives
//! after a newer one.
//!
//! An adapter with on-demand paging pins nothing: each block is registered as a whole when its first pages are
//! taken, and stays registered. With other adapters windows are registered.
//!
//! Memory stays registered until the migration ends, unless there is a limit. [`RdmaSource::destroy`](source::RdmaSource::destroy) ends the adapter's
//! access before anything is deregistered.

mod blocks;
pub(super) mod carrier;
mod connect;
mod counts;
mod gather;
mod packet_lane;
mod question;
mod registering;
mod source;
mod used_blocks;
mod windows;
mod work;
mod write_lane;

use super::carrier::facts::Facts;
use super::carrier::transport::Transport;
use carrier::RdmaCarrier;

/// The transport of `rdma:`.
pub(super) static TRANSPORT: Transport = Transport {
    facts: Facts {
        stores: false,
        can_ask: true,
        can_reconnect: false,
        gains_by_multifd: false,
        takes_device_packets: true,
        // Memory is registered ahead of the lanes, whether they need it or not.
        gains_by_hints: false,
        counts_rdma: true,
    },
    open: |shared| Ok(Box::new(RdmaCarrier::open(shared)?)),
    ask: question::ask,
};
