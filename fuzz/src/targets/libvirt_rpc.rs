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

/// First inputs: each payload as a daemon sends it, whole and cut off, alone and in a packet.
pub fn seeds() -> Vec<Vec<u8>> {
    let domain = Domain { name: "web1".into(), uuid: [7; 16], id: 3 };
    let error = Writer::default().i32(42).i32(10).u32(1).string("no such domain").i32(2).into_bytes();
    let no_text = Writer::default().i32(38).i32(7).u32(0).i32(2).into_bytes();
    let event =
        |details: Writer| domain.encode(Writer::default().i32(5)).string("STOP").fixed(&details.into_bytes());
    let times = || Writer::default().u32(0).u32(1_700_000_000).u32(17);
    let payloads = [
        (0, error),
        (0, no_text),
        (1, domain.encode(Writer::default()).into_bytes()),
        (1, Domain { name: String::new(), uuid: [0; 16], id: -1 }.encode(Writer::default()).into_bytes()),
        (2, event(times().u32(1).string("{\"a\": 1}")).into_bytes()),
        (2, event(times().u32(0)).into_bytes()),
        (3, Writer::default().u32(2).u32(0).u32(1).into_bytes()),
        (3, Writer::default().u32(21).fixed(&[0; 84]).into_bytes()),
    ];
    let head =
        Head { program: 0x2000_8086, version: 1, procedure: 6, kind: Head::REPLY, serial: 9, status: 1 };
    let mut seeds = Vec::new();
    for (choice, payload) in payloads {
        seeds.push([&[choice][..], &payload].concat());
        seeds.push([&[choice][..], &payload[..payload.len() - 3]].concat());
        seeds.push([&[choice][..], &head.packet(&payload)].concat());
    }
    // Lengths that no packet has.
    seeds.push(vec![0, 0, 0, 0, 27]);
    seeds.push(vec![0, 0x7f, 0xff, 0xff, 0xff]);
    seeds
}
