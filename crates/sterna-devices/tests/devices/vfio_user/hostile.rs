//! Tests in which the peer sends invalid messages, or none.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use sterna_devices::statebank::{StateBank, StateBankConfig};
use sterna_devices::vfio::{MigState, MigrationPort, PortError, feature};
use sterna_devices::vfio_user::wire::{
    Capabilities, Command, DeviceInfo, DeviceState, DmaLogRange, FeatureRequest, Header, Kind, MigData,
    MigrationCapability, Version,
};
use sterna_devices::vfio_user::{Client, ClientOptions, ServerEnd, serve};

const TIMEOUT: Duration = Duration::from_millis(300);

/// A message as received.
struct Message {
    header: Header,
    payload: Vec<u8>,
}

fn receive(stream: &mut UnixStream) -> Option<Message> {
    let mut head = [0; 16];
    stream.read_exact(&mut head).ok()?;
    let header = Header::decode(&head, 2 << 20).unwrap();
    let mut payload = vec![0; header.payload_bytes()];
    stream.read_exact(&mut payload).ok()?;
    Some(Message { header, payload })
}

fn message(header: Header, payload: &[u8]) -> Vec<u8> {
    let header = Header { size: 16 + payload.len() as u32, ..header };
    [&header.encode()[..], payload].concat()
}

fn reply_to(request: &Message, payload: &[u8]) -> Vec<u8> {
    message(Header { kind: Kind::Reply, ..request.header }, payload)
}

/// A valid server's answers to the first requests of every client.
fn greeting(request: &Message) -> Option<Vec<u8>> {
    let payload = match request.header.command()? {
        Command::Version => request.payload.clone(),
        Command::DeviceGetInfo => DeviceInfo { flags: 1, regions: 1, irqs: 0 }.encode(),
        Command::DeviceFeature => {
            let asked =
                FeatureRequest::decode(sterna_devices::vfio_user::wire::Payload::new("q", &request.payload));
            match asked.unwrap().feature {
                feature::MIGRATION => [&request.payload[..], &7u64.to_le_bytes()].concat(),
                _ => return None,
            }
        }
        _ => return None,
    };
    Some(reply_to(request, &payload))
}

/// A client of a server with a valid greeting, which then answers with `answer`. On `None` it closes the
/// connection.
fn against(answer: impl Fn(&Message) -> Option<Vec<u8>> + Send + 'static) -> (Client, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        while let Some(request) = receive(&mut theirs) {
            let Some(bytes) = greeting(&request).or_else(|| answer(&request)) else { return };
            if theirs.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    let client = Client::over(ours, "device 7".into(), &ClientOptions { timeout: TIMEOUT }).unwrap();
    (client, server)
}

fn misbehaves(result: Result<impl std::fmt::Debug, PortError>, expected: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, PortError::Misbehaved { .. }), "{error:?}");
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn reply_with_more_data_than_were_asked_for_is_refused() {
    let (client, _server) = against(|request| {
        let data = [&MigData { size: 200 }.encode()[..], &[0; 200]].concat();
        Some(reply_to(request, &data))
    });
    misbehaves(client.read_data(&mut [0; 100]), "MIG_DATA_READ, byte 20: size is 0xc8");
}

#[test]
fn reply_with_less_data_than_it_says_is_refused() {
    let (client, _server) = against(|request| {
        let data = [&MigData { size: 100 }.encode()[..], &[0; 99]].concat();
        Some(reply_to(request, &data))
    });
    misbehaves(client.read_data(&mut [0; 100]), "needs 100 bytes, but only 99 are left");
}

#[test]
fn reply_longer_than_was_asked_for_is_refused() {
    let (client, _server) = against(|request| {
        let data = [&MigData { size: 50 }.encode()[..], &[0; 101]].concat();
        Some(reply_to(request, &data))
    });
    misbehaves(client.read_data(&mut [0; 100]), "MIG_DATA_READ, byte 124: 1 bytes too many");
}

