//! Control messages and private data of `rdma:`: bytes of a QEMU 11.1.3, and single broken rules.

use crate::common::{hex, unhex};
use sterna_wire::Fault;
use sterna_wire::WireError;
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, BlockRange, ChunkSize, ConnectReply, ConnectRequest, Header, Introduction,
    MESSAGE_BYTES, Message, MessageType, PAYLOAD_BYTES, Part, Record, RegisterRequest, RegisterResult,
    Registration, UnregisterRequest, ZeroRange, encode_empty, encode_file, encode_records,
};

const MIB: u64 = 1 << 20;

fn place(host_address: u64, offset: u64, length_bytes: u64, key: u32) -> BlockPlace {
    BlockPlace { host_address, offset, length_bytes, key }
}

fn empty(kind: MessageType) -> Vec<u8> {
    let mut out = Vec::new();
    encode_empty(kind, 1, &mut out).unwrap();
    out
}

fn records<T: Record>(records: &[T]) -> Vec<u8> {
    let mut out = Vec::new();
    encode_records(records, &mut out).unwrap();
    out
}

fn header(length: u32, code: u32, repeat: u32) -> Vec<u8> {
    [length, code, repeat, 0].map(u32::to_be_bytes).concat()
}

#[test]
fn messages_without_payload_are_those_of_the_specification() {
    let cases = [
        (MessageType::Ready, "00000000000000020000000100000000"),
        (MessageType::Error, "00000000000000010000000100000000"),
        (MessageType::RamBlocksRequest, "00000000000000040000000100000000"),
        (MessageType::RegisterFinished, "00000000000000090000000100000000"),
        (MessageType::UnregisterFinished, "000000000000000b0000000100000000"),
    ];
    for (kind, bytes) in cases {
        assert_eq!(hex(&empty(kind)), bytes, "{kind}");
        assert_eq!(Message::decode(&unhex(bytes)).unwrap().kind(), kind);
    }
    // The content of the padding does not matter.
    assert_eq!(Message::decode(&unhex("000000000000000200000001deadbeef")).unwrap(), Message::Ready);
}

#[test]
fn messages_of_a_captured_start_decode_and_encode_to_the_same_bytes() {
    // The end of RAM's setup, then the first iteration up to its mark.
    let eos = unhex("00000008 00000003 00000000 00000000 0000000000000010");
    let mark = unhex("00000012 00000003 00000000 00000000 7e00000001 0200000001 0000000000000080");
    for bytes in [eos, mark] {
        let Message::File(stream) = Message::decode(&bytes).unwrap() else { panic!("no FILE") };
        let mut again = Vec::new();
        encode_file(stream, &mut again).unwrap();
        assert_eq!(again, bytes);
        assert_eq!(Header::decode(&bytes).unwrap(), Header::file(stream.len()).unwrap());
    }

    let blocks = [place(0x7f00_0000_0000, 0, 8 * MIB, 0), place(0x7f10_0000_0000, 8 * MIB, 4096, 0x1234)];
    let answer = unhex(
        "00000040 00000005 00000001 00000000 \
         00007f0000000000 0000000000000000 0000000000800000 00000000 00000000 \
         00007f1000000000 0000000000800000 0000000000001000 00001234 00000000",
    );
    assert_eq!(hex(&records(&blocks)), hex(&answer));
    let Message::RamBlocksResult(list) = Message::decode(&answer).unwrap() else { panic!("no list") };
    assert_eq!(list.iter().collect::<Vec<_>>(), [(16, blocks[0]), (48, blocks[1])]);

    // A request for the second page of a chunk, because the first page was zero.
    let request = RegisterRequest { key: 0x10_1000, block: 0, more_chunks: 0 };
    let bytes =
        unhex("00000018 00000007 00000001 00000000 0000000000101000 00000000 00000000 0000000000000000");
    assert_eq!(hex(&records(&[request])), hex(&bytes));
    let Message::RegisterRequest(list) = Message::decode(&bytes).unwrap() else { panic!("no request") };
    assert_eq!((list.len(), list.is_empty()), (1, false));
    assert_eq!(list.iter().next(), Some((16, request)));

    let result = RegisterResult { key: 0x0000_5f3a, host_address: 0x7f00_0000_0000 };
    let bytes = unhex("00000010 00000008 00000001 00000000 00005f3a 00000000 00007f0000000000");
    assert_eq!(hex(&records(&[result])), hex(&bytes));

    // In this record, the index precedes the address.
    let zero = ZeroRange { value: 0, block: 3, start: 0x90_0000, length: 12 << 10 };
    let bytes =
        unhex("00000018 00000006 00000001 00000000 00000000 00000003 0000000000900000 0000000000003000");
    assert_eq!(hex(&records(&[zero])), hex(&bytes));

    let back = UnregisterRequest { chunk: 5, block: 2 };
    let bytes =
        unhex("00000018 0000000a 00000001 00000000 0000000000000005 00000002 00000000 0000000000000000");
    assert_eq!(hex(&records(&[back])), hex(&bytes));
}

