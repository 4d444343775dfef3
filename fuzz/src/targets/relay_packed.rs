//! PACKED frames between two relays. The first byte chooses: frames of a peer, or bytes that are packed and unpacked.

use std::sync::Arc;
use std::time::Duration;

use sterna_relay::frame::{DATA_BYTES, Frame, Head, PAGE_BYTES, PackedHead};
use sterna_relay::pack::{Cache, Known, Mode, Packer, Unpacked, Unpacker};

/// Memory of the cache: a few pages, so that pages are missing, too.
const CACHE: u64 = 20 << 10;
/// Bytes of one instruction for the packer.
const INSTRUCTION: usize = 4;

/// A peer's frame unpacks to exactly the stated bytes or to an error; packed bytes come back.
pub fn target(data: &[u8]) {
    let [choice, rest @ ..] = data else { return };
    let cache = Arc::new(Cache::new(CACHE, Vec::new()));
    if choice % 2 == 0 {
        unpack(rest, &cache)
    } else {
        pack(rest, &cache, *choice)
    }
    assert!(cache.pages() <= cache.most_pages() as usize);
}

/// Frames without their first byte, which is always that of PACKED.
fn unpack(mut rest: &[u8], cache: &Arc<Cache>) {
    let mut unpacker = Unpacker::new(Arc::clone(cache)).expect("memory");
    while let Some((head, body)) = rest.split_first_chunk::<{ Head::BYTES - 1 }>() {
        let mut bytes = [11; Head::BYTES];
        bytes[1..].copy_from_slice(head);
        let Ok(head) = Head::decode(&bytes) else { return };
        let Some((fixed, body)) = body.split_at_checked(PackedHead::BYTES) else { return };
        let Ok(Frame::Packed { flow, head, payload }) = head.body(fixed) else { return };
        let (payload, behind) = body.split_at(payload.min(body.len()));
        match unpacker.unpack(flow, &head, payload) {
            Ok(Unpacked::Bytes(bytes)) => assert_eq!(bytes.len(), head.length),
            Ok(Unpacked::Missing) => assert!(head.pages > 0),
            Err(error) => return assert_eq!((error.frame, error.flow), ("PACKED", flow)),
        }
        rest = behind;
    }
}

/// Instructions: a page of this content, bytes before it, whether it was sent before, whether the frame ends.
fn pack(rest: &[u8], cache: &Arc<Cache>, choice: u8) {
    let known = Arc::new(parking_lot::Mutex::new(Known::new(cache.most_pages(), u32::MAX)));
    let mode = if choice & 2 == 0 { Mode::Zstd(1) } else { Mode::Auto };
    let mut packer = Packer::new(mode, 1, known).expect("memory");
    let mut unpacker = Unpacker::new(Arc::clone(cache)).expect("memory");
    let (mut bytes, mut places) = (Vec::new(), Vec::new());
    let clock = || Duration::ZERO;
    for instruction in rest.chunks_exact(INSTRUCTION).take(200) {
        let &[content, gap, is_again, ends] = instruction else { return };
        bytes.extend(std::iter::repeat_n(gap, usize::from(gap)));
        places.push(bytes.len());
        bytes.extend((0..PAGE_BYTES).map(|at| content.wrapping_mul(at as u8) ^ (at >> 8) as u8));
        if ends % 4 > 0 && bytes.len() < DATA_BYTES / 2 {
            continue;
        }
        let packed = packer.pack(1, 0, &bytes, &places, is_again % 2 > 0, &clock).expect("zstd works");
        if let Some(packed) = packed {
            packed.frame.encode(&mut Vec::new()).expect("the frame keeps the rules");
            let Frame::Packed { head, .. } = packed.frame else { panic!("no PACKED") };
            let back = unpacker.unpack(1, &head, &packed.payload).expect("its own frame");
            assert!(back == Unpacked::Bytes(std::mem::take(&mut bytes)), "the bytes come back");
        }
        (bytes, places) = (Vec::new(), Vec::new());
    }
}

/// First inputs, with their names.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let cache = Arc::new(Cache::new(CACHE, Vec::new()));
    let known = Arc::new(parking_lot::Mutex::new(Known::new(cache.most_pages(), u32::MAX)));
    let mut packer = Packer::new(Mode::Zstd(1), 1, known).expect("memory");
    let page = |content: u8| (0..PAGE_BYTES).map(move |at| content ^ (at >> 8) as u8);
    let mut frames = vec![0];
    for contents in [[1, 2], [3, 1], [4, 4]] {
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        for content in contents {
            bytes.extend([content; 8]);
            places.push(bytes.len());
            bytes.extend(page(content));
        }
        let packed = packer.pack(1, 0, &bytes, &places, false, &|| Duration::ZERO).expect("zstd works");
        let packed = packed.expect("it is packed");
        let mut head = Vec::new();
        packed.frame.encode(&mut head).expect("the frame keeps the rules");
        frames.extend_from_slice(&head[1..]);
        frames.extend_from_slice(&packed.payload);
    }
    vec![
        ("frames".into(), frames),
        ("pages".into(), vec![1, 5, 8, 0, 1, 6, 8, 0, 0, 5, 0, 0, 0, 7, 9, 1, 0]),
        ("auto".into(), vec![3, 0, 8, 0, 1, 0, 8, 0, 0, 200, 0, 1, 0]),
    ]
}
