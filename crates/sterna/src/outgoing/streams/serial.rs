//! Streams on the main channel, one device behind the other: for a source without multifd channels, and for files.
//!
//! Each is a section in parts (START, PART…, END; `specs/extension.md §9`) of its own name, whose bodies are the
//! chunks that packets would carry. Save threads read ahead meanwhile.

use std::sync::Arc;

use sterna_wire::multifd::DEVICE_STATE_PACKET_BYTES;

use super::super::control::Control;
use super::Streams;
use crate::error::MigrationError;

/// Sends all streams.
pub(super) fn send(control: &Control, streams: &Arc<Streams>) -> Result<(), MigrationError> {
    for (index, device) in streams.devices.iter().enumerate() {
        let is_read = || streams.lock().savers[index].is_done;
        let section = control.with_main(|stream| stream.stream_section(&device.name, device.instance))?;
        while let Some(chunk) = streams.outbox.next_of(index, is_read) {
            let payload = &chunk.packet[DEVICE_STATE_PACKET_BYTES..];
            control.with_main(|stream| stream.stream_part(section, payload, false))?;
            streams.outbox.done(chunk);
        }
        if !is_read() {
            // A save thread has said why.
            return Ok(());
        }
        control.with_main(|stream| stream.stream_part(section, &[], true))?;
    }
    Ok(())
}