#[test]
fn message_that_breaks_a_rule_is_refused_at_its_field() {
    let with = |head: Vec<u8>, payload: usize| [head, vec![0; payload]].concat();
    let cases = [
        ("no header", vec![0; 15], 15),
        ("nothing", vec![], 0),
        ("type 0", header(0, 0, 1), 4),
        ("type 12", header(0, 12, 1), 4),
        ("type 99", header(0, 99, 1), 4),
        ("fewer bytes than stated", with(header(8, 3, 0), 7), 0),
        ("more bytes than stated", with(header(8, 3, 0), 9), 0),
        ("longer than any", with(header(PAYLOAD_BYTES as u32 + 1, 3, 0), PAYLOAD_BYTES + 1), 0),
        ("FILE without stream", header(0, 3, 0), 0),
        ("READY with payload", with(header(4, 2, 1), 4), 0),
        ("ERROR with payload", with(header(4, 1, 1), 4), 0),
        ("RAM_BLOCKS_REQUEST with payload", with(header(4, 4, 1), 4), 0),
        ("REGISTER_FINISHED with payload", with(header(8, 9, 1), 8), 0),
        ("UNREGISTER_FINISHED with payload", with(header(8, 11, 1), 8), 0),
        ("half a block", with(header(48, 5, 1), 48), 0),
        ("COMPRESS of repeat 0", header(0, 6, 0), 8),
        ("COMPRESS too short", with(header(24, 6, 2), 24), 0),
        ("REGISTER_REQUEST of repeat 0", with(header(24, 7, 0), 24), 8),
        ("REGISTER_REQUEST of repeat 4097", with(header(24 * 4097, 7, 4097), 24 * 4097), 8),
        ("REGISTER_REQUEST too long", with(header(48, 7, 1), 48), 0),
        ("REGISTER_RESULT without result", header(0, 8, 1), 0),
        ("REGISTER_RESULT too long", with(header(48, 8, 2), 48), 0),
        ("UNREGISTER_REQUEST of repeat 0", with(header(24, 10, 0), 24), 8),
        ("UNREGISTER_REQUEST that overflows", with(header(24, 10, u32::MAX), 24), 8),
    ];
    for (what, bytes, at) in cases {
        let error = Message::decode(&bytes).expect_err(what);
        assert_eq!((error.offset, error.fault), (at, Fault::PeerMisbehaved), "{what}: {error}");
        assert!(error.paragraph.starts_with("specs/rdma.md §3."), "{error}");
    }
}

#[test]
fn message_of_most_bytes_and_most_records_is_taken() {
    let mut file = Vec::new();
    encode_file(&vec![7; PAYLOAD_BYTES], &mut file).unwrap();
    assert_eq!(file.len(), MESSAGE_BYTES);
    assert!(
        matches!(Message::decode(&file).unwrap(), Message::File(stream) if stream.len() == PAYLOAD_BYTES)
    );

    let most = vec![RegisterRequest { key: 1, block: 2, more_chunks: 3 }; 4096];
    let bytes = records(&most);
    let Message::RegisterRequest(list) = Message::decode(&bytes).unwrap() else { panic!("no request") };
    assert_eq!(list.iter().map(|(_, record)| record).collect::<Vec<_>>(), most);

    // QEMU answers several requests with the first result only, and states the requests' repeat.
    let answer = [header(16, 8, 2), vec![0; 16]].concat();
    assert!(matches!(Message::decode(&answer).unwrap(), Message::RegisterResult(list) if list.len() == 1));
}

