//! The streams: random bytes, recorded guests, and guests whose pages are those of files.

use std::collections::HashSet;
use std::path::Path;

use sterna_benches::Failure;
use sterna_relay::phase::StreamReader;
use sterna_wire::PAGE_SIZE;
use sterna_wire::main::{Configuration, FileHeader, SectionHeader, encode_footer, encode_section_part};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use xxhash_rust::xxh3::xxh3_128;

const RAM: u32 = 2;
const BLOCK: &str = "pc.ram";
/// Pages of a guest that is made of files, and how many of the second one are others: one in five.
const PAGES: usize = 48 << 10;
const OTHER: usize = 5;

pub(crate) fn random(length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Two guests: the second one has the first one's pages, and in their place other ones now and then.
pub(crate) fn of_files(directory: &Path) -> Result<(Vec<u8>, Vec<u8>), Failure> {
    let mut pages = Vec::new();
    collect(directory, &mut pages)?;
    if pages.len() < PAGES + PAGES / OTHER {
        return Err(format!("{}: too few files: give a larger --files", directory.display()));
    }
    let others = pages.split_off(PAGES);
    let first = stream(&pages)?;
    for (at, page) in others.into_iter().take(PAGES / OTHER).enumerate() {
        pages[at * OTHER] = page;
    }
    Ok((first, stream(&pages)?))
}

fn collect(directory: &Path, pages: &mut Vec<Vec<u8>>) -> Result<(), Failure> {
    let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
    let mut entries: Vec<_> = std::fs::read_dir(directory).map_err(failed)?.filter_map(Result::ok).collect();
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type().map_err(failed)?;
        if pages.len() > PAGES * 2 {
            break;
        }
        if kind.is_dir() {
            collect(&entry.path(), pages)?;
        } else if kind.is_file()
            && let Ok(content) = std::fs::read(entry.path())
        {
            let filled = |page: &&[u8]| page.iter().any(|byte| *byte != 0);
            pages.extend(content.chunks_exact(PAGE_SIZE).filter(filled).map(<[u8]>::to_vec));
        }
    }
    Ok(())
}

/// The main channel of a guest with these pages, up to the last page.
fn stream(pages: &[Vec<u8>]) -> Result<Vec<u8>, Failure> {
    let write = || -> Result<Vec<u8>, sterna_wire::WireError> {
        let mut out = Vec::new();
        FileHeader.encode(&mut out);
        Configuration { machine_type: "pc-q35-11.1".into(), ..Configuration::default() }.encode(&mut out)?;
        SectionHeader { id: RAM, name: "ram", instance: 0, version: 4 }.encode_start(&mut out)?;
        BlockList { blocks: vec![BlockEntry::new(BLOCK, (pages.len() * PAGE_SIZE) as u64)] }
            .encode(&mut out)?;
        RamRecordWriter::eos(&mut out);
        encode_footer(RAM, &mut out);
        let mut records = RamRecordWriter::default();
        encode_section_part(RAM, false, &mut out);
        for (at, page) in pages.iter().enumerate() {
            records.page_header(0, BLOCK, (at * PAGE_SIZE) as u64, &mut out)?;
            out.extend_from_slice(page);
        }
        RamRecordWriter::eos(&mut out);
        encode_footer(RAM, &mut out);
        Ok(out)
    };
    write().map_err(|error| error.to_string())
}

/// How many pages of the second stream the first one has, and how many pages it has. Zero pages do not count.
pub(crate) fn share(first: &[u8], second: &[u8]) -> (usize, usize) {
    let first: HashSet<u128> = pages(first).into_iter().collect();
    let second = pages(second);
    (second.iter().filter(|page| first.contains(page)).count(), second.len())
}

fn pages(stream: &[u8]) -> Vec<u128> {
    let mut reader = StreamReader::new(false);
    reader.collect_pages();
    if reader.feed(stream).is_err() {
        return Vec::new();
    }
    let page = |begin: u64| stream.get(begin as usize..begin as usize + PAGE_SIZE);
    reader.take_pages().into_iter().filter_map(page).map(xxh3_128).collect()
}
