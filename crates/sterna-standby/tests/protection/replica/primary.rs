//! A hand-made COLO primary: two blocks of RAM and three devices, over the main channel alone or with multifd.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use sterna::Address;
use sterna_wire::PAGE_SIZE;
use sterna_wire::colo::Message;
use sterna_wire::main::{
    Command, Configuration, FileHeader, SectionHeader, encode_end, encode_footer, encode_section_part,
};
use sterna_wire::multifd::{InitialPacket, Method, RamPacketEncoder, push_difference};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::replica::CheckpointSummary;
use sterna_wire::vmdesc;
use zstd::stream::write::Encoder as ZstdEncoder;

use crate::support;

pub const BLOCKS: [(&str, usize); 2] = [("pc.ram", 64), ("/rom@etc/acpi/tables", 8)];
const RAM: u32 = 2;
const EARLY: &str = "0000:00:02.0/virtio-mem-device-early";

pub struct Primary {
    pub main: TcpStream,
    pub lanes: Vec<TcpStream>,
    packets: u64,
    records: RamRecordWriter,
    /// RAM as it was last sent.
    pub ram: Vec<Vec<u8>>,
    /// The byte that filled the devices' state last.
    pub state: u8,
    /// The version of summaries (`specs/replica.md §7`), if the seeding announces them, as a Sterna's does.
    pub summaries: Option<u32>,
    /// Encoders of the lanes, if pages are compressed.
    pub zstd: Vec<ZstdEncoder<'static, Vec<u8>>>,
}

/// A page in a checkpoint: block, page, fill byte.
pub type Page = (usize, usize, u8);

fn globalstate(run_state: &str) -> Vec<u8> {
    let mut body = vec![0; 104];
    body[3] = run_state.len() as u8 + 1;
    body[4..4 + run_state.len()].copy_from_slice(run_state.as_bytes());
    body[36] = 1;
    body
}

/// Devices of the machine, in the order of a checkpoint: id, name, body.
pub fn devices(state: u8) -> Vec<(u32, &'static str, Vec<u8>)> {
    vec![
        (39, EARLY, vec![state; 44]),
        (6, "apic", [&[0x7e, 0, 0, 0, 6, state][..], &[state; 200]].concat()),
        // Paused, as for a guest that was paused when it was seeded.
        (3, "globalstate", globalstate("paused")),
    ]
}

pub fn section(id: u32, name: &str, body: &[u8], out: &mut Vec<u8>) {
    versioned(id, name, 1, body, out);
}

fn versioned(id: u32, name: &str, version: u32, body: &[u8], out: &mut Vec<u8>) {
    SectionHeader { id, name, instance: 0, version }.encode_full(out).unwrap();
    out.extend_from_slice(body);
    encode_footer(id, out);
}

/// Device state of a checkpoint.
pub fn blob(state: u8) -> Vec<u8> {
    let mut out = Vec::new();
    devices(state).iter().for_each(|(id, name, body)| section(*id, name, body, &mut out));
    out.push(0);
    out
}

/// The section of a summary: id, name, body.
pub fn summary(summary: &CheckpointSummary) -> (u32, &'static str, Vec<u8>) {
    let body = [&40_u32.to_be_bytes()[..], &summary.encode()].concat();
    (90, CheckpointSummary::SECTION_NAME, body)
}

impl Primary {
    /// Connects, seeds a guest whose pages are filled with their numbers, and reads SHUT and READY.
    pub fn seed(to: &Address, lanes: u8) -> Self {
        let mut primary = Self::connect(to, lanes);
        primary.send_seeding(true);
        primary.hear("00020004 00000001 00010004 00000000 00000000");
        primary
    }

    pub fn connect(to: &Address, lanes: u8) -> Self {
        let dial = || {
            let socket = TcpStream::connect(("127.0.0.1", support::port(to))).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            socket.set_nodelay(true).unwrap();
            socket
        };
        let main = dial();
        let lanes = (0..lanes)
            .map(|id| {
                let mut lane = dial();
                let mut out = Vec::new();
                InitialPacket { uuid: [0; 16], id }.encode(&mut out);
                lane.write_all(&out).unwrap();
                lane
            })
            .collect();
        let ram = BLOCKS.iter().map(|(_, pages)| vec![0; pages * PAGE_SIZE]).collect();
        Self {
            main,
            lanes,
            packets: 0,
            records: RamRecordWriter::new(),
            ram,
            state: 1,
            summaries: None,
            zstd: Vec::new(),
        }
    }

    /// Sends the header and the configuration, with which the stream begins.
    pub fn send_start(&mut self) {
        let mut out = Vec::new();
        FileHeader.encode(&mut out);
        Configuration { machine_type: "pc-i440fx-11.1".into(), ..Configuration::default() }
            .encode(&mut out)
            .unwrap();
        // The byte that ends the configuration is the first byte of an element.
        out.push(8);
        self.write(&out);
    }

