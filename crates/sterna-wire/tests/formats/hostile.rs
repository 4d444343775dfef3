//! Damages sample messages by every truncation and by changes of single bytes.
//!
//! The result is an error, another value or a wait for more bytes, but never a panic. A counting allocator
//! proves the bound on memory: the live bytes that a decoder adds stay below [`FACTOR`] × received bytes +
//! [`FLOOR`].

use crate::common::{expectations, informed, opaque, read_all, vector};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use sterna_wire::extension::{
    ConfigurationRefusal, Handover, MigrationSecret, SourceConfiguration, Status, StatusAnswer,
    StatusQuestion,
};
use sterna_wire::global_state::GlobalState;
use sterna_wire::main::{
    BodyKind, Command, Configuration, Expectations, FileHeader, MainDecoder, SectionHeader, SectionKind,
    encode_end, encode_footer, encode_length_prefixed, encode_section_part,
};
use sterna_wire::mapped_ram::MappedHeader;
use sterna_wire::multifd::{
    BlockTable, DeviceChunk, DeviceChunkKind, DeviceStatePacket, InitialPacket, Method, PacketHeader,
    RamPacketView,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::rdma::{
    BlockPlace, BlockPlaces, ChunkSize, ConnectReply, ConnectRequest, Introduction, Message, Part,
    RegisterRequest, Registration, ZeroRange, encode_file, encode_records,
};
use sterna_wire::return_path::ReturnMessage;
use sterna_wire::{PAGE_SIZE, vmdesc, xbzrle};

/// Most bytes of memory per received byte. A section's entry in two tables needs the most.
const FACTOR: usize = 64;
/// Additional memory in bytes, for an error's text and for tables at their first growth.
const FLOOR: usize = 8 << 10;

struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    // Ignore allocations at the end of a thread, when its thread-local values are gone.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call passes its arguments to `System` unchanged. Counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller guarantees the requirements on `layout`, and `System` has the same ones.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `pointer` comes from `System` with this layout, as does every pointer from this allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Runs `decode`. Returns the largest increase of live memory, in bytes.
fn peak(decode: impl FnOnce()) -> usize {
    let before = LIVE.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    decode();
    (PEAK.with(Cell::get) - before) as usize
}

#[test]
fn counting_allocator_sees_what_is_held() {
    let held = peak(|| drop(std::hint::black_box(vec![1u8; 100_000])));

    assert!((100_000..101_000).contains(&held), "{held}");
}

fn check(what: &str, bytes: &[u8], decode: &dyn Fn(&[u8])) {
    let held = peak(|| decode(bytes));
    let allowed = FACTOR * bytes.len() + FLOOR;
    assert!(held <= allowed, "{what}: {held} bytes held for {} that arrived, {allowed} allowed", bytes.len());
}

/// Tries every truncation, and several values for every byte.
///
/// The values are: each single bit flipped, 0, ff, plus one, minus one.
fn assault(what: &str, sample: &[u8], decode: &dyn Fn(&[u8])) {
    for end in 0..=sample.len() {
        check(what, &sample[..end], decode);
    }
    let mut changed = sample.to_vec();
    for at in 0..sample.len() {
        let old = sample[at];
        let bits = (0..8).map(|bit| old ^ 1 << bit);
        for new in bits.chain([0, 0xff, old.wrapping_add(1), old.wrapping_sub(1)]) {
            changed[at] = new;
            check(what, &changed, decode);
        }
        changed[at] = old;
    }
}

#[test]
fn small_messages_changed_or_cut_are_refused_or_other_values() {
    type Decode = fn(&[u8]);
    let mut samples: Vec<(&str, Vec<u8>, Decode)> = Vec::new();
    let mut add = |what, fill: &dyn Fn(&mut Vec<u8>), decode: Decode| {
        let mut bytes = Vec::new();
        fill(&mut bytes);
        samples.push((what, bytes, decode));
    };
    add("initial packet", &|out| InitialPacket { uuid: [9; 16], id: 1 }.encode(out), |b| {
        let _ = InitialPacket::decode(b);
    });
    let state = DeviceStatePacket { name: "0000:00:02.0/vfio".into(), instance: 1, payload_bytes: 77 };
    add("device-state packet", &|out| state.encode(out).unwrap(), |b| {
        let _ = DeviceStatePacket::decode(b);
        let _ = PacketHeader::peek(b);
    });
    for message in [
        ReturnMessage::Shut(0),
        ReturnMessage::Pong(7),
        ReturnMessage::RequestPages { block: Some("pc.ram".into()), start: 4096, length: 8192 },
        ReturnMessage::RequestPages { block: None, start: 4096, length: 8192 },
        ReturnMessage::ReceivedBitmap { block: "pc.ram".into() },
        ReturnMessage::ResumeAck(1),
        ReturnMessage::SwitchoverAck,
        ReturnMessage::Grant { device: "bank".into(), instance: 1, bytes: 1 << 20 },
        ReturnMessage::ConfigurationRefused(ConfigurationRefusal::Vm("no memory".into())),
        ReturnMessage::ConfigurationRefused(ConfigurationRefusal::Setting {
            name: "multifd-channels".into(),
            limit: "at most 4".into(),
        }),
    ] {
        add("return path", &|out| message.encode(out).unwrap(), |b| {
            let _ = ReturnMessage::decode(b);
        });
    }
    let settings = [("multifd-channels".into(), "4".into()), ("postcopy-ram".into(), "on".into())].into();
    let from_source = SourceConfiguration { settings, configuration: b"vcpus=2".to_vec() };
    add("source configuration", &|out| out.extend(from_source.encode().unwrap()), |b| {
        let _ = SourceConfiguration::decode(1, b);
    });
    let kind = DeviceChunkKind::Configuration { total_bytes: Some(1 << 20) };
    add("device chunk", &|out| DeviceChunk { index: 3, kind }.encode(out), |b| {
        let _ = DeviceChunk::decode(b);
    });
    let secret = MigrationSecret::from_bytes([7; 32]);
    let question = StatusQuestion::new([3; 16], [4; 16], &secret, &None);
    add("status question", &|out| question.encode(out), |b| {
        let _ = StatusQuestion::decode(b);
    });
    let answer = StatusAnswer::new(Status::Never, &question, &secret, &None);
    add("status answer", &|out| answer.encode(out), |b| {
        let _ = StatusAnswer::decode(b);
    });
    let handover = Handover { migration_id: [1; 16], secret: Some(secret) };
    add("handover", &|out| out.extend(handover.encode().1), |b| {
        let _ = (Handover::decode(1, b), Handover::decode(2, b), Handover::decode(3, b));
    });
    let state = GlobalState { run_state: "running".into(), suspended: Some(false) };
    add("globalstate", &|out| out.extend(state.encode().unwrap()), |b| {
        let _ = GlobalState::decode(b);
    });
    add("mapped-ram header", &|out| MappedHeader::place(0x6e, 64 << 20).unwrap().encode(out), |b| {
        if let Ok(Some((header, _))) = MappedHeader::decode(b) {
            let _ = header.check(0x8a, 64 << 20);
        }
    });
    add("RDMA stream", &|out| encode_file(&[1; 40], out).unwrap(), rdma);
    let place = BlockPlace { host_address: 1 << 40, offset: 1 << 30, length_bytes: 4 << 20, key: 7 };
    add("RDMA blocks", &|out| encode_records(&[place; 2], out).unwrap(), rdma);
    let request = RegisterRequest { key: 1 << 30, block: 1, more_chunks: 2 };
    add("RDMA registration", &|out| encode_records(&[request; 2], out).unwrap(), rdma);
    let zero = ZeroRange { value: 0, block: 1, start: 1 << 30, length: 1 << 20 };
    add("RDMA zero range", &|out| encode_records(&[zero; 2], out).unwrap(), rdma);
    let connect = connect();
    add("RDMA request", &|out| out.extend(connect.to_bytes()), |b| {
        let _ = ConnectRequest::decode(b);
    });
    let reply = connect.reply(2, ChunkSize::LEAST).unwrap();
    add("RDMA reply", &|out| out.extend(reply.to_bytes()), |b| {
        let _ = ConnectReply::decode(b, &self::connect());
    });
    let delta = [0x10, 1, 0xa3, 0xef, 3, 2, 0x75, 0x6f, 0xfd, 0x1b, 1, 0xa3];
    add("XBZRLE delta", &|out| out.extend(delta), |b| {
        let mut page = [0; PAGE_SIZE];
        let _ = xbzrle::apply(b, &mut page);
    });
    let configuration = Configuration {
        machine_type: "pc-i440fx-11.1".into(),
        target_page_bits: Some(12),
        capabilities: vec!["x-ignore-shared".into(), "mapped-ram".into()],
        uuid: Some([7; 16]),
    };
    let fill = |out: &mut Vec<u8>| {
        configuration.encode(out).unwrap();
        out.push(8);
    };
    add("configuration", &fill, |b| {
        let _ = Configuration::decode(b).map(|read| read.map(|(it, _)| it.check(&Expectations::default())));
    });

    for (what, bytes, decode) in &samples {
        assault(what, bytes, decode);
    }
    assert_eq!(samples.len(), 27);
}

fn connect() -> ConnectRequest {
    let (part, chunk) = (Part::Lane(1), ChunkSize::LEAST);
    let introduction = Introduction { version: 1, part, lanes: 2, chunk, session: [3; 16], nonce: [4; 16] };
    ConnectRequest { pin_all: true, introduction: Some(introduction) }
}

/// Decodes a control message, and checks its records against two blocks.
fn rdma(bytes: &[u8]) {
    let place = BlockPlace { host_address: 1 << 40, offset: 1 << 30, length_bytes: 4 << 20, key: 7 };
    let places = BlockPlaces::new(vec![place; 2]).unwrap();
    match Message::decode(bytes) {
        Ok(Message::RamBlocksResult(list)) => {
            let _ = BlockPlaces::agreed(&list, &[4 << 20; 2], Registration::PinAll);
        }
        Ok(Message::RegisterRequest(list)) => {
            list.iter().for_each(|(at, record)| drop(places.requested(&record, ChunkSize::LEAST, at)));
        }
        Ok(Message::Compress(list)) => {
            list.iter().for_each(|(at, record)| drop(places.cleared(&record, at)));
        }
        _ => {}
    }
}

#[test]
fn ram_packets_changed_are_refused_or_other_values() {
    let table = BlockTable::new([("m0".to_owned(), 4 << 20)]).unwrap();
    for (name, method) in [("none", Method::None), ("zlib", Method::Zlib), ("zstd", Method::Zstd)] {
        let channel = vector(&format!("multifd2-{name}.1"));
        // The SYNC and the first packet with pages.
        for at in [64, 64 + 1344] {
            let decode = |bytes: &[u8]| {
                let Some(bytes) = bytes.first_chunk() else { return };
                let Ok(view) = RamPacketView::decode(bytes, &table, method) else { return };
                for offset in view.normal().chain(view.zero()) {
                    assert!(offset % 4096 == 0 && offset < 4 << 20);
                }
                assert!(view.payload_bytes() <= 1 << 20);
            };
            assault("RAM packet", &channel[at..at + 1344], &decode);
        }
    }
}

#[test]
fn ram_packet_decoding_and_encoding_allocate_nothing() {
    let table = BlockTable::new([("m0".to_owned(), 4 << 20)]).unwrap();
    let channel = vector("multifd2-none.1");
    let bytes = channel[64 + 1344..].first_chunk().unwrap();
    let mut encoder = sterna_wire::multifd::RamPacketEncoder::new(Method::None);

    let held = peak(|| {
        let view = RamPacketView::decode(bytes, &table, Method::None).unwrap();
        encoder.begin("m0").unwrap();
        assert!(view.normal().all(|offset| encoder.push_normal(offset)));
        assert!(view.zero().all(|offset| encoder.push_zero(offset)));
        encoder.finish(1, view.payload_bytes() as u32);
        encoder.sync(2);
        assert!(view.normal_runs().count() > 0);
    });

    assert_eq!(held, 0);
}

/// A stream with every kind of element and record, small enough to try every change.
fn rich_stream() -> Vec<u8> {
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out).unwrap();
    let put = |command: Command, out: &mut Vec<u8>| command.encode(out).unwrap();
    put(Command::OpenReturnPath, &mut out);
    put(Command::Ping(1), &mut out);
    put(Command::PostcopyAdvise(Some((4096, 4096))), &mut out);
    SectionHeader { id: 9, name: "framed", instance: 0, version: 1 }.encode_full(&mut out).unwrap();
    encode_length_prefixed(&[1; 16], &mut out).unwrap();
    encode_footer(9, &mut out);
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
    let blocks = vec![BlockEntry::new("m0", 4 << 20), BlockEntry::new("b", 4096)];
    BlockList { blocks }.encode(&mut out).unwrap();
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    encode_section_part(1, false, &mut out);
    let mut records = RamRecordWriter::new();
    records.zero(0, "m0", 0, &mut out).unwrap();
    records.xbzrle(0, "m0", 4096, &[0x10, 1, 0xa3, 0xef, 3, 2, 0x75, 0x6f], &mut out).unwrap();
    records.zero(1, "b", 0, &mut out).unwrap();
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    put(Command::PostcopyDiscard { block: "m0".into(), ranges: vec![(0, 4096), (8192, 4096)] }, &mut out);
    put(Command::ReceivedBitmap("m0".into()), &mut out);
    put(Command::SwitchoverStart, &mut out);
    encode_section_part(1, true, &mut out);
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    SectionHeader { id: 3, name: "opaque", instance: 0, version: 2 }.encode_full(&mut out).unwrap();
    out.extend_from_slice(&[0x7e, 0, 0, 0, 3, 9, 0, 0, 0x7e, 0, 0]);
    encode_footer(3, &mut out);
    put(Command::Ping(2), &mut out);
    encode_end(&mut out);
    vmdesc::encode(&vmdesc::build("none", &[]), &mut out).unwrap();
    out
}

