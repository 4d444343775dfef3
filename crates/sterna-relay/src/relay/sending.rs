//! Writes frames to a carrier, from any thread that has taken them.

use sterna_transport::{Channel, IoPart};

use super::error::RelayError;
use super::live::{Live, Sending};
use crate::session::OutgoingFrame;

/// Bytes of most frames without their payload.
const HEAD_ROOM: usize = 40;

/// Sends frames that another thread than the carrier's own took.
pub(super) fn send(live: &Live, sending: &Sending) {
    if let Err(error) = write_frames(live, &sending.channel, &sending.frames) {
        tracing::debug!("carrier: {error}");
        // Its reader notices, and reports the loss.
        sending.channel.shutdown();
    }
    live.written(sending.id);
}

/// Writes frames to a carrier.
pub(super) fn write_frames(
    live: &Live,
    channel: &Channel,
    frames: &[OutgoingFrame],
) -> Result<(), RelayError> {
    let mut heads = Vec::with_capacity(frames.len() * HEAD_ROOM);
    let mut ends = Vec::with_capacity(frames.len());
    for frame in frames {
        let encoded = frame.frame.encode(&mut heads);
        encoded.map_err(|source| RelayError::Greeting { peer: channel.peer().to_owned(), source })?;
        ends.push(heads.len());
    }
    let mut parts = Vec::with_capacity(2 * frames.len());
    let (mut from, mut bytes) = (0, heads.len());
    for (frame, end) in frames.iter().zip(&ends) {
        parts.push(IoPart::Bytes(&heads[from..*end]));
        if let Some(payload) = &frame.payload {
            parts.push(IoPart::Bytes(payload));
            bytes += payload.len();
        }
        from = *end;
    }
    live.share.sent(bytes as u64);
    channel.write_parts(&parts)?;
    Ok(())
}