    pub fn send_seeding(&mut self, return_path: bool) {
        let mut out = Vec::new();
        FileHeader.encode(&mut out);
        Configuration { machine_type: "pc-i440fx-11.1".into(), ..Configuration::default() }
            .encode(&mut out)
            .unwrap();
        if return_path {
            Command::OpenReturnPath.encode(&mut out).unwrap();
            Command::Ping(1).encode(&mut out).unwrap();
        }
        let devices = devices(1);
        let summaries = self.summaries.map(|version| (version, summary(&CheckpointSummary::default())));
        let (id, name, body) = &devices[0];
        section(*id, name, body, &mut out);
        SectionHeader { id: RAM, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
        let blocks = BLOCKS.map(|(name, pages)| BlockEntry::new(name, (pages * PAGE_SIZE) as u64)).to_vec();
        BlockList { blocks }.encode(&mut out).unwrap();
        if !self.lanes.is_empty() {
            RamRecordWriter::multifd_flush(&mut out);
        }
        RamRecordWriter::eos(&mut out);
        encode_footer(RAM, &mut out);
        self.write(&out);
        if !self.lanes.is_empty() {
            self.sync();
        }
        let mut out = Vec::new();
        Command::SwitchoverStart.encode(&mut out).unwrap();
        self.write(&out);
        let all = BLOCKS.iter().enumerate().flat_map(|(block, (_, pages))| {
            (0..*pages).map(move |page| (block, page, (page % 5 * 50) as u8))
        });
        self.send_ram(&all.collect::<Vec<_>>());
        let mut out = Vec::new();
        devices[1..].iter().for_each(|(id, name, body)| section(*id, name, body, &mut out));
        if let Some((version, (id, name, body))) = &summaries {
            versioned(*id, name, *version, body, &mut out);
        }
        encode_end(&mut out);
        let listed: Vec<_> = devices
            .iter()
            .chain(summaries.iter().map(|(_, section)| section))
            .map(|(_, name, body)| {
                let fields = vec![vmdesc::Field::new("data", "buffer", body.len() as u64)];
                vmdesc::Device { name: (*name).to_owned(), instance: 0, version: 1, fields }
            })
            .collect();
        vmdesc::encode(&vmdesc::build("pc-i440fx-11.1", &listed), &mut out).unwrap();
        self.write(&out);
    }

    /// Sends RAM's END section with these pages, up to its footer. The lanes carry the pages, if there are any.
    pub fn send_ram(&mut self, pages: &[Page]) {
        let mut out = Vec::new();
        encode_section_part(RAM, true, &mut out);
        if self.lanes.is_empty() {
            for &(block, page, fill) in pages {
                let (name, offset) = (BLOCKS[block].0, (page * PAGE_SIZE) as u64);
                if fill == 0 {
                    self.records.zero(block, name, offset, &mut out).unwrap();
                } else {
                    self.records.page_header(block, name, offset, &mut out).unwrap();
                    out.extend_from_slice(&[fill; PAGE_SIZE]);
                }
            }
        } else {
            self.send_on_lanes(pages);
            // As QEMU 11.1 does: two flushes.
            for _ in 0..2 {
                self.sync();
                RamRecordWriter::multifd_flush(&mut out);
            }
        }
        RamRecordWriter::eos(&mut out);
        encode_footer(RAM, &mut out);
        self.write(&out);
        self.has_sent(pages);
    }

    /// Sends RAM's END section with differences of these pages. Valid ones are applied to the guest's copy.
    pub fn send_deltas(&mut self, deltas: &[(usize, usize, &[u8])]) {
        let mut out = Vec::new();
        encode_section_part(RAM, true, &mut out);
        for &(block, page, delta) in deltas {
            let (name, offset) = (BLOCKS[block].0, page * PAGE_SIZE);
            self.records.xbzrle(block, name, offset as u64, delta, &mut out).unwrap();
            let bytes = &mut self.ram[block][offset..offset + PAGE_SIZE];
            let _ = sterna_wire::xbzrle::apply(delta, bytes.try_into().unwrap());
        }
        RamRecordWriter::eos(&mut out);
        encode_footer(RAM, &mut out);
        self.write(&out);
    }

    /// Records these pages as sent.
    fn has_sent(&mut self, pages: &[Page]) {
        for &(block, page, fill) in pages {
            self.ram[block][page * PAGE_SIZE..(page + 1) * PAGE_SIZE].fill(fill);
        }
    }

    /// Sends one packet per page, over all lanes in turn.
    pub fn send_on_lanes(&mut self, pages: &[Page]) {
        for (index, &(block, page, fill)) in pages.iter().enumerate() {
            let lane = index % self.lanes.len();
            let method = if self.zstd.is_empty() { Method::None } else { Method::Zstd };
            let mut encoder = RamPacketEncoder::new(method);
            encoder.begin(BLOCKS[block].0).unwrap();
            let offset = (page * PAGE_SIZE) as u64;
            assert!(if fill == 0 { encoder.push_zero(offset) } else { encoder.push_normal(offset) });
            let mut payload = if fill == 0 { Vec::new() } else { vec![fill; PAGE_SIZE] };
            if let (Some(zstd), true) = (self.zstd.get_mut(lane), fill > 0) {
                zstd.write_all(&payload).unwrap();
                zstd.flush().unwrap();
                payload = std::mem::take(zstd.get_mut());
            }
            let packet = encoder.finish(self.packets, payload.len() as u32);
            self.packets += 1;
            let _ = self.lanes[lane].write_all(&[&packet[..], &payload[..]].concat());
        }
    }

    /// Sends one packet per difference, over all lanes in turn. Valid ones are applied to the guest's copy.
    pub fn send_deltas_on_lanes(&mut self, deltas: &[(usize, usize, &[u8])]) {
        for (index, &(block, page, delta)) in deltas.iter().enumerate() {
            let offset = page * PAGE_SIZE;
            let mut encoder = RamPacketEncoder::new(Method::None);
            encoder.begin(BLOCKS[block].0).unwrap();
            assert!(encoder.push_normal(offset as u64));
            let mut payload = Vec::new();
            push_difference(delta, &mut payload).unwrap();
            let packet = encoder.finish_differences(self.packets, payload.len() as u32);
            self.packets += 1;
            let lane = index % self.lanes.len();
            let _ = self.lanes[lane].write_all(&[&packet[..], &payload[..]].concat());
            let bytes = &mut self.ram[block][offset..offset + PAGE_SIZE];
            let _ = sterna_wire::xbzrle::apply(delta, bytes.try_into().unwrap());
        }
    }

    /// Sends a SYNC on every lane.
    pub fn sync(&mut self) {
        let method = if self.zstd.is_empty() { Method::None } else { Method::Zstd };
        for lane in &mut self.lanes {
            let mut encoder = RamPacketEncoder::new(method);
            // A standby that has refused something has closed the connection. The next read reports that.
            let _ = lane.write_all(encoder.sync(self.packets));
            self.packets += 1;
        }
    }

    pub fn say(&mut self, message: Message) {
        let mut out = Vec::new();
        message.encode(&mut out).unwrap();
        self.write(&out);
    }

    pub fn write(&mut self, bytes: &[u8]) {
        let _ = self.main.write_all(bytes);
    }

    /// Asserts that the next bytes of the return path are these, in hexadecimal digits.
    pub fn hear(&mut self, wanted: &str) {
        let digits: Vec<u32> = wanted.chars().filter_map(|digit| digit.to_digit(16)).collect();
        let wanted: Vec<u8> = digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect();
        let mut came = vec![0; wanted.len()];
        self.main.read_exact(&mut came).expect("an answer in time");
        assert_eq!(came, wanted);
    }

    /// Whether no byte arrives for a while.
    pub fn hears_nothing(&mut self) -> bool {
        self.main.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let read = self.main.read(&mut [0; 1]);
        self.main.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        read.is_err()
    }

    /// Exchanges messages up to VMSTATE_SEND.
    pub fn begin_checkpoint(&mut self) {
        self.say(Message::CheckpointRequest);
        self.hear("00000002");
        self.say(Message::VmstateSend);
    }

    /// Sends RAM, size and devices of a checkpoint.
    pub fn send_checkpoint(&mut self, pages: &[Page], state: u8) {
        self.send_ram(pages);
        self.send_rest(state);
    }

    /// Sends the part of a checkpoint after RAM.
    pub fn send_rest(&mut self, state: u8) {
        self.write(&[0]);
        let devices = blob(state);
        self.say(Message::VmstateSize { bytes: devices.len() as u64 });
        self.write(&devices);
        self.state = state;
    }

    /// Sends a complete checkpoint, which the standby may refuse. Returns whether it was answered.
    pub fn tries_checkpoint(&mut self, pages: &[Page], state: u8) -> bool {
        let hears = |main: &mut TcpStream, count: usize| main.read_exact(&mut vec![0; count]).is_ok();
        self.say(Message::CheckpointRequest);
        if !hears(&mut self.main, 4) {
            return false;
        }
        self.say(Message::VmstateSend);
        self.send_checkpoint(pages, state);
        hears(&mut self.main, 8)
    }

    /// Sends a complete checkpoint, and reads the answers.
    pub fn checkpoint(&mut self, pages: &[Page], state: u8) {
        self.begin_checkpoint();
        self.send_checkpoint(pages, state);
        self.hear("00000005 00000006");
    }
}
