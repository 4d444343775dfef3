//! Packets of libvirt's RPC, as a daemon sends them. The first byte chooses the payload.

use sterna_libvirt::packet::{
    Domain, ErrorReply, Head, MonitorEvent, PACKET_BYTES, authentications, packet_length,
};
use sterna_libvirt::xdr::{Reader, STRING_BYTES, Writer};

/// Decodes the input as a packet and as one kind of payload; a decoded head or domain encodes to the same bytes.
pub fn target(data: &[u8]) {
    let [choice, bytes @ ..] = data else { return };
    packet(bytes);
    match choice % 4 {
        0 => match ErrorReply::decode(bytes) {
            Ok(error) => assert!(error.message.len() <= STRING_BYTES),
            Err(error) => assert_eq!(ErrorReply::decode(bytes), Err(error)),
        },
        1 => domain(bytes),
        2 => match MonitorEvent::decode(bytes) {
            Ok(event) => {
                let text = event.name.len() + event.details.as_ref().map_or(0, String::len);
                assert!(event.domain.name.len() + text <= bytes.len(), "every byte is of the input");
            }
            Err(error) => assert_eq!(MonitorEvent::decode(bytes), Err(error)),
        },
        _ => match authentications(bytes) {
            Ok(types) => assert!(types.len() <= 20 && 4 * types.len() + 4 <= bytes.len()),
            Err(error) => assert_eq!(authentications(bytes), Err(error)),
        },
    }
}

fn packet(bytes: &[u8]) {
    let length = match packet_length(bytes) {
        Ok(Some(length)) => length,
        Ok(None) => return assert!(bytes.len() < 4),
        Err(length) => return assert!(!(Head::BYTES..=PACKET_BYTES).contains(&(length as usize))),
    };
    let Some(packet) = bytes.get(..length) else { return };
    let mut reader = Reader::new(&packet[4..]);
    let head = Head::decode(&mut reader).expect("a packet has a head");
    assert_eq!(head.packet(reader.rest()), packet);
}

fn domain(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let Ok(domain) = Domain::decode(&mut reader) else { return };
    let again = domain.encode(Writer::default()).into_bytes();
    let used = bytes.len() - reader.rest().len();
    // The bytes of the padding may have any value.
    assert_eq!(again.len(), used);
    assert_eq!(Domain::decode(&mut Reader::new(&again)), Ok(domain));
}