#[test]
fn reply_of_the_length_asked_for_gives_as_much_as_its_size_says() {
    // libvfio-user's answers at the end of every stream: 64 bytes of data, then none.
    let left = std::sync::atomic::AtomicU32::new(64);
    let (client, _server) = against(move |request| {
        let size = left.swap(0, std::sync::atomic::Ordering::Relaxed);
        let data = [&MigData { size }.encode()[..], &[7; 64], &[0; 262_144 - 64]].concat();
        Some(reply_to(request, &data))
    });
    let mut to = vec![1; 262_144];
    assert_eq!(client.read_data(&mut to).unwrap(), 64);
    assert_eq!((&to[..64], to[64]), (&[7; 64][..], 1), "more was taken than it has");
    assert_eq!(client.read_data(&mut to).unwrap(), 0);
}

#[test]
fn reply_without_its_head_is_refused() {
    let (client, _server) = against(|request| Some(reply_to(request, &[0; 3])));
    misbehaves(client.read_data(&mut [0; 100]), "needs 8 bytes, but only 3 are left");
    misbehaves(client.state(), "needs 4 bytes, but only 3 are left");
    misbehaves(client.region_read(0, 0, &mut [0; 8]), "needs 16 bytes, but only 3 are left");
}

#[test]
fn reply_of_impossible_size_is_refused_before_it_is_received() {
    let (client, _server) = against(|request| {
        Some(Header { kind: Kind::Reply, size: u32::MAX, ..request.header }.encode().to_vec())
    });
    misbehaves(client.read_data(&mut [0; 100]), "byte 4: a size of 4294967295 bytes");
    let error = client.state().unwrap_err();
    assert!(matches!(error, PortError::Gone { .. }), "nothing can be understood after that: {error}");
}

#[test]
fn reply_to_another_command_is_refused() {
    let (client, _server) =
        against(|request| Some(message(Header { kind: Kind::Reply, command: 3, ..request.header }, &[])));
    misbehaves(client.state(), "it answers command 3, but command 16 was sent");
}

#[test]
fn reply_about_another_feature_or_state_is_refused() {
    let (client, _server) = against(|request| {
        let other = FeatureRequest { feature: feature::MIG_DATA_SIZE, method: feature::GET, data: &[0; 8] };
        Some(reply_to(request, &other.encode(0)))
    });
    misbehaves(client.state(), "another feature");
    let (client, _server) = against(|request| {
        let state =
            FeatureRequest { feature: feature::MIG_DEVICE_STATE, method: feature::GET, data: &[99; 8] };
        Some(reply_to(request, &state.encode(0)))
    });
    misbehaves(client.state(), "this state does not exist");
}

#[test]
fn report_with_another_bitmap_is_refused() {
    for extra in [0usize, 7, 9, 16] {
        let (client, _server) = against(move |request| {
            let bytes = [&request.payload[..], &vec![0xff; extra]].concat();
            Some(reply_to(request, &bytes))
        });
        misbehaves(
            client.report_logged(DmaLogRange { address: 0, length: 4096 * 3 }),
            "bitmap needs 8 bytes",
        );
    }
}

#[test]
fn report_with_bits_behind_the_range_is_cut() {
    let (client, _server) =
        against(|request| Some(reply_to(request, &[&request.payload[..], &[0xff; 8]].concat())));
    assert_eq!(client.report_logged(DmaLogRange { address: 0, length: 4096 * 3 }).unwrap(), [0b111]);
}

#[test]
fn commands_of_the_server_are_refused_and_the_answer_still_found() {
    let (client, _server) = against(|request| {
        if request.header.kind != (Kind::Command { no_reply: false }) {
            return Some(Vec::new());
        }
        let command = |no_reply| Header {
            id: 5,
            command: Command::DmaRead.number(),
            size: 0,
            kind: Kind::Command { no_reply },
        };
        let state = FeatureRequest {
            feature: feature::MIG_DEVICE_STATE,
            method: feature::GET,
            data: &DeviceState(MigState::Stop).encode(),
        };
        let old = message(Header { id: 60_000, kind: Kind::Reply, ..request.header }, &[1; 50]);
        let parts = [
            message(command(false), &[0; 16]),
            message(command(true), &[0; 70_000]),
            old,
            reply_to(request, &state.encode(0)),
        ];
        Some(parts.concat())
    });
    assert_eq!(client.state().unwrap(), MigState::Stop);
}

