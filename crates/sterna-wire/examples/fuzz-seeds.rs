//! Writes seeds for the fuzz targets, from golden vectors and from encoded messages.
//!
//! Run `cargo run -p sterna-wire --example fuzz-seeds -- fuzz/seeds`. The argument is the target directory.

use std::io::Read;
use std::path::Path;
use sterna_wire::colo::Message;
use sterna_wire::extension::{
    ConfigurationRefusal, Features, HandedOver, Handover, Holds, KEEPALIVE_PING, MemoryAnswer, MemoryOffer,
    MigrationSecret, POSTCOPY_STARTED_PING, PREPARE_PING, PreemptHello, RECONNECT_PING, ROUND_PING,
    ReconnectAnswer, ReconnectChannel, ReconnectHello, SHUT_PAGE_FAILED, SHUT_PAUSED, SourceConfiguration,
    Status, StatusAnswer, StatusQuestion, encode_held,
};
use sterna_wire::global_state::GlobalState;
use sterna_wire::main::{
    Command, Configuration, FileHeader, SectionHeader, encode_end, encode_footer, encode_length_prefixed,
    encode_section_part,
};
use sterna_wire::mapped_ram::MappedHeader;
use sterna_wire::multifd::{
    DeviceChunk, DeviceChunkKind, DeviceStatePacket, Method, RamPacketEncoder, push_difference,
};
use sterna_wire::nbd::{CommandKind, DiskHello, Request};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::rdma::{
    BlockPlace, ChunkSize, ConnectRequest, Introduction, MessageType, Part, RegisterRequest, RegisterResult,
    UnregisterRequest, ZeroRange, encode_empty, encode_file, encode_records,
};
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::replica::{self, Hello, Role, Session, Terms, Welcome};
use sterna_wire::return_path::ReturnMessage;
use sterna_wire::{PAGE_SIZE, WireError, vmdesc};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let directory = std::env::args().nth(1).ok_or("give the directory to write to")?;
    let seeds = Seeds(directory.into());
    main_channel(&seeds)?;
    multifd_packet(&seeds)?;
    rdma(&seeds)?;
    replica(&seeds)?;
    colo(&seeds)?;
    nbd(&seeds)?;
    small_messages(&seeds)?;
    extension(&seeds)
}

struct Seeds(std::path::PathBuf);

impl Seeds {
    fn put(&self, target: &str, name: &str, parts: &[&[u8]]) -> std::io::Result<()> {
        let directory = self.0.join(target);
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join(name), parts.concat())
    }
}

fn vector(name: &str) -> std::io::Result<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(format!("{name}.gz"));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path)?).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Seeds for the main channel. The first byte selects expectations: bit 1 blocks, 2 multifd, 3 RDMA, 4
/// mapped-ram, 6 postcopy. The second byte selects the size of the pieces.
fn main_channel(seeds: &Seeds) -> Result<(), Failure> {
    let multifd = vector("multifd2-none.0")?;
    seeds.put("main_channel", "multifd", &[&[0b0111, 50], &multifd])?;
    let alone = vector("main.0")?;
    // Two and a half pages. Another seed covers the end of such a stream.
    seeds.put("main_channel", "alone", &[&[0b0011, 200], &alone[..10_000]])?;
    let file = vector("file-mapped-ram")?;
    seeds.put("main_channel", "mapped-ram", &[&[0b0001_0011, 9], &file[..200]])?;
    seeds.put("main_channel", "sterna", &[&[0b0100_0000, 33], &hand_made()?])?;
    seeds.put("main_channel", "postcopy", &[&[0b0100_0100, 17], &postcopy()?])?;
    seeds.put("main_channel", "rdma", &[&[0b0000_1000, 7], &over_rdma()?])?;
    let configuration = &alone[FileHeader::BYTES..FileHeader::BYTES + 10];
    seeds.put("configuration", "captured", &[configuration])?;
    let mut rich = Vec::new();
    Configuration {
        machine_type: "pc-i440fx-11.1".into(),
        target_page_bits: Some(12),
        capabilities: vec!["x-ignore-shared".into(), "mapped-ram".into()],
        uuid: Some([7; 16]),
    }
    .encode(&mut rich)?;
    seeds.put("configuration", "rich", &[&rich, &[1]])?;
    Ok(())
}

