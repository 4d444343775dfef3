//! Packer and unpacker against each other, and against payloads that break rules.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::*;
use crate::frame::{Frame, Method, NamedPage, PAGE_BYTES, PackedHead, Rule};

/// A page whose bytes compress to a half or so.
fn page(number: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number);
    (0..PAGE_BYTES).map(|_| random.u8(0..16)).collect()
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| random.u8(..)).collect()
}

/// Pages as a QEMU sends them: 8 bytes before each. Returns the places of the pages, too.
fn stream(pages: impl IntoIterator<Item = u64>) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut places) = (Vec::new(), Vec::new());
    for (at, number) in pages.into_iter().enumerate() {
        bytes.extend_from_slice(&((at as u64 * 4096) | 0x28).to_be_bytes());
        places.push(bytes.len());
        bytes.extend(page(number));
    }
    (bytes, places)
}

struct Ends {
    packer: Packer,
    unpacker: Unpacker,
}

fn known(pages: u32) -> Arc<Mutex<Known>> {
    Arc::new(Mutex::new(Known::new(pages, pages)))
}

fn cache(pages: u64) -> Arc<Cache> {
    Arc::new(Cache::new(pages * 4352, Vec::new()))
}

fn ends(mode: Mode, known: &Arc<Mutex<Known>>, cache: &Arc<Cache>) -> Ends {
    Ends {
        packer: Packer::new(mode, 1, Arc::clone(known)).unwrap(),
        unpacker: Unpacker::new(Arc::clone(cache)).unwrap(),
    }
}

impl Ends {
    fn pack(&mut self, bytes: &[u8], places: &[usize], is_again: bool) -> (PackedHead, Vec<u8>) {
        let clock = || Duration::ZERO;
        let packed = self.packer.pack(3, 0, bytes, places, is_again, &clock).unwrap().expect("it is packed");
        let Frame::Packed { flow: 3, head, payload } = packed.frame else { panic!("{packed:?}") };
        assert_eq!(payload, packed.payload.len());
        // The frame keeps the protocol's limits.
        packed.frame.encode(&mut Vec::new()).unwrap();
        (head, packed.payload)
    }

    /// The bytes after both ends, and how many were sent.
    fn carry(&mut self, bytes: &[u8], places: &[usize]) -> (Unpacked, usize) {
        let (head, payload) = self.pack(bytes, places, false);
        (self.unpacker.unpack(3, &head, &payload).unwrap(), payload.len())
    }
}

#[test]
fn bytes_come_back_and_known_pages_go_as_references() {
    let mut ends = ends(Mode::Zstd(1), &known(100), &cache(100));
    let (first, places) = stream(0..20);
    let (back, sent) = ends.carry(&first, &places);
    assert!(back == Unpacked::Bytes(first.clone()) && sent < first.len() * 3 / 4, "{sent} bytes");
    // The same pages at other addresses, among new ones.
    let (second, places) = stream((10..20).chain(100..102).chain(0..10));
    let (back, sent) = ends.carry(&second, &places);
    assert!(back == Unpacked::Bytes(second) && sent < 4 * PAGE_BYTES, "{sent} bytes");
    assert_eq!(ends.packer.take_figures().references, 20);
    // Pages that begin in one frame and end in the next one are bytes like others.
    let (third, places) = stream(0..3);
    let (here, next) = third.split_at(6000);
    assert!(ends.carry(here, &places[..1]).0 == Unpacked::Bytes(here.to_vec()));
    assert!(ends.carry(next, &[places[2] - 6000]).0 == Unpacked::Bytes(next.to_vec()));
}

#[test]
fn frames_of_any_content_and_size_come_back() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut ends = ends(Mode::Zstd(3), &known(50), &cache(50));
    for round in 0..300 {
        let count = random.u64(1..31);
        let (mut bytes, places) = stream((0..count).map(|_| random.u64(0..90)));
        if random.bool() {
            bytes.extend(noise(round, random.usize(0..100_000)));
        }
        let places: Vec<usize> = places.into_iter().filter(|_| random.u8(0..4) > 0).collect();
        let (head, payload) = ends.pack(&bytes, &places, random.bool());
        match ends.unpacker.unpack(3, &head, &payload).unwrap() {
            Unpacked::Bytes(back) => assert!(back == bytes, "round {round}"),
            Unpacked::Missing => panic!("round {round}: the sender forgets earlier than the receiver"),
        }
    }
}

