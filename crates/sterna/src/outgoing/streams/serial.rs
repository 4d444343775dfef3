//! Streams on the main channel, one device behind the other: for a source without multifd channels, and for files.
//!
//! Each is a section in parts (START, PART…, END; `specs/extension.md §9`) of its own name, whose bodies are the
//! chunks that packets would carry. Save threads read ahead meanwhile.

use std::sync::Arc;

use sterna_wire::multifd::DEVICE_STATE_PACKET_BYTES;

use super::super::control::Control;
use super::Streams;
use crate::error::MigrationError;

/// Sends all streams. False: the machine wants something else done.
pub(super) fn send(control: &mut Control, streams: &Arc<Streams>) -> Result<bool, MigrationError> {
    for (index, device) in streams.devices.iter().enumerate() {
        let section = control.with_main(|stream| stream.stream_section(&device.name, device.instance))?;
        loop {
            let mut chunk = None;
            let is_there = control.until(|| {
                // In this order: what was put out before the end is not overlooked.
                let is_read = streams.is_read(index);
                chunk = streams.outbox.take_of(index);
                (chunk.is_some() || is_read).then_some(())
            });
            if !is_there {
                return Ok(false);
            }
            let Some(chunk) = chunk else { break };
            let payload = &chunk.packet[DEVICE_STATE_PACKET_BYTES..];
            control.with_main(|stream| stream.stream_part(section, payload, false))?;
            streams.outbox.done(chunk);
        }
        control.with_main(|stream| stream.stream_part(section, &[], true))?;
    }
    Ok(true)
}
