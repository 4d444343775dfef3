//! The main channel's decoder with single broken rules: each error names the byte and the fault.

use crate::common::{BLOCK, expectations, informed, opaque, read_all};
use sterna_wire::Fault;
use sterna_wire::WireError;
use sterna_wire::main::{
    BodyKind, Command, Configuration, Expectations, FileHeader, MainDecoder, MainItem, SectionHeader,
    SectionKind, Step, encode_end, encode_footer, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::vmdesc;

/// A stream up to its configuration, 17 bytes.
fn opened() -> Vec<u8> {
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out).unwrap();
    out
}

/// A stream up to the word of RAM's block list, 34 bytes.
fn ram_opened() -> Vec<u8> {
    let mut out = opened();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
    out
}

/// A stream up to the first record of a PART.
fn ram_listed(flush: bool) -> Vec<u8> {
    let mut out = ram_opened();
    BlockList { blocks: vec![BlockEntry::new(BLOCK, 4 << 20)] }.encode(&mut out).unwrap();
    if flush {
        RamRecordWriter::multifd_flush(&mut out);
    }
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    encode_section_part(1, false, &mut out);
    out
}

fn refusal(expect: Expectations, stream: &[u8]) -> WireError {
    // The same byte is at fault, independent of the pieces in which the bytes arrive.
    let mut whole = MainDecoder::new(Box::new(opaque), expect.clone());
    let mut pieces = MainDecoder::new(Box::new(opaque), expect);
    let error = read_all(&mut whole, stream, 1 << 16).expect_err("must be refused");
    assert_eq!(read_all(&mut pieces, stream, 1), Err(error.clone()));
    assert_eq!(whole.next(stream), Err(error.clone()), "an error stays");
    error
}

fn blocks(list: &[(&str, u64)]) -> Expectations {
    let blocks = list.iter().map(|(name, length)| ((*name).to_owned(), *length)).collect();
    Expectations { blocks: Some(blocks), ..Expectations::default() }
}

#[test]
fn configuration_that_differs_is_incompatible() {
    let stream = [opened(), vec![8]].concat();
    let other = Expectations { machine_type: Some("pc".into()), ..Expectations::default() };
    let prefix = Expectations { machine_type: Some("none-2".into()), ..Expectations::default() };
    let mapped = Expectations { mapped_ram: true, ..Expectations::default() };
    let shared = Expectations { ignore_shared: true, ..Expectations::default() };
    for expect in [other, prefix, mapped, shared] {
        let error = refusal(expect, &stream);
        assert_eq!((error.offset, error.fault), (8, Fault::PeerIncompatible), "{error}");
    }
}

