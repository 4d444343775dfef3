//! Messages of the return path, one after the other.

use sterna_wire::return_path::ReturnMessage;

/// Takes one input.
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