/// A stream with every kind of element and record.
fn hand_made() -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out)?;
    Command::OpenReturnPath.encode(&mut out)?;
    Command::Ping(1).encode(&mut out)?;
    Command::PostcopyAdvise(Some((4096, 4096))).encode(&mut out)?;
    SectionHeader { id: 9, name: "sterna/handover", instance: 0, version: 2 }.encode_full(&mut out)?;
    encode_length_prefixed(&[1; Handover::BODY_BYTES], &mut out)?;
    encode_footer(9, &mut out);
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out)?;
    BlockList { blocks: vec![BlockEntry::new("m0", 4 << 20), BlockEntry::new("b", 4096)] }
        .encode(&mut out)?;
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    encode_section_part(1, false, &mut out);
    let mut records = RamRecordWriter::new();
    records.zero(0, "m0", 0, &mut out)?;
    records.xbzrle(0, "m0", 4096, &[0x10, 1, 0xa3, 0xef, 3, 2, 0x75, 0x6f], &mut out)?;
    records.zero(1, "b", 0, &mut out)?;
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    Command::PostcopyDiscard { block: "m0".into(), ranges: vec![(0, 4096), (8192, 4096)] }
        .encode(&mut out)?;
    Command::ReceivedBitmap("m0".into()).encode(&mut out)?;
    Command::SwitchoverStart.encode(&mut out)?;
    encode_section_part(1, true, &mut out);
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    SectionHeader { id: 3, name: "timer", instance: 0, version: 2 }.encode_full(&mut out)?;
    out.extend_from_slice(&[0x7e, 0, 0, 0, 3, 9, 0, 0, 0x7e, 0, 0]);
    encode_footer(3, &mut out);
    Command::Ping(2).encode(&mut out)?;
    encode_end(&mut out);
    vmdesc::encode(&vmdesc::build("none", &[]), &mut out)?;
    Ok(out)
}

/// A postcopy stream: the package, and pages after the start of the guest.
fn postcopy() -> Result<Vec<u8>, WireError> {
    let mut package = Vec::new();
    Command::PostcopyListen.encode(&mut package)?;
    SectionHeader { id: 3, name: "timer", instance: 0, version: 2 }.encode_full(&mut package)?;
    package.extend_from_slice(&[5; 8]);
    encode_footer(3, &mut package);
    Command::Ping(PREPARE_PING).encode(&mut package)?;
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out)?;
    Command::OpenReturnPath.encode(&mut out)?;
    Command::PostcopyAdvise(Some((4096, 4096))).encode(&mut out)?;
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out)?;
    BlockList { blocks: vec![BlockEntry::new("m0", 4 << 20)] }.encode(&mut out)?;
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    encode_section_part(1, false, &mut out);
    let mut records = RamRecordWriter::new();
    records.zero(0, "m0", 0, &mut out)?;
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    for ping in [RECONNECT_PING, ROUND_PING, KEEPALIVE_PING] {
        Command::Ping(ping).encode(&mut out)?;
    }
    Command::SwitchoverStart.encode(&mut out)?;
    Command::PostcopyDiscard { block: "m0".into(), ranges: vec![(0, 4096)] }.encode(&mut out)?;
    Command::Packaged(package.len() as u32).encode(&mut out)?;
    out.extend_from_slice(&package);
    Command::PostcopyRun.encode(&mut out)?;
    Command::Ping(POSTCOPY_STARTED_PING).encode(&mut out)?;
    Command::ReceivedBitmap("m0".into()).encode(&mut out)?;
    Command::PostcopyResume.encode(&mut out)?;
    for last in [false, true] {
        encode_section_part(1, last, &mut out);
        RamRecordWriter::multifd_flush(&mut out);
        RamRecordWriter::eos(&mut out);
        encode_footer(1, &mut out);
    }
    encode_end(&mut out);
    Ok(out)
}

