//! Frames between two relays. The first byte chooses the kind, or that the head is taken as it is.

use sterna_relay::frame::{Frame, Head, Kind, PACKED_BYTES, PackedHead};

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
    assert!(
        head.fixed_bytes() + head.payload_bytes() <= PackedHead::BYTES + PACKED_BYTES,
        "the kind limits the body"
    );
    let Some(body) = rest.get(..head.fixed_bytes()) else { return };
    match head.body(body) {
        Ok(frame) => {
            let mut again = Vec::new();
            frame.encode(&mut again).expect("a decoded frame keeps the rules");
            assert_eq!(again, bytes[..Head::BYTES + body.len()]);
            assert_eq!(frame.kind(), head.kind());
            if let Frame::Data { length: payload, .. } | Frame::Packed { payload, .. } = frame {
                assert_eq!(payload, head.payload_bytes());
            }
        }
        Err(error) => assert_eq!(head.body(body), Err(error)),
    }
}

/// First inputs, with their names: a frame of every kind.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    use sterna_relay::frame::{Method, ResetReason, Verdict};
    let head = PackedHead { offset: 5, check: 6, length: 8200, pages: 2, method: Method::Zstd };
    let frames = [
        Frame::Open { flow: 1, credit: 65_536 },
        Frame::Data { flow: 1, offset: 7, length: 3 },
        Frame::Finish { flow: 2, offset: 10 },
        Frame::Reset { flow: 3, offset: 11, reason: ResetReason::Broken },
        Frame::Stop { flow: 4, reason: ResetReason::Refused },
        Frame::Ack { flow: 5, received: 3, delivered: 2, credit: 9, has_end: true, has_stop: true },
        Frame::Sync,
        Frame::Ping(1),
        Frame::Pong(2),
        Frame::Over { verdict: Verdict::Passed, text: "over".into() },
        Frame::Packed { flow: 6, head, payload: 9 },
        Frame::Miss { flow: 7, offset: 12 },
        Frame::Have { stay: true, hashes: vec![1, 2] },
    ];
    let mut seeds = Vec::new();
    for frame in &frames {
        let mut bytes = vec![255];
        frame.encode(&mut bytes).expect("the frame keeps the rules");
        seeds.push((frame.kind().name().to_ascii_lowercase(), bytes));
    }
    seeds
}
