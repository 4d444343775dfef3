//! Round trips of every message with random values.
//!
//! The seed is printed, and `STERNA_SEED` sets it.

use crate::common::{self, seeded};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use std::collections::HashSet;
use sterna_wire::PAGE_SIZE;
use sterna_wire::extension::{
    ConfigurationRefusal, Features, Handover, MigrationSecret, SourceConfiguration, Status, StatusAnswer,
    StatusQuestion,
};
use sterna_wire::global_state::GlobalState;
use sterna_wire::main::{
    BodyKind, Command, Configuration, Expectations, FileHeader, MainDecoder, MainItem, SectionHeader,
    SectionKind, encode_end, encode_footer, encode_length_prefixed, encode_section_part,
};
use sterna_wire::mapped_ram::MappedHeader;
use sterna_wire::multifd::{
    BlockTable, DeviceStatePacket, InitialPacket, Method, RamPacketEncoder, RamPacketView,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::return_path::ReturnMessage;
use sterna_wire::{vmdesc, xbzrle};

fn name() -> impl Strategy<Value = String> {
    "[a-z0-9./@:_-]{1,40}|[a-z]{255}"
}

fn method() -> impl Strategy<Value = Method> {
    prop_oneof![Just(Method::None), Just(Method::Zlib), Just(Method::Zstd)]
}

fn return_message() -> impl Strategy<Value = ReturnMessage> {
    let request = (proptest::option::of(name()), any::<u64>(), any::<u32>())
        .prop_map(|(block, start, length)| ReturnMessage::RequestPages { block, start, length });
    prop_oneof![
        any::<u32>().prop_map(ReturnMessage::Shut),
        any::<u32>().prop_map(ReturnMessage::Pong),
        request,
        name().prop_map(|block| ReturnMessage::ReceivedBitmap { block }),
        (name(), any::<u32>(), any::<u64>()).prop_map(|(device, instance, bytes)| ReturnMessage::Grant {
            device,
            instance,
            bytes
        }),
        refusal().prop_map(ReturnMessage::ConfigurationRefused),
        Just(ReturnMessage::ResumeAck(1)),
        Just(ReturnMessage::SwitchoverAck),
    ]
}

fn refusal() -> impl Strategy<Value = ConfigurationRefusal> {
    let text = || "[ -~äöü]{0,200}".prop_map(|text| text);
    prop_oneof![
        text().prop_map(ConfigurationRefusal::Vm),
        ("[a-z0-9.-]{1,63}", text()).prop_map(|(name, limit)| ConfigurationRefusal::Setting { name, limit }),
        text().prop_map(ConfigurationRefusal::Other),
    ]
}

fn command() -> impl Strategy<Value = Command> {
    let range = (0u64..1 << 40, 1u64..1 << 20).prop_map(|(start, pages)| (start << 12, pages << 12));
    prop_oneof![
        any::<u32>().prop_map(Command::Ping),
        proptest::option::of((any::<u64>(), any::<u64>())).prop_map(Command::PostcopyAdvise),
        Just(Command::PostcopyListen),
        Just(Command::PostcopyRun),
        (name(), vec(range, 1..=12)).prop_map(|(block, ranges)| Command::PostcopyDiscard { block, ranges }),
        (0u32..=256 << 20).prop_map(Command::Packaged),
        Just(Command::PostcopyResume),
        name().prop_map(Command::ReceivedBitmap),
        Just(Command::SwitchoverStart),
    ]
}

#[test]
fn return_message_encoded_decodes_to_itself() {
    seeded("return_message", &vec(return_message(), 1..8), |messages| {
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| message.encode(&mut bytes).unwrap());

        let (mut decoded, mut rest) = (Vec::new(), bytes.as_slice());
        while let Some((message, used)) = ReturnMessage::decode(rest).unwrap() {
            decoded.push(message);
            rest = &rest[used..];
        }

        prop_assert_eq!(decoded, messages);
        prop_assert!(rest.is_empty());
        Ok(())
    });
}

#[test]
fn source_configuration_encoded_decodes_to_itself() {
    let settings = btree_map("[a-z0-9.-]{1,63}", "[a-z0-9.-]{1,63}", 0..=64);
    seeded("source_configuration", &(settings, vec(any::<u8>(), 0..5000)), |(settings, configuration)| {
        let whole = SourceConfiguration { settings, configuration };
        let body = whole.encode().unwrap();
        prop_assert_eq!(SourceConfiguration::decode(SourceConfiguration::SECTION_VERSION, &body), Ok(whole));
        Ok(())
    });
}

