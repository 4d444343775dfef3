//! The header of a libvirt save image: a decoded header encodes to the same bytes.

use sterna_wire::libvirt::{SaveHeader, VERSION};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let Ok(Some((header, used))) = SaveHeader::decode(data) else { return };
    assert_eq!(used, SaveHeader::BYTES);
    assert!(header.version <= VERSION && header.format <= 6 && header.data_length > 0);
    assert!(header.xml_area() <= header.data_length);
    assert!(header.stream_offset() <= 92 + u64::from(u32::MAX));
    let mut again = Vec::new();
    header.encode(&mut again);
    // The unused words may have any value, and the encoder writes 0.
    assert_eq!(again[..36], data[..36]);
}
