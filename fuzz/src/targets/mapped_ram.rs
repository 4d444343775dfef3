//! A block's header in a mapped-ram file: eight bytes for its position, eight for the block's length, then the
//! header.

use sterna_wire::mapped_ram::{MappedHeader, bitmap_bytes};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let Some((place, rest)) = data.split_first_chunk::<8>() else { return };
    let Some((length, bytes)) = rest.split_first_chunk::<8>() else { return };
    let place = u64::from_be_bytes(*place);
    let length = u64::from_be_bytes(*length) & !4095;
    if let Ok(header) = MappedHeader::place(place, length) {
        header.check(place + MappedHeader::BYTES as u64, length).unwrap();
    }
    let Ok(Some((header, used))) = MappedHeader::decode(bytes) else { return };
    let mut again = Vec::new();
    header.encode(&mut again);
    // The decoder accepts version 0, but the encoder never writes it.
    assert_eq!(again[4..], bytes[4..used]);
    if header.check(place, length).is_ok() {
        assert!(header.bitmap_offset >= place);
        assert!(header.bitmap_offset + bitmap_bytes(length) <= header.pages_offset);
        assert!(header.end_of_pages(length) <= i64::MAX as u64);
    }
}