#[test]
fn page_that_the_receiver_lacks_is_missing_and_the_stream_continues() {
    let known = known(100);
    let (bytes, places) = stream(0..4);
    ends(Mode::Zstd(1), &known, &cache(100)).carry(&bytes, &places);
    // Another carrier, whose receiver has no page.
    let mut ends = ends(Mode::Zstd(1), &known, &cache(100));
    let (more, more_places) = stream([0, 9]);
    assert_eq!(ends.carry(&more, &more_places).0, Unpacked::Missing);
    // Sent again without references; the new page of the frame before was kept.
    let (head, payload) = ends.pack(&more, &more_places, true);
    assert_eq!(ends.unpacker.unpack(3, &head, &payload), Ok(Unpacked::Bytes(more.clone())));
    assert_eq!(ends.carry(&more, &more_places).0, Unpacked::Bytes(more));
}

#[test]
fn payload_that_breaks_a_rule_is_refused() {
    let start = || ends(Mode::Zstd(1), &known(100), &cache(100));
    let (bytes, places) = stream(0..4);
    let (head, payload) = start().pack(&bytes, &places, false);
    let refused = |head: PackedHead, payload: &[u8]| {
        let error = Unpacker::new(cache(100)).unwrap().unpack(3, &head, payload).unwrap_err();
        assert_eq!((error.frame, error.flow), ("PACKED", 3));
        assert!(error.to_string().ends_with("(specs/relay.md §10)"), "{error}");
        error.rule
    };
    let length = head.length;
    // Compressed bytes that expand to more than stated, to less, to other content.
    assert_eq!(
        refused(PackedHead { length: length - 1, pages: 3, ..head }, &payload_of(3, &payload)),
        Rule::Expands(length - 1)
    );
    assert_eq!(refused(PackedHead { length: length + 1, ..head }, &payload), Rule::Short);
    assert!(matches!(refused(PackedHead { check: 1, ..head }, &payload), Rule::Content { stated: 1, .. }));
    assert_eq!(refused(head, &payload[..payload.len() - 1]), Rule::Short);
    // Bytes after the block, and a stream that ends.
    assert!(matches!(refused(head, &[&payload[..], &[0xff; 9]].concat()), Rule::Compressed(_)));
    let ended = zstd::bulk::compress(&bytes, 1).unwrap();
    assert!(matches!(refused(PackedHead { pages: 0, ..head }, &ended), Rule::Compressed(_)));
    // A window that needs more memory than the protocol permits.
    let mut wide = zstd::stream::raw::Encoder::new(19).unwrap();
    wide.set_parameter(zstd::stream::raw::CParameter::WindowLog(27)).unwrap();
    let mut out = Vec::new();
    super::packer::compress(&mut wide, &bytes, &mut out).unwrap();
    assert!(matches!(refused(PackedHead { pages: 0, ..head }, &out), Rule::Compressed(_)));
    // Plain bytes of another number, and pages that do not fit.
    let plain = PackedHead { pages: 0, method: Method::Plain, ..head };
    assert_eq!(refused(plain, &bytes[1..]), Rule::Short);
    let outside = PackedHead { length: 100, pages: 1, ..head };
    assert!(matches!(refused(outside, &payload), Rule::PageOutside { .. }));
}

/// The payload with the names of its first `pages` pages only; each takes 4 bytes.
fn payload_of(pages: usize, payload: &[u8]) -> Vec<u8> {
    [&payload[..4 * pages], &payload[16..]].concat()
}

#[test]
fn bomb_expands_to_no_more_than_the_frame_states() {
    let zeros = vec![0; crate::frame::DATA_BYTES];
    let (head, payload) = ends(Mode::Zstd(1), &known(0), &cache(0)).pack(&zeros, &[], false);
    assert!(payload.len() < 100, "{} bytes", payload.len());
    let mut unpacker = Unpacker::new(cache(0)).unwrap();
    let small = PackedHead { length: 100, ..head };
    assert_eq!(unpacker.unpack(3, &small, &payload).unwrap_err().rule, Rule::Expands(100));
}

