//! A sequence of messages of the return path.

use sterna_wire::return_path::ReturnMessage;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some((message, used))) = ReturnMessage::decode(rest) {
        assert!(used <= ReturnMessage::MAX_BYTES);
        let mut again = Vec::new();
        message.encode(&mut again).unwrap();
        assert_eq!(again, rest[..used]);
        rest = &rest[used..];
    }
}
