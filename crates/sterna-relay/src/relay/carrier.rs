//! The threads of one carrier: one writes frames, one reads them.

use std::sync::Arc;

use sterna_transport::{Channel, IoPart, TransportError};

use super::error::RelayError;
use super::live::Live;
use crate::frame::{Frame, FrameError, Head};
use crate::session::{CarrierId, Piece, SessionError};

/// Bytes that one read takes in addition to payloads. Payloads are read directly to their place.
const READ_BYTES: usize = 4096;

/// Runs a carrier that has finished its greeting until it is lost or the session is over. Returns the reason.
pub(super) fn run(live: &Arc<Live>, id: CarrierId, lane: u8, channel: &Arc<Channel>) -> RelayError {
    let writer = {
        let (live, channel) = (Arc::clone(live), Arc::clone(channel));
        let write = move || {
            if let Err(error) = write(&live, id, &channel) {
                tracing::debug!("carrier {lane}: {error}");
            }
            // The reader notices, and reports the loss.
            channel.shutdown();
        };
        super::vmm::spawn("carrier", write)
    };
    let error = match writer {
        Ok(writer) => {
            let error = read(live, id, lane, channel);
            live.detach(id, &error.to_string());
            let _ = writer.join();
            error
        }
        Err(error) => error,
    };
    live.detach(id, &error.to_string());
    error
}

fn write(live: &Live, id: CarrierId, channel: &Channel) -> Result<(), RelayError> {
    let (mut frames, mut heads) = (Vec::new(), Vec::new());
    while live.next_frames(id, &mut frames) {
        heads.clear();
        let mut ends = Vec::with_capacity(frames.len());
        for frame in &frames {
            let encoded = frame.frame.encode(&mut heads);
            encoded.map_err(|source| RelayError::Greeting { peer: channel.peer().to_owned(), source })?;
            ends.push(heads.len());
        }
        let mut parts = Vec::with_capacity(2 * frames.len());
        let mut from = 0;
        for (frame, end) in frames.iter().zip(&ends) {
            parts.push(IoPart::Bytes(&heads[from..*end]));
            parts.extend(frame.payload.as_deref().map(IoPart::Bytes));
            from = *end;
        }
        channel.write_parts(&parts)?;
        if frames.iter().any(|frame| matches!(frame.frame, Frame::Over { .. })) {
            channel.finish_writing()?;
            // The peer closes when it has read OVER.
            return wait_for_the_peer(live, id, channel);
        }
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

fn read(live: &Live, id: CarrierId, lane: u8, channel: &Channel) -> RelayError {
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
                // The session ends: a peer with proof does not follow the protocol.
                let error = SessionError { session: live.id, lane, source };
                live.stop(&error.to_string());
                return error.into();
            }
        };
        from += used;
        let payload = match frame {
            Frame::Data { length, .. } => {
                let mut bytes = vec![0; length];
                let here = length.min(to - from);
                bytes[..here].copy_from_slice(&buffer[from..from + here]);
                from += here;
                if let Err(error) = channel.read_exact(&mut bytes[here..]) {
                    return error.into();
                }
                Some(Piece::from(bytes))
            }
            _ => None,
        };
        let is_over = matches!(frame, Frame::Over { .. });
        if let Err(error) = live.receive(id, frame, payload) {
            return error.into();
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
