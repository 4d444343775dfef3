//! Tests with answers in libvfio-user's form. An answer to MIG_DATA_READ is as long as the request permits,
//! and its `size` is the number of data bytes (specs/vfio-user.md §8).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use sterna_devices::statebank::{StateBank, StateBankConfig, Verdict};
use sterna_devices::vfio::VfioDevice;
use sterna_devices::vfio_user::wire::{Command, HEADER_BYTES, Header, Kind, MigData};
use sterna_devices::vfio_user::{Client, ClientOptions};

use super::support::{Plan, migrate, serve};

/// Upper bound of a message's length in these tests.
const MOST: u32 = 2 << 20;

/// Number of answers of [`lengthened`] that were longer than their data.
type Long = Arc<AtomicU32>;

/// A client of the server at `path`. Short answers to MIG_DATA_READ are lengthened to the requested size.
fn lengthened(path: &std::path::Path) -> (Client, Long) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut server = UnixStream::connect(path).unwrap();
    let long = Long::default();
    let count = Arc::clone(&long);
    thread::spawn(move || {
        while let Some((asked, question)) = receive(&mut theirs) {
            server.write_all(&question).unwrap();
            let Some((header, mut answer)) = receive(&mut server) else { return };
            if asked.command() == Some(Command::MigDataRead)
                && header.kind == Kind::Reply
                && answer.len() < HEADER_BYTES + MigData::BYTES + size_of(&question)
            {
                answer.resize(HEADER_BYTES + MigData::BYTES + size_of(&question), 0xa5);
                let header = Header { size: answer.len() as u32, ..header };
                answer[..HEADER_BYTES].copy_from_slice(&header.encode());
                count.fetch_add(1, Ordering::Relaxed);
            }
            if theirs.write_all(&answer).is_err() {
                return;
            }
        }
    });
    let client = Client::over(ours, "a device of the library".into(), &ClientOptions::default()).unwrap();
    (client, long)
}

/// Receives the next message: its header, and all its bytes.
fn receive(stream: &mut UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut bytes = vec![0; HEADER_BYTES];
    stream.read_exact(&mut bytes).ok()?;
    let header = Header::decode(bytes[..].try_into().unwrap(), MOST).unwrap();
    bytes.resize(HEADER_BYTES + header.payload_bytes(), 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..]).ok()?;
    Some((header, bytes))
}

/// The `size` field of a migration data message.
fn size_of(message: &[u8]) -> usize {
    let at = HEADER_BYTES + 4;
    u32::from_le_bytes(message[at..at + 4].try_into().unwrap()) as usize
}

#[test]
fn device_whose_short_answers_have_the_length_asked_for_moves_whole() {
    let config = |seed| StateBankConfig { state_bytes: (3 << 20) + 64, seed, ..StateBankConfig::default() };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bank");
    let server = StateBank::new(config(1)).unwrap().serve(&path).unwrap();
    let target = serve(config(2));
    let (client, long) = lengthened(&path);
    let source = VfioDevice::new(Arc::new(client)).unwrap();

    migrate(&source, &target.device, Plan::plain()).unwrap();

    assert!(long.load(Ordering::Relaxed) > 0, "no answer was lengthened, so nothing was tried");
    assert_eq!(server.bank().status().digest, target.bank().status().digest);
    assert_eq!(target.bank().status().loaded, Verdict::Good);
}
