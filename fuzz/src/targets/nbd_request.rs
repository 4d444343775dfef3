//! NBD, as a standby serves it: a client's bytes from the first one on. The first byte of the input chooses the
//! disk's length, a power of two.

use sterna_wire::nbd::{
    ClientOption, CommandKind, DiskHello, OPTION_BYTES, Request, TRANSFER_BYTES, client_flags,
};

/// Decodes hello, flags and options until an option starts the transmission; then requests, with the data of
/// WRITEs.
pub fn target(data: &[u8]) {
    let [size, stream @ ..] = data else { return };
    let len_bytes = 1u64 << (size % 64);
    let Some(at) = handshake(stream) else { return };
    requests(&stream[at..], len_bytes);
    // Requests are also decoded from the start of the stream, so that inputs without a handshake reach their
    // checks.
    requests(stream, len_bytes);
}

/// Position at which the transmission starts.
fn handshake(stream: &[u8]) -> Option<usize> {
    let mut at = DiskHello::decode(stream).ok()??;
    assert_eq!(stream[..at], DiskHello::BYTES);
    at += client_flags(&stream[at..]).ok()??.1;
    for _ in 0..64 {
        let (option, used) = ClientOption::decode(&stream[at..]).ok()??;
        assert!((16..=16 + OPTION_BYTES as usize).contains(&used));
        assert_eq!(stream[at + 8..at + 12], option.number().to_be_bytes());
        for short in 0..used {
            assert_eq!(ClientOption::decode(&stream[at..at + short]), Ok(None));
        }
        at += used;
        match option {
            ClientOption::ExportName(name) | ClientOption::Export { name, is_go: true } => {
                assert!(name.len() <= 255 && !name.contains('\0'));
                return Some(at);
            }
            ClientOption::Abort => return None,
            ClientOption::Export { .. } | ClientOption::List | ClientOption::Unknown(_) => {}
        }
    }
    None
}

fn requests(mut stream: &[u8], len_bytes: u64) {
    loop {
        let (request, used) = match Request::decode(stream, len_bytes) {
            Ok(Some(decoded)) => decoded,
            Ok(None) => return assert!(stream.len() < Request::BYTES),
            Err(error) => {
                assert!(error.paragraph.starts_with("specs/"));
                return;
            }
        };
        let mut again = Vec::new();
        request.encode(&mut again);
        // The flags may differ, so bytes 4 and 5 are not compared.
        assert_eq!((&again[..4], &again[6..]), (&stream[..4], &stream[6..used]));
        let end = request.offset.checked_add(request.length.into());
        match request.kind {
            CommandKind::Disconnect => return,
            CommandKind::Flush => assert_eq!((request.offset, request.length), (0, 0)),
            _ => assert!(end.is_some_and(|end| end <= len_bytes)),
        }
        stream = &stream[used..];
        if let CommandKind::Read | CommandKind::Write = request.kind {
            assert!(request.length <= TRANSFER_BYTES);
        }
        if request.kind == CommandKind::Write {
            let Some(rest) = stream.get(request.length as usize..) else { return };
            stream = rest;
        }
    }
}