#[test]
fn message_that_cannot_be_said_is_our_fault_and_writes_nothing() {
    let mut out = Vec::new();
    let refused = [
        encode_file(&[], &mut out),
        encode_file(&vec![0; PAYLOAD_BYTES + 1], &mut out),
        encode_empty(MessageType::File, 1, &mut out),
        encode_empty(MessageType::RamBlocksResult, 1, &mut out),
        encode_empty(MessageType::UnregisterFinished, 0, &mut out),
        encode_empty(MessageType::UnregisterFinished, 4097, &mut out),
        encode_records::<RegisterRequest>(&[], &mut out),
        encode_records(&vec![ZeroRange { value: 0, block: 0, start: 0, length: 1 }; 4097], &mut out),
        encode_records(&vec![place(0, 0, 0, 0); 16_384], &mut out),
    ];
    for error in refused.map(Result::unwrap_err) {
        assert_eq!(error.fault, Fault::Local, "{error}");
    }
    assert!(out.is_empty());
    encode_records(&vec![place(0, 0, 0, 0); 16_383], &mut out).unwrap();
    assert!(out.len() <= MESSAGE_BYTES);
}

/// Two blocks: 8.5 MiB at offset 1 GiB, and one page at offset 0.
fn places() -> BlockPlaces {
    let long = 8 * MIB + (MIB >> 1);
    BlockPlaces::new(vec![place(0x7f00_0000_0000, 1 << 30, long, 0), place(0x5500_0000_0000, 0, 4096, 0)])
        .unwrap()
}

fn range(block: usize, start: u64, length: u64) -> BlockRange {
    BlockRange { block, start, length }
}

#[test]
fn register_request_is_clipped_to_chunks_and_block() {
    let base = 1 << 30;
    let cases = [
        (base, 0, MIB, range(0, 0, MIB)),
        (base + 0x1000, 0, MIB, range(0, 0, MIB)),
        (base + MIB - 1, 1, MIB, range(0, 0, 2 * MIB)),
        (base + 3 * MIB + 5, 2, MIB, range(0, 3 * MIB, 3 * MIB)),
        (base + 8 * MIB, 0, MIB, range(0, 8 * MIB, MIB >> 1)),
        (base + 7 * MIB, 1000, MIB, range(0, 7 * MIB, MIB + (MIB >> 1))),
        (base, u64::MAX, MIB, range(0, 0, 8 * MIB + (MIB >> 1))),
        (base + 5 * MIB, 0, 4 * MIB, range(0, 4 * MIB, 4 * MIB)),
        (base + 5 * MIB, u64::MAX >> 20, 1 << 30, range(0, 0, 8 * MIB + (MIB >> 1))),
    ];
    for (key, more_chunks, chunk, wanted) in cases {
        let request = RegisterRequest { key, block: 0, more_chunks };
        let found = places().requested(&request, ChunkSize::new(chunk).unwrap(), 16).unwrap();
        assert_eq!(found, wanted, "{request:?}");
    }
    let small = RegisterRequest { key: 0, block: 1, more_chunks: 0 };
    assert_eq!(places().requested(&small, ChunkSize::LEAST, 16).unwrap(), range(1, 0, 4096));
}

fn fault_at(result: Result<BlockRange, WireError>, at: u64, paragraph: &str) {
    let error = result.expect_err("must be refused");
    assert_eq!((error.offset, error.fault), (at, Fault::PeerMisbehaved), "{error}");
    assert_eq!(error.paragraph, paragraph, "{error}");
}

