//! Hand-made peers: a source and a destination that act like a QEMU, or misbehave.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use sterna::ram::PAGE_SIZE;
use sterna::{Address, SourceVm, Vm};
use sterna_guests::process::ProcessGuest;
use sterna_wire::extension::{
    self, Features, Handover, MigrationSecret, ReconnectAnswerHead, ReconnectHello,
};
use sterna_wire::global_state::{self, GlobalState};
use sterna_wire::main::{
    BodyKind, Command, Configuration, Expectations, FileHeader, MainDecoder, MainItem, SectionHeader,
    SectionKind, Step, encode_end, encode_footer, encode_length_prefixed, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::received_pages::ReceivedPages;
use sterna_wire::return_path::ReturnMessage;

use super::lanes_peer::{LaneOfSource, connect};

/// Id of a migration whose source is a Sterna.
pub const ID: [u8; 16] = [9; 16];
pub const SECRET: [u8; 32] = [8; 32];

const PATIENCE: Duration = Duration::from_secs(30);

/// A source without precopy: all pages follow the guest.
pub struct HandMadeSource {
    pub main: TcpStream,
    /// Multifd channels of the source.
    pub lanes: Vec<LaneOfSource>,
    to: Address,
    guest: std::sync::Arc<ProcessGuest>,
    heard: Vec<u8>,
    /// Requests that arrived before the awaited answer.
    early: VecDeque<ReturnMessage>,
}

impl HandMadeSource {
    /// Connects. The guest must be paused.
    pub fn of(guest: &std::sync::Arc<ProcessGuest>, to: &Address) -> Self {
        guest.stop().unwrap();
        let main = connect(to);
        Self {
            main,
            lanes: Vec::new(),
            to: to.clone(),
            guest: guest.clone(),
            heard: Vec::new(),
            early: VecDeque::new(),
        }
    }

    /// Opens that many multifd channels.
    pub fn with_lanes(mut self, count: u8) -> Self {
        self.lanes = (0..count).map(|id| LaneOfSource::connect(&self.to, id)).collect();
        self
    }

    pub fn write(&mut self, fill: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = Vec::new();
        fill(&mut bytes);
        // After a refusal the peer no longer reads; `hear_refusal` finds that out.
        let _ = self.main.write_all(&bytes);
    }

    /// Sends everything up to the block list and an empty PART.
    pub fn open(&mut self, page_sizes: u64) {
        self.open_with(page_sizes, |_, _| {});
    }

    /// Like [`open`](Self::open), as a Sterna.
    pub fn open_as_sterna(&mut self) {
        self.open_with(PAGE_SIZE as u64, |guest, out| {
            let secret = Some(MigrationSecret::from_bytes(SECRET));
            let (version, body) = Handover { migration_id: ID, secret }.encode();
            framed((90, Handover::SECTION_NAME, version), &body, out);
            let record = guest.compatibility().unwrap();
            framed((91, extension::COMPATIBILITY_SECTION, record.version()), &record.save().unwrap(), out);
        });
    }

    fn open_with(&mut self, page_sizes: u64, early: impl FnOnce(&ProcessGuest, &mut Vec<u8>)) {
        let configuration =
            Configuration { machine_type: self.guest.machine_type(), ..Configuration::default() };
        let (guest, has_lanes) = (self.guest.clone(), !self.lanes.is_empty());
        let blocks = self.guest.ram();
        let blocks =
            blocks.blocks().iter().map(|block| BlockEntry::new(block.name(), block.len_bytes())).collect();
        self.write(|out| {
            FileHeader.encode(out);
            configuration.encode(out).unwrap();
            let advise = Command::PostcopyAdvise(Some((page_sizes, PAGE_SIZE as u64)));
            for command in [Command::OpenReturnPath, Command::Ping(1), advise] {
                command.encode(out).unwrap();
            }
            early(&guest, out);
            SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(out).unwrap();
            BlockList { blocks }.encode(out).unwrap();
            if has_lanes {
                RamRecordWriter::multifd_flush(out);
            }
            RamRecordWriter::eos(out);
            encode_footer(1, out);
            encode_section_part(1, false, out);
            RamRecordWriter::eos(out);
            encode_footer(1, out);
            Command::Ping(0x10).encode(out).unwrap();
        });
        self.sync();
    }

    /// Sends a SYNC on every lane.
    pub fn sync(&mut self) {
        self.lanes.iter_mut().for_each(LaneOfSource::sync);
    }

    /// Sends a PART with MULTIFD_FLUSH.
    pub fn flush(&mut self) {
        self.write(|out| {
            encode_section_part(1, false, out);
            RamRecordWriter::multifd_flush(out);
            RamRecordWriter::eos(out);
            encode_footer(1, out);
        });
    }

    /// Sends a packet with these pages of a block, without compression.
    pub fn lane_pages(&mut self, lane: usize, block: usize, pages: impl Iterator<Item = u64>) {
        let ram = self.guest.ram();
        let block = ram.block(block);
        let (mut zero, mut normal, mut payload) = (Vec::new(), Vec::new(), Vec::new());
        for page in pages {
            let (mut content, offset) = ([0; PAGE_SIZE], page * PAGE_SIZE as u64);
            block.read(offset, &mut content).unwrap();
            if content == [0; PAGE_SIZE] {
                zero.push(offset);
            } else {
                normal.push(offset);
                payload.extend_from_slice(&content);
            }
        }
        self.lanes[lane].packet(block.name(), &normal, &zero, &payload);
    }

    /// Closes the connection without a message.
    pub fn lose(&mut self) {
        let _ = self.main.shutdown(Shutdown::Both);
        self.heard.clear();
        self.early.clear();
    }

    /// Opens another connection with this hello. Returns false if it was closed without a byte.
    pub fn comes_back(&mut self, hello: &ReconnectHello) -> bool {
        let mut main = connect(&self.to);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        main.write_all(&bytes).unwrap();
        let mut answer = [0; ReconnectAnswerHead::BYTES];
        match main.read(&mut answer) {
            Ok(0) | Err(_) => return false,
            Ok(count) => main.read_exact(&mut answer[count..]).unwrap(),
        }
        (self.main, self.heard, self.early) = (main, Vec::new(), VecDeque::new());
        true
    }

    /// Reads the next message, which must be the bitmap of this block.
    pub fn hear_bitmap(&mut self, block: usize) -> ReceivedPages {
        let (name, pages) = {
            let ram = self.guest.ram();
            (ram.block(block).name().to_owned(), ram.block(block).pages())
        };
        match self.hear() {
            Some(ReturnMessage::ReceivedBitmap { block }) if block == name => {}
            other => panic!("{other:?}"),
        }
        loop {
            if let Some((received, used)) = ReceivedPages::decode(&self.heard, pages).unwrap() {
                self.heard.drain(..used);
                return received;
            }
            let mut piece = [0; 4096];
            let count = self.main.read(&mut piece).unwrap();
            assert!(count > 0, "closed in a bitmap");
            self.heard.extend_from_slice(&piece[..count]);
        }
    }

    /// Waits for this PONG. Requests that arrive meanwhile are kept for later calls.
    pub fn hear_pong(&mut self, value: u32) {
        let mut early = VecDeque::new();
        loop {
            match self.hear() {
                Some(ReturnMessage::Pong(heard)) if heard == value => {
                    self.early = early;
                    return;
                }
                Some(request @ ReturnMessage::RequestPages { .. }) => early.push_back(request),
                Some(_) => {}
                None => panic!("closed before the answer to PING {value:#x}"),
            }
        }
    }

    /// The next message; `None` if the destination has closed.
    pub fn hear(&mut self) -> Option<ReturnMessage> {
        if let Some(request) = self.early.pop_front() {
            return Some(request);
        }
        loop {
            if let Some((message, used)) = ReturnMessage::decode(&self.heard).unwrap() {
                self.heard.drain(..used);
                return Some(message);
            }
            let mut piece = [0; 4096];
            match self.main.read(&mut piece) {
                Ok(0) | Err(_) => return None,
                Ok(count) => self.heard.extend_from_slice(&piece[..count]),
            }
        }
    }

    /// Asserts that the destination has given up: SHUT 1, or a closed connection.
    pub fn hear_refusal(&mut self) {
        while let Some(message) = self.hear() {
            match message {
                ReturnMessage::Shut(0) => panic!("it has everything?"),
                ReturnMessage::Shut(_) => return,
                _ => {}
            }
        }
    }

    pub fn preempt(&self) -> TcpStream {
        connect(&self.to)
    }

    /// Sends discard commands for every page.
    pub fn discard_all(&mut self) {
        let ram = self.guest.ram();
        self.write(|out| {
            Command::SwitchoverStart.encode(out).unwrap();
            for block in ram.blocks() {
                let ranges = vec![(0, block.len_bytes())];
                Command::PostcopyDiscard { block: block.name().into(), ranges }.encode(out).unwrap();
            }
        });
    }

    /// Sections of the devices.
    pub fn devices(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let state = GlobalState { run_state: "running".into(), suspended: Some(false) }.encode().unwrap();
        let (name, instance, version) =
            (global_state::SECTION_NAME, global_state::SECTION_INSTANCE, global_state::SECTION_VERSION);
        SectionHeader { id: 2, name, instance, version }.encode_full(&mut out).unwrap();
        out.extend_from_slice(&state);
        encode_footer(2, &mut out);
        for (id, device) in (3..).zip(self.guest.devices()) {
            let name = device.name();
            let header =
                SectionHeader { id, name: &name, instance: device.instance(), version: device.version() };
            header.encode_full(&mut out).unwrap();
            encode_length_prefixed(&device.save().unwrap(), &mut out).unwrap();
            encode_footer(id, &mut out);
        }
        out
    }

    /// Sends the package: LISTEN, `devices`, and these commands.
    pub fn package(&mut self, devices: &[u8], commands: &[Command]) {
        let mut inner = Vec::new();
        Command::PostcopyListen.encode(&mut inner).unwrap();
        inner.extend_from_slice(devices);
        commands.iter().for_each(|command| command.encode(&mut inner).unwrap());
        self.packaged(&inner);
    }

    pub fn packaged(&mut self, inner: &[u8]) {
        self.write(|out| {
            Command::Packaged(inner.len() as u32).encode(out).unwrap();
            out.extend_from_slice(inner);
        });
    }

    /// Sends everything up to RUN, like a QEMU. The guest then runs at the destination.
    pub fn hand_over(&mut self) {
        self.open(PAGE_SIZE as u64);
        self.hear_pong(0x10);
        self.discard_all();
        let devices = self.devices();
        self.package(&devices, &[Command::Ping(3), Command::Ping(0x42), Command::PostcopyRun]);
        self.hear_pong(0x42);
    }

    /// Sends everything up to RUN, like a Sterna.
    pub fn hand_over_as_sterna(&mut self) {
        self.open_as_sterna();
        self.hear_pong(0x10);
        self.discard_all();
        let devices = self.devices();
        self.package(&devices, &[Command::Ping(extension::PREPARE_PING)]);
        self.hear_pong(extension::PREPARE_PING);
        self.write(|out| {
            Command::PostcopyRun.encode(out).unwrap();
            Command::Ping(extension::POSTCOPY_STARTED_PING).encode(out).unwrap();
        });
        self.hear_pong(extension::POSTCOPY_STARTED_PING);
    }

    /// Appends a page as a record.
    pub fn record(&self, writer: &mut RamRecordWriter, block: usize, page: u64, out: &mut Vec<u8>) {
        let ram = self.guest.ram();
        let name = ram.block(block).name();
        let mut content = [0; PAGE_SIZE];
        ram.block(block).read(page * PAGE_SIZE as u64, &mut content).unwrap();
        if content == [0; PAGE_SIZE] {
            return writer.zero(block, name, page * PAGE_SIZE as u64, out).unwrap();
        }
        writer.page_header(block, name, page * PAGE_SIZE as u64, out).unwrap();
        out.extend_from_slice(&content);
    }

    /// Sends a PART with these pages.
    pub fn pages(&mut self, pages: impl Iterator<Item = (usize, u64)>) {
        let mut out = Vec::new();
        encode_section_part(1, false, &mut out);
        let mut writer = RamRecordWriter::new();
        pages.for_each(|(block, page)| self.record(&mut writer, block, page, &mut out));
        RamRecordWriter::eos(&mut out);
        encode_footer(1, &mut out);
        let _ = self.main.write_all(&out);
    }

    /// Every page, in order.
    pub fn every_page(&self) -> Vec<(usize, u64)> {
        let ram = self.guest.ram();
        let blocks = ram.blocks().iter().enumerate();
        blocks.flat_map(|(index, block)| (0..block.pages()).map(move |page| (index, page))).collect()
    }

    pub fn end(&mut self) {
        self.write(|out| {
            encode_section_part(1, true, out);
            RamRecordWriter::eos(out);
            encode_footer(1, out);
            encode_end(out);
        });
    }
}

/// Appends a FULL section whose body begins with its length.
fn framed((id, name, version): (u32, &str, u32), body: &[u8], out: &mut Vec<u8>) {
    SectionHeader { id, name, instance: 0, version }.encode_full(out).unwrap();
    encode_length_prefixed(body, out).unwrap();
    encode_footer(id, out);
}

/// A destination that reads the main channel, and whose answers the test sends.
pub struct HandMadeDestination {
    listener: TcpListener,
    pub main: Option<TcpStream>,
    decoder: MainDecoder,
    buffer: Vec<u8>,
    /// Features that it announces, if it is a Sterna.
    features: Option<Features>,
    /// Number of received MULTIFD_FLUSHes.
    pub flushes: usize,
    /// Pages received on the main channel: block, offset, content.
    pub pages: Vec<(usize, u64, Vec<u8>)>,
}

impl HandMadeDestination {
    pub fn new() -> Self {
        Self::expecting(false)
    }

    /// A Sterna that announces these features.
    pub fn sterna(features: Features) -> Self {
        Self { features: Some(features), ..Self::expecting(false) }
    }

    /// Like [`sterna`](Self::sterna), with multifd channels.
    pub fn sterna_with_lanes(features: Features) -> Self {
        Self { features: Some(features), ..Self::expecting(true) }
    }

    fn expecting(multifd: bool) -> Self {
        let knows = |name: &str, _: u32, _: u32, _: SectionKind| match name {
            "ram" => BodyKind::Ram,
            global_state::SECTION_NAME => BodyKind::FixedLength(global_state::BODY_BYTES),
            _ => BodyKind::LengthPrefixed { most: 1 << 20 },
        };
        let expect = Expectations { postcopy: true, multifd, ..Expectations::default() };
        Self {
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            main: None,
            decoder: MainDecoder::new(Box::new(knows), expect),
            buffer: Vec::new(),
            features: None,
            flushes: 0,
            pages: Vec::new(),
        }
    }

    pub fn address(&self) -> Address {
        format!("tcp:127.0.0.1:{}", self.listener.local_addr().unwrap().port()).parse().unwrap()
    }

    pub fn accept(&self) -> TcpStream {
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    pub fn say(&mut self, message: &ReturnMessage) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        self.say_bytes(&bytes);
    }

    pub fn say_bytes(&mut self, bytes: &[u8]) {
        let _ = self.main.as_mut().unwrap().write_all(bytes);
    }

    /// Closes the connection without a message. The next connection continues the same stream.
    pub fn lose(&mut self) {
        if let Some(main) = self.main.take() {
            let _ = main.shutdown(Shutdown::Both);
        }
        self.buffer.clear();
        self.decoder.begin_recovery();
    }

    /// The next element. Pages are recorded, and PINGs echoed. `None` if the source has closed.
    pub fn next(&mut self) -> Option<MainItem> {
        if self.main.is_none() {
            self.main = Some(self.accept());
        }
        loop {
            match self.decoder.next(&self.buffer).unwrap() {
                Step::Item { item, consumed } => {
                    self.buffer.drain(..consumed);
                    match &item {
                        MainItem::Command(Command::Ping(value)) => {
                            self.say(&ReturnMessage::Pong(*value));
                            let features = self.features.filter(|_| *value == extension::EXTENSION_PING);
                            if let Some(features) = features {
                                self.say(&ReturnMessage::Pong(features.to_pong()));
                            }
                        }
                        MainItem::MultifdFlush => self.flushes += 1,
                        MainItem::Zero { block, offset } => {
                            self.pages.push((*block, *offset, vec![0; PAGE_SIZE]));
                            continue;
                        }
                        MainItem::PagePayloadFollows { block, offset } => {
                            while self.buffer.len() < PAGE_SIZE {
                                self.fill()?;
                            }
                            self.pages.push((*block, *offset, self.buffer.drain(..PAGE_SIZE).collect()));
                            self.decoder.payload_consumed();
                            continue;
                        }
                        _ => {}
                    }
                    return Some(item);
                }
                Step::Partial { consumed } => {
                    self.buffer.drain(..consumed);
                }
                Step::NeedMore(_) => self.fill()?,
                Step::End => return None,
            }
        }
    }

    /// Reads up to the element for which `what` is true.
    pub fn until(&mut self, what: impl Fn(&MainItem) -> bool) -> MainItem {
        loop {
            let item = self.next().expect("the source has closed");
            if what(&item) {
                return item;
            }
        }
    }

    fn fill(&mut self) -> Option<()> {
        let mut piece = vec![0; 64 << 10];
        match self.main.as_mut()?.read(&mut piece) {
            Ok(count) if count > 0 => {
                self.buffer.extend_from_slice(&piece[..count]);
                Some(())
            }
            _ => None,
        }
    }
}
