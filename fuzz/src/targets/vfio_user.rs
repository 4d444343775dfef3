//! vfio-user: a sequence of messages, each decoded according to its command. A decoded message must encode to
//! bytes that decode to the same message.

use sterna_devices::vfio_user::wire::{
    Command, DeviceInfo, DeviceState, DmaLogReport, DmaLogStart, DmaMap, DmaUnmap, FeatureRequest,
    HEADER_BYTES, Header, IrqInfo, IrqSet, MigData, Payload, PrecopySizes, RegionAccess, RegionInfo, Version,
    decode_flags, decode_size, message_limit,
};

const MOST_BYTES: u32 = 4096;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let mut rest = data;
    while let Some((head, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::decode(head, message_limit(MOST_BYTES)) else { return };
        assert_eq!(header.encode(), *head);
        assert!(header.size <= message_limit(MOST_BYTES));
        let Some((bytes, next)) = behind.split_at_checked(header.payload_bytes()) else { return };
        if let Some(command) = header.command() {
            decode(command, bytes);
        }
        rest = next;
    }
}

/// Decodes bytes, encodes the result, decodes it again, and compares both results.
macro_rules! again {
    ($decode:expr, $bytes:expr) => {
        if let Ok(value) = $decode($bytes) {
            assert_eq!($decode(&value.encode()), Ok(value));
        }
    };
}

fn decode(command: Command, bytes: &[u8]) {
    fn payload(bytes: &[u8]) -> Payload<'_> {
        Payload::new("message", bytes)
    }
    match command {
        Command::Version => again!(|bytes| Version::decode(payload(bytes)), bytes),
        Command::DmaMap => again!(|bytes| DmaMap::decode(payload(bytes)), bytes),
        Command::DmaUnmap => again!(|bytes| DmaUnmap::decode(payload(bytes)), bytes),
        Command::DeviceGetInfo => again!(|bytes| DeviceInfo::decode(payload(bytes)), bytes),
        Command::DeviceGetRegionInfo => again!(|bytes| RegionInfo::decode(payload(bytes)), bytes),
        Command::DeviceGetIrqInfo => again!(|bytes| IrqInfo::decode(payload(bytes)), bytes),
        Command::DeviceSetIrqs => {
            if let Ok(set) = IrqSet::decode(payload(bytes)) {
                let encoded = set.encode();
                assert_eq!(IrqSet::decode(payload(&encoded)), Ok(set));
            }
        }
        Command::RegionRead | Command::RegionWrite => {
            again!(|bytes| RegionAccess::decode(payload(bytes), MOST_BYTES), bytes);
            if let Ok((access, data)) = RegionAccess::decode_with_data(payload(bytes), MOST_BYTES) {
                assert_eq!(access.count as usize, data.len());
            }
        }
        Command::MigDataRead | Command::MigDataWrite => {
            again!(|bytes: &[u8]| MigData::decode(payload(bytes), MOST_BYTES), bytes);
            if let Ok((head, data)) = MigData::decode_with_data(payload(bytes), MOST_BYTES) {
                assert_eq!(head.size as usize, data.len());
            }
        }
        Command::DeviceFeature => {
            if let Ok(request) = FeatureRequest::decode(payload(bytes)) {
                let encoded = request.encode(0);
                assert_eq!(FeatureRequest::decode(payload(&encoded)), Ok(request));
                decode_feature(request.data);
            }
        }
        Command::DmaRead | Command::DmaWrite | Command::DeviceReset => {}
    }
}

fn decode_feature(data: &[u8]) {
    if let Ok(state) = DeviceState::decode("feature", data) {
        assert_eq!(DeviceState::decode("feature", &state.encode()), Ok(state));
    }
    if let Ok(features) = decode_flags("feature", data) {
        assert_eq!(decode_flags("feature", &features.flags().to_le_bytes()), Ok(features));
    }
    if let Ok(size) = decode_size("feature", data) {
        assert_eq!(size.to_le_bytes(), data);
    }
    again!(|bytes| PrecopySizes::decode("feature", bytes), data);
    if let Ok(start) = DmaLogStart::decode("feature", data) {
        assert!(start.ranges.len() * 16 <= data.len());
        assert_eq!(DmaLogStart::decode("feature", &start.encode()), Ok(start));
    }
    if let Ok((report, bitmap)) = DmaLogReport::decode("feature", data) {
        assert!(report.bitmap_bytes() > 0 && bitmap.len() <= data.len());
    }
}
