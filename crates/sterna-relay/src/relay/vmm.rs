//! The threads of one flow at its VMM's connection: one reads, one writes.

use std::sync::Arc;
use std::thread::JoinHandle;

use sterna_transport::Channel;

use super::control_flow::ControlFlow;
use super::error::RelayError;
use super::live::Live;
use super::main_flow::Refusal;
use super::options::Notice;
use super::readiness::is_readable;
use crate::frame::{DATA_BYTES, ResetReason};
use crate::session::{Delivery, Piece};

/// From so many bytes on, a read's buffer is kept instead of copied.
const KEPT_BYTES: usize = DATA_BYTES / 2;
/// How often a reader looks whether the flow is over.
const LOOK_MS: i64 = 200;

/// Starts the threads of a flow whose connection is registered.
pub(super) fn start(live: &Arc<Live>, flow: u32, channel: &Arc<Channel>) -> Result<(), RelayError> {
    let (reading, writing) = (Arc::clone(live), Arc::clone(live));
    let (from, to) = (Arc::clone(channel), Arc::clone(channel));
    let control = Arc::new(ControlFlow::new(live.role));
    let shared = Arc::clone(&control);
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
    let mut buffer = vec![0; DATA_BYTES];
    loop {
        // Bytes are taken only when they are there, so that no flow reserves room that another one could use.
        let is_there = is_readable(channel, LOOK_MS);
        let room = match live.wait_for_room(flow) {
            Some(0) => return,
            Some(room) if is_there => buffer.len().min(usize::try_from(room).unwrap_or(usize::MAX)),
            _ => continue,
        };
        match channel.read_some(&mut buffer[..room]) {
            Ok(0) => {
                if let Some(Err(refusal)) = control.rest().map(|rest| live.take(flow, rest)) {
                    return refuse(live, flow, channel, refusal);
                }
                return live.with(|state| state.session.finish(flow));
            }
            Ok(count) => {
                let piece = if count >= KEPT_BYTES {
                    Piece::new(std::mem::replace(&mut buffer, vec![0; DATA_BYTES]), count)
                } else {
                    Piece::from(buffer[..count].to_vec())
                };
                let Some(piece) = control.taken(channel, piece, || live.is_away()) else { continue };
                if let Err(refusal) = live.take(flow, piece) {
                    return refuse(live, flow, channel, refusal);
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
            Err(refusal) => return refuse(live, flow, channel, refusal),
        }
    }
}

fn refuse(live: &Live, flow: u32, channel: &Channel, refusal: Refusal) {
    channel.shutdown();
    live.options.notices.send(Notice::Refused { session: Some(live.id), why: refusal.to_string() });
    live.with(|state| state.session.reset(flow, ResetReason::Refused));
}