#[test]
fn request_outside_of_the_blocks_is_refused_at_its_field() {
    let (places, base, end) = (places(), 1 << 30, (1 << 30) + 8 * MIB + (MIB >> 1));
    for (block, key, at) in [
        (2, base, 48),
        (u32::MAX, base, 48),
        (0, base - 1, 40),
        (0, 0, 40),
        (0, end, 40),
        (0, u64::MAX, 40),
        (1, 4096, 40),
    ] {
        let request = RegisterRequest { key, block, more_chunks: 0 };
        fault_at(places.requested(&request, ChunkSize::LEAST, 40), at, "specs/rdma.md §4.2");
    }
    for (value, block, start, length, at) in [
        (1, 0, base, 1, 0),
        (0, 2, base, 1, 4),
        (0, 0, base - 1, 1, 8),
        (0, 0, end, 0, 8),
        (0, 0, base, end - base + 1, 16),
        (0, 0, end - 1, 2, 16),
        (0, 0, base + 1, u64::MAX, 16),
        (0, 1, 4095, u64::MAX - 4094, 16),
    ] {
        fault_at(
            places.cleared(&ZeroRange { value, block, start, length }, 100),
            100 + at,
            "specs/rdma.md §4.4",
        );
    }
    let whole = ZeroRange { value: 0, block: 0, start: base, length: end - base };
    assert_eq!(places.cleared(&whole, 16).unwrap(), range(0, 0, end - base));

    let back = |chunk, block, registered| {
        places.given_back(&UnregisterRequest { chunk, block }, ChunkSize::LEAST, |_| registered, 16)
    };
    fault_at(back(0, 2, true), 24, "specs/rdma.md §4.5");
    fault_at(back(9, 0, true), 16, "specs/rdma.md §4.5");
    fault_at(back(u64::MAX, 0, true), 16, "specs/rdma.md §4.5");
    fault_at(back(3, 0, false), 16, "specs/rdma.md §4.5");
    assert_eq!(back(8, 0, true).unwrap(), range(0, 8 * MIB, MIB >> 1));
}

#[test]
fn answer_that_is_not_about_the_own_blocks_is_refused() {
    let own = [8 * MIB, 4096];
    let good = [place(1 << 40, 0, 8 * MIB, 7), place(1 << 41, 0, 4096, 8)];
    let agreed = |places: &[BlockPlace], registration| {
        let bytes = records(places);
        let Message::RamBlocksResult(list) = Message::decode(&bytes).unwrap() else { panic!("no list") };
        BlockPlaces::agreed(&list, &own, registration)
    };
    let found = agreed(&good, Registration::PinAll).unwrap();
    assert_eq!(found.blocks(), good);
    assert_eq!(agreed(&good, Registration::Dynamic).unwrap(), found);

    let keyless = [good[0], BlockPlace { key: 0, ..good[1] }];
    assert!(agreed(&keyless, Registration::Dynamic).is_ok());
    let cases = [
        ("fewer", vec![good[0]], 0, Fault::PeerIncompatible),
        ("none", vec![], 0, Fault::PeerIncompatible),
        ("more", vec![good[0], good[1], good[1]], 0, Fault::PeerIncompatible),
        ("other order", vec![good[1], good[0]], 32, Fault::PeerIncompatible),
        ("other length", vec![good[0], place(0, 0, 8192, 1)], 64, Fault::PeerIncompatible),
        ("address wraps", vec![good[0], place(u64::MAX - 4094, 0, 4096, 1)], 48, Fault::PeerMisbehaved),
        ("offset wraps", vec![place(0, u64::MAX, 8 * MIB, 1), good[1]], 16, Fault::PeerMisbehaved),
        ("no key", keyless.to_vec(), 72, Fault::PeerMisbehaved),
    ];
    for (what, places, at, fault) in cases {
        let error = agreed(&places, Registration::PinAll).expect_err(what);
        assert_eq!((error.offset, error.fault), (at, fault), "{what}: {error}");
    }
    assert_eq!(BlockPlaces::new(vec![good[0]; 4097]).unwrap_err().fault, Fault::Local);
    assert_eq!(BlockPlaces::new(vec![place(u64::MAX, 0, 1, 0)]).unwrap_err().fault, Fault::Local);
}

