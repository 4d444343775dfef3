//! Shared code of this crate's tests: golden vectors, and a driver for the decoder.
#![allow(dead_code)] // each test program uses only a part

use std::io::Read;
use sterna_wire::PAGE_SIZE;
use sterna_wire::main::{BodyKind, Expectations, MainDecoder, MainItem, SectionKind, Step};

/// Reads and decompresses a file of `tests/vectors`.
pub fn vector(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/vectors/{name}.gz", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// Name of the only RAM block in the captures.
pub const BLOCK: &str = "m0";
/// Length of that block, in bytes.
pub const BLOCK_BYTES: u64 = 4 << 20;

/// Expectations that the captured streams meet.
pub fn expectations() -> Expectations {
    Expectations {
        machine_type: Some("none".into()),
        blocks: Some(vec![(BLOCK.into(), BLOCK_BYTES)]),
        ..Expectations::default()
    }
}

/// Knowledge of no device but RAM.
pub fn opaque(name: &str, _: u32, _: u32, _: SectionKind) -> BodyKind {
    if name == "ram" { BodyKind::Ram } else { BodyKind::OpaqueByFooter }
}

/// Knowledge of the devices in the captures.
pub fn informed(name: &str, _: u32, _: u32, _: SectionKind) -> BodyKind {
    match name {
        "ram" => BodyKind::Ram,
        "timer" => BodyKind::FixedLength(24),
        "globalstate" => BodyKind::FixedLength(104),
        _ => BodyKind::Refuse("not in the captures".into()),
    }
}

/// An item, and the page's bytes if it is a page.
pub type Seen = (MainItem, Vec<u8>);

/// Reads a whole stream that arrives in pieces of `piece` bytes. Returns the items and the number of bytes left
/// over.
pub fn read_all(
    decoder: &mut MainDecoder,
    stream: &[u8],
    piece: usize,
) -> Result<(Vec<Seen>, usize), sterna_wire::WireError> {
    let (mut items, mut at, mut arrived) = (Vec::new(), 0, 0);
    loop {
        match decoder.next(&stream[at..arrived])? {
            Step::NeedMore(needed) => {
                assert!(needed > arrived - at && needed <= sterna_wire::limits::MAIN_STEP_BYTES);
                if arrived == stream.len() {
                    return Ok((items, stream.len() - at));
                }
                arrived = (arrived + piece).min(stream.len());
            }
            Step::Partial { consumed } => {
                assert!(consumed > 0);
                at += consumed;
            }
            Step::Item { item, consumed } => {
                at += consumed;
                let mut page = Vec::new();
                if let MainItem::PagePayloadFollows { .. } = item {
                    if stream.len() - at < PAGE_SIZE {
                        return Ok((items, stream.len() - at));
                    }
                    page = stream[at..at + PAGE_SIZE].to_vec();
                    at += PAGE_SIZE;
                    decoder.payload_consumed();
                }
                if let MainItem::MappedBlock { resume_at, .. } = item {
                    at = usize::try_from(resume_at).unwrap();
                }
                arrived = arrived.max(at);
                items.push((item, page));
            }
            Step::End => return Ok((items, stream.len() - at)),
        }
    }
}

/// Runs a property with values drawn from the run's seed.
pub fn seeded<S: proptest::strategy::Strategy>(
    test: &str,
    strategy: &S,
    property: impl Fn(S::Value) -> proptest::test_runner::TestCaseResult,
) {
    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&sterna_testing::seed(test).to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases: 256, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new_with_rng(config, rng).run(strategy, property);
    if let Err(error) = outcome {
        panic!("{test}: {error}");
    }
}

/// The bytes as two hexadecimal digits each.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of hexadecimal digits. Other characters are ignored.
pub fn unhex(digits: &str) -> Vec<u8> {
    let digits: Vec<u32> = digits.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}
