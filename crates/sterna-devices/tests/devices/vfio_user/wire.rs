//! Tests of the codec. Encoded messages must decode to the same values. Malformed ones must give an error
//! that names the rule.

use proptest::prelude::*;
use sterna_devices::vfio::{MigState, feature};
use sterna_devices::vfio_user::wire::*;

fn header(kind: Kind, size: u32) -> Header {
    Header { id: 0x1234, command: Command::MigDataRead.number(), size, kind }
}

fn payload(bytes: &[u8]) -> Payload<'_> {
    Payload::new("TEST", bytes)
}

#[test]
fn header_has_the_layout_of_the_protocol() {
    let bytes = header(Kind::ErrorReply(22), 16).encode();

    assert_eq!(bytes, [0x34, 0x12, 17, 0, 16, 0, 0, 0, 0x21, 0, 0, 0, 22, 0, 0, 0]);
    let no_reply = header(Kind::Command { no_reply: true }, 24).encode();
    assert_eq!(no_reply[8..12], [0x10, 0, 0, 0]);
}

#[test]
fn header_that_cannot_be_names_the_byte() {
    let good = header(Kind::Reply, 100).encode();
    for (at, bytes, expected) in [
        (4, 15u32, "byte 4: a size of 15 bytes; it must be 16 to 1000"),
        (4, 1001, "byte 4: a size of 1001 bytes"),
        (8, 2, "byte 8: flags is 0x2: it is neither a command nor a reply"),
        (8, 0x20, "byte 8: flags is 0x20: a command reports no error"),
        (8, 0x11, "byte 8: flags is 0x11: a reply cannot request an answer"),
        (8, 0x41, "byte 8: flags is 0x41: it has unknown bits"),
        (12, 5, "byte 12: error is 0x5: only a reply that reports an error has one"),
    ] {
        let mut wrong = good;
        wrong[at..at + 4].copy_from_slice(&bytes.to_le_bytes());
        let error = Header::decode(&wrong, 1000).unwrap_err().to_string();
        assert!(error.starts_with("MIG_DATA_READ, ") && error.contains(expected), "{error}");
    }
    let long_error = header(Kind::ErrorReply(5), 17).encode();
    assert!(Header::decode(&long_error, 1000).is_err(), "an error reply has no payload");
}

#[test]
fn version_without_capabilities_has_the_defaults() {
    let version = Version::decode(payload(&[0, 0, 1, 0])).unwrap();

    assert_eq!(version.capabilities.max_msg_fds, 1);
    assert_eq!(version.capabilities.max_data_xfer_size, 1 << 20);
    assert_eq!(version.capabilities.migration, None);
}

#[test]
fn version_of_another_implementation_is_understood() {
    let text = br#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":65536,"twin_socket":{"supported":true},"migration":{"pgsize":4096}}}"#;
    let bytes = [&[0, 0, 1, 0][..], text, &[0]].concat();

    let version = Version::decode(payload(&bytes)).unwrap();

    assert_eq!((version.major, version.minor), (0, 1));
    assert_eq!(version.capabilities.max_data_xfer_size, 65536);
    assert_eq!(version.capabilities.migration.map(|migration| migration.pgsize), Some(4096));
}

#[test]
fn version_whose_text_is_wrong_is_refused() {
    for text in
        [&b"{}"[..], b"{\0", b"3\0", b"{\"capabilities\":{\"max_msg_fds\":-1}}\0", b"\xff\0", b"{}\0\0"]
    {
        let bytes = [&[0, 0, 1, 0][..], text].concat();
        let error = Version::decode(payload(&bytes)).unwrap_err().to_string();
        assert!(error.starts_with("TEST, byte 20: the capabilities"), "{text:?}: {error}");
    }
    let long = [&[0, 0, 1, 0][..], &vec![b' '; 20_000], &[0]].concat();
    assert!(Version::decode(payload(&long)).unwrap_err().to_string().contains("20001 bytes"));
}

#[test]
fn dma_map_that_cannot_be_is_refused() {
    let good = DmaMap { flags: 3, offset: 4096, address: 1 << 32, size: 8192 };
    assert_eq!(DmaMap::decode(payload(&good.encode())), Ok(good));
    for wrong in [
        DmaMap { flags: 4, ..good },
        DmaMap { size: 0, ..good },
        DmaMap { size: 4097, ..good },
        DmaMap { address: 1, ..good },
        DmaMap { offset: 8, ..good },
        DmaMap { address: u64::MAX - 4095, ..good },
        DmaMap { offset: (1 << 63) - 4096, ..good },
    ] {
        assert!(DmaMap::decode(payload(&wrong.encode())).is_err(), "{wrong:?}");
    }
    let mut short = good.encode();
    short[0] = 31;
    assert!(DmaMap::decode(payload(&short)).is_err(), "argsz");
}

