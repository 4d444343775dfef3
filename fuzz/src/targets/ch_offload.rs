//! What Cloud Hypervisor sends: a stream of requests up to the machine's texts, or a page request. The first byte chooses.

use sterna_pager::cloud_hypervisor::{
    Command, Found, HEADER_BYTES, MemoryLayout, Order, PAGE_REQUEST_BYTES, PageRequest, Request, Response,
    migration_config, vm_config,
};

/// Feeds one input to the decoders; panics if a check fails.
pub fn target(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 4 {
        0 => requests(data),
        1 => texts(data),
        2 => files(data),
        _ => page_request(data),
    }
}

/// A whole connection. A payload is the bytes after its header; a descriptor comes with each slot whose number is even.
fn requests(mut data: &[u8]) {
    let mut order = Order::new();
    let (mut ends, mut slots) = (0, 0);
    while let Some((header, rest)) = data.split_first_chunk::<HEADER_BYTES>() {
        data = rest;
        let Ok(request) = Request::decode(header) else { return };
        assert_eq!(Request::decode(&request.encode()), Ok(request));
        if order.check(&request).is_err() {
            return;
        }
        let Ok(length) = usize::try_from(request.payload_bytes) else { return };
        let Some((payload, rest)) = data.split_at_checked(length) else { return };
        data = rest;
        let slot = match request.command {
            Command::MemoryFd => payload.try_into().ok().map(u32::from_le_bytes),
            _ => None,
        };
        let descriptors = usize::from(slot.is_some_and(|slot| slot % 2 == 0));
        if order.arrived(request.command, slot, descriptors).is_err() {
            return;
        }
        slots += usize::from(slot.is_some());
        ends += usize::from(matches!(
            request.command,
            Command::Complete | Command::CompletePaused | Command::Abandon
        ));
        assert!(ends <= 1 && slots <= 1024);
    }
}

/// A `Config` and a `State`, separated by a byte 0.
fn texts(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (config, state) = (&data[..end], data.get(end + 1..).unwrap_or(b"{}"));
    if let Ok(text) = vm_config(config) {
        assert!(text.len() < config.len());
    }
    let Ok(layout) = MemoryLayout::new(config, state) else { return };
    let mut next = 0;
    for part in layout.parts() {
        assert_eq!(part.offset, next, "parts follow each other");
        next += part.bytes;
        let slot = &layout.slots()[part.slot];
        assert!(slot.address <= part.address && part.address + part.bytes <= slot.address + slot.bytes);
        assert_eq!(part.file_offset - slot.file_offset, part.address - slot.address);
        let found = layout.at_address(part.address, part.bytes);
        assert_eq!(found, Some(vec![Found::Image { offset: part.offset, bytes: part.bytes }]));
    }
    assert_eq!(layout.len_bytes(), next);
    let mut at = 0;
    for part in layout.at_offset(0, next) {
        assert_eq!(part.offset, at);
        at += part.bytes;
    }
    assert_eq!(at, next);
    for slot in layout.slots() {
        let Some(found) = layout.at_address(slot.address, slot.bytes) else { panic!("a slot is whole") };
        let bytes = |found: &Found| match found {
            Found::Image { bytes, .. } | Found::Unused { bytes, .. } => *bytes,
        };
        assert_eq!(found.iter().map(bytes).sum::<u64>(), slot.bytes);
    }
}

/// `config.json` and `state.json`, separated by a byte 0.
fn files(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (config, state) = (&data[..end], data.get(end + 1..).unwrap_or_default());
    if let Ok(made) = migration_config(config, state) {
        assert_eq!(vm_config(&made), Ok(config.trim_ascii()));
        let _ = MemoryLayout::new(&made, state);
    }
}

fn page_request(data: &[u8]) {
    if let Some(payload) = data.first_chunk::<PAGE_REQUEST_BYTES>() {
        if let Ok(request) = PageRequest::decode(payload) {
            assert_eq!(&request.encode(), payload);
            assert!(request.bytes > 0 && request.address.checked_add(request.bytes).is_some());
        }
        if let Ok(response) = Response::decode(payload) {
            assert_eq!(Response::decode(&response.encode()), Ok(response));
        }
    }
}
