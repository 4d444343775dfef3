//! RAM and device state of COLO's checkpoints, after the end of a migration.

use crate::common::{opaque, read_all, seeded};
use proptest::prelude::*;
use sterna_wire::colo::{DeviceList, KnownDevice};
use sterna_wire::main::{
    Configuration, Expectations, FileHeader, MainDecoder, MainItem, SectionHeader, SectionKind, encode_end,
    encode_footer, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::replica::{CheckpointSummary, EpochSection, PageSums};
use sterna_wire::{Fault, PAGE_SIZE, vmdesc};

/// A seeding of one block up to its devices, and its writer of records.
fn seeding(multifd: bool) -> (Vec<u8>, RamRecordWriter) {
    let (mut out, mut records) = (Vec::new(), RamRecordWriter::new());
    FileHeader.encode(&mut out);
    Configuration { machine_type: "pc".into(), ..Configuration::default() }.encode(&mut out).unwrap();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
    BlockList { blocks: vec![BlockEntry::new("m0", 1 << 20)] }.encode(&mut out).unwrap();
    if multifd {
        RamRecordWriter::multifd_flush(&mut out);
    }
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    encode_section_part(1, true, &mut out);
    if !multifd {
        records.page_header(0, "m0", 0, &mut out).unwrap();
        out.extend_from_slice(&[1; PAGE_SIZE]);
    }
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    out.extend_from_slice(&[4]);
    (out, records)
}

/// A decoder after a seeding, the writer, and the stream's length.
fn behind_seeding(multifd: bool) -> (MainDecoder, RamRecordWriter, u64) {
    let expect = Expectations { multifd, opaque_tail: true, ..Expectations::default() };
    let mut decoder = MainDecoder::new(Box::new(opaque), expect);
    let (stream, records) = seeding(multifd);
    let (items, left) = read_all(&mut decoder, &stream, 100).unwrap();
    assert_eq!((items.last().map(|(item, _)| item), left), (Some(&MainItem::Tail), 1));
    (decoder, records, stream.len() as u64)
}

/// RAM of a checkpoint: a page, a zero page, the end.
fn ram(records: &mut RamRecordWriter) -> Vec<u8> {
    let mut out = Vec::new();
    encode_section_part(1, true, &mut out);
    records.page_header(0, "m0", 8192, &mut out).unwrap();
    out.extend_from_slice(&[2; PAGE_SIZE]);
    records.zero(0, "m0", 0, &mut out).unwrap();
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    out.push(0);
    out
}

#[test]
fn checkpoints_come_one_after_the_other_and_continue_the_last_block() {
    for piece in [1, 7, 100, 1 << 20] {
        let (mut decoder, mut records, mut position) = behind_seeding(false);
        for _ in 0..3 {
            let bytes = ram(&mut records);
            // The seeding's last page was in the same block, so that no record names it again.
            assert!(!bytes.windows(2).any(|pair| pair == b"m0"));

            decoder.begin_checkpoint(position).unwrap();
            let (items, left) = read_all(&mut decoder, &bytes, piece).unwrap();

            let items: Vec<_> = items.into_iter().map(|(item, _)| item).collect();
            let wanted = [
                MainItem::PagePayloadFollows { block: 0, offset: 8192 },
                MainItem::Zero { block: 0, offset: 0 },
                MainItem::RamEnd { kind: SectionKind::End },
                MainItem::CheckpointRam,
            ];
            assert_eq!((items, left), (wanted.to_vec(), 0));
            position += bytes.len() as u64;
            assert_eq!(decoder.position(), position);
            assert_eq!(decoder.end_of_file(0), Ok(()));
        }
    }
}

#[test]
fn checkpoint_of_multifd_is_flushes_alone() {
    let (mut decoder, _, position) = behind_seeding(true);
    let bytes = [
        &[3, 0, 0, 0, 1][..],
        &0x200u64.to_be_bytes(),
        &0x200u64.to_be_bytes(),
        &0x10u64.to_be_bytes(),
        &[0x7e, 0, 0, 0, 1, 0],
    ]
    .concat();

    decoder.begin_checkpoint(position).unwrap();
    let (items, _) = read_all(&mut decoder, &bytes, bytes.len()).unwrap();

    let flushes = items.iter().filter(|(item, _)| *item == MainItem::MultifdFlush).count();
    assert_eq!((flushes, items.last().map(|(item, _)| item)), (2, Some(&MainItem::CheckpointRam)));
}

#[test]
fn everything_but_one_end_of_ram_is_refused_in_a_checkpoint() {
    let whole = ram(&mut RamRecordWriter::new());
    let mut twice = whole[..whole.len() - 1].to_vec();
    twice.extend_from_slice(&whole);
    let cases: [(&[u8], &str); 5] = [
        (&[2, 0, 0, 0, 1], "02 instead of the END section (03) of RAM"),
        (&[4, 0, 0, 0, 7], "04 instead of the END section (03) of RAM"),
        (&[0], "00 instead of the END section (03) of RAM"),
        (&[3, 0, 0, 0, 9], "END of section 9, which is not the section of RAM"),
        (&twice, "03 after RAM's END instead of 00"),
    ];
    for (bytes, rule) in cases {
        let (mut decoder, _, position) = behind_seeding(false);
        decoder.begin_checkpoint(position).unwrap();

        let error = read_all(&mut decoder, bytes, bytes.len()).unwrap_err();

        assert_eq!(error.fault, Fault::PeerMisbehaved);
        assert!(error.to_string().contains(rule), "{error}");
        assert!(error.offset >= position, "{error}");
    }
}

#[test]
fn checkpoint_begins_behind_the_end_alone() {
    let (mut decoder, mut records, position) = behind_seeding(false);
    decoder.begin_checkpoint(position).unwrap();
    assert_eq!(decoder.begin_checkpoint(position).unwrap_err().fault, Fault::Local);
    let bytes = ram(&mut records);
    read_all(&mut decoder, &bytes[..20], 20).unwrap();
    assert_eq!(decoder.begin_checkpoint(position).unwrap_err().fault, Fault::Local);

    let mut fresh = MainDecoder::new(Box::new(opaque), Expectations::default());
    assert_eq!(fresh.begin_checkpoint(0).unwrap_err().fault, Fault::Local);
}

#[test]
fn connection_that_ends_at_any_byte_of_a_checkpoints_ram_ends_inside_it() {
    let bytes = ram(&mut RamRecordWriter::new());
    let in_page = 5 + 8 + 3..5 + 8 + 3 + PAGE_SIZE;
    for length in (0..bytes.len()).filter(|length| !in_page.contains(length)) {
        let (mut decoder, _, position) = behind_seeding(false);
        decoder.begin_checkpoint(position).unwrap();

        let (_, left) = read_all(&mut decoder, &bytes[..length], 64).unwrap();

        let error = decoder.end_of_file(left).unwrap_err();
        assert!(error.to_string().contains("inside a checkpoint"), "{length}: {error}");
    }
}

const NAMES: [&str; 4] = ["0000:00:02.0/virtio-mem-device-early", "timer", "apic", "globalstate"];

fn device(index: usize, length_bytes: usize) -> KnownDevice {
    KnownDevice {
        id: 3 + index as u32,
        name: NAMES[index].to_owned(),
        instance: 0,
        version: 1,
        length_bytes,
        is_early: index == 0,
    }
}

fn full(known: &KnownDevice, body: &[u8]) -> Vec<u8> {
    let KnownDevice { id, name, instance, version, .. } = known;
    let mut out = Vec::new();
    SectionHeader { id: *id, name, instance: *instance, version: *version }.encode_full(&mut out).unwrap();
    out.extend_from_slice(body);
    encode_footer(*id, &mut out);
    out
}

fn list(lengths: &[usize]) -> DeviceList {
    let mut list = DeviceList::new();
    lengths.iter().enumerate().for_each(|(index, length)| list.push(device(index, *length)).unwrap());
    list
}

fn blob(bodies: &[&[u8]]) -> Vec<u8> {
    let mut out: Vec<u8> =
        bodies.iter().enumerate().flat_map(|(index, body)| full(&device(index, 0), body)).collect();
    out.push(0);
    out
}

#[test]
fn devices_of_any_bytes_are_found_by_the_lengths_of_the_seeding() {
    // Bytes that look like footers are frequent. The id of the last section does not occur in bodies, so that
    // no shorter state is valid.
    let byte = prop_oneof![Just(0x7eu8), Just(0), Just(3), Just(4), Just(5), 7u8..];
    let bodies = proptest::collection::vec(proptest::collection::vec(byte, 0..60), NAMES.len());
    seeded("colo_devices", &bodies, |bodies| {
        let bodies: Vec<&[u8]> = bodies.iter().map(Vec::as_slice).collect();
        let known = list(&bodies.iter().map(|body| body.len()).collect::<Vec<_>>());
        let bytes = blob(&bodies);

        let found = known.check(&bytes).unwrap();

        for ((section, body), wanted) in found.sections.iter().zip(&bodies) {
            prop_assert_eq!(&bytes[body.clone()], *wanted);
            prop_assert_eq!((bytes[section.start], section.end), (4, body.end + 5));
        }
        for length in 0..bytes.len() {
            prop_assert!(known.check(&bytes[..length]).is_err(), "{} of {} bytes", length, bytes.len());
        }
        Ok(())
    });
}

#[test]
fn devices_whose_length_has_changed_are_found_by_their_footers() {
    let known = list(&[10, 0, 300, 104]);
    // A false footer, followed by bytes that cannot be a section.
    let tricky = [&[0x7e, 0, 0, 0, 4, 4, 0, 0, 0, 9][..], &[1; 20]].concat();
    let bytes = blob(&[&[7; 12], &tricky, &[], &[2; 104]]);

    let found = known.check(&bytes).unwrap();

    let lengths: Vec<_> = found.sections.iter().map(|(_, body)| body.len()).collect();
    assert_eq!(lengths, [12, tricky.len(), 0, 104]);
}

#[test]
fn what_a_guest_writes_to_its_disk_never_passes_for_a_section() {
    let named = |id, name: &str| KnownDevice { id, name: name.into(), instance: 0, ..device(1, 4) };
    let (epoch, last) = (named(7, &EpochSection::name_of("virtio/0")), named(8, "cpu"));
    let mut known = DeviceList::new();
    known.push(epoch.clone()).unwrap();
    known.push(last.clone()).unwrap();
    // In the guest's block: the section's own footer, and a forged state of the processor.
    let forged = [&[0x7e, 0, 0, 0, 7][..], &full(&last, b"forged")].concat();
    let framed = |length: usize, bytes: &[u8]| [&(length as u32).to_be_bytes()[..], bytes].concat();
    let with = |body: &[u8]| [&full(&epoch, body)[..], &full(&last, b"true"), &[0]].concat();
    let body = framed(forged.len(), &forged);
    let bytes = with(&body);

    let found = known.check(&bytes).unwrap();

    let bodies: Vec<_> = found.sections.iter().map(|(_, body)| &bytes[body.clone()]).collect();
    assert_eq!(bodies, [&body[..], b"true"]);
    for wrong in [forged.len() - 1, 1 << 30, u32::MAX as usize] {
        let error = known.check(&with(&framed(wrong, &forged))).unwrap_err();
        assert!(error.to_string().contains("\"virtio/0/epoch\" instance 0 does not end after"), "{error}");
    }
    assert!(known.check(&with(&[0; 3])).is_err());
}

#[test]
fn summary_is_found_whatever_its_digests_are() {
    let summary =
        KnownDevice { id: 7, name: CheckpointSummary::SECTION_NAME.into(), instance: 0, ..device(1, 44) };
    let mut known = DeviceList::new();
    known.push(device(0, 4)).unwrap();
    known.push(summary.clone()).unwrap();
    // The section's own footer, followed by the end.
    let pages = PageSums { digest: 0x7e00_0000_0700_0000, ..PageSums::default() };
    let said = CheckpointSummary { number: 3, pages, sections: 0 };
    let body = [&40_u32.to_be_bytes()[..], &said.encode()].concat();
    let bytes = [&full(&device(0, 4), &[9; 4])[..], &full(&summary, &body), &[0]].concat();

    let found = known.check(&bytes).unwrap();

    assert_eq!(bytes[found.sections[1].1.clone()], body[..]);
    assert_eq!(found.sections[1].0.end, bytes.len() - 1);
}

#[test]
fn devices_that_are_not_those_of_the_seeding_are_refused_by_name() {
    let known = list(&[4, 4, 4, 4]);
    let sections: Vec<Vec<u8>> = (0..4).map(|index| full(&device(index, 4), &[9; 4])).collect();
    let other_id = full(&KnownDevice { id: 99, ..device(2, 4) }, &[9; 4]);
    let other_version = full(&KnownDevice { version: 2, ..device(2, 4) }, &[9; 4]);
    let stranger = full(&KnownDevice { name: "e1000".into(), id: 50, ..device(2, 4) }, &[9; 4]);
    let with = |parts: &[&[u8]]| [&parts.concat()[..], &[0]].concat();
    let cases = [
        (with(&[&sections[0], &sections[1], &sections[3]]), "\"apic\" instance 0 of the seeding is missing"),
        // Read as one long section, because no other element could follow its first footer.
        (with(&[&sections[0], &sections[0]]), "\"timer\" instance 0 of the seeding is missing"),
        (with(&[&other_id]), "has id 99"),
        (with(&[&other_version]), "has id 5 and version 2"),
        (with(&[&stranger]), "\"e1000\" instance 0 was not in the seeding"),
        (with(&[&sections[0], &[8, 0, 2, 0, 4]]), "instance 0 has no end"),
        (sections.concat(), "does not end with EOF"),
        (Vec::new(), "does not end with EOF"),
        (vec![0], "is missing"),
    ];
    for (bytes, rule) in cases {
        let error = known.check(&bytes).unwrap_err();

        assert_eq!(error.fault, Fault::PeerMisbehaved);
        assert!(error.to_string().contains(rule), "{error}\n{rule}");
    }
}

#[test]
fn list_of_a_seeding_has_its_sections_with_their_lengths() {
    let bodies: [&[u8]; 3] = [&[0x7e, 0, 0, 0, 4, 0x55], &[0x7e; 40], &[0; 104]];
    let tail: Vec<u8> =
        bodies.iter().zip(1..).flat_map(|(body, index)| full(&device(index, 0), body)).collect();
    let described: Vec<_> = (0..4)
        .map(|index| {
            let length = if index == 0 { 17 } else { bodies[index - 1].len() as u64 };
            let fields = vec![vmdesc::Field::new("data", "buffer", length)];
            vmdesc::Device { name: NAMES[index].to_owned(), instance: 0, version: 1, fields }
        })
        .collect();
    let text = vmdesc::build("pc", &described);

    for description in [Some(text.as_bytes()), Some(&b"{"[..]), None] {
        let mut known = DeviceList::new();
        known.push(device(0, 17)).unwrap();
        known.push_tail(&tail, description).unwrap();

        let wanted: Vec<_> =
            [17, 6, 40, 104].iter().enumerate().map(|(index, length)| device(index, *length)).collect();
        assert_eq!(known.devices(), wanted);
        assert_eq!(known.find("apic", 0), Some(2));
        assert!(known.push(device(2, 1)).is_err(), "twice");
    }
    assert!(DeviceList::new().push_tail(&tail[..tail.len() - 1], None).is_err());
    let mut end = tail;
    encode_end(&mut end);
    assert!(DeviceList::new().push_tail(&end, None).is_err());
}