#[test]
fn block_list_that_differs_is_incompatible() {
    let mut stream = ram_opened();
    BlockList { blocks: vec![BlockEntry::new("a", 8192), BlockEntry::new("b", 4096)] }
        .encode(&mut stream)
        .unwrap();
    // The word is at 34. Entries of 10 bytes start at 42, with their lengths at 44 and 54.
    let cases = [
        (blocks(&[("a", 8192)]), 54, "does not exist here"),
        (blocks(&[("a", 4096), ("b", 4096)]), 44, "8192 bytes at the source and 4096 here"),
        (blocks(&[("a", 8192), ("b", 4096), ("c", 4096)]), 54, "\"c\" is missing"),
    ];
    for (expect, offset, words) in cases {
        let error = refusal(expect, &stream);
        assert_eq!((error.offset, error.fault), (offset, Fault::PeerIncompatible), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn block_list_that_is_unsound_is_misbehaviour() {
    let entry = |name: &str, length: u64| {
        let mut out = vec![name.len() as u8];
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(&length.to_be_bytes());
        out
    };
    let total = |bytes: u64| (bytes | 4).to_be_bytes().to_vec();
    let cases: [(&str, Vec<Vec<u8>>); 6] = [
        ("overshoot", vec![total(4096), entry("a", 8192)]),
        ("overshoot by wrapping", vec![total(4096), entry("a", u64::MAX - 4095)]),
        ("not whole pages", vec![total(8192), entry("a", 4097)]),
        ("twice", vec![total(8192), entry("a", 4096), entry("a", 4096)]),
        ("no name", vec![total(8192), entry("", 4096)]),
        ("no list", vec![8u64.to_be_bytes().to_vec()]),
    ];
    for (what, parts) in cases {
        let stream = [ram_opened(), parts.concat()].concat();
        let error = refusal(Expectations::default(), &stream);
        assert_eq!(error.fault, Fault::PeerMisbehaved, "{what}: {error}");
    }
}

#[test]
fn expected_blocks_that_are_unsound_are_our_fault() {
    let mut decoder = MainDecoder::new(Box::new(opaque), blocks(&[("a", 4096), ("a", 4096)]));

    let error = decoder.next(b"").unwrap_err();

    assert_eq!(error.fault, Fault::Local);
}

#[test]
fn ram_record_that_breaks_a_rule_is_refused() {
    let word = |word: u64| word.to_be_bytes().to_vec();
    let named =
        |word: u64, name: &str| [&word.to_be_bytes()[..], &[name.len() as u8], name.as_bytes()].concat();
    // Name, record, and offset of the error in the record.
    let cases: [(&str, Vec<u8>, u64); 12] = [
        ("no flag", word(0), 0),
        ("two flags", word(0x00a), 0),
        ("obsolete flag", word(0x001), 0),
        ("HOOK", word(0x080), 0),
        ("removed flag", word(0x100), 0),
        ("block list again", word(0x004), 0),
        ("EOS with an offset", word(0x1010), 0),
        ("CONTINUE first", word(0x028), 0),
        ("unknown block", named(0x008, "m1"), 9),
        ("beyond the block", named(0x0040_0008, BLOCK), 0),
        ("zero page that is not", [named(0x002, BLOCK), vec![1]].concat(), 11),
        ("delta of another encoding", [named(0x040, BLOCK), vec![2, 0, 1, 0]].concat(), 11),
    ];
    for (what, record, at) in cases {
        let mut stream = ram_listed(false);
        let start = stream.len() as u64;
        stream.extend_from_slice(&record);
        let error = refusal(expectations(), &stream);
        assert_eq!((error.offset - start, error.fault), (at, Fault::PeerMisbehaved), "{what}: {error}");
    }
}

#[test]
fn xbzrle_delta_that_leaves_the_page_is_refused_at_its_byte() {
    let mut stream = ram_listed(false);
    let start = stream.len() as u64;
    // Keep 4095 bytes, then two new bytes: the second is outside the page. Word 8, name 3, encoding 1, length
    // 2, skip 2.
    RamRecordWriter::new().xbzrle(0, BLOCK, 0, &[0xff, 0x1f, 2, 9, 9], &mut stream).unwrap();

    let error = refusal(expectations(), &stream);

    assert_eq!(error.offset, start + 16, "{error}");
}

#[test]
fn multifd_flush_without_multifd_is_incompatible() {
    let error = refusal(expectations(), &ram_listed(true));

    assert_eq!(error.fault, Fault::PeerIncompatible);
    assert!(error.to_string().contains("multifd"), "{error}");
}

#[test]
fn legacy_flush_is_refused_or_reported_at_each_eos() {
    let mut stream = ram_listed(false);
    RamRecordWriter::eos(&mut stream);
    encode_footer(1, &mut stream);
    let multifd = Expectations { multifd: true, ..expectations() };
    let error = refusal(multifd.clone(), &stream);
    assert_eq!(error.fault, Fault::PeerIncompatible, "{error}");

    let accept = Expectations { accept_legacy_flush: true, ..multifd };
    let mut decoder = MainDecoder::new(Box::new(opaque), accept.clone());
    let (items, _) = read_all(&mut decoder, &stream, 3).unwrap();

    let tail: Vec<_> = items.into_iter().map(|(item, _)| item).skip(3).collect();
    let end = |kind| MainItem::RamEnd { kind };
    let flush = MainItem::MultifdFlush;
    assert_eq!(tail, [flush.clone(), end(SectionKind::Start), flush, end(SectionKind::Part)]);
    assert!(decoder.flushes_silently());
    // A source cannot change its way to flush.
    let mut changed = ram_listed(false);
    RamRecordWriter::multifd_flush(&mut changed);
    assert_eq!(refusal(accept, &changed).fault, Fault::PeerMisbehaved);
}

#[test]
fn section_out_of_order_is_refused() {
    let full = |id, name: &str| {
        let mut out = Vec::new();
        SectionHeader { id, name, instance: 0, version: 1 }.encode_full(&mut out).unwrap();
        out.extend_from_slice(&[1, 2, 3]);
        encode_footer(id, &mut out);
        out
    };
    let part = |last| {
        let mut out = Vec::new();
        encode_section_part(1, last, &mut out);
        RamRecordWriter::eos(&mut out);
        encode_footer(1, &mut out);
        out
    };
    // `ram_listed` ends inside a PART.
    let rest = &part(false)[5..];
    let cases: [(&str, Vec<Vec<u8>>); 9] = [
        ("FULL twice", vec![opened(), full(5, "a"), full(6, "a"), vec![0]]),
        ("id twice", vec![opened(), full(5, "a"), vec![8, 0, 1, 0, 0], full(5, "b")]),
        ("PART of no section", vec![opened(), vec![2, 0, 0, 0, 9]]),
        ("PART of a FULL", vec![opened(), full(5, "a"), vec![8, 0, 1, 0, 0], vec![2, 0, 0, 0, 5]]),
        ("PART after END", vec![ram_listed(false), rest.to_vec(), part(true), part(false)]),
        ("RAM twice", vec![ram_listed(false), rest.to_vec(), ram_opened()[17..].to_vec()]),
        ("EOF before END", vec![ram_listed(false), rest.to_vec(), vec![0]]),
        ("EOF without RAM", vec![opened(), vec![0]]),
        ("wrong footer", vec![ram_listed(false), rest[..12].to_vec(), vec![2]]),
    ];
    for (what, parts) in cases {
        let error = refusal(expectations(), &parts.concat());
        assert_eq!(error.fault, Fault::PeerMisbehaved, "{what}: {error}");
    }
}

#[test]
fn ram_of_another_version_is_incompatible() {
    let mut stream = opened();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 5 }.encode_start(&mut stream).unwrap();

    assert_eq!(refusal(expectations(), &stream).fault, Fault::PeerIncompatible);
}

#[test]
fn command_out_of_order_is_refused() {
    let open = [8, 0, 1, 0, 0];
    let ping = [8, 0, 2, 0, 4, 0, 0, 0, 1];
    let cases: [(&str, Vec<u8>, Fault); 7] = [
        ("PING first", ping.to_vec(), Fault::PeerMisbehaved),
        ("opened twice", [open, open].concat(), Fault::PeerMisbehaved),
        ("0", vec![8, 0, 0, 0, 0], Fault::PeerMisbehaved),
        ("8", vec![8, 0, 8, 0, 0], Fault::PeerMisbehaved),
        ("12", vec![8, 0, 12, 0, 0], Fault::PeerMisbehaved),
        ("wrong length", vec![8, 0, 11, 0, 1, 0], Fault::PeerMisbehaved),
        ("postcopy", vec![8, 0, 4, 0, 0], Fault::PeerIncompatible),
    ];
    for (what, bytes, fault) in cases {
        let error = refusal(expectations(), &[opened(), bytes].concat());
        assert_eq!(error.fault, fault, "{what}: {error}");
    }
}

#[test]
fn body_over_its_sections_limit_is_refused_with_its_length() {
    let framed = |_: &str, _: u32, _: u32, _: SectionKind| BodyKind::LengthPrefixed { most: 7 };
    for (length, fits) in [(7u32, true), (8, false), (u32::MAX, false)] {
        let mut stream = opened();
        SectionHeader { id: 5, name: "clock", instance: 0, version: 1 }.encode_full(&mut stream).unwrap();
        stream.extend_from_slice(&length.to_be_bytes());
        let mut decoder = MainDecoder::new(Box::new(framed), Expectations::default());
        let result = read_all(&mut decoder, &stream, 64).map(drop);
        assert_eq!(result.is_ok(), fits, "{length}: {result:?}");
        if let Err(error) = result {
            assert_eq!(error.fault, Fault::PeerMisbehaved);
            assert!(error.to_string().contains("section \"clock\", which has at most 7"), "{error}");
        }
    }
}

#[test]
fn device_state_over_the_limit_is_refused_before_it_is_awaited() {
    let framed = |_: &str, _: u32, _: u32, _: SectionKind| BodyKind::LengthPrefixed { most: usize::MAX };
    let fixed = |_: &str, _: u32, _: u32, _: SectionKind| BodyKind::FixedLength(101);
    let expect = Expectations { device_state_bytes: 100, ..Expectations::default() };
    let mut stream = opened();
    SectionHeader { id: 5, name: "a", instance: 0, version: 1 }.encode_full(&mut stream).unwrap();
    let header = stream.len();
    stream.extend_from_slice(&101u32.to_be_bytes());
    let opaque_body = [&stream[..header], &[9; 101]].concat();
    for (decoder, bytes) in [
        (MainDecoder::new(Box::new(framed), expect.clone()), stream.as_slice()),
        (MainDecoder::new(Box::new(fixed), expect.clone()), &stream[..header]),
        (MainDecoder::new(Box::new(opaque), expect), &opaque_body),
    ] {
        let mut decoder = decoder;
        let error = read_all(&mut decoder, bytes, 64).unwrap_err();
        assert_eq!(error.fault, Fault::PeerMisbehaved);
        assert!(error.to_string().contains("more than 100"), "{error}");
    }
}

#[test]
fn section_refused_by_knowledge_says_why() {
    let mut stream = opened();
    SectionHeader { id: 5, name: "e1000", instance: 0, version: 1 }.encode_full(&mut stream).unwrap();
    let mut decoder = MainDecoder::new(Box::new(informed), Expectations::default());

    let error = read_all(&mut decoder, &stream, 64).unwrap_err();

    assert_eq!(error.fault, Fault::PeerIncompatible);
    assert!(error.to_string().contains("not in the captures"), "{error}");
}

#[test]
fn opaque_body_with_false_footers_ends_at_the_true_one() {
    let mut body = vec![0x7e, 0, 0, 0, 5, 0xff, 0x7e, 0x7e, 0, 0, 0, 5, 8, 0, 99, 0, 0];
    body.extend_from_slice(&[0x7e, 0, 0, 0, 5, 4, 0, 0, 0, 5, 1, b'a']);
    let mut stream = opened();
    SectionHeader { id: 5, name: "a", instance: 0, version: 1 }.encode_full(&mut stream).unwrap();
    stream.extend_from_slice(&body);
    encode_footer(5, &mut stream);
    Command::SwitchoverStart.encode(&mut stream).unwrap();
    for piece in [1, 2, 5, 1000] {
        let mut decoder = MainDecoder::new(Box::new(opaque), Expectations::default());
        let (items, left) = read_all(&mut decoder, &stream, piece).unwrap();
        assert_eq!(left, 0);
        let MainItem::Section { body: seen, .. } = &items[2].0 else { panic!("{items:?}") };
        assert_eq!(*seen, body);
        assert_eq!(items[3].0, MainItem::Command(Command::SwitchoverStart));
    }
}

#[test]
fn page_not_taken_is_our_fault() {
    let mut stream = ram_listed(false);
    RamRecordWriter::new().page_header(0, BLOCK, 0, &mut stream).unwrap();
    let mut decoder = MainDecoder::new(Box::new(opaque), expectations());
    let mut at = 0;
    while let Step::Item { item, consumed } = decoder.next(&stream[at..]).unwrap() {
        at += consumed;
        if matches!(item, MainItem::PagePayloadFollows { .. }) {
            break;
        }
    }

    assert_eq!(decoder.next(&[0; 4096]).unwrap_err().fault, Fault::Local);
}

#[test]
fn description_of_any_bytes_is_taken_as_it_is_however_it_arrives() {
    // A loader ignores the description: after EOF, its content cannot make the stream invalid (specs/stream.md
    // §1.6).
    for text in [&b"{ \xc3\xa4}"[..], b"{\xff\0}", b"nonsense"] {
        let mut stream = opened();
        encode_end(&mut stream);
        vmdesc::encode(text, &mut stream).unwrap();
        for piece in [1, 3, stream.len()] {
            let mut decoder = MainDecoder::new(Box::new(opaque), Expectations::default());

            let (items, left) = read_all(&mut decoder, &stream, piece).unwrap();

            assert_eq!(left, 0);
            assert_eq!(items.last().unwrap().0, MainItem::VmDescription(text.to_vec()));
        }
    }
}

#[test]
fn stream_without_description_ends_at_eof() {
    let mut stream = opened();
    encode_end(&mut stream);
    let expect = Expectations { no_description: true, ..Expectations::default() };
    let mut decoder = MainDecoder::new(Box::new(opaque), expect);

    let (items, left) = read_all(&mut decoder, &stream, 1).unwrap();

    assert_eq!((items.last().unwrap().0.clone(), left), (MainItem::Eof, 0));
    assert_eq!(decoder.next(b"more").unwrap(), Step::End);
}

#[test]
fn switchover_start_that_comes_twice_is_misbehaviour() {
    let mut stream = opened();
    Command::SwitchoverStart.encode(&mut stream).unwrap();
    let at = stream.len() as u64;
    Command::SwitchoverStart.encode(&mut stream).unwrap();

    let error = refusal(Expectations::default(), &stream);

    assert_eq!(error.fault, Fault::PeerMisbehaved, "{error}");
    assert!(error.offset >= at && error.to_string().contains("SWITCHOVER_START occurs twice"), "{error}");
}

#[test]
fn end_with_several_sections_open_names_the_lowest_id_every_time() {
    let mut stream = opened();
    for id in [3u32, 1, 2] {
        let name = format!("device{id}");
        SectionHeader { id, name: &name, instance: 0, version: 1 }.encode_start(&mut stream).unwrap();
        encode_footer(id, &mut stream);
    }
    encode_end(&mut stream);

    for _ in 0..50 {
        let expect = Expectations { no_description: true, ..Expectations::default() };
        let error = refusal(expect, &stream);
        assert!(error.to_string().contains("END of section \"device1\""), "{error}");
    }
}

#[test]
fn bodies_that_pass_do_not_count_against_what_is_held() {
    let stream = |bodies: usize| {
        let mut out = opened();
        SectionHeader { id: 1, name: "bank/stream", instance: 0, version: 1 }.encode_start(&mut out).unwrap();
        for part in 0..bodies {
            if part > 0 {
                encode_section_part(1, part + 1 == bodies, &mut out);
            }
            out.extend_from_slice(&40u32.to_be_bytes());
            out.extend_from_slice(&[7; 40]);
            encode_footer(1, &mut out);
        }
        out
    };
    let read = |kind: fn() -> BodyKind, bodies: usize| {
        let knowledge = move |_: &str, _: u32, _: u32, _: SectionKind| kind();
        let expect = Expectations { device_state_bytes: 100, ..Expectations::default() };
        let mut decoder = MainDecoder::new(Box::new(knowledge), expect);
        read_all(&mut decoder, &stream(bodies), 16).map(|(items, _)| items.len())
    };

    // Header and configuration precede the bodies.
    assert!(read(|| BodyKind::LengthPrefixed { most: 50 }, 3).unwrap_err().to_string().contains("120 bytes"));
    assert_eq!(read(|| BodyKind::Passing { most: 50 }, 3), Ok(5));
    assert!(read(|| BodyKind::Passing { most: 39 }, 1).unwrap_err().to_string().contains("at most 39"));
}

#[test]
fn recovery_goes_on_with_the_stream_after_a_torn_record_and_after_rams_end() {
    let mut stream = ram_listed(false);
    RamRecordWriter::new().zero(0, BLOCK, 0, &mut stream).unwrap();
    let mut again = Vec::new();
    encode_section_part(1, false, &mut again);
    RamRecordWriter::new().zero(0, BLOCK, 4096, &mut again).unwrap();
    RamRecordWriter::eos(&mut again);
    encode_footer(1, &mut again);
    let mut nameless = Vec::new();
    encode_section_part(1, false, &mut nameless);
    let mut writer = RamRecordWriter::new();
    writer.zero(0, BLOCK, 0, &mut Vec::new()).unwrap();
    writer.zero(0, BLOCK, 4096, &mut nameless).unwrap();
    let mut ended = stream.clone();
    RamRecordWriter::eos(&mut ended);
    encode_footer(1, &mut ended);
    encode_section_part(1, true, &mut ended);
    RamRecordWriter::eos(&mut ended);
    encode_footer(1, &mut ended);
    stream.extend_from_slice(&[0; 3]);

    for before in [stream, ended] {
        let mut decoder = MainDecoder::new(Box::new(opaque), expectations());
        read_all(&mut decoder, &before, 1 << 16).unwrap();
        decoder.begin_recovery();
        assert_eq!(decoder.position(), 0);
        let Step::Item { item, .. } = decoder.next(&again).unwrap() else { panic!() };
        assert_eq!(item, MainItem::Zero { block: 0, offset: 4096 });
        // The decoder forgets the block of the records before the loss.
        decoder.begin_recovery();
        assert!(decoder.next(&nameless).is_err());
    }
}