#[test]
fn source_asks_from_any_byte_in_units_and_stays_in_its_blocks() {
    let places = places();
    let base = 1 << 30;
    let asked = |range| places.request(range, ChunkSize::LEAST).unwrap();
    assert_eq!(asked(range(0, 0, 1)), RegisterRequest { key: base, block: 0, more_chunks: 0 });
    assert_eq!(asked(range(0, 0, MIB)).more_chunks, 0);
    assert_eq!(asked(range(0, 0, MIB + 1)).more_chunks, 1);
    assert_eq!(
        asked(range(0, MIB - 1, 2)),
        RegisterRequest { key: base + MIB - 1, block: 0, more_chunks: 1 }
    );
    assert_eq!(asked(range(0, 0, 8 * MIB + (MIB >> 1))).more_chunks, 8);
    assert_eq!(places.address(range(0, 4096, 4096)).unwrap(), 0x7f00_0000_1000);
    assert_eq!(
        places.zero_range(range(0, 4096, 8192)).unwrap(),
        ZeroRange { value: 0, block: 0, start: base + 4096, length: 8192 }
    );
    for outside in [range(2, 0, 1), range(0, 9 * MIB, 1), range(0, 8 * MIB, MIB), range(0, 1, u64::MAX)] {
        assert_eq!(places.request(outside, ChunkSize::LEAST).unwrap_err().fault, Fault::Local);
        assert_eq!(places.zero_range(outside).unwrap_err().fault, Fault::Local);
        assert_eq!(places.address(outside).unwrap_err().fault, Fault::Local);
    }
    assert_eq!(places.request(range(0, 0, 0), ChunkSize::LEAST).unwrap_err().fault, Fault::Local);

    let answered = |key, host_address| places.key(0, &RegisterResult { key, host_address }, 16);
    assert_eq!(answered(9, 0x7f00_0000_0000), Ok(9));
    assert_eq!(answered(0, 0x7f00_0000_0000).unwrap_err().offset, 16);
    assert_eq!(answered(9, 0x7f00_0010_0000).unwrap_err().offset, 24);
    assert!(places.key(2, &RegisterResult { key: 9, host_address: 0 }, 16).is_err());
}

fn introduction(part: Part) -> Introduction {
    let chunk = ChunkSize::new(64 * MIB).unwrap();
    Introduction { version: 1, part, lanes: 4, chunk, session: [0x11; 16], nonce: [0x22; 16] }
}

fn request(part: Part) -> ConnectRequest {
    ConnectRequest { pin_all: false, introduction: Some(introduction(part)) }
}

/// Private data as the connection manager delivers it: padded with arbitrary bytes.
fn padded(bytes: &[u8], length: usize, padding: u8) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out.resize(length, padding);
    out
}

#[test]
fn private_data_are_those_of_the_specification() {
    let plain = ConnectRequest { pin_all: false, introduction: None };
    assert_eq!(hex(&plain.to_bytes()), "0000000100000000");
    assert_eq!(hex(&ConnectRequest { pin_all: true, ..plain }.to_bytes()), "0000000100000001");

    let head = |part: &str, lane: &str| format!("0000000100000000 53544e52 0001 {part} 04000000 {lane} 0004");
    let tail = format!("{}{}", "11".repeat(16), "22".repeat(16));
    for (part, bytes) in [
        (Part::Main, head("0001", "0000")),
        (Part::ReturnPath, head("0002", "0000")),
        (Part::Lane(3), head("0003", "0003")),
        (Part::Question, head("0004", "0000")),
    ] {
        let bytes = unhex(&format!("{bytes}{tail}"));
        assert_eq!(hex(&request(part).to_bytes()), hex(&bytes));
        assert_eq!(bytes.len(), ConnectRequest::MAX_BYTES);
        assert_eq!(ConnectRequest::decode(&bytes), Ok(request(part)));
    }
}

#[test]
fn request_of_a_qemu_is_one_whatever_it_is_padded_with() {
    let plain = |pin_all| Ok(ConnectRequest { pin_all, introduction: None });
    for (bytes, pin_all) in [
        ("0000000100000000", false),
        ("0000000100000001", true),
        ("00000001fffffffe", false),
        ("00000001ffffffff", true),
    ] {
        let bytes = unhex(bytes);
        assert_eq!(ConnectRequest::decode(&bytes), plain(pin_all));
        for padding in [0, 0x53, 0xff] {
            assert_eq!(ConnectRequest::decode(&padded(&bytes, 56, padding)), plain(pin_all));
        }
    }
    for version in [0, 2, 0xffff_ffff_u32] {
        let bytes = padded(&version.to_be_bytes(), 56, 0);
        let error = ConnectRequest::decode(&bytes).unwrap_err();
        assert_eq!((error.offset, error.fault), (0, Fault::PeerIncompatible), "{error}");
    }
    assert_eq!(ConnectRequest::decode(&[0, 0, 0, 1, 0, 0, 0]).unwrap_err().offset, 7);
}

