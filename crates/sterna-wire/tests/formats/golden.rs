//! Bytes of a real QEMU 11.1.3: the decoder understands every byte, and rebuilds RAM exactly.

use crate::common::{self, BLOCK, BLOCK_BYTES, expectations, informed, opaque, read_all, vector};
use sterna_wire::global_state::GlobalState;
use sterna_wire::main::{
    Command, Configuration, Expectations, FileHeader, MainDecoder, MainItem, SectionHeader, SectionKind,
    encode_end, encode_footer, encode_section_part,
};
use sterna_wire::multifd::{
    BlockTable, InitialPacket, Method, RAM_PACKET_BYTES, RamPacketEncoder, RamPacketView,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::{PAGE_SIZE, mapped_ram, vmdesc};

/// Section ids of the captures, which items do not contain.
const IDS: [(&str, u32); 3] = [("ram", 1), ("timer", 0), ("globalstate", 3)];

fn id(name: &str) -> u32 {
    IDS.iter().find(|pair| pair.0 == name).unwrap().1
}

/// Encodes decoded items again.
fn encode_again(items: &[common::Seen]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut records = RamRecordWriter::new();
    let mut started = false;
    for (index, (item, page)) in items.iter().enumerate() {
        let begins_part =
            matches!(items[..index].last(), Some((MainItem::RamEnd { .. } | MainItem::Command(_), _)))
                && !matches!(item, MainItem::Section { .. } | MainItem::Command(_) | MainItem::Eof);
        if started && begins_part {
            let end = items[index..].iter().find_map(|(item, _)| match item {
                MainItem::RamEnd { kind } => Some(*kind),
                _ => None,
            });
            encode_section_part(id("ram"), end == Some(SectionKind::End), &mut out);
        }
        match item {
            MainItem::Header => FileHeader.encode(&mut out),
            MainItem::Configuration(configuration) => configuration.encode(&mut out).unwrap(),
            MainItem::Command(command) => command.encode(&mut out).unwrap(),
            MainItem::RamStart(list) => {
                SectionHeader { id: id("ram"), name: "ram", instance: 0, version: 4 }
                    .encode_start(&mut out)
                    .unwrap();
                list.encode(&mut out).unwrap();
                started = true;
            }
            MainItem::Zero { block, offset } => records.zero(*block, BLOCK, *offset, &mut out).unwrap(),
            MainItem::PagePayloadFollows { block, offset } => {
                records.page_header(*block, BLOCK, *offset, &mut out).unwrap();
                out.extend_from_slice(page);
            }
            MainItem::MultifdFlush => RamRecordWriter::multifd_flush(&mut out),
            MainItem::RamEnd { .. } => {
                RamRecordWriter::eos(&mut out);
                encode_footer(id("ram"), &mut out);
            }
            MainItem::Section { name, instance, version, kind, body } => {
                assert_eq!(*kind, SectionKind::Full);
                let header = SectionHeader { id: id(name), name, instance: *instance, version: *version };
                header.encode_full(&mut out).unwrap();
                out.extend_from_slice(body);
                encode_footer(id(name), &mut out);
            }
            MainItem::Eof => encode_end(&mut out),
            MainItem::VmDescription(text) => vmdesc::encode(text, &mut out).unwrap(),
            other => panic!("{other:?} in a capture"),
        }
    }
    out
}

/// Writes the pages of a main channel into `ram`.
fn apply(items: &[common::Seen], ram: &mut [u8]) {
    for (item, page) in items {
        match item {
            MainItem::PagePayloadFollows { offset, .. } => {
                ram[*offset as usize..][..PAGE_SIZE].copy_from_slice(page);
            }
            MainItem::Zero { offset, .. } => ram[*offset as usize..][..PAGE_SIZE].fill(0),
            _ => {}
        }
    }
}

/// RAM with wrong content in every byte that a test must overwrite.
fn dirty_ram() -> Vec<u8> {
    vec![0xa5; BLOCK_BYTES as usize]
}

#[test]
fn main_channel_alone_rebuilds_ram_and_reencodes() {
    for name in ["main.0", "file-legacy"] {
        let stream = vector(name);
        for piece in [1 << 16, 4096, 7, 1] {
            let mut decoder = MainDecoder::new(Box::new(opaque), expectations());

            let (items, left) = read_all(&mut decoder, &stream, piece).unwrap();

            assert_eq!(left, 0, "{name}: bytes not understood");
            decoder.end_of_file(0).unwrap();
            assert_eq!(decoder.position(), stream.len() as u64);
            let mut ram = dirty_ram();
            apply(&items, &mut ram);
            assert!(ram == vector("guest.ram"), "{name}: RAM differs");
            assert!(encode_again(&items) == stream, "{name}: the bytes differ when encoded again");
        }
    }
}

#[test]
fn main_channel_device_sections_agree_with_description() {
    for knows in [opaque, informed] {
        let stream = vector("main.0");
        let mut decoder = MainDecoder::new(Box::new(knows), expectations());

        let (items, _) = read_all(&mut decoder, &stream, 1 << 16).unwrap();

        let bodies: Vec<(String, u32, u64)> = items
            .iter()
            .filter_map(|(item, _)| match item {
                MainItem::Section { name, instance, body, .. } => {
                    Some((name.clone(), *instance, body.len() as u64))
                }
                _ => None,
            })
            .collect();
        let Some((MainItem::VmDescription(text), _)) = items.last() else { panic!("no description") };
        let lengths = vmdesc::section_lengths(text).unwrap();
        let described: Vec<_> = lengths.into_iter().map(|s| (s.name, s.instance, s.length_bytes)).collect();
        assert_eq!(bodies, described);
        assert_eq!(bodies.len(), 2);
    }
}

#[test]
fn main_channel_globalstate_is_prelaunch_and_reencodes() {
    let stream = vector("main.0");
    let mut decoder = MainDecoder::new(Box::new(informed), expectations());
    let (items, _) = read_all(&mut decoder, &stream, 1 << 16).unwrap();
    let body = items.iter().find_map(|(item, _)| match item {
        MainItem::Section { name, body, .. } if name == "globalstate" => Some(body.clone()),
        _ => None,
    });

    let state = GlobalState::decode(body.as_deref().unwrap()).unwrap();

    assert_eq!(state.run_state, "prelaunch");
    assert_eq!(state.suspended, Some(false));
    assert!(!state.wants_to_run());
    assert_eq!(state.encode().unwrap().as_slice(), body.unwrap());
}

/// Decompresses the payloads of one channel.
enum Unpacker {
    None,
    Zlib(flate2::Decompress),
    Zstd(zstd::stream::raw::Decoder<'static>),
}

impl Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: usize) -> Vec<u8> {
        use zstd::stream::raw::{InBuffer, Operation, OutBuffer};
        let mut out = vec![0; pages * PAGE_SIZE];
        match self {
            Unpacker::None => out.copy_from_slice(payload),
            Unpacker::Zlib(stream) => {
                let (from_in, from_out) = (stream.total_in(), stream.total_out());
                stream.decompress(payload, &mut out, flate2::FlushDecompress::Sync).unwrap();
                assert_eq!(stream.total_in() - from_in, payload.len() as u64);
                assert_eq!(stream.total_out() - from_out, out.len() as u64);
            }
            Unpacker::Zstd(stream) => {
                let mut input = InBuffer::around(payload);
                let mut output = OutBuffer::around(out.as_mut_slice());
                while input.pos() < payload.len() {
                    stream.run(&mut input, &mut output).unwrap();
                }
                assert_eq!(output.pos(), pages * PAGE_SIZE);
            }
        }
        out
    }
}

