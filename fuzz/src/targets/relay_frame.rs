//! Frames between two relays. The first byte chooses the kind, or that the head is taken as it is.

use sterna_relay::frame::{DATA_BYTES, Frame, Head, Kind};

/// Decodes one frame of the chosen kind; a decoded frame encodes to the same bytes, and errors are stable.
pub fn target(data: &[u8]) {
    let [choice, bytes @ ..] = data else { return };
    let mut bytes = bytes.to_vec();
    if let Some(kind) = Kind::ALL.get(usize::from(*choice)) {
        // A head that fits the input, so that most inputs reach the body.
        let body = bytes.len().saturating_sub(Head::BYTES);
        let [_, length @ ..] = (body as u32).to_be_bytes();
        let number = usize::from(*choice) as u8 + 1;
        for (to, from) in bytes.iter_mut().zip([number, length[0], length[1], length[2]]) {
            *to = from;
        }
        if let Some(Ok(head)) = bytes.first_chunk().map(Head::decode) {
            assert_eq!(head.kind(), *kind);
        }
    }
    let Some((head, rest)) = bytes.split_first_chunk() else { return };
    let head = match Head::decode(head) {
        Ok(head) => head,
        Err(error) => return assert_eq!(Head::decode(head), Err(error)),
    };
    assert!(head.fixed_bytes() + head.payload_bytes() <= 8 + DATA_BYTES, "the kind limits the body");
    let Some(body) = rest.get(..head.fixed_bytes()) else { return };
    match head.body(body) {
        Ok(frame) => {
            let mut again = Vec::new();
            frame.encode(&mut again).expect("a decoded frame keeps the rules");
            assert_eq!(again, bytes[..Head::BYTES + body.len()]);
            assert_eq!(frame.kind(), head.kind());
            if let Frame::Data { length, .. } = frame {
                assert_eq!(length, head.payload_bytes());
            }
        }
        Err(error) => assert_eq!(head.body(body), Err(error)),
    }
}