#[test]
fn introduction_that_breaks_a_rule_is_refused_at_its_field() {
    // Name, offset of the change, new bytes, offset of the error.
    let cases: [(&str, usize, &[u8], u64); 12] = [
        ("version 0", 12, &[0, 0], 12),
        ("part 0", 14, &[0, 0], 14),
        ("part 5", 14, &[0, 5], 14),
        ("chunk 0", 16, &[0; 4], 16),
        ("chunk of 3 MiB", 16, &[0, 0x30, 0, 0], 16),
        ("chunk of 2 GiB", 16, &[0x80, 0, 0, 0], 16),
        ("lane 256", 20, &[1, 0], 20),
        ("lane beyond the lanes", 20, &[0, 4], 22),
        ("256 lanes", 22, &[1, 0], 22),
        ("no lanes", 22, &[0, 0], 22),
        ("no session", 24, &[0; 16], 40),
        ("no nonce", 40, &[0; 16], 40),
    ];
    let sound = request(Part::Lane(2)).to_bytes();
    for (what, from, bytes, at) in cases {
        let mut changed = sound.clone();
        changed[from..from + bytes.len()].copy_from_slice(bytes);
        let error = ConnectRequest::decode(&changed).expect_err(what);
        assert_eq!((error.offset, error.fault), (at, Fault::PeerMisbehaved), "{what}: {error}");
    }
    let mut main = request(Part::Main).to_bytes();
    main[21] = 1;
    assert_eq!(
        ConnectRequest::decode(&main).unwrap_err().offset,
        20,
        "a lane's number on the main connection"
    );
}

#[test]
fn reply_counts_only_with_magic_and_the_nonce_that_was_sent() {
    let asked = request(Part::Main);
    let reply = asked.reply(2, ChunkSize::MOST).unwrap();
    let wanted = Introduction { lanes: 2, chunk: ChunkSize::MOST, ..introduction(Part::Main) };
    assert_eq!(reply.introduction, Some(wanted));
    let bytes = padded(&reply.to_bytes(), 196, 0xa5);
    let decoded = ConnectReply::decode(&bytes, &asked).unwrap();
    assert_eq!(decoded, reply);
    assert_eq!(decoded.is_plain(&asked), Ok(false));

    let plain = ConnectReply { pin_all: false, introduction: None, pinned_limit: None };
    for at in (8..12).chain(40..56) {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        assert_eq!(ConnectReply::decode(&changed, &asked), Ok(plain), "byte {at}");
    }
    // A reply to another request, which remained in a buffer.
    let other = ConnectRequest {
        introduction: Some(Introduction { nonce: [0x33; 16], ..introduction(Part::Main) }),
        ..asked
    };
    assert_eq!(ConnectReply::decode(&bytes, &other), Ok(plain));
    assert_eq!(ConnectReply::decode(&bytes, &ConnectRequest { introduction: None, ..asked }), Ok(plain));
    // The eight bytes of a QEMU, with a version that the decoder ignores.
    assert_eq!(ConnectReply::decode(&unhex("0000000700000000"), &asked), Ok(plain));
    assert!(ConnectReply::decode(&[0; 7], &asked).is_err());

    for part in [Part::Main, Part::ReturnPath] {
        assert_eq!(plain.is_plain(&request(part)), Ok(true));
    }
    for part in [Part::Lane(0), Part::Question] {
        assert_eq!(plain.is_plain(&request(part)).unwrap_err().fault, Fault::PeerIncompatible);
    }
}