/// Two checkpoints of a COLO primary. The first byte selects multifd (bit 0) and the size of the pieces.
fn colo(seeds: &Seeds) -> Result<(), Failure> {
    for (name, multifd) in [("alone", false), ("multifd", true)] {
        let (mut out, mut records) = (Vec::new(), RamRecordWriter::new());
        for _ in 0..2 {
            Message::CheckpointRequest.encode(&mut out)?;
            Message::VmstateSend.encode(&mut out)?;
            encode_section_part(1, true, &mut out);
            if multifd {
                RamRecordWriter::multifd_flush(&mut out);
            } else {
                records.page_header(0, "m0", 4096, &mut out)?;
                out.extend_from_slice(&[7; PAGE_SIZE]);
                records.zero(0, "m0", 8192, &mut out)?;
            }
            RamRecordWriter::eos(&mut out);
            encode_footer(1, &mut out);
            encode_end(&mut out);
            let mut devices = Vec::new();
            for (id, name, length) in [(0, "timer", 24), (3, "globalstate", 104)] {
                SectionHeader { id, name, instance: 0, version: 1 }.encode_full(&mut devices)?;
                devices.resize(devices.len() + length, 5);
                encode_footer(id, &mut devices);
            }
            encode_end(&mut devices);
            Message::VmstateSize { bytes: devices.len() as u64 }.encode(&mut out)?;
            out.extend_from_slice(&devices);
        }
        seeds.put("colo_message", name, &[&[40 | u8::from(multifd)], &out])?;
    }
    Ok(())
}

/// A stream with memory over RDMA.
fn over_rdma() -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out)?;
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out)?;
    BlockList { blocks: vec![BlockEntry::new("m0", 4 << 20)] }.encode(&mut out)?;
    for last in [None, Some(false), Some(true)] {
        if let Some(last) = last {
            encode_section_part(1, last, &mut out);
        }
        RamRecordWriter::hook(&mut out);
        RamRecordWriter::eos(&mut out);
        encode_footer(1, &mut out);
    }
    encode_end(&mut out);
    vmdesc::encode(&vmdesc::build("none", &[]), &mut out)?;
    Ok(out)
}

fn multifd_packet(seeds: &Seeds) -> Result<(), Failure> {
    for (choice, name) in [(0, "none"), (1, "zlib"), (2, "zstd")] {
        let channel = vector(&format!("multifd2-{name}.1"))?;
        // Initial packet, SYNC, pages.
        seeds.put("multifd_packet", &format!("{name}-initial"), &[&[choice], &channel[..64]])?;
        seeds.put("multifd_packet", &format!("{name}-sync"), &[&[choice], &channel[64..64 + 1344]])?;
        seeds.put("multifd_packet", &format!("{name}-pages"), &[&[choice], &channel[1408..1408 + 1344]])?;
    }
    let mut state = Vec::new();
    DeviceStatePacket { name: "0000:00:02.0/vfio".into(), instance: 0, payload_bytes: 77 }
        .encode(&mut state)?;
    seeds.put("multifd_packet", "device-state", &[&[0], &state])?;
    for (name, kind) in [
        ("chunk", DeviceChunkKind::Data { initial_ends: false }),
        ("chunk-initial", DeviceChunkKind::Data { initial_ends: true }),
        ("chunk-configuration", DeviceChunkKind::Configuration { total_bytes: None }),
        ("chunk-total", DeviceChunkKind::Configuration { total_bytes: Some(77) }),
    ] {
        let mut chunk = Vec::new();
        DeviceChunk { index: 3, kind }.encode(&mut chunk);
        seeds.put("multifd_packet", name, &[&[0], &chunk, b"contents"])?;
    }
    let mut encoder = RamPacketEncoder::new(Method::None);
    encoder.begin("m0")?;
    let is_taken = [0, 0x3000].into_iter().all(|offset| encoder.push_normal(offset));
    debug_assert!(is_taken, "two pages fit");
    let mut payload = Vec::new();
    push_difference(&[16, 1, 7], &mut payload)?;
    push_difference(&[0xff, 0x1f, 1, 9], &mut payload)?;
    let packet = encoder.finish_differences(5, payload.len() as u32);
    seeds.put("multifd_packet", "differences", &[&[0], packet])?;
    // For a payload, the first byte is the number of pages.
    seeds.put("multifd_packet", "differences-payload", &[&[2], &payload])?;
    Ok(())
}

