//! Phases of streams that are read while they pass, in pieces of any size.

use sterna_relay::phase::{Phase, StreamKind, StreamReader, Unconfirmed};
use sterna_wire::main::{
    Command, Configuration, FileHeader, SectionHeader, encode_end, encode_footer, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::{PAGE_SIZE, WireError, vmdesc};

const RAM: u32 = 2;
const BLOCK: &str = "pc.ram";
pub(crate) const PAGES: u64 = 8;

/// A stream, and its length at the places that a test names.
#[derive(Default)]
pub(crate) struct Stream {
    pub(crate) bytes: Vec<u8>,
    records: RamRecordWriter,
}

impl Stream {
    pub(crate) fn begin(has_return_path: bool) -> Result<Self, WireError> {
        Self::of(has_return_path, PAGES)
    }

    /// A stream of a guest with so many pages.
    pub(crate) fn of(has_return_path: bool, pages: u64) -> Result<Self, WireError> {
        let mut stream = Self::default();
        let out = &mut stream.bytes;
        FileHeader.encode(out);
        Configuration { machine_type: "pc-q35-11.1".into(), ..Configuration::default() }.encode(out)?;
        if has_return_path {
            Command::OpenReturnPath.encode(out)?;
            Command::Ping(1).encode(out)?;
        }
        SectionHeader { id: RAM, name: "ram", instance: 0, version: 4 }.encode_start(out)?;
        BlockList { blocks: vec![BlockEntry::new(BLOCK, pages * PAGE_SIZE as u64)] }.encode(out)?;
        RamRecordWriter::eos(out);
        encode_footer(RAM, out);
        Ok(stream)
    }

    /// A section of RAM with these pages; every other one is zero.
    pub(crate) fn ram(&mut self, pages: std::ops::Range<u64>, is_last: bool) -> Result<(), WireError> {
        encode_section_part(RAM, is_last, &mut self.bytes);
        for page in pages {
            let offset = page * PAGE_SIZE as u64;
            if page % 2 == 0 {
                self.records.zero(0, BLOCK, offset, &mut self.bytes)?;
            } else {
                self.records.page_header(0, BLOCK, offset, &mut self.bytes)?;
                // Content that looks like a footer and an end.
                let like_an_end = [0x7e, 0, 0, 0, 2, 0, 6, 0];
                self.bytes.extend(like_an_end.iter().cycle().take(PAGE_SIZE));
            }
        }
        RamRecordWriter::eos(&mut self.bytes);
        encode_footer(RAM, &mut self.bytes);
        Ok(())
    }

    /// A section of RAM with these pages from `first` on.
    pub(crate) fn contents(&mut self, first: u64, pages: &[Vec<u8>]) -> Result<(), WireError> {
        encode_section_part(RAM, false, &mut self.bytes);
        for (at, page) in (first..).zip(pages) {
            self.records.page_header(0, BLOCK, at * PAGE_SIZE as u64, &mut self.bytes)?;
            self.bytes.extend_from_slice(page);
        }
        RamRecordWriter::eos(&mut self.bytes);
        encode_footer(RAM, &mut self.bytes);
        Ok(())
    }

    fn devices() -> Result<Vec<u8>, WireError> {
        let mut out = Vec::new();
        for (id, name) in [(5, "timer"), (6, "cpu")] {
            SectionHeader { id, name, instance: 0, version: 1 }.encode_full(&mut out)?;
            out.extend_from_slice(&[9; 700]);
            encode_footer(id, &mut out);
        }
        Ok(out)
    }

    pub(crate) fn end(&mut self) -> Result<(), WireError> {
        self.bytes.extend(Self::devices()?);
        encode_end(&mut self.bytes);
        vmdesc::encode(&vmdesc::build("none", &[]), &mut self.bytes)
    }
}

/// Feeds the stream in pieces. Returns the phases in their order.
fn phases(bytes: &[u8], piece: usize) -> (StreamReader, Vec<Phase>) {
    let mut reader = StreamReader::new(true);
    let mut seen = vec![reader.phase().clone()];
    for part in bytes.chunks(piece) {
        reader.feed(part).unwrap();
        if seen.last() != Some(reader.phase()) {
            seen.push(reader.phase().clone());
        }
    }
    (reader, seen)
}

#[test]
fn stream_of_precopy_is_followed_to_its_end_in_pieces_of_any_size() -> Result<(), WireError> {
    let mut stream = Stream::begin(true)?;
    stream.ram(0..PAGES, false)?;
    stream.ram(2..5, false)?;
    Command::SwitchoverStart.encode(&mut stream.bytes)?;
    stream.ram(1..4, true)?;
    let devices = stream.bytes.len();
    stream.end()?;
    let end = (devices + Stream::devices()?.len()) as u64;
    for piece in [1, 7, 100, 4096, 5000, stream.bytes.len()] {
        let (reader, seen) = phases(&stream.bytes, piece);
        if piece == 1 {
            let rounds = [Phase::Ram { round: 1 }, Phase::Ram { round: 2 }];
            let rest = [Phase::Switchover, Phase::Devices, Phase::Ended];
            assert_eq!(seen, [&[Phase::Setup][..], &rounds, &rest].concat());
        }
        assert_eq!((reader.phase(), reader.end()), (&Phase::Ended, Some(end)), "pieces of {piece}");
        assert_eq!(reader.pages(), PAGES + 3 + 3);
    }
    let (reader, _) = phases(&stream.bytes[..end as usize], 64);
    assert_eq!((reader.phase(), reader.end()), (&Phase::Devices, None), "one byte before the end");
    Ok(())
}

#[test]
fn stream_with_multifd_and_one_with_differences_are_read() -> Result<(), WireError> {
    let mut stream = Stream::default();
    let out = &mut stream.bytes;
    FileHeader.encode(out);
    Configuration { machine_type: "pc".into(), ..Configuration::default() }.encode(out)?;
    Command::OpenReturnPath.encode(out)?;
    SectionHeader { id: RAM, name: "ram", instance: 0, version: 4 }.encode_start(out)?;
    BlockList { blocks: vec![BlockEntry::new(BLOCK, PAGES * PAGE_SIZE as u64)] }.encode(out)?;
    RamRecordWriter::multifd_flush(out);
    RamRecordWriter::eos(out);
    encode_footer(RAM, out);
    encode_section_part(RAM, true, out);
    RamRecordWriter::multifd_flush(out);
    RamRecordWriter::eos(out);
    encode_footer(RAM, out);
    assert_eq!(phases(&stream.bytes, 9).0.phase(), &Phase::Devices);

    let mut stream = Stream::begin(true)?;
    stream.ram(0..PAGES, false)?;
    encode_section_part(RAM, true, &mut stream.bytes);
    // A delta that keeps a byte and changes the next one.
    stream.records.xbzrle(0, BLOCK, 0, &[1, 1, 7], &mut stream.bytes)?;
    RamRecordWriter::eos(&mut stream.bytes);
    encode_footer(RAM, &mut stream.bytes);
    let (reader, seen) = phases(&stream.bytes, 11);
    assert_eq!((reader.phase(), reader.pages()), (&Phase::Devices, PAGES + 1), "{seen:?}");
    Ok(())
}

#[test]
fn stream_of_postcopy_states_the_last_byte_of_its_package() -> Result<(), WireError> {
    for has_ping in [true, false] {
        let mut stream = Stream::begin(true)?;
        stream.ram(0..4, false)?;
        let mut package = Vec::new();
        Command::PostcopyListen.encode(&mut package)?;
        package.extend(Stream::devices()?);
        if has_ping {
            Command::Ping(0x42).encode(&mut package)?;
        }
        Command::PostcopyRun.encode(&mut package)?;
        Command::Packaged(package.len() as u32).encode(&mut stream.bytes)?;
        stream.bytes.extend(package);
        let last = stream.bytes.len() as u64 - 1;
        stream.records.forget_block();
        stream.ram(4..PAGES, false)?;
        stream.ram(0..2, true)?;
        encode_end(&mut stream.bytes);
        for piece in [1, 50, 5000, stream.bytes.len()] {
            let (reader, seen) = phases(&stream.bytes, piece);
            assert_eq!(reader.package(), Some((last, has_ping)), "pieces of {piece}");
            assert_eq!((reader.phase(), reader.end()), (&Phase::Postcopy, None));
            assert_eq!(reader.pages(), PAGES + 2, "{seen:?}");
        }
    }
    Ok(())
}

#[test]
fn stream_without_return_path_is_refused_before_ram_unless_it_is_permitted() -> Result<(), WireError> {
    let stream = Stream::begin(false)?;
    assert_eq!(StreamReader::new(true).feed(&stream.bytes), Err(Unconfirmed));
    let mut permitted = StreamReader::new(false);
    assert_eq!(permitted.feed(&stream.bytes), Ok(()));
    assert_eq!(permitted.phase(), &Phase::Ram { round: 1 });
    Ok(())
}

#[test]
fn stream_that_breaks_the_format_is_relayed_and_may_have_ended() -> Result<(), WireError> {
    let mut stream = Stream::begin(true)?;
    stream.bytes.extend_from_slice(&[0xff; 100]);
    let (reader, _) = phases(&stream.bytes, 10);
    assert!(matches!(reader.phase(), Phase::Unread { .. }), "{:?}", reader.phase());
    assert_eq!(reader.end(), Some(0), "no byte may be taken for harmless");
    Ok(())
}

#[test]
fn kinds_are_told_by_the_first_bytes() {
    for (first, has_main, kind) in [
        (&b"QEVM"[..], false, StreamKind::Main),
        (b"QEVM", true, StreamKind::Main),
        (&[0x11, 0x22, 0x33, 0x44], true, StreamKind::Multifd),
        (&[0, 0, 0, 0], true, StreamKind::Preempt),
        (&[8, 0, 10, 0], false, StreamKind::Recovered),
        (&[0x16, 3, 1, 2], false, StreamKind::Opaque),
        (&[0x16, 3, 1, 2], true, StreamKind::Opaque),
        (b"\0\0\0\x1c\x20\x00\x80\x86", false, StreamKind::Control),
        (b"\0\0\0\x1c\x20\x00\x80\x86", true, StreamKind::Control),
        (b"GET ", false, StreamKind::Opaque),
        (b"GET ", true, StreamKind::Raw),
    ] {
        assert_eq!(StreamKind::of(first, has_main), kind, "{first:x?} {has_main}");
    }
}