#[test]
fn ram_packet_encoded_decodes_to_itself() {
    let pages = vec((0u64..1 << 20, any::<bool>()), 0..=128);
    let packets = vec((name(), pages, any::<u64>(), 1u32..=1 << 20), 1..4);
    seeded("ram_packet", &(method(), packets), |(method, packets)| {
        // One encoder for all packets: no content of a packet may appear in the next one.
        let mut encoder = RamPacketEncoder::new(method);
        for (name, pages, number, compressed) in packets {
            let table = BlockTable::new([
                ("other".to_owned() + &name[..name.len().min(9)], 4096),
                (name.clone(), 1 << 32),
            ])
            .unwrap();
            let mut seen = HashSet::new();
            let (mut normal, mut zero) = (Vec::new(), Vec::new());
            encoder.begin(&name).unwrap();
            for (page, is_zero) in pages.into_iter().filter(|(page, _)| seen.insert(*page)) {
                let offset = page << 12;
                if is_zero {
                    prop_assert!(encoder.push_zero(offset));
                    zero.push(offset);
                } else {
                    prop_assert!(encoder.push_normal(offset));
                    normal.push(offset);
                }
            }
            let payload = match (normal.len(), method) {
                (0, _) => 0,
                (count, Method::None) => (count * PAGE_SIZE) as u32,
                _ => compressed,
            };
            let bytes = encoder.finish(number, payload);

            let view = RamPacketView::decode(bytes, &table, method).unwrap();

            prop_assert!(!view.is_sync());
            prop_assert_eq!(view.normal().collect::<Vec<_>>(), normal.clone());
            prop_assert_eq!(view.zero().collect::<Vec<_>>(), zero.clone());
            prop_assert_eq!(view.packet_number(), number);
            prop_assert_eq!(view.payload_bytes(), payload as usize);
            prop_assert_eq!(view.block(), (!seen.is_empty()).then_some(1));
            for (runs, offsets) in [(view.normal_runs(), normal), (view.zero_runs(), zero)] {
                let pages =
                    runs.flat_map(|run| (0..run.pages as u64).map(move |page| run.offset + (page << 12)));
                prop_assert_eq!(pages.collect::<Vec<_>>(), offsets);
            }
            let sync = RamPacketView::decode(encoder.sync(number), &table, method).unwrap();
            prop_assert!(sync.is_sync() && sync.block().is_none() && sync.pages_alloc() == 0);
        }
        Ok(())
    });
}

#[test]
fn small_messages_encoded_decode_to_themselves() {
    let ids = (any::<[u8; 16]>(), any::<u8>(), any::<u32>(), 1u32..1 << 20, name(), "[a-z-]{1,31}");
    seeded(
        "small_messages",
        &(ids, any::<u16>()),
        |((uuid, id, instance, length, name, run_state), bits)| {
            let mut bytes = Vec::new();
            let initial = InitialPacket { uuid, id };
            initial.encode(&mut bytes);
            prop_assert_eq!(InitialPacket::decode(&bytes).unwrap(), Some((initial, 64)));

            bytes.clear();
            let state = DeviceStatePacket { name, instance, payload_bytes: length };
            state.encode(&mut bytes).unwrap();
            prop_assert_eq!(DeviceStatePacket::decode(&bytes).unwrap(), Some((state, 276)));

            bytes.clear();
            let secret = MigrationSecret::from_bytes([id; 32]);
            let binding = (bits & 1 == 1).then_some([id; 32]);
            let question = StatusQuestion::new(uuid, [id; 16], &secret, &binding);
            question.encode(&mut bytes);
            prop_assert_eq!(StatusQuestion::decode(&bytes).unwrap(), Some((question, StatusQuestion::BYTES)));
            prop_assert!(question.is_authentic(&secret, &binding));

            for status in [Status::Committed, Status::Never, Status::Pending] {
                bytes.clear();
                let answer = StatusAnswer::new(status, &question, &secret, &binding);
                answer.encode(&mut bytes);
                prop_assert_eq!(StatusAnswer::decode(&bytes).unwrap(), Some((answer, StatusAnswer::BYTES)));
                prop_assert!(answer.is_authentic(&question, &secret, &binding));
            }
            if uuid != [0; 16] {
                for secret in [None, Some(secret)] {
                    let (version, body) = Handover { migration_id: uuid, secret }.encode();
                    let read = Handover::decode(version, &body).unwrap();
                    prop_assert_eq!(read.encode(), (version, body));
                }
            }
            prop_assert_eq!(Features::from_pong(Features(bits).to_pong()), Some(Features(bits)));

            for suspended in [None, Some(false), Some(true)] {
                let state = GlobalState { run_state: run_state.clone(), suspended };
                prop_assert_eq!(GlobalState::decode(&state.encode().unwrap()).unwrap(), state);
            }

            bytes.clear();
            let header = MappedHeader::place(u64::from(instance), u64::from(length) << 12).unwrap();
            header.encode(&mut bytes);
            prop_assert_eq!(MappedHeader::decode(&bytes).unwrap(), Some((header, MappedHeader::BYTES)));
            header.check(u64::from(instance) + 28, u64::from(length) << 12).unwrap();
            Ok(())
        },
    );
}

