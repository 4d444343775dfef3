//! Checkpoints that a complete standby receives over a socket: a COLO primary's stream after its seeding. The
//! first byte chooses the size of pieces, and whether checkpoints end with summaries.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::error::VmError;
use sterna::{Address, Capabilities, Parameters};
use sterna_standby::{HeldDevice, HeldGuest, OperatorsWord, Standby, StandbyOptions, StandbyState, Survivor};
use sterna_wire::main::{
    Command, Configuration, FileHeader, SectionHeader, encode_end, encode_footer, encode_section_part,
};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};
use sterna_wire::replica::{CheckpointSummary, PageSums};
use sterna_wire::{PAGE_SIZE, WireError, vmdesc};

const BLOCK: &str = "m0";
const PAGES: usize = 16;
const RAM: u32 = 1;
/// If the first byte is at least this value, checkpoints end with summaries.
const SUMMARIES: u8 = 0x80;
/// Limit of the standby's journal, in bytes. It is small, so that a checkpoint can exceed it.
const JOURNAL: u64 = 128 << 10;
/// Time limit of a read. No input takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sends one input to a standby twice, in different pieces. After each, the last complete checkpoint can be
/// taken over. Both must be equal.
pub fn target(data: &[u8]) {
    let [piece, stream @ ..] = data else { return };
    let has_summaries = *piece >= SUMMARIES;
    let whole = follow(stream, stream.len().max(1), has_summaries);
    let pieces = follow(stream, 7 * usize::from(*piece % SUMMARIES) + 1, has_summaries);
    assert_eq!(whole.number, pieces.number, "how the bytes arrive must not matter");
    assert!(whole == pieces, "checkpoint {} differs by how its bytes arrived", whole.number);
    if whole.number == 0 {
        let seeded = (0..PAGES).flat_map(|page| [page as u8; PAGE_SIZE]).collect::<Vec<_>>();
        assert!(whole.ram == seeded, "nothing of a checkpoint that is not held reaches RAM");
    }
    if has_summaries {
        let held = whole.devices.iter().find(|device| device.name == CheckpointSummary::SECTION_NAME);
        let summary = CheckpointSummary::decode(&held.expect("its section").body[4..]).expect("a sound one");
        assert_eq!(summary.number, whole.number, "a summary of another checkpoint");
    }
}

/// The state with which the survivor took over.
#[derive(PartialEq, Eq)]
struct Held {
    number: u64,
    ram: Vec<u8>,
    devices: Vec<HeldDevice>,
}

fn follow(stream: &[u8], piece: usize, has_summaries: bool) -> Held {
    let at = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    let options =
        StandbyOptions { insecure: true, journal_limit_bytes: JOURNAL, ..StandbyOptions::default() };
    let (parameters, capabilities) = (Parameters::default(), Capabilities::default());
    let standby = Standby::listen(&at, &options, parameters, capabilities, Arc::new(())).expect("a listener");
    let Address::Tcp { port, .. } = standby.address() else { unreachable!("it listens at TCP") };
    let mut wire = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    wire.set_read_timeout(Some(PATIENCE)).expect("a limit");
    wire.write_all(&seeding(has_summaries).expect("a sound seeding")).expect("a standby that listens");
    // The answers to the seeding: PONG, SHUT 0, READY.
    wire.read_exact(&mut [0; 20]).expect("a guest that was taken");
    // A standby that refuses the stream closes the connection, so a write may fail.
    let _ = stream.chunks(piece).try_for_each(|piece| wire.write_all(piece));
    let _ = wire.shutdown(Shutdown::Write);
    let begin = Instant::now();
    while !matches!(standby.state(), StandbyState::Lost(_)) {
        assert!(begin.elapsed() < PATIENCE, "{:?}", standby.state());
        std::thread::sleep(Duration::from_micros(200));
    }
    let number = standby.statistics().checkpoints;
    let taken = Taken::default();
    let held = standby.takeover_by(&taken, &OperatorsWord).expect("the last checkpoint");
    assert_eq!(held.number, number);
    taken.0.into_inner().expect("no other thread").expect("a guest")
}

/// Stores the guest of the takeover, so that it can be compared.
#[derive(Default)]
struct Taken(std::sync::Mutex<Option<Held>>);

