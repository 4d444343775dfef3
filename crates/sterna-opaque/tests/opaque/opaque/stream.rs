//! A hand-made stream of a QEMU.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread::JoinHandle;

use sterna::Address;
use sterna_wire::extension::{Handover, MigrationSecret};
use sterna_wire::main::{
    Command, Configuration, FileHeader, SectionHeader, encode_end, encode_footer, encode_section_part,
};
use sterna_wire::ram::{RamRecordWriter, flags};
use sterna_wire::vmdesc;

use crate::support::recording::spawn;

/// Id of RAM's section.
pub const RAM: u32 = 2;
pub const BLOCKS: [(&str, u64); 2] = [("m0", 16 << 12), ("/rom@etc/acpi/tables", 4 << 12)];

pub struct Stream {
    pub return_path: bool,
    /// Whether the source identifies itself as a Sterna.
    pub is_sterna: bool,
    pub machine: &'static str,
    pub capabilities: Vec<String>,
    pub early: Vec<u8>,
    /// Bytes immediately after RAM's START.
    pub setup: Vec<u8>,
    pub between: Vec<u8>,
    pub devices: Vec<u8>,
    pub has_end: bool,
    pub described: bool,
    pub blocks: Vec<(&'static str, u64)>,
    pub total: Option<u64>,
    /// Offset of a first record in block 0.
    pub pages_word: Option<u64>,
    pub flushes: bool,
    pub xbzrle: bool,
    /// The expected content of RAM.
    pub ram: Vec<Vec<u8>>,
    listed: Vec<vmdesc::Device>,
}

pub type Change = (&'static str, fn(&mut Stream));

/// Differences between valid streams.
pub const CHANGES: [Change; 9] = [
    ("plain", |_| {}),
    ("early section", |s| {
        let mut early = Vec::new();
        let body = [b"\x7e\x00\x00\x00\x09".as_slice(), &[7; 47]].concat();
        s.section(9, "0000:00:02.0/virtio-mem-device-early", &body, &mut early);
        s.listed.rotate_right(1);
        s.early = early;
    }),
    ("early section behind RAM's START, as QEMU 10.0 has it", |s| {
        let mut early = Vec::new();
        s.section(39, "0000:00:02.0/virtio-mem-device-early", &[7; 68], &mut early);
        s.listed.rotate_right(1);
        s.setup = early;
    }),
    ("a live device that starts behind RAM's START and ends behind its END", |s| {
        SectionHeader { id: 41, name: "dirty-bitmap", instance: 0, version: 1 }
            .encode_start(&mut s.setup)
            .unwrap();
        s.setup.extend_from_slice(b"\x1c\x02n0\x03bm0");
        encode_footer(41, &mut s.setup);
        let mut part = Vec::new();
        encode_section_part(41, false, &mut part);
        part.push(1);
        encode_footer(41, &mut part);
        s.between = [part, s.between.clone()].concat();
        let mut end = Vec::new();
        encode_section_part(41, true, &mut end);
        end.extend_from_slice(&[0x42; 15]);
        encode_footer(41, &mut end);
        s.devices = [end, s.devices.clone()].concat();
    }),
    ("no END, no command 11", |s| {
        s.has_end = false;
        s.between.clear();
    }),
    ("no command 11", |s| s.between.clear()),
    ("no description", |s| s.described = false),
    ("xbzrle", |s| s.xbzrle = true),
    ("a live device", |s| {
        let mut live = Vec::new();
        SectionHeader { id: 40, name: "0000:00:05.0/vfio", instance: 0, version: 1 }
            .encode_start(&mut live)
            .unwrap();
        live.extend_from_slice(&[1; 32]);
        encode_footer(40, &mut live);
        encode_section_part(40, false, &mut live);
        live.extend_from_slice(&[2; 77]);
        encode_footer(40, &mut live);
        live.extend_from_slice(&s.between);
        encode_section_part(40, true, &mut live);
        live.extend_from_slice(&[3; 8]);
        encode_footer(40, &mut live);
        s.between = live;
    }),
];

impl Stream {
    pub fn new(return_path: bool) -> Self {
        let mut between = Vec::new();
        Command::SwitchoverStart.encode(&mut between).unwrap();
        let mut stream = Self {
            return_path,
            is_sterna: false,
            machine: "pc-i440fx-11.1",
            capabilities: Vec::new(),
            early: Vec::new(),
            setup: Vec::new(),
            between,
            devices: Vec::new(),
            has_end: true,
            described: true,
            blocks: BLOCKS.to_vec(),
            total: None,
            pages_word: None,
            flushes: false,
            xbzrle: false,
            ram: Vec::new(),
            listed: Vec::new(),
        };
        let mut devices = Vec::new();
        stream.section(6, "apic", &[0x7e; 200], &mut devices);
        stream.section(0, "timer", b"\x00\x06\x00\x00\x00\x02{}------------------------", &mut devices);
        let mut state = vec![0; 104];
        state[3] = 8;
        state[4..11].copy_from_slice(b"running");
        state[36] = 1;
        stream.section(3, "globalstate", &state, &mut devices);
        stream.devices = devices;
        stream
    }

    /// Appends a FULL section and adds it to the list.
    fn section(&mut self, id: u32, name: &str, body: &[u8], out: &mut Vec<u8>) {
        SectionHeader { id, name, instance: 0, version: 1 }.encode_full(out).unwrap();
        out.extend_from_slice(body);
        encode_footer(id, out);
        let fields = vec![vmdesc::Field::new("data", "buffer", body.len() as u64)];
        self.listed.push(vmdesc::Device { name: name.to_owned(), instance: 0, version: 1, fields });
    }

    pub fn description(&self) -> String {
        vmdesc::build(self.machine, &self.listed)
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.encode().0
    }

    /// The expected content of RAM.
    pub fn final_ram(&self) -> Vec<Vec<u8>> {
        self.encode().1
    }

    /// All bytes of the stream, and the expected content of RAM.
    fn encode(&self) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut out = Vec::new();
        FileHeader.encode(&mut out);
        let configuration = Configuration {
            machine_type: self.machine.to_owned(),
            capabilities: self.capabilities.clone(),
            ..Configuration::default()
        };
        configuration.encode(&mut out).unwrap();
        if self.return_path {
            Command::OpenReturnPath.encode(&mut out).unwrap();
            Command::Ping(1).encode(&mut out).unwrap();
        }
        if self.is_sterna {
            let secret = Some(MigrationSecret::from_bytes([8; 32]));
            let (version, body) = Handover { migration_id: [7; 16], secret }.encode();
            let name = Handover::SECTION_NAME;
            let header = SectionHeader { id: 99, name, instance: Handover::SECTION_INSTANCE, version };
            header.encode_full(&mut out).unwrap();
            out.extend_from_slice(&(body.len() as u32).to_be_bytes());
            out.extend_from_slice(&body);
            encode_footer(99, &mut out);
        }
        out.extend_from_slice(&self.early);
        SectionHeader { id: RAM, name: "ram", instance: 0, version: 4 }.encode_start(&mut out).unwrap();
        let total = self.total.unwrap_or(self.blocks.iter().map(|(_, length)| length).sum());
        out.extend_from_slice(&((total & !0xfff) | flags::MEM_SIZE).to_be_bytes());
        for (name, length) in &self.blocks {
            out.push(name.len() as u8);
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(&length.to_be_bytes());
            if !self.capabilities.is_empty() {
                out.extend_from_slice(&[0; 8]);
            }
        }
        self.end_of_list(&mut out);
        out.extend_from_slice(&self.setup);
        let ram = self.pages(&mut out);
        out.extend_from_slice(&self.between);
        if self.has_end {
            encode_section_part(RAM, true, &mut out);
            self.end_of_list(&mut out);
        }
        out.extend_from_slice(&self.devices);
        out.extend_from_slice(&self.end());
        (out, ram)
    }

    /// EOF, and the description if there is one.
    pub fn end(&self) -> Vec<u8> {
        let mut out = Vec::new();
        encode_end(&mut out);
        if self.described {
            vmdesc::encode(&self.description(), &mut out).unwrap();
        }
        out
    }

    fn end_of_list(&self, out: &mut Vec<u8>) {
        if self.flushes {
            RamRecordWriter::multifd_flush(out);
        }
        RamRecordWriter::eos(out);
        encode_footer(RAM, out);
    }

    /// Several rounds: pages with content, zero pages, a page that becomes zero, a page that gets content, and
    /// differences.
    fn pages(&self, out: &mut Vec<u8>) -> Vec<Vec<u8>> {
        let mut ram: Vec<Vec<u8>> = BLOCKS.iter().map(|(_, length)| vec![0; *length as usize]).collect();
        let mut records = RamRecordWriter::new();
        let content = |block: usize, page: usize, round: usize| {
            (0..4096)
                .map(|at| (at * 7 + page * 31 + block * 3 + round * 101 + at / 256) as u8)
                .collect::<Vec<_>>()
        };
        // A background snapshot, which has no END, sends each page once.
        for round in 0..if self.has_end { 3 } else { 1 } {
            encode_section_part(RAM, false, out);
            if let Some(word) = self.pages_word {
                records.zero(0, BLOCKS[0].0, word, out).unwrap();
            }
            for (block, (name, length)) in BLOCKS.iter().enumerate() {
                for page in (0..(*length >> 12) as usize).filter(|page| round == 0 || page % 3 < round) {
                    let at = page << 12;
                    let old = ram[block][at..at + 4096].to_vec();
                    if (page + round) % 4 == 1 {
                        records.zero(block, name, at as u64, out).unwrap();
                        ram[block][at..at + 4096].fill(0);
                    } else if self.xbzrle && round > 0 {
                        // Keeps 100 bytes, replaces 3, keeps the rest.
                        let delta = [100, 3, 0xaa, 0xbb, page as u8 + 1];
                        records.xbzrle(block, name, at as u64, &delta, out).unwrap();
                        let mut new = old;
                        new[100..103].copy_from_slice(&delta[2..]);
                        ram[block][at..at + 4096].copy_from_slice(&new);
                    } else {
                        records.page_header(block, name, at as u64, out).unwrap();
                        let new = content(block, page, round);
                        out.extend_from_slice(&new);
                        ram[block][at..at + 4096].copy_from_slice(&new);
                    }
                }
            }
            RamRecordWriter::eos(out);
            encode_footer(RAM, out);
        }
        ram
    }

    /// Sends the stream, and waits for the answers if there is a return path.
    pub fn play(&mut self, to: &Address) -> JoinHandle<Vec<u8>> {
        let (bytes, ram) = self.encode();
        self.ram = ram;
        play(to, bytes, self.return_path)
    }
}

/// Sends bytes like a source. Then waits until the destination closes, or closes itself.
pub fn play(to: &Address, bytes: Vec<u8>, waits: bool) -> JoinHandle<Vec<u8>> {
    let mut socket = TcpStream::connect(("127.0.0.1", crate::support::port(to))).unwrap();
    spawn(move || {
        // The destination may have closed the connection meanwhile.
        let _ = socket.write_all(&bytes);
        let mut answers = Vec::new();
        if !waits {
            let _ = socket.shutdown(Shutdown::Write);
        }
        let mut buffer = [0; 512];
        while let Ok(count) = socket.read(&mut buffer) {
            if count == 0 {
                break;
            }
            answers.extend_from_slice(&buffer[..count]);
            // A source closes after it has received SHUT.
            if answers.windows(4).any(|bytes| bytes == [0, 1, 0, 4]) && answers.len() >= 8 {
                break;
            }
        }
        answers
    })
}