#[test]
fn xbzrle_delta_of_two_pages_turns_one_into_the_other() {
    let edits = vec((0usize..PAGE_SIZE, vec(any::<u8>(), 1..200)), 0..20);
    seeded("xbzrle", &(any::<u8>(), edits), |(fill, edits)| {
        let old = [fill; PAGE_SIZE];
        let mut new = old;
        for (at, bytes) in edits {
            let end = (at + bytes.len()).min(PAGE_SIZE);
            new[at..end].copy_from_slice(&bytes[..end - at]);
        }
        let mut delta = vec![0xee];

        let made = xbzrle::encode(&old, &new, PAGE_SIZE, &mut delta);

        if made {
            let mut page = old;
            xbzrle::apply(&delta[1..], &mut page).unwrap();
            prop_assert!(page == new);
        } else {
            prop_assert_eq!(delta, [0xee]);
        }
        Ok(())
    });
}

#[test]
fn configuration_encoded_decodes_to_itself() {
    let capabilities =
        proptest::sample::subsequence(vec!["x-ignore-shared".to_owned(), "mapped-ram".to_owned()], 0..=2);
    let parts = (name(), any::<bool>(), capabilities, proptest::option::of(any::<[u8; 16]>()));
    seeded("configuration", &parts, |(machine_type, bits, capabilities, uuid)| {
        let target_page_bits = bits.then_some(12);
        let configuration = Configuration { machine_type, target_page_bits, capabilities, uuid };
        let mut bytes = Vec::new();
        configuration.encode(&mut bytes).unwrap();
        let length = bytes.len();
        prop_assert_eq!(Configuration::decode(&bytes).unwrap(), None, "its end is not clear yet");
        bytes.push(8);

        let decoded = Configuration::decode(&bytes).unwrap();

        prop_assert_eq!(decoded, Some((configuration, length)));
        Ok(())
    });
}

/// A device section: name, body, and whether it is framed by its length. Otherwise it is opaque.
type DeviceSection = (String, Vec<u8>, bool);

fn devices() -> impl Strategy<Value = Vec<DeviceSection>> {
    // Many of these bytes look like parts of footers.
    let body = vec(prop_oneof![any::<u8>(), Just(0x7e), Just(0), Just(8), Just(4)], 0..300);
    vec((name(), body, any::<bool>()), 0..6)
}

/// Selects the framing of a body by its version.
fn by_version(name: &str, _: u32, version: u32, _: SectionKind) -> BodyKind {
    match (name, version) {
        ("ram", 4) => BodyKind::Ram,
        (_, 1) => BodyKind::LengthPrefixed { most: 300 },
        _ => BodyKind::OpaqueByFooter,
    }
}