/// Reads a multifd channel, writes its pages into `ram`, and checks the encoder against it. Returns the number
/// of SYNCs and the packet numbers.
fn read_channel(stream: &[u8], method: Method, ram: &mut [u8]) -> (usize, Vec<u64>) {
    let table = BlockTable::new([(BLOCK.to_owned(), BLOCK_BYTES)]).unwrap();
    let (initial, mut at) = InitialPacket::decode(stream).unwrap().unwrap();
    initial.check(&[0; 16], 2).unwrap();
    assert_eq!(initial.to_bytes(), stream[..at]);
    let mut encoder = RamPacketEncoder::new(method);
    let mut unpacker = match method {
        Method::None => Unpacker::None,
        Method::Zlib => Unpacker::Zlib(flate2::Decompress::new(true)),
        Method::Zstd => Unpacker::Zstd(zstd::stream::raw::Decoder::new().unwrap()),
    };
    let (mut syncs, mut numbers) = (0, Vec::new());
    while at < stream.len() {
        let bytes = stream[at..].first_chunk::<RAM_PACKET_BYTES>().expect("a whole packet");
        let view = RamPacketView::decode(bytes, &table, method).unwrap();
        at += RAM_PACKET_BYTES;
        numbers.push(view.packet_number());
        let again = if view.is_sync() {
            syncs += 1;
            encoder.sync(view.packet_number())
        } else {
            encoder.begin(BLOCK).unwrap();
            assert!(view.zero().all(|offset| encoder.push_zero(offset)));
            assert!(view.normal().all(|offset| encoder.push_normal(offset)));
            encoder.finish(view.packet_number(), view.payload_bytes() as u32)
        };
        assert!(again == bytes, "packet {} differs when encoded again", view.packet_number());
        let payload = &stream[at..at + view.payload_bytes()];
        at += payload.len();
        let runs: usize = view.normal_runs().chain(view.zero_runs()).map(|run| run.pages).sum();
        assert_eq!(runs, view.normal().len() + view.zero().len());
        for offset in view.zero() {
            ram[offset as usize..][..PAGE_SIZE].fill(0);
        }
        if view.normal().len() > 0 {
            let pages = unpacker.unpack(payload, view.normal().len());
            let mut pages = pages.as_slice();
            for run in view.normal_runs() {
                let (here, rest) = pages.split_at(run.pages * PAGE_SIZE);
                ram[run.offset as usize..][..here.len()].copy_from_slice(here);
                pages = rest;
            }
        }
    }
    (syncs, numbers)
}