fn framed(name: &str, instance: u32, version: u32, kind: SectionKind) -> BodyKind {
    if name == "framed" {
        BodyKind::LengthPrefixed { most: usize::MAX }
    } else {
        opaque(name, instance, version, kind)
    }
}

#[test]
fn main_stream_changed_or_cut_is_refused_or_another_stream() {
    let rich = rich_stream();
    let expect = Expectations { postcopy: true, ..Expectations::default() };
    assert_eq!(read(framed, &expect, &rich), Ok(0), "the sample itself is sound");
    assault("rich stream", &rich, &|bytes| {
        let _ = read(framed, &expect, bytes);
    });
    let captured = vector("multifd2-none.0");
    let expect = Expectations { multifd: true, ..expectations() };
    assert_eq!(read(informed, &expect, &captured), Ok(0), "the sample itself is sound");
    assault("captured stream", &captured, &|bytes| {
        let _ = read(informed, &expect, bytes);
    });
}

/// Decodes a stream. Returns the number of bytes left over.
fn read(
    knowledge: fn(&str, u32, u32, SectionKind) -> BodyKind,
    expect: &Expectations,
    bytes: &[u8],
) -> Result<usize, sterna_wire::WireError> {
    let mut decoder = MainDecoder::new(Box::new(knowledge), expect.clone());
    let (_, left) = read_all(&mut decoder, bytes, 100)?;
    decoder.end_of_file(left)?;
    Ok(left)
}

