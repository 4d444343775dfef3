//! Packets of a multifd channel. The first byte chooses the method; a packet follows.

use sterna_wire::PAGE_SIZE;
use sterna_wire::multifd::{
    BlockTable, DeviceChunk, DeviceStatePacket, Differences, InitialPacket, Method, PacketHeader,
    RAM_PACKET_BYTES, RamPacketEncoder, RamPacketView,
};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let [choice, bytes @ ..] = data else { return };
    let method = [Method::None, Method::Zlib, Method::Zstd][usize::from(*choice % 3)];
    let _ = PacketHeader::peek(bytes);
    if let Ok(Some((packet, used))) = InitialPacket::decode(bytes) {
        assert_eq!(packet.to_bytes(), bytes[..used]);
        let _ = packet.check(&[0; 16], 2);
    }
    if let Ok(Some((packet, used))) = DeviceStatePacket::decode(bytes) {
        let mut again = Vec::new();
        packet.encode(&mut again).unwrap();
        let name = 12 + packet.name.len();
        assert_eq!(again[..name], bytes[..name]);
        assert_eq!(again[268..], bytes[268..used]);
    }
    if let Ok((chunk, used)) = DeviceChunk::decode(bytes) {
        let mut again = Vec::new();
        chunk.encode(&mut again);
        assert_eq!(again, bytes[..used]);
    }
    for delta in Differences::new(bytes, usize::from(*choice)).flatten() {
        assert!((1..=PAGE_SIZE).contains(&delta.len()));
        let _ = sterna_wire::xbzrle::apply(delta, &mut [0; PAGE_SIZE]);
    }
    // Short inputs are filled up with zeros, so that they reach the checks.
    let mut packet = [0; RAM_PACKET_BYTES];
    let length = bytes.len().min(RAM_PACKET_BYTES);
    packet[..length].copy_from_slice(&bytes[..length]);
    let table = BlockTable::new([("m0".to_owned(), 4 << 20), ("b".to_owned(), 1 << 40)]).unwrap();
    let Ok(view) = RamPacketView::decode(&packet, &table, method) else { return };
    let mut encoder = RamPacketEncoder::new(method);
    let Some(block) = view.block() else { return };
    encoder.begin(table.name(block)).unwrap();
    for offset in view.normal() {
        assert!(offset.is_multiple_of(PAGE_SIZE as u64) && offset < table.length_bytes(block));
        assert!(encoder.push_normal(offset));
    }
    for offset in view.zero() {
        assert!(offset.is_multiple_of(PAGE_SIZE as u64) && offset < table.length_bytes(block));
        assert!(encoder.push_zero(offset));
    }
    let pages: usize = view.normal_runs().chain(view.zero_runs()).map(|run| run.pages).sum();
    assert_eq!(pages, encoder.pages());
    let (number, bytes_after) = (view.packet_number(), view.payload_bytes() as u32);
    let again = match view.holds_differences() {
        true => *encoder.finish_differences(number, bytes_after),
        false => *encoder.finish(number, bytes_after),
    };
    let second = RamPacketView::decode(&again, &table, method).unwrap();
    assert!(second.normal().eq(view.normal()) && second.zero().eq(view.zero()));
    assert_eq!(second.block(), view.block());
}
