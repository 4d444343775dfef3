//! Lanes: packets in one direction, limited by credit, and the pages that are written before each packet.

use std::sync::Arc;

use sterna::rdma::{LaneDestinationStream, LaneSourceStream};
use sterna_ram::{Backing, PAGE_SIZE, RamBlock};
use sterna_transport::rdma::double::Settings;
use sterna_transport::rdma::{Access, Adapter, Memory, Registration, Write};
use sterna_transport::{ByteStream, CancelFlag, StreamError};
use sterna_wire::rdma::{ChunkSize, ConnectRequest, Introduction, Part};

use super::{LIMIT, LONG, Lab, MIB};

const LANES: u8 = 4;
const BLOCK: usize = 4 * MIB;

fn request(lane: u8) -> ConnectRequest {
    let introduction = Introduction {
        version: Introduction::VERSION,
        part: Part::Lane(lane),
        lanes: LANES,
        chunk: ChunkSize::LEAST,
        session: [7; 16],
        nonce: [lane + 1; 16],
    };
    ConnectRequest { pin_all: false, introduction: Some(introduction) }
}

fn accept(lab: &Lab) -> LaneDestinationStream {
    let request = lab.listener.accept(LIMIT, &CancelFlag::new()).unwrap();
    let asked = ConnectRequest::decode(request.private_data()).unwrap();
    let reply = asked.reply(LANES, ChunkSize::LEAST).unwrap();
    LaneDestinationStream::accept(request, &reply, LONG, &CancelFlag::new()).unwrap()
}

fn join(lab: &Lab, lane: u8) -> (LaneSourceStream, LaneDestinationStream) {
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| accept(lab));
        let to = lab.listener.local_address();
        let cancel = CancelFlag::new();
        let source = LaneSourceStream::connect(&lab.source, to, &request(lane), 64, LONG, &cancel).unwrap();
        (source, accepted.join().unwrap())
    })
}

fn register(adapter: &Arc<dyn Adapter>, block: &RamBlock, access: Access) -> Registration {
    adapter.register(Memory::of_block(block, 0, BLOCK).unwrap(), access).unwrap()
}

fn read_exact(stream: &LaneDestinationStream, to: &mut [u8]) -> bool {
    let mut at = 0;
    while at < to.len() {
        match stream.read(&mut to[at..], LIMIT).unwrap() {
            0 => return false,
            count => at += count,
        }
    }
    true
}

/// Sends packets that name a page and its first word. The page was written immediately before its packet.
fn send(stream: &LaneSourceStream, from: &Registration, block: &RamBlock, to: (u64, u32), seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for word in 1..=200u64 {
        let page = random.u64(..(BLOCK / PAGE_SIZE) as u64);
        let offset = page * PAGE_SIZE as u64;
        // Only this lane writes this block, and the page is not in flight: the last packet about it was flushed.
        stream.flush(LIMIT).unwrap();
        block.write(offset, &word.to_be_bytes()).unwrap();
        let piece = from.piece(offset as usize, PAGE_SIZE as u32).unwrap();
        stream.write_memory(&[Write { from: piece, address: to.0 + offset, rkey: to.1 }], LIMIT).unwrap();
        let mut packet = [page.to_be_bytes(), word.to_be_bytes()].concat();
        // Some packets are longer than a message.
        packet.resize(16 + random.usize(..3) * 50_000, 0xee);
        let head = (packet.len() as u32).to_be_bytes();
        for part in [&head[..], &packet] {
            let mut left = part;
            while !left.is_empty() {
                left = &left[stream.write(left, LIMIT).unwrap()..];
            }
        }
    }
    stream.finish_writing().unwrap();
}

fn check(stream: &LaneDestinationStream, block: &RamBlock) -> u64 {
    let mut packets = 0;
    let mut head = [0; 4];
    while read_exact(stream, &mut head) {
        let mut packet = vec![0; u32::from_be_bytes(head) as usize];
        assert!(read_exact(stream, &mut packet));
        let word = |at: usize| u64::from_be_bytes(packet[at..at + 8].try_into().unwrap());
        let mut there = [0; 8];
        block.read(word(0) * PAGE_SIZE as u64, &mut there).unwrap();
        // The source may be ahead: the memory may already have the page of a later packet.
        assert!(u64::from_be_bytes(there) >= word(8), "a packet came before its page");
        packets += 1;
    }
    packets
}

