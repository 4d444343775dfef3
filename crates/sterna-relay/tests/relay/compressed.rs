//! Whole relays that compress, and relays that send references to pages.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_relay::frame::{
    Answer, Confirm, Frame, Hello, Method, NamedPage, Offer, PackedHead, Purpose, SessionId, SessionKey,
    Status,
};
use sterna_relay::pack::{Cache, Dictionary, Figures, Mode};
use sterna_relay::relay::{Acceptor, Compress, Dialer, ImageDictionary, Notice, Options, Routes};
use sterna_transport::Address;

use crate::phases::Stream;
use crate::whole::{Pair, options, read_all, route, send, until};

const CACHE: u64 = 16 << 20;

/// Pages of a guest, a half of whose bits are random.
fn pages(first: u64, count: u64) -> Vec<Vec<u8>> {
    let page = |number| {
        let mut random = fastrand::Rng::with_seed(number);
        (0..4096).map(|_| random.u8(0..16)).collect()
    };
    (first..first + count).map(page).collect()
}

fn noise(length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(3);
    (0..length).map(|_| random.u8(..)).collect()
}

fn compress(options: &mut Options, mode: Mode, bytes: u64) {
    options.is_raw = false;
    options.unconfirmed = true;
    options.compress = Compress { mode, cache: Arc::new(Cache::new(bytes, Vec::new())) };
}

fn guest(contents: &[Vec<u8>]) -> Vec<u8> {
    let mut stream = Stream::of(true, contents.len() as u64).unwrap();
    stream.contents(0, contents).unwrap();
    stream.bytes
}

/// Sends the bytes and the end on both directions. Returns what arrived.
fn carry(pair: &Pair, bytes: &[u8]) -> Vec<u8> {
    let (source, target) = pair.flow();
    let sender = send(source.try_clone().unwrap(), bytes.to_vec());
    let arrived = read_all(&target);
    drop(target);
    assert_eq!(read_all(&source), b"");
    sender.join().unwrap();
    arrived
}

/// The figures of the last session that ended.
fn figures(pair: &Pair, sessions: usize) -> Figures {
    let found = || {
        let notices = pair.notices.lock().unwrap();
        let all = notices.iter().filter_map(|notice| match notice {
            Notice::Compressed { figures, .. } => Some(*figures),
            _ => None,
        });
        all.collect::<Vec<_>>()
    };
    until("the end of the session", || found().len() >= sessions);
    found()[sessions - 1]
}

#[test]
fn relays_compress_and_send_pages_once() {
    let pair = Pair::start(|options, _| compress(options, Mode::Auto, CACHE));
    let bytes = guest(&[pages(0, 500), pages(0, 500)].concat());
    assert!(carry(&pair, &bytes) == bytes, "{}", pair.said());
    let first = figures(&pair, 1);
    assert_eq!((first.plain, first.misses), (bytes.len() as u64, 0));
    assert!(first.references > 400, "the second half: {first:?}");
    assert!(first.sent < first.plain / 3, "{first:?}");
    // A second guest of the same image: the destination still has its pages.
    let bytes = guest(&[pages(700, 100), pages(100, 400)].concat());
    let before = pair.proxy.carried.load(Ordering::SeqCst);
    assert!(carry(&pair, &bytes) == bytes, "{}", pair.said());
    let second = figures(&pair, 2);
    assert!(second.references > 380, "{second:?}");
    let carried = pair.proxy.carried.load(Ordering::SeqCst) - before;
    assert!(carried < bytes.len() as u64 / 3, "{carried} bytes");
}

#[test]
fn relays_send_random_bytes_nearly_without_a_surcharge() {
    let pair = Pair::start(|options, _| compress(options, Mode::Auto, CACHE));
    let bytes = noise(6_000_000);
    assert!(carry(&pair, &bytes) == bytes);
    let figures = figures(&pair, 1);
    assert!(figures.sent * 100 < figures.plain * 102, "{figures:?}");
}