#[test]
fn dma_unmap_that_cannot_be_is_refused() {
    let good = DmaUnmap { flags: 0, address: 4096, size: 8192 };
    assert_eq!(DmaUnmap::decode(payload(&good.encode())), Ok(good));
    let all = DmaUnmap { flags: UNMAP_ALL, address: 0, size: 0 };
    assert_eq!(DmaUnmap::decode(payload(&all.encode())), Ok(all));
    for wrong in [
        DmaUnmap { flags: UNMAP_GET_DIRTY_BITMAP, ..good },
        DmaUnmap { flags: 4, ..good },
        DmaUnmap { flags: UNMAP_ALL, ..good },
        DmaUnmap { address: u64::MAX, ..good },
    ] {
        assert!(DmaUnmap::decode(payload(&wrong.encode())).is_err(), "{wrong:?}");
    }
}

#[test]
fn irq_set_needs_one_action_and_one_kind_of_data() {
    let good = IrqSet { flags: 2 | 32, index: 0, start: 1, count: 3, data: &[1, 0, 1] };
    assert_eq!(IrqSet::decode(payload(&good.encode())), Ok(good));
    for wrong in [
        IrqSet { flags: 2, ..good },
        IrqSet { flags: 32, ..good },
        IrqSet { flags: 3 | 32, ..good },
        IrqSet { flags: 2 | 48, ..good },
        IrqSet { flags: 2 | 32 | 64, ..good },
        IrqSet { count: 2, ..good },
        IrqSet { count: 4, ..good },
        IrqSet { start: u32::MAX, ..good },
    ] {
        assert!(IrqSet::decode(payload(&wrong.encode())).is_err(), "{wrong:?}");
    }
}

#[test]
fn feature_needs_one_method() {
    for method in [feature::GET, feature::SET, feature::PROBE, feature::PROBE | feature::GET | feature::SET] {
        let good = FeatureRequest { feature: 9, method, data: &[1, 2, 3] };
        assert_eq!(FeatureRequest::decode(payload(&good.encode(100))), Ok(good));
    }
    for method in [0, feature::GET | feature::SET, 1 << 19 | feature::GET] {
        let wrong = FeatureRequest { feature: 9, method, data: &[] };
        assert!(FeatureRequest::decode(payload(&wrong.encode(0))).is_err(), "{method:#x}");
    }
}

#[test]
fn device_state_that_is_none_names_its_byte() {
    for state in MigState::ALL {
        assert_eq!(DeviceState::decode("S", &DeviceState(state).encode()), Ok(DeviceState(state)));
    }
    let error = DeviceState::decode("S", &[8, 0, 0, 0, 0, 0, 0, 0]).unwrap_err();
    assert_eq!(error.to_string(), "S, byte 24: device_state is 0x8: this state does not exist");
}

#[test]
fn dma_log_start_that_cannot_be_is_refused() {
    let ranges =
        vec![DmaLogRange { address: 0, length: 4096 }, DmaLogRange { address: 1 << 32, length: 1 << 30 }];
    let good = DmaLogStart { page_size: 4096, ranges };
    assert_eq!(DmaLogStart::decode("L", &good.encode()), Ok(good.clone()));
    let mut more = good.encode();
    more[8] = 3;
    assert!(DmaLogStart::decode("L", &more).is_err());
    more[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(DmaLogStart::decode("L", &more).is_err());
    for page_size in [0, 1, 4095, 12288, 1 << 31, u64::MAX] {
        assert!(DmaLogStart::decode("L", &DmaLogStart { page_size, ..good.clone() }.encode()).is_err());
    }
    for (address, length) in [(1, 4096), (0, 0), (0, 4097), (u64::MAX - 4095, 4096)] {
        let ranges = vec![DmaLogRange { address, length }];
        assert!(DmaLogStart::decode("L", &DmaLogStart { page_size: 4096, ranges }.encode()).is_err());
    }
}

/// Runs every decoder on the bytes.
fn decode_all(bytes: &[u8]) {
    let _ = Version::decode(payload(bytes));
    let _ = DmaMap::decode(payload(bytes));
    let _ = DmaUnmap::decode(payload(bytes));
    let _ = DeviceInfo::decode(payload(bytes));
    let _ = RegionInfo::decode(payload(bytes));
    let _ = IrqInfo::decode(payload(bytes));
    let _ = IrqSet::decode(payload(bytes));
    let _ = RegionAccess::decode(payload(bytes), 100);
    let _ = RegionAccess::decode_with_data(payload(bytes), 100);
    let _ = MigData::decode(payload(bytes), 100);
    let _ = MigData::decode_with_data(payload(bytes), 100);
    let _ = FeatureRequest::decode(payload(bytes));
    let _ = DeviceState::decode("F", bytes);
    let _ = decode_flags("F", bytes);
    let _ = decode_size("F", bytes);
    let _ = PrecopySizes::decode("F", bytes);
    let _ = DmaLogStart::decode("F", bytes);
    let _ = DmaLogReport::decode("F", bytes).map(|report| report.0.bitmap_bytes());
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        any::<bool>().prop_map(|no_reply| Kind::Command { no_reply }),
        Just(Kind::Reply),
        any::<u32>().prop_map(Kind::ErrorReply),
    ]
}

