//! Multifd packets with single broken rules: each error names the byte and the fault.

use sterna_wire::multifd::{
    BlockTable, DeviceChunk, DeviceChunkKind, DeviceStatePacket, InitialPacket, Method, PacketHeader,
    PacketKind, RAM_PACKET_BYTES, RamPacketEncoder, RamPacketView,
};
use sterna_wire::{Fault, WireError};

fn table() -> BlockTable {
    BlockTable::new([("m0".to_owned(), 1 << 20), ("rom".to_owned(), 4096)]).unwrap()
}

/// Three normal pages and two zero pages of "m0".
fn sound() -> [u8; RAM_PACKET_BYTES] {
    let mut encoder = RamPacketEncoder::new(Method::None);
    encoder.begin("m0").unwrap();
    assert!([0, 0x1000, 0x3000].into_iter().all(|offset| encoder.push_normal(offset)));
    assert!([0x5000, 0x6000].into_iter().all(|offset| encoder.push_zero(offset)));
    *encoder.finish(7, 3 * 4096)
}

/// An offset, and the bytes to write there.
type Patch<'a> = (usize, &'a [u8]);

/// The packet after some bytes were replaced.
fn with(patches: &[Patch<'_>]) -> [u8; RAM_PACKET_BYTES] {
    let mut bytes = sound();
    for (at, patch) in patches {
        bytes[*at..at + patch.len()].copy_from_slice(patch);
    }
    bytes
}

fn refusal(bytes: &[u8; RAM_PACKET_BYTES], method: Method) -> WireError {
    RamPacketView::decode(bytes, &table(), method).expect_err("must be refused")
}

#[test]
fn ram_packet_sound_is_taken() {
    let bytes = sound();
    let table = table();

    let view = RamPacketView::decode(&bytes, &table, Method::None).unwrap();

    assert_eq!(view.normal().collect::<Vec<_>>(), [0, 0x1000, 0x3000]);
    assert_eq!(view.zero().collect::<Vec<_>>(), [0x5000, 0x6000]);
    let runs: Vec<_> = view.normal_runs().map(|run| (run.offset, run.pages)).collect();
    assert_eq!(runs, [(0, 2), (0x3000, 1)]);
    assert_eq!((view.packet_number(), view.pages_alloc(), view.block()), (7, 128, Some(0)));
}

#[test]
fn ram_packet_that_breaks_a_rule_is_refused_at_its_byte() {
    let max = u32::MAX.to_be_bytes();
    let cases: [(&str, &[Patch<'_>], u64); 18] = [
        ("magic", &[(0, &[0x12])], 0),
        ("high flag", &[(10, &[1])], 8),
        ("device state", &[(11, &[0x40])], 8),
        ("device state and SYNC", &[(11, &[0x41])], 8),
        ("too much room", &[(15, &[129])], 12),
        ("more normal pages than room", &[(19, &[129])], 16),
        ("normal pages beyond all counting", &[(16, &max)], 16),
        ("more zero pages than room", &[(35, &[126])], 32),
        ("zero pages beyond all counting", &[(32, &max)], 32),
        ("payload a byte short", &[(20, &[0, 0, 0x2f, 0xff])], 20),
        ("payload a page long", &[(20, &[0, 0, 0x40, 0])], 20),
        ("reserved byte", &[(63, &[1])], 36),
        ("name without NUL", &[(64, &[b'a'; 256])], 64),
        ("offset not aligned", &[(335, &[1])], 328),
        ("offset at the end of the block", &[(333, &[0x10, 0, 0])], 328),
        ("offset beyond all blocks", &[(328, &[0xff; 6])], 328),
        ("page twice among the normal", &[(334, &[0])], 328),
        ("page normal and zero", &[(350, &[0x10])], 344),
    ];
    for (what, patches, offset) in cases {
        let error = refusal(&with(patches), Method::None);
        assert_eq!((error.offset, error.fault), (offset, Fault::PeerMisbehaved), "{what}: {error}");
    }
}

/// Packets as QEMU 7.2 sends them. The last pages of a round are in its SYNC. A packet without pages, SYNC or
/// not, repeats the payload length of the previous packet.
#[test]
fn ram_packets_of_an_old_qemu_are_taken() {
    let table = table();
    let (full, empty) = (with(&[(11, &[1])]), with(&[(11, &[1]), (19, &[0]), (35, &[0])]));

    let view = RamPacketView::decode(&full, &table, Method::None).unwrap();
    let bare = RamPacketView::decode(&empty, &table, Method::None).unwrap();

    assert!(view.is_sync() && bare.is_sync());
    assert_eq!((view.normal().len(), view.zero().len(), view.payload_bytes()), (3, 2, 3 * 4096));
    assert_eq!((bare.block(), bare.normal().len(), bare.payload_bytes()), (None, 0, 0));
    let idle = with(&[(19, &[0]), (35, &[0])]);
    let idle = RamPacketView::decode(&idle, &table, Method::None).unwrap();
    assert_eq!((idle.is_sync(), idle.payload_bytes()), (false, 0));
}

#[test]
fn ram_packet_of_another_setting_is_incompatible() {
    let cases: [(&str, [u8; RAM_PACKET_BYTES], Method, u64); 5] = [
        ("version", with(&[(7, &[2])]), Method::None, 4),
        ("zlib where none is on", with(&[(11, &[2])]), Method::None, 8),
        ("none where zstd is on", sound(), Method::Zstd, 8),
        ("qpl", with(&[(11, &[8])]), Method::None, 8),
        ("unknown block", with(&[(64, b"m1")]), Method::None, 64),
    ];
    for (what, bytes, method, offset) in cases {
        let error = refusal(&bytes, method);
        assert_eq!((error.offset, error.fault), (offset, Fault::PeerIncompatible), "{what}: {error}");
    }
}

#[test]
fn ram_packet_compressed_payload_has_its_limits() {
    for (payload, good) in [(0u32, false), (1, true), (1 << 20, true), ((1 << 20) + 1, false)] {
        let bytes = with(&[(11, &[4]), (20, &payload.to_be_bytes())]);
        let table = table();

        let outcome = RamPacketView::decode(&bytes, &table, Method::Zstd);

        assert_eq!(outcome.is_ok(), good, "{payload}: {outcome:?}");
    }
}

#[test]
fn ram_packet_with_all_pages_colliding_is_still_judged() {
    // The block is large enough to choose page numbers that all fall on one slot of the duplicate check.
    let table = BlockTable::new([("big".to_owned(), 1 << 50)]).unwrap();
    let slot = |page: u64| page.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(8) & 255;
    let pages: Vec<u64> = (0u64..).filter(|page| slot(*page) == 255).take(128).collect();
    let mut encoder = RamPacketEncoder::new(Method::None);
    for (repeat, good) in [(pages[127], true), (pages[0], false)] {
        encoder.begin("big").unwrap();
        assert!(pages[..127].iter().chain([&repeat]).all(|page| encoder.push_zero(page << 12)));
        assert!(!encoder.push_zero(0), "a 129th page");
        let bytes = encoder.finish(0, 0);

        assert_eq!(RamPacketView::decode(bytes, &table, Method::None).is_ok(), good);
    }
}

#[test]
fn initial_packet_of_another_setting_is_incompatible() {
    let packet = InitialPacket { uuid: [1; 16], id: 2 };

    assert!(packet.check(&[1; 16], 3).is_ok());
    for (uuid, channels, offset) in [([0; 16], 3, 8), ([1; 16], 2, 24)] {
        let error = packet.check(&uuid, channels).unwrap_err();
        assert_eq!((error.offset, error.fault), (offset, Fault::PeerIncompatible), "{error}");
    }
    let mut bytes = packet.to_bytes();
    bytes[63] = 1;
    assert_eq!(InitialPacket::decode(&bytes).unwrap_err().fault, Fault::PeerMisbehaved);
}

#[test]
fn device_state_packet_that_breaks_a_rule_is_refused() {
    let mut sound = Vec::new();
    DeviceStatePacket { name: "a/vfio".into(), instance: 0, payload_bytes: 5 }.encode(&mut sound).unwrap();
    let peeked = PacketHeader::peek(&sound).unwrap().unwrap();
    assert_eq!((peeked.kind, peeked.kind.packet_bytes()), (PacketKind::DeviceState, sound.len()));
    let cases: [(usize, &[u8]); 4] = [(272, &[0; 4]), (272, &[0xff; 4]), (12, &[b'a'; 256]), (12, &[0])];
    for (at, patch) in cases {
        let mut bytes = sound.clone();
        bytes[at..at + patch.len()].copy_from_slice(patch);
        assert!(DeviceStatePacket::decode(&bytes).is_err(), "{at} {patch:?}");
    }
    assert!(
        DeviceStatePacket { name: String::new(), instance: 0, payload_bytes: 5 }.encode(&mut sound).is_err()
    );
    assert!(
        DeviceStatePacket { name: "a".into(), instance: 0, payload_bytes: 0 }.encode(&mut sound).is_err()
    );
}

#[test]
fn device_chunk_of_every_kind_decodes_to_itself_and_others_are_refused() {
    let kinds = [
        DeviceChunkKind::Data { initial_ends: false },
        DeviceChunkKind::Data { initial_ends: true },
        DeviceChunkKind::Configuration { total_bytes: None },
        DeviceChunkKind::Configuration { total_bytes: Some(u64::MAX - 1) },
    ];
    for (index, kind) in (7..).zip(kinds) {
        let mut bytes = Vec::new();
        DeviceChunk { index, kind }.encode(&mut bytes);
        let head = bytes.len();
        assert!(head <= DeviceChunk::MAX_BYTES);
        for short in 0..head {
            assert!(DeviceChunk::decode(&bytes[..short]).is_err(), "{kind:?}: {short} of {head} bytes");
        }
        bytes.extend_from_slice(b"state");
        assert_eq!(DeviceChunk::decode(&bytes), Ok((DeviceChunk { index, kind }, head)));
    }
    let mut bytes = Vec::new();
    DeviceChunk { index: 0, kind: kinds[0] }.encode(&mut bytes);
    for flags in [3, 4, 6, 7, 8, 0x8000_0000u32] {
        bytes[8..12].copy_from_slice(&flags.to_be_bytes());
        let error = DeviceChunk::decode(&[&bytes[..], &[0; 8]].concat()).unwrap_err();
        assert!(error.to_string().contains("flags"), "{flags:#x}: {error}");
    }
    bytes[3] = 1;
    assert!(DeviceChunk::decode(&bytes).unwrap_err().to_string().contains("version 1"));
}

#[test]
fn packet_of_differences_is_taken_and_each_broken_rule_is_refused_at_its_byte() {
    let (table, mut encoder) = (table(), RamPacketEncoder::new(Method::Zstd));
    encoder.begin("m0").unwrap();
    assert!([0, 0x3000].into_iter().all(|offset| encoder.push_normal(offset)));
    let bytes = *encoder.finish_differences(9, 10);

    // The result does not depend on the lane's compression.
    for method in [Method::None, Method::Zlib, Method::Zstd] {
        let view = RamPacketView::decode(&bytes, &table, method).unwrap();
        assert!(view.holds_differences() && !view.is_sync());
        assert_eq!(view.normal().collect::<Vec<_>>(), [0, 0x3000]);
        assert_eq!((view.packet_number(), view.payload_bytes()), (9, 10));
    }
    assert!(!RamPacketView::decode(&sound(), &table, Method::None).unwrap().holds_differences());
    let cases: [(&str, Patch<'_>, u64); 6] = [
        ("SYNC", (11, &[1]), 8),
        ("a method", (11, &[4]), 8),
        ("zero pages", (35, &[1]), 32),
        ("no pages", (19, &[0]), 16),
        ("no payload", (23, &[0]), 20),
        ("a huge payload", (20, &[0x7f]), 20),
    ];
    for (what, (at, patch), offset) in cases {
        let mut wrong = bytes;
        wrong[at..at + patch.len()].copy_from_slice(patch);
        let error = refusal(&wrong, Method::None);
        assert_eq!((error.offset, error.fault), (offset, Fault::PeerMisbehaved), "{what}: {error}");
        assert!(error.paragraph.starts_with("specs/extension.md"), "{what}: {error}");
    }
}