#[test]
fn multifd_channels_rebuild_ram_and_reencode() {
    for (name, method) in [("none", Method::None), ("zlib", Method::Zlib), ("zstd", Method::Zstd)] {
        let mut ram = dirty_ram();
        let main = vector(&format!("multifd2-{name}.0"));
        let expect = Expectations { multifd: true, ..expectations() };
        let mut decoder = MainDecoder::new(Box::new(opaque), expect);
        let (items, left) = read_all(&mut decoder, &main, 11).unwrap();
        assert_eq!(left, 0);
        assert!(encode_again(&items) == main);
        let flushes = items.iter().filter(|(item, _)| *item == MainItem::MultifdFlush).count();

        let mut numbers = Vec::new();
        for channel in 1..=2 {
            let stream = vector(&format!("multifd2-{name}.{channel}"));
            let (syncs, mut own) = read_channel(&stream, method, &mut ram);
            assert_eq!(syncs, flushes, "{name}.{channel}: as many SYNCs as flushes");
            numbers.append(&mut own);
        }

        assert!(ram == vector("guest.ram"), "{name}: RAM differs");
        numbers.sort_unstable();
        assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "one counter for all channels");
    }
}

#[test]
fn mapped_ram_file_rebuilds_ram_through_its_layout() {
    let file = vector("file-mapped-ram");
    let expect = Expectations { mapped_ram: true, ..expectations() };
    let mut decoder = MainDecoder::new(Box::new(opaque), expect);

    let (items, left) = read_all(&mut decoder, &file, 4096).unwrap();

    assert_eq!(left, 0);
    assert_eq!(decoder.position(), file.len() as u64);
    let Some(MainItem::MappedBlock { name, length_bytes, header, resume_at }) =
        items.iter().map(|(item, _)| item).find(|item| matches!(item, MainItem::MappedBlock { .. }))
    else {
        panic!("no block");
    };
    assert_eq!((name.as_str(), *length_bytes), (BLOCK, BLOCK_BYTES));
    // QEMU's layout is the layout that `place` computes.
    let start = header.bitmap_offset - mapped_ram::MappedHeader::BYTES as u64;
    assert_eq!(mapped_ram::MappedHeader::place(start, *length_bytes).unwrap(), *header);
    assert_eq!(*resume_at, header.end_of_pages(*length_bytes));
    let bitmap = &file[header.bitmap_offset as usize..][..mapped_ram::bitmap_bytes(*length_bytes) as usize];
    let mut ram = vec![0; BLOCK_BYTES as usize];
    let mut again = vec![0; bitmap.len()];
    for page in 0..BLOCK_BYTES / PAGE_SIZE as u64 {
        if mapped_ram::holds_page(bitmap, page) {
            let from = header.page_offset(page) as usize;
            ram[page as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&file[from..from + PAGE_SIZE]);
            mapped_ram::mark_page(&mut again, page);
        }
    }
    assert!(ram == vector("guest.ram"), "RAM differs");
    assert_eq!(again, bitmap);
    // Encode header, configuration and block entry again.
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration {
        machine_type: "none".into(),
        capabilities: vec!["mapped-ram".into()],
        ..Configuration::default()
    }
    .encode(&mut out)
    .unwrap();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
    BlockList { blocks: vec![BlockEntry::new(BLOCK, BLOCK_BYTES)] }.encode(&mut out).unwrap();
    header.encode(&mut out);
    assert_eq!(out, file[..out.len()]);
    assert_eq!(out.len() as u64, header.bitmap_offset);
}

#[test]
fn main_channel_cut_anywhere_before_eof_is_a_failure() {
    let stream = vector("multifd2-none.0");
    let eof = stream.windows(7).position(|w| w[0] == 0 && w[1] == 6 && w[6] == b'{').unwrap();
    for end in 0..stream.len() {
        let expect = Expectations { multifd: true, ..expectations() };
        let mut decoder = MainDecoder::new(Box::new(informed), expect);
        let (_, left) = read_all(&mut decoder, &stream[..end], 64).unwrap();

        let verdict = decoder.end_of_file(left);

        assert_eq!(verdict.is_ok(), end > eof, "cut at {end}: {verdict:?}");
    }
}

#[test]
fn command_of_stream_is_switchover_start_only() {
    let stream = vector("main.0");
    let mut decoder = MainDecoder::new(Box::new(informed), expectations());
    let (items, _) = read_all(&mut decoder, &stream, 1 << 16).unwrap();

    let commands: Vec<_> = items.iter().filter(|(item, _)| matches!(item, MainItem::Command(_))).collect();

    assert_eq!(commands, [&(MainItem::Command(Command::SwitchoverStart), Vec::new())]);
}
