//! The connections of a session: what waits at each, and whether some thread writes to it; and what one thread passes on itself.

use std::sync::Arc;

use parking_lot::Condvar;
use sterna_transport::Channel;

use crate::relay::control_flow::ControlFlow;
use crate::session::{CarrierId, OutgoingFrame, Piece};

/// A connection to the other relay.
pub(super) struct CarrierPlace {
    pub(super) channel: Arc<Channel>,
    /// Its own thread waits here for frames.
    pub(super) wake: Arc<Condvar>,
    pub(super) is_waiting: bool,
    /// Some thread writes frames: no other one may take frames.
    pub(super) is_writing: bool,
}

/// A connection to a VMM.
pub(super) struct VmmPlace {
    pub(super) channel: Arc<Channel>,
    pub(super) control: Arc<ControlFlow>,
    /// Its own thread waits here for deliveries.
    pub(super) deliveries: Arc<Condvar>,
    pub(super) is_waiting: bool,
    /// Some thread writes a delivery: no other one may take one.
    pub(super) is_delivering: bool,
    /// Offset up to which deliveries were read for their phase.
    pub(super) read_to: u64,
    /// Its reading thread waits here for room.
    pub(super) room: Arc<Condvar>,
    pub(super) waits_for_room: bool,
}

impl CarrierPlace {
    pub(super) fn new(channel: &Arc<Channel>) -> Self {
        Self { channel: Arc::clone(channel), wake: Arc::default(), is_waiting: false, is_writing: false }
    }
}

impl VmmPlace {
    pub(super) fn new(channel: &Arc<Channel>, control: &Arc<ControlFlow>) -> Self {
        Self {
            channel: Arc::clone(channel),
            control: Arc::clone(control),
            deliveries: Arc::default(),
            is_waiting: false,
            is_delivering: false,
            read_to: 0,
            room: Arc::default(),
            waits_for_room: false,
        }
    }

    /// Ends the connection, and lets its threads see that.
    pub(super) fn close(&self) {
        self.channel.shutdown();
        self.deliveries.notify_all();
        self.room.notify_all();
    }
}

/// Frames that this thread has to write to the carrier; then it calls `Live::written`.
pub(in crate::relay) struct Sending {
    pub(in crate::relay) id: CarrierId,
    pub(in crate::relay) channel: Arc<Channel>,
    pub(in crate::relay) frames: Vec<OutgoingFrame>,
}

/// Bytes that this thread has to write to a VMM; then it calls `Live::passed_on`.
pub(in crate::relay) struct Passing {
    pub(in crate::relay) flow: u32,
    pub(in crate::relay) channel: Arc<Channel>,
    pub(in crate::relay) piece: Piece,
}
