//! Round trips and checks of `rdma:`'s messages with random values, and every message cut at every byte.
//!
//! The seed is printed, and `STERNA_SEED` sets it.

use crate::common::seeded;
use proptest::collection::vec;
use proptest::prelude::*;
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, ChunkSize, ConnectReply, ConnectRequest, Introduction, Message,
    MessageType, Part, Record, Records, RegisterRequest, RegisterResult, Registration, UnregisterRequest,
    ZeroRange, encode_empty, encode_file, encode_records,
};

fn all<T: Record>(records: Records<'_, T>) -> Vec<T> {
    records.iter().map(|(_, record)| record).collect()
}

fn chunk() -> impl Strategy<Value = ChunkSize> {
    (20u32..=30).prop_map(|shift| ChunkSize::new(1 << shift).unwrap())
}

fn block_place() -> impl Strategy<Value = BlockPlace> {
    (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
        |(host_address, offset, length_bytes, key)| BlockPlace { host_address, offset, length_bytes, key },
    )
}

/// A block that a guest can have: whole pages, within 64 bits.
fn sound_place() -> impl Strategy<Value = BlockPlace> {
    (1u64..1 << 48, 0u64..1 << 50, 1u64..1 << 24, any::<u32>()).prop_map(
        |(host_address, offset, pages, key)| BlockPlace {
            host_address,
            offset,
            length_bytes: pages << 12,
            key,
        },
    )
}

#[test]
fn records_encoded_decode_to_themselves() {
    let requests = (any::<u64>(), any::<u32>(), any::<u64>())
        .prop_map(|(key, block, more_chunks)| RegisterRequest { key, block, more_chunks });
    let results =
        (any::<u32>(), any::<u64>()).prop_map(|(key, host_address)| RegisterResult { key, host_address });
    let zeros = (any::<u32>(), any::<u32>(), any::<u64>(), any::<u64>())
        .prop_map(|(value, block, start, length)| ZeroRange { value, block, start, length });
    let backs = (any::<u64>(), any::<u32>()).prop_map(|(chunk, block)| UnregisterRequest { chunk, block });
    let lists = (
        vec(block_place(), 0..40),
        vec(requests, 1..40),
        vec(results, 1..40),
        vec(zeros, 1..40),
        vec(backs, 1..40),
    );
    seeded("rdma_records", &lists, |(places, requests, results, zeros, backs)| {
        let encoded = |encode: &dyn Fn(&mut Vec<u8>)| {
            let mut out = Vec::new();
            encode(&mut out);
            out
        };
        let bytes = encoded(&|out| encode_records(&places, out).unwrap());
        prop_assert!(
            matches!(Message::decode(&bytes).unwrap(), Message::RamBlocksResult(r) if all(r) == places)
        );
        let bytes = encoded(&|out| encode_records(&requests, out).unwrap());
        prop_assert!(
            matches!(Message::decode(&bytes).unwrap(), Message::RegisterRequest(r) if all(r) == requests)
        );
        let bytes = encoded(&|out| encode_records(&results, out).unwrap());
        prop_assert!(
            matches!(Message::decode(&bytes).unwrap(), Message::RegisterResult(r) if all(r) == results)
        );
        let bytes = encoded(&|out| encode_records(&zeros, out).unwrap());
        prop_assert!(matches!(Message::decode(&bytes).unwrap(), Message::Compress(r) if all(r) == zeros));
        let bytes = encoded(&|out| encode_records(&backs, out).unwrap());
        prop_assert!(
            matches!(Message::decode(&bytes).unwrap(), Message::UnregisterRequest(r) if all(r) == backs)
        );
        Ok(())
    });
}

