//! Device streams at the destination: lanes store chunks, and one load thread per device loads them in order.
//!
//! Loading begins with the first chunk. The bytes that wait for a slow device have a limit ([`inbox`]).

pub(super) mod inbox;
pub(super) mod inboxes;

use std::time::Instant;

use sterna_wire::multifd::DeviceChunkKind;

use super::shared::Shared;
use crate::error::MigrationError;
use inbox::{Inbox, Next};
use inboxes::grant;

/// The body of a load thread: runs until the device is loaded, or loading stops.
pub(super) fn load(shared: &Shared, inbox: &Inbox) {
    if let Err(error) = run(shared, inbox) {
        shared.fail(error);
    }
    shared.nudge();
}

fn run(shared: &Shared, inbox: &Inbox) -> Result<(), MigrationError> {
    let device = &inbox.device;
    if inbox.begin() {
        device.call("begin to load", |stream| stream.begin_load())?;
    }
    while let Some(next) = inbox.take() {
        let Next::Chunk(chunk) = next else {
            if inbox.has_loaded() {
                device.call("forget what was loaded", |stream| stream.end_load())?;
                device.call("begin to load", |stream| stream.begin_load())?;
            }
            inbox.has_forgotten();
            continue;
        };
        let began = Instant::now();
        match chunk.kind {
            DeviceChunkKind::Data { .. } if chunk.data().is_empty() => {}
            DeviceChunkKind::Data { .. } => {
                device.call("load", |stream| stream.write(chunk.data()))?;
            }
            DeviceChunkKind::Configuration { total_bytes } => {
                inbox.check_total(total_bytes)?;
                device.call("finish loading", |stream| stream.finish_load(chunk.data()))?;
            }
        }
        let is_last = matches!(chunk.kind, DeviceChunkKind::Configuration { .. });
        if let Some(bytes) = inbox.loaded(chunk, began.elapsed()) {
            shared.say(&grant(device, bytes))?;
        }
        if is_last {
            break;
        }
    }
    Ok(())
}
