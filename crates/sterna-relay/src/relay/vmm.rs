//! The threads of one flow at its VMM's connection: one reads, one writes.

use std::sync::Arc;
use std::thread::JoinHandle;

use sterna_transport::Channel;

use super::control_flow::ControlFlow;
use super::error::RelayError;
use super::live::Live;
use super::readiness::{is_readable, waiting_bytes};
use super::sending::send;
use crate::frame::{DATA_BYTES, ResetReason};
use crate::session::{Delivery, Piece};

/// How often a reader looks whether the flow is over.
const LOOK_MS: i64 = 200;

/// Starts the threads of a flow whose connection is registered.
pub(super) fn start(
    live: &Arc<Live>,
    flow: u32,
    channel: &Arc<Channel>,
    control: &Arc<ControlFlow>,
) -> Result<(), RelayError> {
    let (reading, writing) = (Arc::clone(live), Arc::clone(live));
    let (from, to) = (Arc::clone(channel), Arc::clone(channel));
    let (control, shared) = (Arc::clone(control), Arc::clone(control));
    spawn("flow out", move || read(&reading, flow, &from, &shared))?;
    spawn("flow in", move || write(&writing, flow, &to, &control))?;
    Ok(())
}

/// Starts a named thread.
pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, RelayError> {
    let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10);
    builder.spawn(body).map_err(|source| RelayError::System { what: "a thread", source })
}

fn read(live: &Live, flow: u32, channel: &Channel, control: &ControlFlow) {
    loop {
        // Bytes are taken only when they are there, so that no flow reserves room that another one could use.
        let is_there = is_readable(channel, LOOK_MS);
        let room = match live.wait_for_room(flow) {
            Some(0) => return,
            Some(room) if is_there => usize::try_from(room).unwrap_or(usize::MAX).min(DATA_BYTES),
            _ => continue,
        };
        let mut buffer = live.buffers.take(waiting_bytes(channel).min(room));
        let most = buffer.len().min(room);
        match channel.read_some(&mut buffer[..most]) {
            Ok(0) => {
                if let Some(rest) = control.rest()
                    && !take(live, flow, rest)
                {
                    return;
                }
                return live.with(|state| state.session.finish(flow));
            }
            Ok(count) => {
                let piece = Piece::of(buffer, count, &live.buffers);
                let Some(piece) = control.taken(channel, piece, || live.is_away()) else { continue };
                if !take(live, flow, piece) {
                    return;
                }
            }
            Err(_) => return live.with(|state| state.session.reset(flow, ResetReason::Broken)),
        }
    }
}

fn write(live: &Live, flow: u32, channel: &Channel, control: &ControlFlow) {
    loop {
        match live.next_delivery(flow) {
            Ok(None) => return,
            Ok(Some(Delivery::Bytes(piece))) => match control.write(channel, &piece) {
                Ok(()) => live.delivered(flow, &piece),
                Err(_) => return live.with(|state| state.session.stop(flow, ResetReason::Broken)),
            },
            Ok(Some(Delivery::Finish)) => {
                control.write_rest(channel);
                let _ = channel.finish_writing();
                return live.with(|state| {
                    if live.role == crate::session::Role::Dialer {
                        state.main.answers_arrived(flow, None);
                    }
                    state.session.end_delivered(flow);
                });
            }
            Ok(Some(Delivery::Reset(reason))) => {
                channel.shutdown();
                return live.with(|state| {
                    state.session.end_delivered(flow);
                    state.session.reset(flow, reason);
                });
            }
            Err(refusal) => return live.with(|state| live.refuse(state, flow, refusal)),
        }
    }
}

/// Takes bytes of a VMM, and sends them if no other thread does. False: the flow is refused.
fn take(live: &Live, flow: u32, piece: Piece) -> bool {
    match live.take(flow, piece) {
        Ok(sending) => {
            sending.into_iter().for_each(|sending| send(live, &sending));
            true
        }
        Err(refusal) => {
            live.with(|state| live.refuse(state, flow, refusal));
            false
        }
    }
}
