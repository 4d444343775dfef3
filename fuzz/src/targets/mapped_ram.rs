//! The header of a block in a mapped-ram file: eight bytes its place, eight the block's length, then the header.

use sterna_wire::mapped_ram::{MappedHeader, bitmap_bytes};

/// Takes one input.
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
    // Version 0 is read, and never written.
    assert_eq!(again[4..], bytes[4..used]);
    if header.check(place, length).is_ok() {
        assert!(header.bitmap_offset >= place);
        assert!(header.bitmap_offset + bitmap_bytes(length) <= header.pages_offset);
        assert!(header.end_of_pages(length) <= i64::MAX as u64);
    }
}