/// The messages of one migration that a destination receives, and those that a source receives. The first byte
/// selects the chunk size.
fn rdma(seeds: &Seeds) -> Result<(), Failure> {
    let (mut commands, mut answers) = (Vec::new(), Vec::new());
    let out = &mut commands;
    encode_file(&0x80_u64.to_be_bytes(), out)?;
    encode_empty(MessageType::RamBlocksRequest, 1, out)?;
    encode_empty(MessageType::RegisterFinished, 1, out)?;
    encode_file(&0x10_u64.to_be_bytes(), out)?;
    encode_records(&[RegisterRequest { key: 0x4000_1000, block: 0, more_chunks: 2 }], out)?;
    encode_records(&[ZeroRange { value: 0, block: 1, start: 0, length: 12 << 10 }], out)?;
    encode_records(&[UnregisterRequest { chunk: 1, block: 0 }], out)?;
    encode_empty(MessageType::RegisterFinished, 1, out)?;
    encode_empty(MessageType::Error, 1, out)?;
    seeds.put("rdma_control", "commands", &[&[0], &commands])?;
    let out = &mut answers;
    encode_empty(MessageType::Ready, 1, out)?;
    let place =
        |host_address, offset, length_bytes| BlockPlace { host_address, offset, length_bytes, key: 0 };
    encode_records(&[place(0x7f00_0000_0000, 1 << 30, 17 << 19), place(0x5500_0000_0000, 0, 4096)], out)?;
    encode_records(&[RegisterResult { key: 9, host_address: 0x7f00_0000_0000 }], out)?;
    encode_empty(MessageType::UnregisterFinished, 1, out)?;
    seeds.put("rdma_control", "answers", &[&[3], &answers])?;

    let plain = ConnectRequest { pin_all: true, introduction: None };
    seeds.put("rdma_private_data", "qemu", &[&plain.to_bytes(), &[0; 48]])?;
    for (name, part) in [("main", Part::Main), ("lane", Part::Lane(1))] {
        let (session, nonce, chunk) = ([1; 16], [2; 16], ChunkSize::LEAST);
        let own = Introduction { version: 1, part, lanes: 2, chunk, session, nonce };
        let bytes = ConnectRequest { introduction: Some(own), ..plain }.to_bytes();
        seeds.put("rdma_private_data", name, &[&bytes])?;
    }
    Ok(())
}