#[test]
fn server_that_closes_at_any_byte_of_its_answer_is_gone() {
    for cut in 0..24 {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || {
            while let Some(request) = receive(&mut theirs) {
                let whole = greeting(&request);
                let asked = whole.is_none();
                let answer = whole.unwrap_or_else(|| reply_to(&request, &[0; 8])[..cut].to_vec());
                theirs.write_all(&answer).unwrap();
                if asked {
                    return;
                }
            }
        });
        let client = Client::over(ours, "device 7".into(), &ClientOptions { timeout: TIMEOUT }).unwrap();
        let error = client.read_data(&mut [0; 100]).unwrap_err();
        assert!(matches!(error, PortError::Gone { .. }), "cut at {cut}: {error}");
        server.join().unwrap();
        assert!(!client.is_connected());
    }
}

#[test]
fn server_that_stops_inside_an_answer_is_given_up_on() {
    let (client, _server) = against(|request| Some(reply_to(request, &[0; 8])[..20].to_vec()));
    let error = client.read_data(&mut [0; 100]).unwrap_err();
    assert!(matches!(error, PortError::Silent { .. }), "{error}");
}

/// A client of a server that sends a valid greeting, and then a flood. It answers the next request with
/// `flood` repeatedly until the client closes the connection.
fn flooded(flood: Vec<u8>, timeout: Duration) -> Client {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        while let Some(request) = receive(&mut theirs) {
            let Some(bytes) = greeting(&request) else { break };
            theirs.write_all(&bytes).unwrap();
        }
        while theirs.write_all(&flood).is_ok() {}
    });
    Client::over(ours, "device 7".into(), &ClientOptions { timeout }).unwrap()
}

#[test]
fn server_that_floods_with_small_messages_is_turned_away() {
    let question = Header { id: 5, command: 11, size: 0, kind: Kind::Command { no_reply: true } };
    let old = Header { id: 60_000, command: 16, size: 0, kind: Kind::Reply };
    for header in [question, old] {
        let client = flooded(message(header, &[0; 8]), Duration::from_secs(60));
        misbehaves(client.state(), "this many messages arrived that are not its answer");
        assert!(!client.is_connected());
    }
}

#[test]
fn server_that_floods_with_large_messages_is_given_up_on_in_time() {
    let header = Header { id: 5, command: 11, size: 0, kind: Kind::Command { no_reply: true } };
    let client = flooded(message(header, &vec![0; 1 << 20]), TIMEOUT);
    let error = client.state().unwrap_err();
    assert!(matches!(error, PortError::Silent { .. }), "{error}");
}

#[test]
fn server_of_another_version_is_refused() {
    for (major, minor, expected) in [(1, 0, "major is 0x1"), (0, 2, "minor is 0x2")] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || {
            let request = receive(&mut theirs).unwrap();
            let version = Version { major, minor, capabilities: Default::default() };
            theirs.write_all(&reply_to(&request, &version.encode())).unwrap();
        });
        misbehaves(Client::over(ours, "x".into(), &ClientOptions { timeout: TIMEOUT }), expected);
        server.join().unwrap();
    }
}

/// A client of a server with these capabilities, all migration states, and a DMA log.
fn with(migration: Option<MigrationCapability>) -> Result<Client, PortError> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        while let Some(request) = receive(&mut theirs) {
            let capabilities = Capabilities { migration: migration.clone(), ..Default::default() };
            let answer = match request.header.command() {
                Some(Command::Version) => {
                    reply_to(&request, &Version { major: 0, minor: 1, capabilities }.encode())
                }
                _ => greeting(&request).unwrap_or_else(|| reply_to(&request, &request.payload)),
            };
            theirs.write_all(&answer).unwrap();
        }
    });
    Client::over(ours, "x".into(), &ClientOptions { timeout: Duration::from_secs(60) })
}

#[test]
fn server_whose_capabilities_do_not_name_migration_cannot_migrate() {
    assert!(with(None).unwrap().migration_features().is_none());
    assert!(with(Some(MigrationCapability::default())).unwrap().migration_features().is_some());
}