#[test]
fn compressed_bytes_arrive_whatever_is_cut() {
    let mut random = sterna_testing::random("compressed_bytes_arrive_whatever_is_cut");
    for _ in 0..sterna_testing::rounds(4) {
        // A small cache: pages are missing, too.
        let cache = random.u64(0..4 << 20);
        let pair = Pair::start(|options, is_source| {
            compress(options, Mode::Zstd(1), if is_source { 64 << 20 } else { cache });
        });
        let contents: Vec<_> = (0..8).flat_map(|_| pages(random.u64(0..300), 300)).collect();
        let bytes = guest(&contents);
        let (source, target) = pair.flow();
        let sender = send(source.try_clone().unwrap(), bytes.clone());
        let reader = std::thread::spawn(move || read_all(&target));
        for _ in 0..random.u32(0..6) {
            let before = pair.proxy.cuts.load(Ordering::SeqCst);
            pair.proxy.cut_after.store(random.u64(1..1_000_000), Ordering::SeqCst);
            let began = Instant::now();
            // All bytes may have passed already.
            while pair.proxy.cuts.load(Ordering::SeqCst) == before && began.elapsed() < Duration::from_secs(1)
            {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        pair.proxy.cut_after.store(0, Ordering::SeqCst);
        assert!(reader.join().unwrap() == bytes, "{}", pair.said());
        sender.join().unwrap();
    }
}

/// Announces pages that it does not have.
struct Boaster;

impl Dictionary for Boaster {
    fn copy(&self, _: &sterna_relay::pack::PageHash, _: &mut [u8; 4096]) -> bool {
        false
    }

    fn prefixes(&self) -> Vec<u64> {
        pages(0, 400).iter().map(|page| sterna_relay::pack::PageHash::of(page).prefix()).collect()
    }
}

/// Waits until the source's relay knows the 400 pages that the destination's relay announces while the source is
/// silent. `before` is what the relays had carried before the flow sent its first 1000 bytes.
fn announced(pair: &Pair, before: u64, source: &mut UnixStream, mut target: &UnixStream) {
    const PREFIXES_BYTES: u64 = 400 * 8;
    until("the announcement", || pair.proxy.carried.load(Ordering::SeqCst) >= before + PREFIXES_BYTES);
    // An answer on the return path follows the announcement on the same carrier.
    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];
    target.write_all(&PONG).unwrap();
    let mut heard = [0; PONG.len()];
    source.read_exact(&mut heard).unwrap();
    assert_eq!(heard, PONG);
}

#[test]
fn page_that_is_missing_is_asked_for_and_the_migration_continues() {
    let pair = Pair::start(|options, is_source| {
        compress(options, Mode::Zstd(1), CACHE);
        if !is_source {
            options.compress.cache = Arc::new(Cache::new(CACHE, vec![Arc::new(Boaster)]));
        }
    });
    let (mut source, target) = pair.flow();
    let bytes = guest(&pages(0, 400));
    let before = pair.proxy.carried.load(Ordering::SeqCst);
    source.write_all(&bytes[..1000]).unwrap();
    (&target).read_exact(&mut [0; 1000]).unwrap();
    announced(&pair, before, &mut source, &target);
    let sender = send(source.try_clone().unwrap(), bytes[1000..].to_vec());
    assert!(read_all(&target) == bytes[1000..], "{}", pair.said());
    sender.join().unwrap();
    drop((source, target));
    let figures = figures(&pair, 1);
    assert!(figures.misses > 0 && figures.references > 0, "{figures:?}");
}

#[test]
fn pages_of_a_dictionary_are_not_sent_and_a_file_that_changed_harms_nothing() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [vec![vec![0; 4096]], pages(0, 400)].concat().concat()).unwrap();
    let pair = Pair::start(|options, is_source| {
        compress(options, Mode::Zstd(1), 0);
        options.compress.cache = Arc::new(Cache::new(CACHE, Vec::new()));
        if !is_source {
            let dictionary = ImageDictionary::open(file.path()).unwrap();
            assert_eq!(dictionary.pages(), 400);
            options.compress.cache = Arc::new(Cache::new(0, vec![Arc::new(dictionary)]));
        }
    });
    let bytes = guest(&pages(0, 400));
    for (at, changes) in [(1, false), (2, true)] {
        if changes {
            std::fs::write(file.path(), vec![7; 401 * 4096]).unwrap();
        }
        let before = pair.proxy.carried.load(Ordering::SeqCst);
        let (mut source, target) = pair.flow();
        source.write_all(&bytes[..1000]).unwrap();
        (&target).read_exact(&mut [0; 1000]).unwrap();
        announced(&pair, before, &mut source, &target);
        let sender = send(source.try_clone().unwrap(), bytes[1000..].to_vec());
        assert!(read_all(&target) == bytes[1000..], "{}", pair.said());
        sender.join().unwrap();
        drop((source, target));
        let figures = figures(&pair, at);
        assert_eq!(figures.misses > 0, changes, "{figures:?}");
        assert!(changes || figures.references > 350, "{figures:?}");
    }
}

#[test]
fn destination_that_does_not_accept_compression_gets_plain_bytes() {
    let pair = Pair::start(|options, is_source| {
        compress(options, if is_source { Mode::Auto } else { Mode::Off }, CACHE);
    });
    let bytes = guest(&pages(0, 100));
    assert!(carry(&pair, &bytes) == bytes);
    pair.wait_for("the reason", |notice| matches!(notice, Notice::NotCompressed { .. }));
    assert!(pair.said().contains("does not accept it"), "{}", pair.said());
}