/// Seeds for NBD. The first byte is the log2 of the disk's length.
fn nbd(seeds: &Seeds) -> Result<(), Failure> {
    let option = |number: u32, data: &[u8]| {
        let head = [b"IHAVEOPT".as_slice(), &number.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        [&head.concat(), data].concat()
    };
    let mut requests = Vec::new();
    for (kind, offset, length) in [
        (CommandKind::Write, 4096, 8),
        (CommandKind::Read, 0, 512),
        (CommandKind::Flush, 0, 0),
        (CommandKind::Trim, 100, 100),
        (CommandKind::WriteZeroes, 0, 1 << 20),
        (CommandKind::Disconnect, 0, 0),
    ] {
        Request { kind, cookie: *b"a cookie", offset, length }.encode(&mut requests);
        if kind == CommandKind::Write {
            requests.extend_from_slice(b"contents");
        }
    }
    // One sequence as QEMU sends it, and one as the oldest clients do.
    let qemu = [option(8, b""), option(10, b"\0\0\0\x02q0\0\0\0\0"), option(7, b"\0\0\0\x02q0\0\x01\0\x03")]
        .concat();
    let old = [option(3, b""), option(6, b"\0\0\0\x02q0\0\0"), option(1, b"q0")].concat();
    for (name, flags, options) in [("qemu", 3, qemu), ("old", 1, old)] {
        let flags = u32::to_be_bytes(flags);
        seeds.put("nbd_request", name, &[&[20], &DiskHello::BYTES, &flags, &options, &requests])?;
    }
    Ok(())
}

fn replica(seeds: &Seeds) -> Result<(), Failure> {
    let secret = MigrationSecret::from_bytes([8; 32]);
    let terms = Terms {
        heartbeat_us: 200_000,
        lease_us: 2_000_000,
        margin_us: 500_000,
        claim_interval_us: 1_000_000,
        drift_per_mille: 10,
    };
    let hello = Hello::new([1; 16], 1, true, terms, [2; 16], &secret, &None);
    let welcome = Welcome::new([3; 16], &hello, &secret, &None);
    let (mut greeting, mut answer) = (Vec::new(), Vec::new());
    hello.encode(&mut greeting);
    welcome.encode(&mut answer);
    seeds.put("replica", "hello", &[&greeting])?;
    seeds.put("replica", "welcome", &[&answer])?;
    let mut said = Vec::new();
    let mut session = Session::new(Role::Standby, &secret, &hello, &welcome, &None);
    for message in
        [replica::Message::Answer { held: 1, heartbeat: 2 }, replica::Message::Runs, replica::Message::Never]
    {
        let mut sealed = Vec::new();
        session.seal(message, &mut sealed)?;
        said.extend_from_slice(&sealed[..20]);
    }
    let store = replica::ArbiterStore::Token("0123456789abcdef".to_owned());
    let identity = replica::ArbiterIdentity { name: "file:/claims".to_owned(), store };
    let mut arbiter = Vec::new();
    Session::new(Role::Primary, &secret, &hello, &welcome, &None).seal_arbiter(&identity, &mut arbiter)?;
    seeds.put("replica", "arbiter", &[&arbiter])?;
    let mut pages = replica::PageSums::default();
    pages.page(0, 7, &[1; PAGE_SIZE]);
    pages.zeros(1, 3, 4);
    let summary = replica::CheckpointSummary::of(9, pages, b"the other sections");
    seeds.put("replica", "summary", &[&summary.encode()])?;
    Ok(seeds.put("replica", "messages", &[&said])?)
}

fn small_messages(seeds: &Seeds) -> Result<(), Failure> {
    let mut received = ReceivedPages::none(200);
    (0..200).filter(|page| page % 3 > 0).for_each(|page| received.add(page));
    let mut bytes = Vec::new();
    received.encode(&mut bytes);
    seeds.put("received_pages", "thirds", &[&[0, 200], &bytes])?;
    let (mut records, mut writer) = (Vec::new(), RamRecordWriter::new());
    writer.zero(0, "m0", 0x1000, &mut records)?;
    writer.page_header(0, "m0", 0x2000, &mut records)?;
    records.extend_from_slice(&[7; PAGE_SIZE]);
    writer.zero(1, "rom", 0, &mut records)?;
    seeds.put("bare_records", "pages", &[&records])?;
    let messages = [
        ReturnMessage::Pong(1),
        ReturnMessage::RequestPages { block: Some("m0".into()), start: 0xc_0000, length: 4096 },
        ReturnMessage::RequestPages { block: None, start: 0xc_2000, length: 4096 },
        ReturnMessage::ReceivedBitmap { block: "m0".into() },
        ReturnMessage::ResumeAck(1),
        ReturnMessage::SwitchoverAck,
        ReturnMessage::Grant { device: "bank".into(), instance: 1, bytes: 1 << 20 },
        ReturnMessage::ConfigurationRefused(ConfigurationRefusal::Vm("no memory".into())),
        ReturnMessage::ConfigurationRefused(ConfigurationRefusal::Setting {
            name: "multifd-channels".into(),
            limit: "at most 4".into(),
        }),
        ReturnMessage::Pong(Features::OURS.union(Features::RECONNECT).to_pong()),
        ReturnMessage::Shut(SHUT_PAUSED),
        ReturnMessage::Shut(SHUT_PAGE_FAILED),
        ReturnMessage::Shut(0),
    ];
    let mut out = Vec::new();
    messages.iter().try_for_each(|message| message.encode(&mut out))?;
    seeds.put("return_path", "all", &[&out])?;

    let mut header = Vec::new();
    MappedHeader::place(0x6e, 64 << 20)?.encode(&mut header);
    let place = [0x8a_u64.to_be_bytes(), (64_u64 << 20).to_be_bytes()].concat();
    seeds.put("mapped_ram", "qemu", &[&place, &header])?;
    let delta = [0x10, 1, 0xa3, 0xef, 3, 2, 0x75, 0x6f, 0xfd, 0x1b, 1, 0xa3];
    seeds.put("xbzrle", "spec", &[&delta])?;

    let main = vector("main.0")?;
    let eof = main.windows(7).rposition(|w| w[0] == 0 && w[1] == 6 && w[6] == b'{');
    let text = eof.ok_or("the capture has no description")? + 6;
    seeds.put("vmdesc", "captured", &[&main[text..]])?;
    Ok(())
}

/// Seeds for the extension. The fuzz target checks answers with the same secret.
fn extension(seeds: &Seeds) -> Result<(), Failure> {
    let secret = MigrationSecret::from_bytes([7; 32]);
    let mut hello = Vec::new();
    PreemptHello::new([9; 16], &secret, &None).encode(&mut hello);
    seeds.put("extension", "preempt", &[&hello])?;
    let question = StatusQuestion::new([3; 16], [4; 16], &secret, &None);
    let (mut asked, mut answered) = (Vec::new(), Vec::new());
    question.encode(&mut asked);
    seeds.put("extension", "question", &[&asked])?;
    StatusAnswer::new(Status::Pending, &question, &secret, &None).encode(&mut answered);
    seeds.put("extension", "answer", &[&answered])?;
    reconnect(seeds, &secret)?;
    memory(seeds, &secret)?;
    let handover = Handover { migration_id: [5; 16], secret: Some(secret) };
    seeds.put("extension", "handover", &[&handover.encode().1])?;
    seeds.put("extension", "handover-1", &[&[5; 16]])?;
    let settings = [("multifd-channels".into(), "4".into()), ("postcopy-ram".into(), "on".into())].into();
    let from_source = SourceConfiguration { settings, configuration: b"vcpus=2".to_vec() };
    seeds.put("extension", "configuration", &[&from_source.encode()?])?;
    let state = GlobalState { run_state: "running".into(), suspended: Some(false) };
    seeds.put("extension", "globalstate", &[&state.encode()?])?;
    let features = Features::OURS.union(Features::POSTCOPY).union(Features::POSTCOPY_LANES);
    Ok(seeds.put("extension", "features", &[&features.to_pong().to_be_bytes()])?)
}

/// Each hello, with its answer on the same connection. The hello of a multifd channel has no answer.
fn reconnect(seeds: &Seeds, secret: &MigrationSecret) -> Result<(), Failure> {
    let mut held = Vec::new();
    encode_held(50, [(3, 20), (40, 10)].into_iter(), &mut held);
    // Bytes 0 and 1 are one fifth of the page counts of the two blocks.
    seeds.put("extension", "held", &[&[10, 0], &held])?;
    let mut two_blocks = Vec::new();
    encode_held(1275, [(0, 200), (1000, 275)].into_iter(), &mut two_blocks);
    encode_held(5, std::iter::empty(), &mut two_blocks);
    seeds.put("extension", "held-of-two-blocks", &[&[255, 1], &two_blocks])?;
    let holds = |session, rounds, pages| Some(ReconnectAnswer::Holds(Holds { session, rounds, pages }));
    for (name, channel, answer) in [
        ("reconnect", ReconnectChannel::Main, holds(1, 9, held)),
        ("reconnect-over", ReconnectChannel::Main, Some(ReconnectAnswer::Over)),
        ("reconnect-lane", ReconnectChannel::Lane(255), None),
        ("reconnect-gives-up", ReconnectChannel::GivesUp, Some(ReconnectAnswer::Over)),
        ("recovery", ReconnectChannel::Recovery, holds(2, 0, Vec::new())),
        ("reconnect-preempt", ReconnectChannel::Preempt, None),
    ] {
        let hello = ReconnectHello::new([3; 16], (2, channel), [4; 16], secret, &None);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        if let Some(answer) = answer {
            answer.encode(&hello, secret, &None, &mut bytes);
        }
        seeds.put("extension", name, &[&bytes])?;
    }
    Ok(())
}

/// Memory as file descriptors (`specs/extension.md §11`).
fn memory(seeds: &Seeds, secret: &MigrationSecret) -> Result<(), Failure> {
    let mut table = Vec::new();
    for entry in [
        HandedOver::Block { name: "m0".into(), len_bytes: 1 << 30, page_bytes: 4096, offset: 8192 },
        HandedOver::Device { name: "network card".into(), instance: 3, count: 2 },
    ] {
        entry.encode(&mut table);
    }
    let mut offer = Vec::new();
    MemoryOffer::new([3; 16], secret, &table).encode(&mut offer);
    seeds.put("extension", "memory-offer", &[&offer])?;
    seeds.put("extension", "memory-table", &[&table])?;
    for (name, answer) in [("taken", MemoryAnswer::Taken), ("refused", MemoryAnswer::Refused("no".into()))] {
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        seeds.put("extension", &format!("memory-{name}"), &[&bytes])?;
    }
    Ok(())
}
