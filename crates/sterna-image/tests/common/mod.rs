//! Real files of QEMU 11.1.3, out of sterna-wire's golden vectors.
#![allow(dead_code)]

use std::io::Read;
use std::path::Path;

pub fn vector(name: &str) -> Vec<u8> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna-wire/tests/vectors").join(format!("{name}.gz"));
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}