#[test]
fn reply_of_the_right_nonce_that_contradicts_its_request_is_refused() {
    let asked = request(Part::Main);
    let sound = padded(&asked.reply(4, ChunkSize::LEAST).unwrap().to_bytes(), 196, 0);
    for (what, at, byte) in
        [("version 2", 13, 2), ("another part", 15, 2), ("more lanes", 23, 5), ("another session", 30, 0)]
    {
        let mut changed = sound.clone();
        changed[at] = byte;
        let error = ConnectReply::decode(&changed, &asked).expect_err(what);
        assert_eq!(error.fault, Fault::PeerMisbehaved, "{what}: {error}");
    }
    // With a newer source, the sides select the destination's older version.
    let newer = Introduction { version: 9, ..introduction(Part::Main) };
    let newer = ConnectRequest { introduction: Some(newer), ..asked };
    assert_eq!(ConnectRequest::decode(&newer.to_bytes()), Ok(newer));
    let reply = newer.reply(4, ChunkSize::LEAST).unwrap();
    assert_eq!(reply.introduction.unwrap().version, 2);
    assert_eq!(ConnectReply::decode(&reply.to_bytes(), &newer), Ok(reply));
}

#[test]
fn reply_of_version_2_states_the_destination_s_limit_and_an_older_one_cannot() {
    let asked = |version| {
        let introduction = Introduction { version, ..introduction(Part::Main) };
        ConnectRequest { introduction: Some(introduction), ..request(Part::Main) }
    };
    let reply = |version, limit| asked(version).reply(2, ChunkSize::LEAST).unwrap().with_pinned_limit(limit);
    for (limit, bytes) in [(None, "0000000000000000"), (Some(64 * MIB), "0000000004000000")] {
        let reply = reply(2, limit);
        assert_eq!(reply.to_bytes().len(), 64);
        assert_eq!(hex(&reply.to_bytes()[56..]), bytes);
        let received = padded(&reply.to_bytes(), 196, 0xa5);
        assert_eq!(ConnectReply::decode(&received, &asked(2)).unwrap().pinned_limit, limit);
    }
    // The bytes after an older reply have no meaning.
    let older = reply(1, Some(64 * MIB));
    assert_eq!((older.pinned_limit, older.to_bytes().len()), (None, 56));
    assert_eq!(ConnectReply::decode(&padded(&older.to_bytes(), 196, 0xa5), &asked(2)), Ok(older));
    // A limit below one window, and a limit that is cut off.
    let sound = reply(2, Some(MIB)).to_bytes();
    let mut small = sound.clone();
    small[56..].copy_from_slice(&(MIB - 1).to_be_bytes());
    for (bytes, words) in [(&small[..], "at least 1 MiB"), (&sound[..60], "its bytes are missing")] {
        let error = ConnectReply::decode(bytes, &asked(2)).unwrap_err();
        assert_eq!((error.offset, error.fault), (56, Fault::PeerMisbehaved), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    // A limit below one window is raised to one window.
    assert_eq!(reply(2, Some(1)).pinned_limit, Some(MIB));
}

#[test]
fn pin_all_is_agreed_by_the_reply() {
    let request = |pin_all| ConnectRequest { pin_all, introduction: None };
    let reply = |flags: u32| {
        let bytes = [1, flags].map(u32::to_be_bytes).concat();
        ConnectReply::decode(&bytes, &request(false)).unwrap()
    };
    assert_eq!(request(false).agreed(&reply(0)), Ok(Registration::Dynamic));
    assert_eq!(request(true).agreed(&reply(1)), Ok(Registration::PinAll));
    assert_eq!(request(true).agreed(&reply(0)), Ok(Registration::Dynamic));
    assert_eq!(request(true).agreed(&reply(0xffff_fffe)), Ok(Registration::Dynamic));
    assert_eq!(request(false).agreed(&reply(1)).unwrap_err().fault, Fault::PeerMisbehaved);
    for pin_all in [false, true] {
        let reply = request(pin_all).reply(4, ChunkSize::MOST).unwrap();
        assert_eq!(reply, ConnectReply { pin_all, introduction: None, pinned_limit: None });
    }
}

#[test]
fn lanes_are_as_many_as_both_sides_want_and_one_more_is_rejected() {
    let lane = request(Part::Lane(2));
    for (wanted, agreed) in [(3, 3), (4, 4), (200, 4)] {
        let reply = lane.reply(wanted, ChunkSize::LEAST).unwrap();
        assert_eq!(reply.introduction.unwrap().lanes, agreed);
    }
    let error = lane.reply(2, ChunkSize::LEAST).unwrap_err();
    assert_eq!((error.offset, error.fault), (20, Fault::PeerIncompatible), "{error}");
}
