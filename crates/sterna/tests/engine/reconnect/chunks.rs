//! Devices' streams that are cut between two chunks. The proxy counts which chunks are sent again.

use std::sync::{Arc, Mutex};

use super::streams::{BANKS, WithBanks};
use super::*;
use crate::common::multifd;
use crate::support::bank::Calls;
use crate::support::{eventually, small};
use sterna_wire::multifd::{DeviceChunk, DeviceStatePacket, InitialPacket, PacketHeader, PacketKind};

/// Length of the first message of a channel in a later session.
const HELLO_BYTES: usize = sterna_wire::extension::ReconnectHello::BYTES;
/// Place of the number of pages with content in a packet with pages. Another field contains the number of bytes that
/// follow.
const NORMAL_PAGES: std::ops::Range<usize> = 16..20;
const PAYLOAD_BYTES: std::ops::Range<usize> = 20..24;

/// A chunk that was forwarded completely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sent {
    instance: u32,
    index: u32,
    /// Bytes without the head.
    bytes: u64,
}

/// Chunks of each session.
type Sessions = Arc<Mutex<Vec<Vec<Sent>>>>;

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Parses the start of `bytes`: the chunk, if it is one, and the total length. `None` if more bytes are needed.
fn packet(bytes: &[u8]) -> Option<(Option<Sent>, usize)> {
    let header = PacketHeader::peek(bytes).unwrap()?;
    let length = header.kind.packet_bytes();
    if header.kind != PacketKind::DeviceState {
        // A packet without normal pages has no payload, whatever its length field contains.
        let payload = if word(bytes.get(NORMAL_PAGES)?) == 0 { 0 } else { word(bytes.get(PAYLOAD_BYTES)?) };
        return Some((None, length + payload as usize));
    }
    let (state, _) = DeviceStatePacket::decode(bytes).unwrap()?;
    let payload = bytes.get(length..)?;
    if payload.len() < DeviceChunk::MAX_BYTES.min(state.payload_bytes as usize) {
        return None;
    }
    let (chunk, head) = DeviceChunk::decode(payload).unwrap();
    let bytes = u64::from(state.payload_bytes) - head as u64;
    Some((
        Some(Sent { instance: state.instance, index: chunk.index, bytes }),
        length + state.payload_bytes as usize,
    ))
}

/// Records the chunks that pass on the only multifd channel. In the first session, holds the channel before a chunk
/// if `is_due` returns true for the passed chunks and this one.
fn noting(sessions: &Sessions, is_due: impl Fn(&[Sent], Sent) -> bool + Send + 'static) -> Filter {
    let sessions = Arc::clone(sessions);
    let (mut passed, mut next) = (Vec::new(), 0);
    Box::new(move |line, way, offset, piece| {
        if (line, way) != (Line::Lane(0), Way::Forward) {
            return Verdict::Pass;
        }
        let mut sessions = sessions.lock().unwrap();
        if offset == 0 {
            sessions.push(Vec::new());
            passed.clear();
            next = if sessions.len() == 1 { InitialPacket::BYTES } else { HELLO_BYTES };
        }
        passed.extend_from_slice(piece);
        let is_first = sessions.len() == 1;
        let chunks = sessions.last_mut().unwrap();
        while let Some((chunk, length)) = passed.get(next..).and_then(packet) {
            let in_piece = (next as u64).checked_sub(offset);
            if let (Some(chunk), Some(at), true) = (chunk, in_piece, is_first)
                && is_due(chunks, chunk)
            {
                piece.truncate(at as usize);
                return Verdict::Hold;
            }
            if passed.len() < next + length {
                break;
            }
            chunks.extend(chunk);
            next += length;
        }
        Verdict::Pass
    })
}

/// Chunks of one device, in the order in which they passed.
fn of(chunks: &[Sent], instance: u32) -> Vec<Sent> {
    chunks.iter().copied().filter(|chunk| chunk.instance == instance).collect()
}

fn bytes(chunks: &[Sent]) -> u64 {
    chunks.iter().map(|chunk| chunk.bytes).sum()
}

/// Small chunks on one channel, at a low rate.
fn in_chunks() -> (Parameters, Capabilities) {
    let (mut params, capabilities) = surviving(multifd(1));
    params.max_bandwidth_bytes = 40 << 20;
    params.max_queued_stream_bytes = 1 << 20;
    (params, capabilities)
}