#[test]
fn older_relay_gets_a_hello_of_its_version() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let directory = tempfile::tempdir().unwrap();
    let notices = Arc::default();
    let mut options = options(&notices);
    compress(&mut options, Mode::Auto, CACHE);
    let listen = Address::Unix(directory.path().join("source"));
    let to = format!("tcp:127.0.0.1:{port}").parse().unwrap();
    let _dialer = Dialer::start(&listen, to, route(), options).unwrap();
    let _source = UnixStream::connect(directory.path().join("source")).unwrap();
    let hello = || {
        let (mut carrier, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 500];
        let mut filled = 0;
        loop {
            filled += carrier.read(&mut bytes[filled..]).unwrap();
            if let Some((hello, _)) = Hello::decode(&bytes[..filled]).unwrap() {
                return (carrier, hello);
            }
        }
    };
    let (mut carrier, first) = hello();
    assert!(first.offer.is_some_and(|offer| offer.packs), "{first:?}");
    let mut answer = Vec::new();
    Answer::without_proof(Status::OtherVersion).encode(&mut answer);
    carrier.write_all(&answer).unwrap();
    let (_, second) = hello();
    assert_eq!((second.offer, second.session), (None, first.session));
    drop(first);
}

/// A carrier of a source's relay that this test plays. Compression is agreed, and flow 1 is open.
fn play_source(port: u16, route: &str, session: u8) -> TcpStream {
    let mut carrier = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let (id, share) = (SessionId([session; 16]), [1; 32]);
    let key = SessionKey::new(None, id, &share);
    let offer = Some(Offer { packs: true, cache_pages: 0 });
    let name = route.parse().unwrap();
    let hello = Hello::new(id, Purpose::Open, (0, 1), 1, [2; 16], share, name, offer, &key, &None);
    let mut bytes = Vec::new();
    hello.encode(&mut bytes);
    carrier.write_all(&bytes).unwrap();
    let mut answer = [0; Answer::BYTES];
    carrier.read_exact(&mut answer).unwrap();
    let answer = Answer::decode(&answer).unwrap();
    assert!(answer.accepts.is_some_and(|accepts| accepts.packs), "{answer:?}");
    let mut bytes = Confirm::new(&hello, &answer, &key, &None).to_bytes().to_vec();
    Frame::Sync.encode(&mut bytes).unwrap();
    Frame::Open { flow: 1, credit: 1000 }.encode(&mut bytes).unwrap();
    carrier.write_all(&bytes).unwrap();
    carrier
}

fn packed(head: PackedHead, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame::Packed { flow: 1, head, payload: payload.len() }.encode(&mut bytes).unwrap();
    [&bytes, payload].concat()
}

#[test]
fn peer_whose_packed_frames_break_a_rule_ends_its_own_session_only() {
    let (notices, directory) = (Arc::default(), tempfile::tempdir().unwrap());
    let mut options = options(&notices);
    compress(&mut options, Mode::Auto, CACHE);
    let vmms = [1, 2].map(|number| {
        let path = directory.path().join(format!("web{number}"));
        UnixListener::bind(path).unwrap()
    });
    let routes = Routes { directory: Some(directory.path().to_owned()), ..Routes::default() };
    let acceptor = Acceptor::start(&"tcp:127.0.0.1:0".parse().unwrap(), routes, options).unwrap();
    let Address::Tcp { port, .. } = *acceptor.address() else { unreachable!() };
    let mut good = play_source(port, "web2", 99);
    let (mut delivered, _) = vmms[1].accept().unwrap();

    let plain = PackedHead { offset: 0, check: 0, length: 4, pages: 0, method: Method::Plain };
    let zeros = zstd::bulk::compress(&vec![0; 200_000], 1).unwrap();
    let mut reference = Vec::new();
    NamedPage { gap: 0, hash: Some([5; 32]) }.encode(&mut reference);
    let missing = packed(PackedHead { length: 4096, pages: 1, ..plain }, &reference);
    let cases = [
        (packed(plain, b"abcd"), "the unpacked bytes have the check sum"),
        (
            packed(PackedHead { method: Method::Zstd, ..plain }, &zeros),
            "expand to more than the stated 4 bytes",
        ),
        (packed(PackedHead { pages: 1, ..plain }, &reference), "a page ends at byte 4096"),
        ([&missing[..], &missing].concat(), "it refers to a page that is missing"),
        (vec![11, 0xff, 0xff, 0xff, 0, 0, 0, 1], "a body of 16777215 bytes"),
    ];
    for (number, (bytes, rule)) in (1..).zip(cases) {
        let mut bad = play_source(port, "web1", number);
        bad.write_all(&bytes).unwrap();
        let said = || -> String {
            let notices: std::sync::MutexGuard<'_, Vec<Notice>> = notices.lock().unwrap();
            notices.iter().map(|notice| format!("{notice}\n")).collect()
        };
        until(rule, || said().contains(rule));
        let line = said().lines().find(|line| line.contains(rule)).unwrap().to_owned();
        let session = format!("session {}", format!("{number:02x}").repeat(8));
        for part in [&session, "carrier 0", "frame PACKED of flow 1, byte ", "specs/relay.md §"] {
            assert!(line.contains(part), "{part}: {line}");
        }
        until("the end of the session", || acceptor.open_sessions() == 1);
        notices.lock().unwrap().clear();
        drop(bad);
    }
    let check = xxhash_rust::xxh3::xxh3_64(b"abcd");
    good.write_all(&packed(PackedHead { check, ..plain }, b"abcd")).unwrap();
    let mut bytes = [0; 4];
    delivered.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"abcd");
}
