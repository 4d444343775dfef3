//! The threads of one carrier: one writes frames, one reads them.

use std::sync::Arc;

use sterna_transport::{Channel, TransportError};

use super::error::RelayError;
use super::live::{Live, Passing};
use super::packing::Codec;
use super::readiness::write_now;
use super::sending::{send, write_frames};
use crate::frame::{Frame, FrameError, Head, ResetReason};
use crate::pack::{Packed, Packer, Unpacked, Unpacker};
use crate::session::{CarrierId, OutgoingFrame, Piece};

/// Bytes that one read takes in addition to payloads. Payloads are read directly to their place.
const READ_BYTES: usize = 4096;

/// Runs a carrier that has finished its greeting until it is lost or the session is over. Returns the reason.
pub(super) fn run(
    live: &Arc<Live>,
    id: CarrierId,
    lane: u8,
    channel: &Arc<Channel>,
    codec: Codec,
) -> RelayError {
    let Codec { packer, unpacker } = codec;
    let writer = {
        let (live, channel) = (Arc::clone(live), Arc::clone(channel));
        let write = move || {
            if let Err(error) = write(&live, id, &channel, packer) {
                tracing::debug!("carrier {lane}: {error}");
            }
            // The reader notices, and reports the loss.
            channel.shutdown();
        };
        super::vmm::spawn("carrier", write)
    };
    let error = match writer {
        Ok(writer) => {
            let error = read(live, id, lane, channel, unpacker);
            live.detach(id, lane, &error.to_string());
            let _ = writer.join();
            error
        }
        Err(error) => error,
    };
    live.detach(id, lane, &error.to_string());
    error
}

fn write(
    live: &Live,
    id: CarrierId,
    channel: &Channel,
    mut packer: Option<Packer>,
) -> Result<(), RelayError> {
    let mut frames = Vec::new();
    while live.next_frames(id, &mut frames) {
        if let Some(packer) = &mut packer {
            pack(live, packer, &mut frames)?;
        }
        write_frames(live, channel, &frames)?;
        if frames.iter().any(|frame| matches!(frame.frame, Frame::Over { .. })) {
            channel.finish_writing()?;
            // The peer closes when it has read OVER.
            return wait_for_the_peer(live, id, channel);
        }
    }
    Ok(())
}

/// Writes the bytes that have just arrived to their VMM, as many as it takes at once.
fn pass_on(live: &Live, passing: &Passing) {
    match write_now(&passing.channel, &passing.piece) {
        Ok(count) => {
            let acknowledgements = live.passed_on(passing.flow, &passing.piece[..count]);
            acknowledgements.into_iter().for_each(|sending| send(live, &sending));
        }
        Err(_) => live.with(|state| state.session.stop(passing.flow, ResetReason::Broken)),
    }
}

/// Packs the bulk data among the frames.
fn pack(live: &Live, packer: &mut Packer, frames: &mut [OutgoingFrame]) -> Result<(), RelayError> {
    for frame in frames {
        let (Some(hint), Some(bytes), &Frame::Data { flow, offset, .. }) =
            (&frame.packing, &frame.payload, &frame.frame)
        else {
            continue;
        };
        let clock = || live.now();
        let packed = packer
            .pack(flow, offset, bytes, &hint.pages, hint.is_again, &clock)
            .map_err(|source| RelayError::System { what: "compression", source })?;
        if let Some(Packed { frame: head, payload }) = packed {
            *frame = OutgoingFrame { frame: head, payload: Some(Piece::from(payload)), packing: None };
        }
    }
    let figures = packer.take_figures();
    if figures.plain > 0 {
        live.lock().packing.add(figures);
    }
    Ok(())
}

/// Leaves the connection open, so that the kernel does not discard OVER because unread bytes arrive.
fn wait_for_the_peer(live: &Live, id: CarrierId, channel: &Channel) -> Result<(), RelayError> {
    let mut none = Vec::new();
    while live.next_frames(id, &mut none) {}
    channel.shutdown();
    Ok(())
}

fn read(
    live: &Live,
    id: CarrierId,
    lane: u8,
    channel: &Channel,
    mut unpacker: Option<Unpacker>,
) -> RelayError {
    let mut buffer = vec![0; READ_BYTES];
    let (mut from, mut to) = (0, 0);
    loop {
        let (frame, used) = match decode(&buffer[from..to]) {
            Ok(Some(decoded)) => decoded,
            Ok(None) => {
                buffer.copy_within(from..to, 0);
                (from, to) = (0, to - from);
                match channel.read_some(&mut buffer[to..]) {
                    Ok(0) => {
                        let (channel, offset) = (channel.peer().to_owned(), channel.bytes_read());
                        return TransportError::Closed { channel, offset, missing: Head::BYTES as u64 }
                            .into();
                    }
                    Ok(count) => to += count,
                    Err(error) => return error.into(),
                }
                continue;
            }
            Err(source) => {
                return live.broken(lane, source).into();
            }
        };
        from += used;
        let payload = match &frame {
            Frame::Data { length, .. } | Frame::Packed { payload: length, .. } => {
                let length = *length;
                let mut bytes = live.buffers.take(length);
                let here = length.min(to - from);
                bytes[..here].copy_from_slice(&buffer[from..from + here]);
                from += here;
                if let Err(error) = channel.read_exact(&mut bytes[here..length]) {
                    return error.into();
                }
                Some(Piece::of(bytes, length, &live.buffers))
            }
            _ => None,
        };
        let (frame, payload) = match (frame, payload, &mut unpacker) {
            (Frame::Packed { flow, head, .. }, Some(bytes), Some(unpacker)) => {
                match unpacker.unpack(flow, &head, &bytes) {
                    Ok(Unpacked::Bytes(bytes)) => (
                        Frame::Data { flow, offset: head.offset, length: head.length },
                        Some(Piece::from(bytes)),
                    ),
                    Ok(Unpacked::Missing) => match live.missing(id, flow, head.offset, head.length) {
                        Ok(()) => continue,
                        Err(error) => return error.into(),
                    },
                    Err(source) => return live.broken(lane, source).into(),
                }
            }
            (frame, payload, _) => (frame, payload),
        };
        let is_over = matches!(frame, Frame::Over { .. });
        match live.receive(id, frame, payload) {
            Ok(passing) => passing.into_iter().for_each(|passing| pass_on(live, &passing)),
            Err(error) => return error.into(),
        }
        if is_over {
            let (channel, offset) = (channel.peer().to_owned(), channel.bytes_read());
            return TransportError::Closed { channel, offset, missing: 0 }.into();
        }
    }
}

/// Decodes a frame without the payload of DATA; `None` while bytes are missing.
fn decode(buffer: &[u8]) -> Result<Option<(Frame, usize)>, FrameError> {
    let Some((head, rest)) = buffer.split_first_chunk() else { return Ok(None) };
    let head = Head::decode(head)?;
    match rest.get(..head.fixed_bytes()) {
        Some(body) => Ok(Some((head.body(body)?, Head::BYTES + body.len()))),
        None => Ok(None),
    }
}