#[test]
fn message_cut_anywhere_or_with_a_byte_more_is_refused() {
    let mut samples: Vec<Vec<u8>> = Vec::new();
    let mut add = |fill: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        fill(&mut bytes);
        samples.push(bytes);
    };
    for kind in [
        MessageType::Error,
        MessageType::Ready,
        MessageType::RamBlocksRequest,
        MessageType::RegisterFinished,
        MessageType::UnregisterFinished,
    ] {
        add(&|out| encode_empty(kind, 1, out).unwrap());
    }
    add(&|out| encode_file(&[7; 300], out).unwrap());
    let place = BlockPlace { host_address: 1, offset: 2, length_bytes: 4096, key: 4 };
    add(&|out| encode_records(&[place; 3], out).unwrap());
    add(&|out| encode_records(&[ZeroRange { value: 0, block: 1, start: 2, length: 3 }; 2], out).unwrap());
    add(&|out| encode_records(&[RegisterRequest { key: 1, block: 2, more_chunks: 3 }; 2], out).unwrap());
    add(&|out| encode_records(&[RegisterResult { key: 1, host_address: 2 }; 2], out).unwrap());
    add(&|out| encode_records(&[UnregisterRequest { chunk: 1, block: 2 }; 2], out).unwrap());
    assert_eq!(samples.len(), MessageType::ALL.len());
    for sample in samples {
        assert!(Message::decode(&sample).is_ok());
        for end in 0..sample.len() {
            assert!(Message::decode(&sample[..end]).is_err(), "{end} bytes of {sample:02x?}");
        }
        assert!(Message::decode(&[&sample[..], &[0]].concat()).is_err(), "one byte more than {sample:02x?}");
    }
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        Just(Part::Main),
        Just(Part::ReturnPath),
        (0u8..254).prop_map(Part::Lane),
        Just(Part::Question)
    ]
}

fn introduction() -> impl Strategy<Value = Introduction> {
    (1u16.., part(), any::<u8>(), chunk(), any::<[u8; 15]>(), any::<[u8; 15]>()).prop_map(
        |(version, part, lanes, chunk, session, nonce)| {
            let lanes = if let Part::Lane(number) = part { lanes.max(number + 1) } else { lanes };
            // An id of zeros breaks the format, so the first byte is 1.
            let id = |drawn: [u8; 15]| std::array::from_fn(|at| if at == 0 { 1 } else { drawn[at - 1] });
            Introduction { version, part, lanes, chunk, session: id(session), nonce: id(nonce) }
        },
    )
}

#[test]
fn private_data_encoded_decode_to_themselves_and_cut_anywhere_are_a_qemus_or_refused() {
    let values =
        (any::<bool>(), proptest::option::of(introduction()), any::<u8>(), chunk(), vec(any::<u8>(), 0..140));
    seeded("rdma_private_data", &values, |(pin_all, introduction, lanes, chunk, padding)| {
        let request = ConnectRequest { pin_all, introduction };
        let bytes = request.to_bytes();
        prop_assert_eq!(ConnectRequest::decode(&bytes), Ok(request));
        for end in 0..bytes.len() {
            let cut = ConnectRequest::decode(&bytes[..end]);
            // A request without its whole introduction is a QEMU's. No Sterna sends such a request.
            prop_assert_eq!(cut.ok(), (end >= 8).then_some(ConnectRequest { pin_all, introduction: None }));
        }

        let limit = (lanes > 100).then_some(chunk.bytes());
        let Ok(reply) = request.reply(lanes, chunk).map(|reply| reply.with_pinned_limit(limit)) else {
            let number = introduction.map(|asked| asked.part);
            prop_assert!(matches!(number, Some(Part::Lane(number)) if number >= lanes));
            return Ok(());
        };
        let bytes = [reply.to_bytes(), padding].concat();
        prop_assert_eq!(ConnectReply::decode(&bytes, &request), Ok(reply));
        prop_assert!(
            reply.introduction.is_none_or(|it| it.version <= Introduction::VERSION
                && it.lanes <= lanes
                && it.chunk == chunk)
        );
        for end in 0..reply.to_bytes().len() {
            let cut = ConnectReply::decode(&bytes[..end], &request);
            // An introduction without its limit breaks its format.
            let plain = ConnectReply { pin_all, introduction: None, pinned_limit: None };
            prop_assert_eq!(cut.ok(), (8..56).contains(&end).then_some(plain));
        }
        Ok(())
    });
}

