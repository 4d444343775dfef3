//! COLO: a primary's stream after the end of the seeding. The first byte chooses multifd (bit 0) and the size
//! of pieces.

use sterna_wire::colo::{DeviceList, Due, KnownDevice, Message, MessageKind, StandbyOrder};
use sterna_wire::main::{
    BodyKind, Configuration, Expectations, FileHeader, MainDecoder, MainItem, SectionHeader, SectionKind,
    Step, encode_footer, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::{PAGE_SIZE, WireError};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let [choice, stream @ ..] = data else { return };
    let (multifd, piece) = (choice & 1 == 1, usize::from(choice >> 1).max(1));
    let whole = Standby::new(multifd, stream.len().max(1)).run(stream);
    let pieces = Standby::new(multifd, piece).run(stream);
    assert_eq!(whole, pieces, "how the bytes arrive must not matter");
}

struct Standby {
    order: StandbyOrder,
    decoder: MainDecoder,
    devices: DeviceList,
    piece: usize,
    /// Descriptions of the decoded items, so that two runs can be compared.
    came: Vec<String>,
}

impl Standby {
    fn new(multifd: bool, piece: usize) -> Self {
        let mut devices = DeviceList::new();
        for (id, name, length_bytes) in [(0, "timer", 24), (3, "globalstate", 104)] {
            let (name, instance, version) = (name.to_owned(), 0, 1);
            devices.push(KnownDevice { id, name, instance, version, length_bytes, is_early: false }).unwrap();
        }
        let mut order = StandbyOrder::new();
        order.say(MessageKind::CheckpointReady).unwrap();
        Self { order, decoder: behind_seeding(multifd), devices, piece, came: Vec::new() }
    }

    /// Decodes all of `stream`. Returns descriptions of the items, and the error that ended it.
    fn run(mut self, stream: &[u8]) -> (Vec<String>, Option<WireError>) {
        let error = self.follow(stream).err();
        if let Some(error) = &error {
            assert!(error.paragraph.starts_with("specs/"));
        }
        (self.came, error)
    }

    fn follow(&mut self, stream: &[u8]) -> Result<(), WireError> {
        let mut at = 0;
        loop {
            match self.order.due() {
                Due::Hear(_) => {
                    let Some((message, used)) = Message::decode(&stream[at..])? else { return Ok(()) };
                    let mut again = Vec::new();
                    message.encode(&mut again)?;
                    assert_eq!(again, stream[at..at + used]);
                    at += used;
                    self.order.heard(&message)?;
                    self.came.push(format!("{message:?}"));
                }
                Due::Say(kind) => self.order.say(kind)?,
                Due::Ram => {
                    self.decoder.begin_checkpoint(at as u64)?;
                    let Some(used) = self.ram(&stream[at..])? else { return Ok(()) };
                    at += used;
                    self.order.ram_came()?;
                }
                Due::Devices { bytes } => {
                    let Some(devices) = stream[at..].get(..bytes as usize) else { return Ok(()) };
                    let found = self.devices.check(devices)?;
                    for (section, body) in &found.sections {
                        assert!(section.start < body.start && body.end + 5 == section.end);
                        assert!(section.end < devices.len());
                    }
                    self.came.push(format!("{found:?}"));
                    at += bytes as usize;
                    self.order.checkpoint_is_held()?;
                }
            }
        }
    }

    /// Decodes the RAM of a checkpoint at the start of `stream`. Returns its length in bytes.
    fn ram(&mut self, stream: &[u8]) -> Result<Option<usize>, WireError> {
        let (mut at, mut arrived) = (0, 0);
        loop {
            match self.decoder.next(&stream[at..arrived])? {
                Step::End => return Ok(Some(at)),
                Step::NeedMore(needed) => {
                    assert!(needed > arrived - at);
                    if arrived == stream.len() {
                        assert!(self.decoder.end_of_file(stream.len() - at).is_err());
                        return Ok(None);
                    }
                    arrived = arrived.saturating_add(self.piece).min(stream.len());
                }
                Step::Partial { consumed } => at += consumed,
                Step::Item { item, consumed } => {
                    at += consumed;
                    if let MainItem::PagePayloadFollows { .. } = item {
                        if stream.len() - at < PAGE_SIZE {
                            return Ok(None);
                        }
                        at += PAGE_SIZE;
                        self.decoder.payload_consumed();
                    }
                    arrived = arrived.max(at);
                    let is_last = item == MainItem::CheckpointRam;
                    self.came.push(format!("{item:?} {}", self.decoder.position()));
                    if is_last {
                        return Ok(Some(at));
                    }
                }
            }
        }
    }
}

/// A decoder of a machine with one block, in its state after the seeding.
fn behind_seeding(multifd: bool) -> MainDecoder {
    let knowledge = |name: &str, _: u32, _: u32, _: SectionKind| match name {
        "ram" => BodyKind::Ram,
        _ => BodyKind::OpaqueByFooter,
    };
    let expect = Expectations { multifd, opaque_tail: true, ..Expectations::default() };
    let mut decoder = MainDecoder::new(Box::new(knowledge), expect);
    let seeding = seeding(multifd).expect("a sound seeding");
    let mut at = 0;
    loop {
        match decoder.next(&seeding[at..]).expect("a sound seeding") {
            Step::Item { consumed, .. } | Step::Partial { consumed } => at += consumed,
            Step::NeedMore(_) => panic!("the seeding ends early"),
            Step::End => return decoder,
        }
    }
}

fn seeding(multifd: bool) -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out)?;
    SectionHeader { id: 1, name: "ram", instance: 0, version: 4 }.encode_start(&mut out)?;
    BlockList { blocks: vec![BlockEntry::new("m0", 4 << 20)] }.encode(&mut out)?;
    if multifd {
        RamRecordWriter::multifd_flush(&mut out);
    }
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    encode_section_part(1, true, &mut out);
    RamRecordWriter::eos(&mut out);
    encode_footer(1, &mut out);
    out.push(4);
    Ok(out)
}