#[test]
fn page_is_there_before_its_packet_and_no_message_lacks_a_receive() {
    for seed in 0..4 {
        println!("seed {seed}");
        let lab = Lab::new(if seed == 0 { Settings::new() } else { Settings::seeded(seed) });
        let lanes: Vec<_> = (0..LANES).map(|lane| join(&lab, lane)).collect();
        let block = |_: &_| RamBlock::new("ram", BLOCK as u64, Backing::Memfd).unwrap();
        let (ours, theirs): (Vec<_>, Vec<_>) =
            (lanes.iter().map(block).collect(), lanes.iter().map(block).collect());
        // The adapter of the first lane serves all lanes of a side.
        let (here, there) =
            (lanes[0].0.endpoint().connection().adapter(), lanes[0].1.endpoint().connection().adapter());
        let from: Vec<_> = ours.iter().map(|block| register(&here, block, Access::SOURCE)).collect();
        let to: Vec<_> = theirs.iter().map(|block| register(&there, block, Access::REMOTE_WRITE)).collect();

        std::thread::scope(|scope| {
            for (at, (source, destination)) in lanes.iter().enumerate() {
                let place = (to[at].memory().address(), to[at].rkey());
                let (from, ours, theirs) = (&from[at], &ours[at], &theirs[at]);
                scope.spawn(move || send(source, from, ours, place, seed * 10 + at as u64));
                scope.spawn(move || assert_eq!(check(destination, theirs), 200));
            }
        });

        // The last credit may reach a source that has disconnected. That request fails without harm.
        assert_eq!(lab.network.counts().rnrs, 0);
        drop((lanes, from, to));
        lab.assert_empty();
    }
}

#[test]
fn destination_that_does_not_read_holds_the_source_back_without_losing_a_message() {
    let lab = Lab::new(Settings::new());
    let (source, destination) = join(&lab, 0);
    let mut sent = 0;
    // Credit is granted with the first read.
    let quiet = source.write(b"early", Some(std::time::Duration::from_millis(30))).unwrap_err();
    assert!(matches!(quiet, StreamError::Quiet), "{quiet}");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| destination.read(&mut [0; 4], LIMIT).unwrap());
        loop {
            match source.write(&[sent], Some(std::time::Duration::from_millis(200))) {
                Ok(_) => sent += 1,
                Err(StreamError::Quiet) => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(first.join().unwrap(), 1);
    });
    assert_eq!(sent, 16, "all of the first credit");
    for expected in 1..16 {
        let mut byte = [0; 1];
        assert_eq!(destination.read(&mut byte, LIMIT).unwrap(), 1);
        assert_eq!(byte, [expected]);
    }
    source.write(&[sent], LIMIT).unwrap();
    assert_eq!(lab.network.counts().rnrs, 0);
    drop((source, destination));
    lab.assert_empty();
}

#[test]
fn lane_of_a_peer_that_is_gone_ends_every_wait() {
    for source_goes in [true, false] {
        let lab = Lab::new(Settings::new());
        let (source, destination) = join(&lab, 0);
        std::thread::scope(|scope| {
            if source_goes {
                let reads = scope.spawn(|| destination.read(&mut [0; 4], LIMIT));
                std::thread::sleep(std::time::Duration::from_millis(20));
                source.shutdown();
                assert!(matches!(reads.join().unwrap(), Ok(0) | Err(_)));
            } else {
                let writes = scope.spawn(|| source.write(b"x", LIMIT));
                std::thread::sleep(std::time::Duration::from_millis(20));
                destination.shutdown();
                assert!(writes.join().unwrap().is_err());
            }
        });
        drop((source, destination));
        lab.assert_empty();
    }
}