proptest! {
    #[test]
    fn header_round_trips(id: u16, command: u16, size in 16u32..1000, kind in kind()) {
        let size = if matches!(kind, Kind::ErrorReply(_)) { 16 } else { size };
        let header = Header { id, command, size, kind };
        prop_assert_eq!(Header::decode(&header.encode(), 1000), Ok(header));
    }

    #[test]
    fn header_of_any_bytes_is_refused_or_encodes_to_the_same(bytes: [u8; 16]) {
        if let Ok(header) = Header::decode(&bytes, u32::MAX) {
            prop_assert_eq!(header.encode(), bytes);
        }
    }

    #[test]
    fn payload_of_any_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        decode_all(&bytes);
    }

    #[test]
    fn payload_cut_anywhere_is_refused(cut in 0usize..32) {
        let map = DmaMap { flags: 1, offset: 0, address: 4096, size: 4096 }.encode();
        prop_assert!(DmaMap::decode(payload(&map[..cut])).is_err());
        let longer = [&map[..], &[0]].concat();
        let error = DmaMap::decode(payload(&longer)).unwrap_err().to_string();
        prop_assert!(error.contains("byte 48: 1 bytes too many"), "{}", error);
    }

    #[test]
    fn version_round_trips(major: u16, minor: u16, fds: u32, data: u32, maps: u32, page: Option<u64>) {
        let migration = page.map(|pgsize| MigrationCapability { pgsize, ..MigrationCapability::default() });
        let capabilities = Capabilities {
            max_msg_fds: fds, max_data_xfer_size: data, max_dma_maps: maps, migration, ..Capabilities::default()
        };
        let version = Version { major, minor, capabilities };
        prop_assert_eq!(Version::decode(payload(&version.encode())), Ok(version));
    }

    #[test]
    fn region_access_round_trips(offset in 0..u64::MAX - 1000, region: u32, data in prop::collection::vec(any::<u8>(), 0..99)) {
        let access = RegionAccess { offset, region, count: data.len() as u32 };
        let bytes = [access.encode(), data.clone()].concat();
        prop_assert_eq!(RegionAccess::decode_with_data(payload(&bytes), 99), Ok((access, &data[..])));
        prop_assert!(RegionAccess::decode_with_data(payload(&bytes), 99.min(data.len() as u32).saturating_sub(1)).is_err() || data.is_empty());
    }

    #[test]
    fn mig_data_round_trips(data in prop::collection::vec(any::<u8>(), 1..99)) {
        let head = MigData { size: data.len() as u32 };
        let bytes = [&head.encode()[..], &data].concat();
        prop_assert_eq!(MigData::decode_with_data(payload(&bytes), 99), Ok((head, &data[..])));
        prop_assert!(MigData::decode_with_data(payload(&bytes), head.size - 1).is_err());
        prop_assert!(MigData::decode(payload(&bytes), 99).is_err());
    }

    #[test]
    fn dma_log_report_round_trips(page in 0u64..1 << 40, pages in 1u64..1 << 20, tail in prop::collection::vec(any::<u8>(), 0..20)) {
        let range = DmaLogRange { address: page << 12, length: pages << 12 };
        let report = DmaLogReport { range, page_size: 4096 };
        prop_assert_eq!(report.bitmap_bytes(), pages.div_ceil(64) * 8);
        let bytes = [report.encode(), tail.clone()].concat();
        prop_assert_eq!(DmaLogReport::decode("R", &bytes), Ok((report, &tail[..])));
    }
}