/// Waits until the channel is held and all passed chunks are loaded, then cuts. Returns the channel's chunks until
/// then.
fn cut_when_loaded(with: &WithBanks, sessions: &Sessions, is_held: impl Fn(&[Sent]) -> bool) -> Vec<Sent> {
    let passed = || sessions.lock().unwrap().first().cloned().unwrap_or_default();
    eventually("a chunk in front of which the channel is held", || is_held(&passed()));
    eventually("all that passed to be loaded", || {
        // The configuration is not part of the stream.
        let of_bank =
            |(instance, _, all_bytes): (u32, u64, u64)| bytes(&of(&passed(), instance)).min(all_bytes);
        BANKS.map(of_bank) == [0, 1].map(|at| with.bench.target.banks[at].position())
    });
    with.bench.proxy.cut();
    passed()
}

#[test]
fn stream_that_is_cut_between_two_chunks_goes_on_with_the_second_and_no_chunk_comes_twice() {
    let sessions = Sessions::default();
    let due = |passed: &[Sent], next: Sent| {
        next.instance == 0 && passed.last().is_some_and(|last| last.instance == 0) && next.index >= 3
    };
    let held = Arc::new(Mutex::new(None));
    let noted = Arc::clone(&held);
    let filter = noting(&sessions, move |passed, next| {
        let is_due = due(passed, next);
        if is_due {
            *noted.lock().unwrap() = Some(next);
        }
        is_due
    });
    let with = WithBanks::new(&config(), in_chunks(), filter);

    let before = cut_when_loaded(&with, &sessions, |_| held.lock().unwrap().is_some());

    assert_eq!(with.bench.arrives(), 1);
    assert_eq!(with.count(0, "begin_save"), [1, 1], "they were read once");
    assert_eq!((with.count(1, "begin_load"), with.count(1, "finish_load")), (vec![1, 1], vec![1, 1]));
    let sessions = sessions.lock().unwrap();
    let [first, after] = &sessions[..] else { panic!("{} sessions", sessions.len()) };
    assert_eq!(first, &before);
    for (instance, _, all_bytes) in BANKS {
        let (came, rest) = (of(first, instance), of(after, instance));
        let indices: Vec<u32> = came.iter().chain(&rest).map(|chunk| chunk.index).collect();
        let in_order: Vec<u32> = (0..indices.len() as u32).collect();
        assert_eq!(indices, in_order, "device {instance}: each once, {} before the cut", came.len());
        // The last chunk is the configuration, 8 bytes.
        assert_eq!(bytes(&came) + bytes(&rest), all_bytes + 8);
    }
    let next = held.lock().unwrap().expect("held");
    assert_eq!(of(after, 0)[0], next, "the second of the two");
}

#[test]
fn stream_that_is_cut_between_two_chunks_in_the_switchover_comes_once_as_a_whole() {
    let sessions = Sessions::default();
    let (calls, held): ([Calls; 2], _) = (Default::default(), Arc::new(Mutex::new(false)));
    let (saving, noted) = (Arc::clone(&calls[0]), Arc::clone(&held));
    let filter = noting(&sessions, move |passed, next| {
        let [(_, _, all_bytes), _] = BANKS;
        let has_stopped = || saving.lock().unwrap().contains(&(0, "stop"));
        // Most of the passed bytes can be read only after the device has stopped.
        let is_read_late = bytes(&of(passed, 0)) > all_bytes / 3 * 2;
        let is_due = next.instance == 0
            && passed.last().is_some_and(|last| last.instance == 0)
            && is_read_late
            && has_stopped();
        *noted.lock().unwrap() |= is_due;
        is_due
    });
    let with = WithBanks::counting(&small(), in_chunks(), calls, filter);

    let before = cut_when_loaded(&with, &sessions, |_| *held.lock().unwrap());

    assert_eq!(with.bench.arrives(), 1);
    assert_eq!(*with.bench.source.resumes.lock().unwrap(), 1, "the guest ran on there");
    assert_eq!(*with.bench.target.starts.lock().unwrap(), 1);
    assert_eq!((with.count(0, "begin_save"), with.count(0, "end_save")), (vec![2, 2], vec![2, 2]));
    assert_eq!(with.count(1, "begin_load"), vec![2, 2]);
    // The other device's stream may have arrived completely before the cut.
    let finished = with.count(1, "finish_load");
    assert!(finished[0] == 1 && (1..=2).contains(&finished[1]), "{finished:?}");
    let sessions = sessions.lock().unwrap();
    let [first, after] = &sessions[..] else { panic!("{} sessions", sessions.len()) };
    assert_eq!(first, &before);
    for (instance, _, all_bytes) in BANKS {
        // The device ran in between, so the state that arrived before is outdated.
        let indices: Vec<u32> = of(after, instance).iter().map(|chunk| chunk.index).collect();
        let in_order: Vec<u32> = (0..indices.len() as u32).collect();
        assert_eq!(indices, in_order, "device {instance}");
        assert_eq!(bytes(&of(after, instance)), all_bytes + 8);
    }
    assert!(bytes(&of(first, 0)) > BANKS[0].2 / 3 * 2, "it was cut late");
}
