//! Private data of `rdma:`: decoded as a request, then as the reply to a request.

use sterna_wire::rdma::{ChunkSize, ConnectReply, ConnectRequest, Introduction, Part};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    if let Ok(request) = ConnectRequest::decode(data) {
        let bytes = request.to_bytes();
        assert_eq!(ConnectRequest::decode(&bytes), Ok(request));
        // The decoder drops unknown flags and nothing else.
        assert_eq!((&bytes[..4], &bytes[8..]), (&data[..4], &data[8..bytes.len()]));
        match request.reply(7, ChunkSize::MOST) {
            Ok(reply) => {
                assert_eq!(reply.introduction.is_some(), request.introduction.is_some());
                assert_eq!(ConnectReply::decode(&reply.to_bytes(), &request), Ok(reply));
                assert!(request.agreed(&reply).is_ok());
            }
            Err(_) => {
                let part = request.introduction.map(|asked| asked.part);
                assert!(matches!(part, Some(Part::Lane(number)) if number >= 7));
            }
        }
    }
    let request = ConnectRequest { pin_all: false, introduction: Some(asked()) };
    if let Ok(reply) = ConnectReply::decode(data, &request) {
        assert_eq!(ConnectReply::decode(&reply.to_bytes(), &request), Ok(reply));
        if let Some(own) = reply.introduction {
            let Introduction { part, session, nonce, .. } = asked();
            assert_eq!((own.part, own.session, own.nonce), (part, session, nonce));
        }
    }
}

/// The request that belongs to the replies among the stored inputs.
fn asked() -> Introduction {
    let chunk = ChunkSize::LEAST;
    Introduction { version: 2, part: Part::Main, lanes: 2, chunk, session: [1; 16], nonce: [2; 16] }
}