#[test]
fn random_bytes_are_rarely_tried() {
    let mut ends = ends(Mode::Auto, &known(100), &cache(100));
    let clock = || Duration::ZERO;
    let frame = noise(1, 128 << 10);
    let mut tried = 0;
    for _ in 0..2000 {
        // 250 MiB.
        tried += usize::from(ends.packer.pack(3, 0, &frame, &[], false, &clock).unwrap().is_some());
    }
    let figures = ends.packer.take_figures();
    assert_eq!(tried, 0);
    assert!(figures.sent * 1000 < figures.plain * 1001, "{figures:?}");
    // Another flow, and this one later, is compressed as soon as it is worth it.
    let (bytes, _) = stream(0..20);
    assert!(ends.packer.pack(4, 0, &bytes, &[], false, &clock).unwrap().is_some());
    let packs = (0..5000).any(|_| ends.packer.pack(3, 0, &bytes, &[], false, &clock).unwrap().is_some());
    assert!(packs, "a flow is tried again");
    // A flow that no longer compresses is given up after some frames.
    let fresh = |at: &u64| noise(*at, frame.len());
    let packed =
        (0..100).filter(|at| ends.packer.pack(4, 0, &fresh(at), &[], false, &clock).unwrap().is_some());
    assert!(packed.count() <= 10);
}

#[test]
fn effort_compares_when_the_processor_is_the_limit_and_keeps_the_faster_way() {
    let frame = 128 << 10;
    // Compressing takes 1 ms for a frame; the link takes `link` for a plain one, a third for a packed one.
    let run = |link: Duration| {
        let (mut effort, mut now, mut packed) = (Effort::default(), Duration::ZERO, 0);
        for _ in 0..2000 {
            let packs = effort.packs();
            packed += u32::from(packs);
            let spent = if packs { Duration::from_millis(1) } else { Duration::ZERO };
            let waits = if packs { (link / 3).saturating_sub(spent) } else { link };
            effort.sent(now + spent, frame, spent);
            now += spent + waits;
        }
        packed
    };
    assert_eq!(run(Duration::from_millis(6)), 2000, "a slow link is never the slower way");
    let some = run(Duration::from_millis(2));
    assert!(some > 1800, "the packed way is faster, and compared rarely: {some}");
    let few = run(Duration::from_micros(100));
    assert!(few < 200, "the plain way is faster: {few}");
}

#[test]
fn cache_keeps_no_more_than_its_limit_and_the_sender_remembers_less() {
    let (cache, mut known) = (cache(8), Known::new(8, u32::MAX));
    for number in 0..100 {
        let bytes = page(number);
        let hash = PageHash::of(&bytes);
        cache.keep(hash, &bytes);
        assert!(known.note(&hash, 1));
        assert!(cache.pages() <= 8);
        for earlier in 0..=number {
            let hash = PageHash::of(&page(earlier));
            assert!(!known.has(&hash, 1) || cache.copy(&hash, &mut [0; PAGE_BYTES]), "page {earlier}");
        }
    }
    assert!(known.has(&PageHash::of(&page(99)), 1));
    assert!(!known.has(&PageHash::of(&page(99)), 2), "another carrier may be faster");
    known.missed();
    known.missed();
    known.missed();
    assert!(!known.has(&PageHash::of(&page(99)), 1));
}

#[test]
fn announced_pages_are_known_and_limited() {
    let (first, second) = (PageHash::of(&page(1)), PageHash::of(&page(2)));
    let mut known = Known::new(0, 0);
    assert!(!known.is_used());
    known.announced(false, &[second.prefix()]).unwrap();
    assert!(!known.has(&second, 1), "the receiver keeps nothing");
    known.announced(true, &[first.prefix()]).unwrap();
    assert!(known.is_used() && known.has(&first, 1) && !known.note(&second, 1));
    let mut known = Known::new(10, 10);
    known.announced(false, &[second.prefix()]).unwrap();
    assert!(known.has(&second, 1) && known.has(&second, 2));
    let many: Vec<u64> = (0..=MOST_ANNOUNCED as u64).collect();
    assert_eq!(known.announced(true, &many), Err(Rule::TooManyHashes(MOST_ANNOUNCED)));
}

#[test]
fn modes_are_read_and_written() {
    for (text, mode) in
        [("off", Mode::Off), ("auto", Mode::Auto), ("zstd", Mode::Zstd(1)), ("zstd:19", Mode::Zstd(19))]
    {
        assert_eq!(text.parse(), Ok(mode));
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    for bad in ["", "zstd:0", "zstd:20", "zstd:", "lz4", "Auto"] {
        assert!(bad.parse::<Mode>().is_err(), "{bad}");
    }
}

#[test]
fn named_page_takes_the_specifications_bytes() {
    let mut out = Vec::new();
    NamedPage { gap: 0x0102, hash: None }.encode(&mut out);
    NamedPage { gap: 8, hash: Some([0xab; 32]) }.encode(&mut out);
    assert_eq!(out[..8], [0, 0, 1, 2, 0x80, 0, 0, 8]);
    assert_eq!(out[8..], [0xab; 32]);
}