#[test]
fn checked_ranges_never_leave_their_block() {
    let wild = (any::<u64>(), any::<u32>(), any::<u64>(), any::<u64>());
    let values = (vec(sound_place(), 1..5), chunk(), wild, 0usize..5, 0u64..1 << 37);
    seeded("rdma_ranges", &values, |(list, chunk, (key, block, count, length), near, offset)| {
        let places = BlockPlaces::new(list.clone()).unwrap();
        // An arbitrary value, and a value near a block.
        let near = near % list.len();
        let close = list[near].offset.saturating_add(offset % (2 * list[near].length_bytes));
        for (key, block) in [(key, block), (close, near as u32)] {
            let inside = |range: BlockRange| {
                range.start < list[range.block].length_bytes
                    && range.length <= list[range.block].length_bytes - range.start
            };
            let is_valid = list
                .get(block as usize)
                .is_some_and(|place| key >= place.offset && key - place.offset < place.length_bytes);
            for more_chunks in [0, count, count % 7, u64::MAX] {
                let found = places.requested(&RegisterRequest { key, block, more_chunks }, chunk, 16);
                prop_assert_eq!(found.is_ok(), is_valid);
                if let Ok(range) = found {
                    let offset = key - list[range.block].offset;
                    prop_assert!(inside(range) && range.start.is_multiple_of(chunk.bytes()));
                    prop_assert!(range.start <= offset && offset < range.end());
                }
            }
            for length in [0, length, length % (1 << 37), u64::MAX] {
                match places.cleared(&ZeroRange { value: 0, block, start: key, length }, 16) {
                    Ok(range) => prop_assert!(inside(range) && range.length == length),
                    Err(_) => prop_assert!(!is_valid || length > 0),
                }
            }
            let back = UnregisterRequest { chunk: count % 64, block };
            if let Ok(range) = places.given_back(&back, chunk, |_| true, 16) {
                prop_assert!(inside(range) && range.start == back.chunk * chunk.bytes() && range.length > 0);
            }
        }
        Ok(())
    });
}

#[test]
fn what_a_source_asks_for_is_registered_by_a_destination_of_any_chunk_size() {
    let values = (sound_place(), chunk(), any::<u64>(), any::<u64>());
    seeded("rdma_requests", &values, |(place, chunk, from, count)| {
        let places = BlockPlaces::new(vec![place]).unwrap();
        let start = from % place.length_bytes;
        let length = 1 + count % (place.length_bytes - start);
        let range = BlockRange { block: 0, start, length };

        // Towards a QEMU, whose chunk size is unknown and not smaller than the unit.
        let request = places.request(range, ChunkSize::LEAST).unwrap();
        let registered = places.requested(&request, chunk, 16).unwrap();

        prop_assert!(registered.start <= range.start && range.end() <= registered.end());
        let zeroed = places.cleared(&places.zero_range(range).unwrap(), 16).unwrap();
        prop_assert_eq!(zeroed, range);
        prop_assert_eq!(places.address(range).unwrap(), place.host_address + start);
        Ok(())
    });
}

#[test]
fn answer_about_the_own_blocks_is_taken_as_it_is() {
    seeded("rdma_agreed", &vec(sound_place(), 0..40), |list| {
        let mut bytes = Vec::new();
        encode_records(&list, &mut bytes).unwrap();
        let Message::RamBlocksResult(answer) = Message::decode(&bytes).unwrap() else {
            return Err(TestCaseError::fail("no answer"));
        };
        let own: Vec<u64> = list.iter().map(|place| place.length_bytes).collect();
        let agreed = BlockPlaces::agreed(&answer, &own, Registration::Dynamic).unwrap();
        prop_assert_eq!(agreed.blocks(), &list[..]);
        Ok(())
    });
}