impl Survivor for Taken {
    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        let mut ram = vec![0; PAGES * PAGE_SIZE];
        guest
            .visit_pages(0, |page, content| {
                ram[page as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(content);
                Ok::<_, sterna::MigrationError>(())
            })
            .map_err(|error| VmError::new("the guest", error))?;
        let (number, devices) = (guest.checkpoint().number, guest.devices().to_vec());
        *self.0.lock().expect("no other thread") = Some(Held { number, ram, devices });
        Ok(())
    }
    fn start(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn discard(&self) {}
}

/// Seeds a machine with two devices and one block. The block's pages are filled with their numbers.
fn seeding(has_summaries: bool) -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    let mut devices = devices(1).to_vec();
    devices.extend(has_summaries.then(|| summary(&CheckpointSummary::default())));
    FileHeader.encode(&mut out);
    Configuration { machine_type: "none".into(), ..Configuration::default() }.encode(&mut out)?;
    Command::OpenReturnPath.encode(&mut out)?;
    Command::Ping(1).encode(&mut out)?;
    SectionHeader { id: RAM, name: "ram", instance: 0, version: 4 }.encode_start(&mut out)?;
    BlockList { blocks: vec![BlockEntry::new(BLOCK, (PAGES * PAGE_SIZE) as u64)] }.encode(&mut out)?;
    RamRecordWriter::eos(&mut out);
    encode_footer(RAM, &mut out);
    let pages: Vec<_> = (0..PAGES).map(|page| (page, page as u8)).collect();
    ram(&pages, &mut out)?;
    for (id, name, body) in &devices {
        section(*id, name, body, &mut out)?;
    }
    encode_end(&mut out);
    let listed: Vec<_> = devices
        .into_iter()
        .map(|(_, name, body)| {
            let fields = vec![vmdesc::Field::new("data", "buffer", body.len() as u64)];
            vmdesc::Device { name: name.to_owned(), instance: 0, version: 1, fields }
        })
        .collect();
    vmdesc::encode(&vmdesc::build("none", &listed), &mut out)?;
    Ok(out)
}

/// Writes the END section of RAM with these pages.
fn ram(pages: &[(usize, u8)], out: &mut Vec<u8>) -> Result<(), WireError> {
    let mut records = RamRecordWriter::new();
    encode_section_part(RAM, true, out);
    for &(page, fill) in pages {
        records.page_header(0, BLOCK, (page * PAGE_SIZE) as u64, out)?;
        out.extend_from_slice(&[fill; PAGE_SIZE]);
    }
    RamRecordWriter::eos(out);
    encode_footer(RAM, out);
    Ok(())
}

fn devices(state: u8) -> [(u32, &'static str, Vec<u8>); 2] {
    let mut global = vec![0; 104];
    (global[3], global[36]) = (8, 1);
    global[4..11].copy_from_slice(b"running");
    [(0, "timer", vec![state; 24]), (3, "globalstate", global)]
}

fn summary(summary: &CheckpointSummary) -> (u32, &'static str, Vec<u8>) {
    let body = [&(CheckpointSummary::BODY_BYTES as u32).to_be_bytes()[..], &summary.encode()].concat();
    (4, CheckpointSummary::SECTION_NAME, body)
}

fn section(id: u32, name: &str, body: &[u8], out: &mut Vec<u8>) -> Result<(), WireError> {
    SectionHeader { id, name, instance: 0, version: 1 }.encode_full(out)?;
    out.extend_from_slice(body);
    encode_footer(id, out);
    Ok(())
}

/// Seeds: no checkpoint, one checkpoint, and three checkpoints of which the last is cut off. The last two also
/// with summaries.
///
/// # Errors
/// Never; the seeds are valid.
pub fn seeds() -> Result<Vec<(&'static str, Vec<u8>)>, WireError> {
    let mut seeds = vec![("none", vec![90])];
    seeds.extend(seeds_of(["one", "three"], false)?);
    seeds.extend(seeds_of(["one-summary", "three-summaries"], true)?);
    Ok(seeds)
}

fn seeds_of(
    [one, three]: [&'static str; 2],
    has_summaries: bool,
) -> Result<Vec<(&'static str, Vec<u8>)>, WireError> {
    use sterna_wire::colo::Message;
    let (mut all, mut seeds) = (vec![if has_summaries { SUMMARIES + 90 } else { 90 }], Vec::new());
    for number in 1..=3u8 {
        Message::CheckpointRequest.encode(&mut all)?;
        Message::VmstateSend.encode(&mut all)?;
        let pages = [(usize::from(number), 0x40 + number), (9, number)];
        ram(&pages, &mut all)?;
        all.push(0);
        let mut blob = Vec::new();
        for (id, name, body) in devices(number) {
            section(id, name, &body, &mut blob)?;
        }
        if has_summaries {
            let mut sums = PageSums::default();
            pages.iter().for_each(|&(page, fill)| sums.page(0, page as u64, &[fill; PAGE_SIZE]));
            let (id, name, body) = summary(&CheckpointSummary::of(number.into(), sums, &blob));
            section(id, name, &body, &mut blob)?;
        }
        blob.push(0);
        Message::VmstateSize { bytes: blob.len() as u64 }.encode(&mut all)?;
        all.extend_from_slice(&blob);
        match number {
            1 => seeds.push((one, all.clone())),
            3 => seeds.push((three, all[..all.len() - 9].to_vec())),
            _ => {}
        }
    }
    Ok(seeds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_bring_the_checkpoints_that_they_name() {
        for (name, input) in seeds().unwrap() {
            target(&input);
            let held = follow(&input[1..], 1000, input[0] >= SUMMARIES);
            let expected = ["none", "one", "three"].iter().position(|known| name.starts_with(known)).unwrap();
            assert_eq!(held.number, expected as u64, "{name}");
        }
    }
}