#[test]
fn description_changed_or_cut_is_refused_or_another() {
    let main = vector("multifd2-none.0");
    let text = main.windows(7).rposition(|w| w[0] == 0 && w[1] == 6 && w[6] == b'{').unwrap() + 6;
    assault("description", &main[text..], &|bytes| {
        if let Ok(text) = std::str::from_utf8(bytes) {
            let _ = vmdesc::section_lengths(text);
        }
    });
}

#[test]
fn announced_sizes_allocate_nothing_before_bytes_arrive() {
    let mut opened = Vec::new();
    FileHeader.encode(&mut opened);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut opened).unwrap();
    let mut body = opened.clone();
    SectionHeader { id: 9, name: "framed", instance: 0, version: 1 }.encode_full(&mut body).unwrap();
    body.extend_from_slice(&(1u32 << 30).to_be_bytes());
    let mut list = opened.clone();
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut list).unwrap();
    list.extend_from_slice(&(u64::MAX << 12 | 4).to_be_bytes());
    let description = [&opened[..], &[0, 6, 1, 0, 0, 0]].concat();
    let machine = [&opened[..9], &255u32.to_be_bytes()].concat();
    for (what, bytes) in
        [("body", body), ("block list", list), ("description", description), ("machine", machine)]
    {
        let held = peak(|| {
            let mut decoder = MainDecoder::new(Box::new(framed), Expectations::default());
            read_all(&mut decoder, &bytes, 1).unwrap();
        });
        assert!(held < FLOOR, "{what}: {held} bytes");
    }
}
