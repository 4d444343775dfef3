//! Device streams on the main channel, one after the other.
//!
//! They are used by a source without multifd channels, and for files.
//!
//! Each stream is a section of its own name, in parts (START, PART…, END; `specs/extension.md §9`). The bodies
//! are the chunks that packets would carry. Save threads read ahead meanwhile.

use sterna_wire::multifd::DEVICE_STATE_PACKET_BYTES;

use super::super::main_channel::MainChannel;
use super::super::waits::Waits;
use super::Streams;
use crate::interruption::Break;

/// Sends all streams on the main channel.
pub(super) fn send(streams: &Streams, waits: &mut Waits, main: &MainChannel) -> Result<(), Break> {
    for (index, device) in streams.devices.iter().enumerate() {
        let section = main.with(|stream| stream.stream_section(&device.name, device.instance))?;
        loop {
            let chunk = waits.until(|| {
                // The end is checked first, so that a chunk that was pushed before the end is not overlooked.
                let is_read = streams.is_read(index);
                let chunk = streams.outbox.take_of(index);
                (chunk.is_some() || is_read).then_some(chunk)
            })?;
            let Some(chunk) = chunk else { break };
            let payload = &chunk.packet[DEVICE_STATE_PACKET_BYTES..];
            main.with(|stream| stream.stream_part(section, payload, false))?;
            streams.outbox.done(chunk);
        }
        main.with(|stream| stream.stream_part(section, &[], true))?;
    }
    Ok(())
}