#[test]
fn main_stream_encoded_decodes_to_itself_in_any_pieces() {
    let records = vec((0usize..2, 0u64..16, 0u8..3, any::<u8>()), 0..12);
    let parts = (devices(), vec(command(), 0..4), vec(records, 0..4), 1usize..3000);
    seeded("main_stream", &parts, |(devices, commands, sections, piece)| {
        let blocks = [("m0", 16u64 << 12), ("rom", 16 << 12)];
        let (mut out, mut expected) = (Vec::new(), Vec::new());
        FileHeader.encode(&mut out);
        expected.push(MainItem::Header);
        let configuration = Configuration { machine_type: "sterna".into(), ..Configuration::default() };
        configuration.encode(&mut out).unwrap();
        expected.push(MainItem::Configuration(configuration));
        let mut commands = commands;
        // This command may occur only once.
        let mut has_come = false;
        commands.retain(|command| {
            *command != Command::SwitchoverStart || !std::mem::replace(&mut has_come, true)
        });
        // After this command, no description follows.
        let is_postcopy = commands.contains(&Command::PostcopyListen);
        for command in std::iter::once(Command::OpenReturnPath).chain(commands) {
            command.encode(&mut out).unwrap();
            expected.push(MainItem::Command(command));
        }
        SectionHeader { id: 77, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
        let entries = blocks.iter().map(|(name, length)| BlockEntry::new(*name, *length));
        let list = BlockList { blocks: entries.collect() };
        // On the wire the order is reversed. The decoder returns the list in the expected order.
        BlockList { blocks: list.blocks.iter().rev().cloned().collect() }.encode(&mut out).unwrap();
        RamRecordWriter::multifd_flush(&mut out);
        RamRecordWriter::eos(&mut out);
        encode_footer(77, &mut out);
        expected.extend([
            MainItem::RamStart(list),
            MainItem::MultifdFlush,
            MainItem::RamEnd { kind: SectionKind::Start },
        ]);
        let mut writer = RamRecordWriter::new();
        let last = sections.len();
        for (index, records) in sections.into_iter().chain([Vec::new()]).enumerate() {
            encode_section_part(77, index == last, &mut out);
            for (block, page, what, fill) in records {
                let (name, offset) = (blocks[block].0, page << 12);
                match what {
                    0 => {
                        writer.zero(block, name, offset, &mut out).unwrap();
                        expected.push(MainItem::Zero { block, offset });
                    }
                    1 => {
                        writer.page_header(block, name, offset, &mut out).unwrap();
                        out.extend_from_slice(&[fill; PAGE_SIZE]);
                        expected.push(MainItem::PagePayloadFollows { block, offset });
                    }
                    _ => {
                        RamRecordWriter::multifd_flush(&mut out);
                        expected.push(MainItem::MultifdFlush);
                    }
                }
            }
            RamRecordWriter::eos(&mut out);
            encode_footer(77, &mut out);
            expected.push(MainItem::RamEnd {
                kind: if index == last { SectionKind::End } else { SectionKind::Part },
            });
        }
        for (index, (name, body, framed)) in devices.iter().enumerate() {
            let (id, instance, version) = (index as u32, index as u32, if *framed { 1 } else { 2 });
            SectionHeader { id, name, instance, version }.encode_full(&mut out).unwrap();
            if *framed {
                encode_length_prefixed(body, &mut out).unwrap();
            } else {
                out.extend_from_slice(body);
            }
            encode_footer(id, &mut out);
            let (name, body, kind) = (name.clone(), body.clone(), SectionKind::Full);
            expected.push(MainItem::Section { name, instance, version, kind, body });
        }
        encode_end(&mut out);
        expected.push(MainItem::Eof);
        if !is_postcopy {
            let text = vmdesc::build("sterna", &[]);
            vmdesc::encode(&text, &mut out).unwrap();
            expected.push(MainItem::VmDescription(text.into_bytes()));
        }
        let expect = Expectations {
            blocks: Some(blocks.iter().map(|(name, length)| ((*name).to_owned(), *length)).collect()),
            multifd: true,
            postcopy: true,
            ..Expectations::default()
        };
        let mut decoder = MainDecoder::new(Box::new(by_version), expect);

        let (seen, left) = common::read_all(&mut decoder, &out, piece).unwrap();

        prop_assert_eq!(left, 0);
        prop_assert_eq!(seen.into_iter().map(|(item, _)| item).collect::<Vec<_>>(), expected);
        prop_assert_eq!(decoder.position(), out.len() as u64);
        Ok(())
    });
}

#[test]
fn description_built_gives_lengths_of_its_fields() {
    let fields = vec((name(), 0u64..1 << 20), 0..6);
    seeded("description", &vec((name(), any::<u32>(), any::<u32>(), fields), 0..6), |devices| {
        let devices: Vec<vmdesc::Device> = devices
            .into_iter()
            .map(|(name, instance, version, fields)| {
                let fields =
                    fields.into_iter().map(|(name, size)| vmdesc::Field::new(name, "buffer", size)).collect();
                vmdesc::Device { name, instance, version, fields }
            })
            .collect();

        let lengths = vmdesc::section_lengths(&vmdesc::build("none", &devices)).unwrap();

        prop_assert_eq!(lengths.len(), devices.len());
        for (length, device) in lengths.iter().zip(&devices) {
            prop_assert_eq!(&length.name, &device.name);
            prop_assert_eq!(length.instance, device.instance);
            prop_assert_eq!(length.length_bytes, device.fields.iter().map(|field| field.size).sum::<u64>());
        }
        Ok(())
    });
}
