//! The main channel over RDMA: valid places of hooks, and elements that are refused.

use crate::common::{BLOCK, BLOCK_BYTES, expectations, hex, opaque, read_all};
use sterna_wire::Fault;
use sterna_wire::main::{
    Configuration, Expectations, FileHeader, MainDecoder, MainItem, SectionHeader, SectionKind, Step,
    encode_end, encode_footer, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::vmdesc;

/// A stream up to the block list of RAM.
fn listed() -> Vec<u8> {
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out).unwrap();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
    BlockList { blocks: vec![BlockEntry::new(BLOCK, BLOCK_BYTES)] }.encode(&mut out).unwrap();
    out
}

/// The stream in the pieces of a source: each piece but the last ends with a hook.
fn pieces() -> Vec<Vec<u8>> {
    let mut pieces = vec![listed()];
    for last in [false, true] {
        RamRecordWriter::hook(pieces.last_mut().unwrap());
        let mut piece = Vec::new();
        RamRecordWriter::eos(&mut piece);
        encode_footer(1, &mut piece);
        encode_section_part(1, last, &mut piece);
        pieces.push(piece);
    }
    RamRecordWriter::hook(pieces.last_mut().unwrap());
    let mut end = Vec::new();
    RamRecordWriter::eos(&mut end);
    encode_footer(1, &mut end);
    encode_end(&mut end);
    vmdesc::encode(&vmdesc::build("none", &[]), &mut end).unwrap();
    pieces.push(end);
    pieces
}

fn rdma() -> Expectations {
    Expectations { rdma: true, ..expectations() }
}

fn decoder(expect: Expectations) -> MainDecoder {
    MainDecoder::new(Box::new(opaque), expect)
}

#[test]
fn sections_with_hooks_are_written_as_a_qemu_writes_them() {
    let pieces = pieces();
    assert!(hex(&pieces[0]).ends_with(&format!("{}0000000000000080", "0000000000400000")));
    // The end of a section and the start of the next: 8 and 10 bytes of a captured migration, then its hook.
    assert_eq!(hex(&pieces[1]), "00000000000000107e0000000102000000010000000000000080");
    assert_eq!(hex(&pieces[2]), "00000000000000107e0000000103000000010000000000000080");
}

#[test]
fn hook_is_an_item_and_the_bytes_after_it_stay_with_the_caller() {
    let stream = pieces().concat();
    for piece in [1, 7, 100, stream.len()] {
        let (items, left) = read_all(&mut decoder(rdma()), &stream, piece).unwrap();
        let hooks: Vec<_> = items
            .iter()
            .filter_map(|(item, _)| match item {
                MainItem::Hook { kind } | MainItem::RamEnd { kind } => {
                    Some((*kind, matches!(item, MainItem::Hook { .. })))
                }
                _ => None,
            })
            .collect();
        let each = |kind| [(kind, true), (kind, false)];
        let wanted = [SectionKind::Start, SectionKind::Part, SectionKind::End].map(each).concat();
        assert_eq!((hooks, left), (wanted, 0), "pieces of {piece}");
    }

    // All bytes have arrived, but the first call that reaches the hook takes no byte after it.
    let mut decoder = decoder(rdma());
    let mut at = 0;
    let taken = loop {
        match decoder.next(&stream[at..]).unwrap() {
            Step::Item { item, consumed } => {
                at += consumed;
                if matches!(item, MainItem::Hook { .. }) {
                    break at;
                }
            }
            Step::Partial { consumed } => at += consumed,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(taken, pieces()[0].len());
    assert_eq!(decoder.position(), taken as u64);
}

#[test]
fn page_over_rdma_and_hook_over_anything_else_are_refused() {
    let part = pieces()[..2].concat();
    let part = &part[..part.len() - 8];
    let page = |fill: &dyn Fn(&mut Vec<u8>)| {
        let mut out = part.to_vec();
        fill(&mut out);
        out
    };
    let records: [Vec<u8>; 3] = [
        page(&|out| RamRecordWriter::new().page_header(0, BLOCK, 0, out).unwrap()),
        page(&|out| RamRecordWriter::new().zero(0, BLOCK, 0, out).unwrap()),
        page(&|out| RamRecordWriter::new().xbzrle(0, BLOCK, 0, &[0, 1, 7], out).unwrap()),
    ];
    for stream in records {
        let error = read_all(&mut decoder(rdma()), &stream, 3).unwrap_err();
        assert_eq!((error.offset, error.paragraph), (part.len() as u64, "specs/rdma.md §5.2"), "{error}");
        assert_eq!(error.fault, Fault::PeerMisbehaved);
    }

    let hooked = pieces()[0].clone();
    let error = read_all(&mut decoder(expectations()), &hooked, 3).unwrap_err();
    assert_eq!((error.offset, error.fault), (hooked.len() as u64 - 8, Fault::PeerMisbehaved), "{error}");
}

#[test]
fn start_has_exactly_one_hook() {
    let with = |hooks: usize| {
        let mut out = listed();
        (0..hooks).for_each(|_| RamRecordWriter::hook(&mut out));
        RamRecordWriter::eos(&mut out);
        out
    };
    let list = listed().len() as u64;
    let none = read_all(&mut decoder(rdma()), &with(0), 3).unwrap_err();
    assert_eq!((none.offset, none.fault), (list, Fault::PeerIncompatible), "{none}");
    assert!(read_all(&mut decoder(rdma()), &with(1), 3).is_ok());
    let two = read_all(&mut decoder(rdma()), &with(2), 3).unwrap_err();
    assert_eq!((two.offset, two.fault), (list + 8, Fault::PeerMisbehaved), "{two}");
}

#[test]
fn hook_with_an_offset_is_none() {
    let mut stream = listed();
    stream.extend_from_slice(&0x1080_u64.to_be_bytes());

    assert!(read_all(&mut decoder(rdma()), &stream, 3).is_err());
}