#[test]
fn server_whose_bitmaps_are_short_or_of_large_pages_is_asked_for_no_more_than_it_has() {
    let short = with(Some(MigrationCapability { pgsize: 4096, max_bitmap_size: 23 })).unwrap();
    assert_eq!(short.longest_report(), 16 * 8 * 4096);
    assert!(short.can_log_dma().unwrap());
    let large = with(Some(MigrationCapability { pgsize: 1 << 16, max_bitmap_size: 4096 })).unwrap();
    assert!(!large.can_log_dma().unwrap());
    for (pgsize, max_bitmap_size, expected) in [(4095, 8, "pgsize is 0xfff"), (4096, 7, "max_bitmap_size")] {
        misbehaves(with(Some(MigrationCapability { pgsize, max_bitmap_size })), expected);
    }
}

#[test]
fn connect_to_a_socket_at_which_nobody_accepts_ends() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("busy");
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None);
    let socket = socket.unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _queued = UnixStream::connect(&path).unwrap();

    let error = Client::connect(&path, &ClientOptions { timeout: TIMEOUT }).unwrap_err();

    assert!(error.to_string().contains("busy"), "{error}");
}

#[test]
fn client_that_says_anything_gets_an_answer_or_is_turned_away() {
    let mut rng = sterna_testing::random("client_that_says_anything");
    let mut random = move |below: u64| rng.u64(..below);
    let bank =
        StateBank::new(StateBankConfig { state_bytes: 100_000, precopy_percent: 50, ..Default::default() });
    let bank = bank.unwrap();
    for _ in 0..200 {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let served = Arc::clone(&bank);
        let server = thread::spawn(move || serve(theirs, served.as_ref()));
        let version = Version { major: 0, minor: 1, capabilities: Default::default() }.encode();
        let header = Header { id: 0, command: 1, size: 0, kind: Kind::Command { no_reply: false } };
        ours.write_all(&message(header, &version)).unwrap();
        receive(&mut ours).unwrap();
        for id in 1..40 {
            let command = Command::ALL[random(15) as usize];
            let mut payload: Vec<u8> = (0..random(64)).map(|_| random(256) as u8).collect();
            // Often a payload that passes the first checks.
            if random(2) == 0 {
                let state = (random(9) as u32).to_le_bytes();
                let size = (random(5000) as u32).to_le_bytes();
                payload = match random(4) {
                    0 => [&16u32.to_le_bytes()[..], &(2u32 | feature::SET).to_le_bytes(), &state, &[0; 4]]
                        .concat(),
                    1 => [&size[..], &size].concat(),
                    2 => [&[0; 8][..], &[0; 4], &size].concat(),
                    _ => {
                        [&64u32.to_le_bytes()[..], &(random(13) as u32 | feature::GET).to_le_bytes()].concat()
                    }
                };
            }
            let header =
                Header { id, command: command.number(), size: 0, kind: Kind::Command { no_reply: false } };
            ours.write_all(&message(header, &payload)).unwrap();
            let answer = receive(&mut ours).unwrap();
            assert_eq!((answer.header.id, answer.header.command), (id, command.number()));
        }
        drop(ours);
        assert!(matches!(server.join().unwrap(), ServerEnd::Disconnected));
    }
    // The device still works.
    bank.release();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let served = Arc::clone(&bank);
    let server = thread::spawn(move || serve(theirs, served.as_ref()));
    let client = Client::over(ours, "x".into(), &ClientOptions { timeout: Duration::from_secs(60) }).unwrap();
    client.reset().unwrap();
    assert_eq!(client.state().unwrap(), MigState::Running);
    drop(client);
    assert!(matches!(server.join().unwrap(), ServerEnd::Disconnected));
}

#[test]
fn client_that_does_not_greet_or_sends_rubbish_is_turned_away() {
    let bank = StateBank::new(StateBankConfig::default()).unwrap();
    let command = Header { id: 0, command: 13, size: 16, kind: Kind::Command { no_reply: false } };
    let reply = Header { kind: Kind::Reply, ..command };
    let unasked =
        [message(Header { command: 1, ..command }, &[0, 0, 1, 0]), reply.encode().to_vec()].concat();
    for bytes in [command.encode().to_vec(), vec![0xff; 16], unasked] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&bytes).unwrap();
        let end = serve(theirs, bank.as_ref());
        assert!(matches!(end, ServerEnd::Misbehaved(_)), "{end:?}");
    }
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.write_all(&[0; 5]).unwrap();
    drop(ours);
    assert!(matches!(serve(theirs, bank.as_ref()), ServerEnd::Broken(_)));
}
