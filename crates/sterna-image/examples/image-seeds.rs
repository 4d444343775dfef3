//! Writes seeds for the fuzz targets `image`, `libvirt_header` and `unpack`, out of a real QEMU's file.
//!
//! `cargo run -p sterna-image --example image-seeds -- fuzz/seeds` (the directory is the argument). The file is that of
//! the golden vectors, its RAM cut to a few pages so that a seed stays short.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_image::convert::{ConvertOptions, Input, Output, Target, convert};
use sterna_image::{Image, ImageError, LegacyWriter, PageVisitor};
use sterna_wire::PAGE_SIZE;

type Failure = Box<dyn std::error::Error>;

/// Pages that a seed keeps.
const PAGES: u64 = 3;

fn main() -> Result<(), Failure> {
    let directory = PathBuf::from(std::env::args().nth(1).ok_or("give the directory to write to")?);
    let scratch = tempfile::tempdir()?;
    let small = scratch.path().join("small");
    fs::write(&small, small_legacy()?)?;
    for target in Target::all() {
        let options = ConvertOptions {
            target: Some(target),
            xml: target.is_libvirt().then(|| b"<domain type='qemu'/>".to_vec()),
            cookie: target.is_libvirt().then(|| b"<cookie/>".to_vec()),
            alignment: PAGE_SIZE as u64,
            threads: 1,
            ..ConvertOptions::default()
        };
        let file = scratch.path().join(target.name());
        convert(Input::File(small.clone()), Output::File(file.clone()), &options)?;
        let bytes = fs::read(&file)?;
        // libvirt's room for longer texts would be most of a seed.
        if bytes.len() < 40_000 {
            put(&directory, "image", &target.name(), &bytes)?;
        }
        if target.is_libvirt() {
            put(&directory, "libvirt_header", &target.name(), &bytes[..92])?;
        }
        if let Some(choice) = choice(target) {
            put(&directory, "unpack", &target.name(), &[&[choice], &bytes[..]].concat())?;
        }
    }
    Ok(())
}

fn put(directory: &Path, target: &str, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(directory.join(target))?;
    fs::write(directory.join(target).join(name), bytes)
}

/// The first byte of a seed of `unpack`.
fn choice(target: Target) -> Option<u8> {
    let names = ["legacy-gzip", "legacy-bzip2", "legacy-xz", "legacy-lzop", "legacy-zstd"];
    names.iter().position(|name| *name == target.name()).map(|at| at as u8)
}

/// The golden file's machine with a few pages of RAM.
fn small_legacy() -> Result<Vec<u8>, Failure> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna-wire/tests/vectors/file-legacy.gz");
    let mut golden = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(path)?).read_to_end(&mut golden)?;
    let image = Image::open_source(Arc::new(golden), "file-legacy")?;
    let mut shape = image.shape().clone();
    shape.ram.blocks[0].length_bytes = PAGES * PAGE_SIZE as u64;
    let mut writer = LegacyWriter::new(Vec::new(), "seed", &shape)?;
    image.visit_pages(&mut First(&mut writer))?;
    Ok(writer.finish(&shape)?)
}

/// Lets only the first pages through.
struct First<'a>(&'a mut dyn PageVisitor);

impl PageVisitor for First<'_> {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        if first < PAGES { self.0.pages(block, first, content) } else { Ok(()) }
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        if first < PAGES { self.0.zero(block, first, count) } else { Ok(()) }
    }
}
