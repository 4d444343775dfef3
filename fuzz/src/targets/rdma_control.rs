//! A sequence of control messages of `rdma:`. The first byte chooses the chunk size.

use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, ChunkSize, Header, Message, MessageType, Record, Records,
    Registration, encode_empty, encode_file, encode_records,
};

const BLOCKS: [BlockPlace; 2] = [
    BlockPlace { host_address: 0x7f00_0000_0000, offset: 1 << 30, length_bytes: 17 << 19, key: 0 },
    BlockPlace { host_address: 0x5500_0000_0000, offset: 0, length_bytes: 4096, key: 0 },
];

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let [choice, rest @ ..] = data else { return };
    let chunk = ChunkSize::new(1 << (20 + choice % 11)).unwrap();
    let places = BlockPlaces::new(BLOCKS.to_vec()).unwrap();
    let mut rest = rest;
    while !rest.is_empty() {
        let (received, behind) = rest.split_at(received(rest));
        match Message::decode(received) {
            Ok(message) => one(&message, received, &places, chunk),
            Err(error) => assert!(error.offset <= received.len() as u64, "{error}"),
        }
        rest = behind;
    }
}

/// Bytes of the next received message: the length in its header, at most the bytes that remain.
fn received(rest: &[u8]) -> usize {
    let Some(length) = rest.first_chunk().map(|length| u32::from_be_bytes(*length) as usize) else {
        return rest.len();
    };
    (Header::BYTES + length).min(rest.len())
}

fn one(message: &Message<'_>, received: &[u8], places: &BlockPlaces, chunk: ChunkSize) {
    let header = Header::decode(received).unwrap();
    assert_eq!(header.kind, message.kind());
    match message {
        Message::File(stream) => {
            let mut again = Vec::new();
            encode_file(stream, &mut again).unwrap();
            assert_eq!(again[Header::BYTES..], received[Header::BYTES..]);
        }
        Message::RamBlocksResult(list) => {
            again(list);
            let own = BLOCKS.map(|block| block.length_bytes);
            for registration in [Registration::Dynamic, Registration::PinAll] {
                if let Ok(agreed) = BlockPlaces::agreed(list, &own, registration) {
                    let lengths = agreed.blocks().iter().map(|block| block.length_bytes);
                    assert!(lengths.eq(own));
                    let last = BlockRange { block: 0, start: own[0] - 1, length: 1 };
                    agreed.address(last).unwrap();
                    agreed.request(last, chunk).unwrap();
                }
            }
        }
        Message::Compress(list) => {
            again(list);
            for (at, record) in list.iter() {
                if let Ok(range) = places.cleared(&record, at) {
                    inside(range);
                    assert_eq!(places.zero_range(range), Ok(record));
                }
            }
        }
        Message::RegisterRequest(list) => {
            again(list);
            for (at, record) in list.iter() {
                let Ok(range) = places.requested(&record, chunk, at) else { continue };
                inside(range);
                assert!(range.start.is_multiple_of(chunk.bytes()));
                let offset = record.key - BLOCKS[range.block].offset;
                assert!((range.start..range.end()).contains(&offset));
            }
        }
        Message::RegisterResult(list) => {
            again(list);
            for (at, record) in list.iter() {
                if let Ok(key) = places.key(0, &record, at) {
                    assert!(key != 0 && record.host_address == BLOCKS[0].host_address);
                }
            }
        }
        Message::UnregisterRequest(list) => {
            again(list);
            for (at, record) in list.iter() {
                places.given_back(&record, chunk, |range| range.start > 0, at).map(inside).ok();
            }
        }
        Message::Error
        | Message::Ready
        | Message::RamBlocksRequest
        | Message::RegisterFinished
        | Message::UnregisterFinished => {
            assert_eq!(received.len(), Header::BYTES);
            let mut again = Vec::new();
            if encode_empty(message.kind(), header.repeat, &mut again).is_ok() {
                // The bytes after 12 are padding, which may differ.
                assert_eq!(again[..12], received[..12]);
            }
        }
    }
}

fn inside(range: BlockRange) {
    assert!(range.end() <= BLOCKS[range.block].length_bytes);
}

/// Checks that encoded records decode to the same records. The bytes may differ in their
/// padding.
fn again<T: Record + PartialEq>(list: &Records<'_, T>) {
    let records: Vec<T> = list.iter().map(|(_, record)| record).collect();
    let mut out = Vec::new();
    encode_records(&records, &mut out).unwrap();
    let header = Header::decode(&out).unwrap();
    assert_eq!(header.length as usize, records.len() * T::BYTES);
    assert!(T::TYPE == MessageType::RamBlocksResult || header.repeat as usize == records.len());
    let decoded = out[Header::BYTES..].chunks(T::BYTES).map(T::decode);
    assert!(decoded.eq(records));
}
