//! The chunks that an inbox accepts, buffers and refuses.

use super::*;
use crate::device_stream::{DeviceStream, RemainingState};
use crate::error::VmError;
use std::sync::Arc;
use std::time::Duration;

/// A device whose methods are not called in these tests.
struct Silent;

impl DeviceStream for Silent {
    fn begin_save(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn remaining(&self) -> Result<RemainingState, VmError> {
        Ok(RemainingState::default())
    }
    fn read(&self, _: &mut [u8]) -> Result<usize, VmError> {
        Ok(0)
    }
    fn stop(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn end_save(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn begin_load(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn write(&self, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn finish_load(&self, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn end_load(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn run(&self) -> Result<(), VmError> {
        Ok(())
    }
}

const CEILING: u64 = 200_000;

fn inbox() -> Inbox {
    Inbox::new(Streamed { name: "bank".into(), instance: 3, stream: Arc::new(Silent) }, CEILING)
}

fn payload(index: u32, kind: DeviceChunkKind, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    DeviceChunk { index, kind }.encode(&mut out);
    out.extend_from_slice(data);
    out
}

fn data(index: u32) -> Vec<u8> {
    payload(index, DeviceChunkKind::Data { initial_ends: false }, b"abc")
}

fn end(index: u32) -> Vec<u8> {
    payload(index, DeviceChunkKind::Configuration { total_bytes: None }, b"")
}

/// Takes the next chunk in order.
fn next_of(inbox: &Inbox) -> Chunk {
    match inbox.take() {
        Some(Next::Chunk(chunk)) => chunk,
        _ => panic!("no chunk"),
    }
}

fn refusal(inbox: &Inbox, payload: Vec<u8>) -> BadChunk {
    reason(inbox.put(payload).expect_err("must be refused"))
}

fn reason(error: MigrationError) -> BadChunk {
    let MigrationError::PeerMisbehaved(Misbehaviour::Chunk { device, instance: 3, why }) = error else {
        panic!("{error}")
    };
    assert_eq!(device, "bank");
    why
}

#[test]
fn put_out_of_order_is_taken_in_order() {
    let inbox = inbox();
    for index in [2, 0, 1] {
        inbox.put(data(index)).unwrap();
    }
    inbox.put(end(3)).unwrap();

    for _ in 0..3 {
        let chunk = next_of(&inbox);
        assert_eq!(chunk.data(), b"abc");
        inbox.loaded(chunk, Duration::ZERO);
    }
    let last = next_of(&inbox);
    assert!(matches!(last.kind, DeviceChunkKind::Configuration { .. }));
    inbox.loaded(last, Duration::ZERO);
    assert!(inbox.is_loaded());
}

#[test]
fn put_twice_is_refused_held_or_loaded() {
    let inbox = inbox();
    inbox.put(data(0)).unwrap();
    assert_eq!(refusal(&inbox, data(0)), BadChunk::Twice { index: 0 });
    let chunk = next_of(&inbox);
    inbox.loaded(chunk, Duration::ZERO);
    assert_eq!(refusal(&inbox, data(0)), BadChunk::Twice { index: 0 });
}

#[test]
fn put_behind_the_end_is_refused() {
    let inbox = inbox();
    inbox.put(end(1)).unwrap();
    assert_eq!(refusal(&inbox, data(2)), BadChunk::AfterEnd { index: 2 });
    assert_eq!(refusal(&inbox, end(2)), BadChunk::AfterEnd { index: 2 });
    inbox.put(data(0)).unwrap();

    let early = self::inbox();
    early.put(data(5)).unwrap();
    assert_eq!(refusal(&early, end(4)), BadChunk::EarlyEnd { index: 4 });
}

#[test]
fn all_came_names_the_first_missing_chunk() {
    let inbox = inbox();
    assert_eq!(reason(inbox.all_came().unwrap_err()), BadChunk::NoneCame);
    inbox.put(data(0)).unwrap();
    inbox.put(data(2)).unwrap();
    assert_eq!(reason(inbox.all_came().unwrap_err()), BadChunk::NoEnd { count: 2 });
    inbox.put(end(3)).unwrap();
    assert_eq!(reason(inbox.all_came().unwrap_err()), BadChunk::Missing { index: 1, count: 4 });
    inbox.put(data(1)).unwrap();
    inbox.all_came().unwrap();
}

#[test]
fn buffer_beyond_what_was_granted_is_refused_before_anything_is_held() {
    let inbox = inbox();
    assert!(inbox.buffer(WHOLE_CHUNK_BYTES as u32 + 1).is_err(), "more than is ever held");
    assert_eq!(inbox.begin_credit(), CEILING);
    assert!(
        inbox.buffer(CEILING as u32 + 1).is_err(),
        "more than is ever held of a source that knows the limit"
    );
    inbox.buffer(150_000).unwrap();
    let why = reason(inbox.buffer(60_000).unwrap_err());
    assert_eq!(why, BadChunk::BeyondGrant { came: 210_000, granted: 200_000 });
}

#[test]
fn source_without_credit_may_send_chunks_beyond_the_limit_and_one_is_held() {
    let inbox = inbox();
    let large = vec![0; CEILING as usize + 1];
    inbox.buffer(large.len() as u32 + 9).unwrap();
    inbox.put(payload(0, DeviceChunkKind::Data { initial_ends: false }, &large)).unwrap();
}

#[test]
fn put_without_credit_out_of_order_beyond_the_limit_is_refused() {
    let inbox = inbox();
    let large = vec![0; 120_000];
    let chunk = |index| payload(index, DeviceChunkKind::Data { initial_ends: false }, &large);
    inbox.put(chunk(1)).unwrap();
    assert!(matches!(refusal(&inbox, chunk(2)), BadChunk::NoRoom { index: 2, next: 0, .. }));
}

#[test]
fn put_without_credit_of_two_lanes_in_order_waits_for_room_in_both() {
    let inbox = inbox();
    let large = vec![0; 120_000];
    let chunk = |index| payload(index, DeviceChunkKind::Data { initial_ends: false }, &large);
    inbox.put(chunk(0)).unwrap();
    std::thread::scope(|scope| {
        let waits = |index| {
            let waiting = scope.spawn({
                let inbox = &inbox;
                let chunk = chunk(index);
                move || inbox.put(chunk)
            });
            while !inbox.state.lock().waiting.contains(&index) {
                std::thread::yield_now();
            }
            waiting
        };
        let (one, two) = (waits(1), waits(2));
        assert_eq!(refusal(&inbox, chunk(1)), BadChunk::Twice { index: 1 });
        for _ in 0..3 {
            let taken = next_of(&inbox);
            inbox.loaded(taken, std::time::Duration::ZERO);
        }
        one.join().unwrap().unwrap();
        two.join().unwrap().unwrap();
    });
    // The limit has room for one chunk. The chunk that the device waits for may exceed it.
    let two = 2 * chunk(0).len() as u64;
    assert!(inbox.statistics().peak_bytes <= two, "{}", inbox.statistics().peak_bytes);
}

#[test]
fn put_without_credit_in_order_waits_for_room() {
    let inbox = inbox();
    let large = vec![0; 120_000];
    let chunk = |index| payload(index, DeviceChunkKind::Data { initial_ends: false }, &large);
    inbox.put(chunk(0)).unwrap();

    std::thread::scope(|scope| {
        let second = scope.spawn(|| inbox.put(chunk(1)));
        let first = next_of(&inbox);
        assert_eq!(inbox.loaded(first, Duration::ZERO), None, "nobody asked for grants");
        second.join().unwrap().unwrap();
    });

    assert!(inbox.statistics().peak_bytes <= CEILING);
}

#[test]
fn total_that_differs_is_refused() {
    let inbox = inbox();
    inbox.put(data(0)).unwrap();
    let chunk = next_of(&inbox);
    inbox.loaded(chunk, Duration::ZERO);
    inbox.check_total(Some(3)).unwrap();
    inbox.check_total(None).unwrap();
    let why = reason(inbox.check_total(Some(4)).unwrap_err());
    assert_eq!(why, BadChunk::Total { came: 3, announced: 4 });
}

#[test]
fn put_of_what_is_no_chunk_is_refused() {
    let inbox = inbox();
    for bad in [
        vec![],
        vec![0; 11],
        vec![1; 40],
        payload(0, DeviceChunkKind::Data { initial_ends: true }, b"")
            .into_iter()
            .enumerate()
            .map(|(at, byte)| if at == 11 { 6 } else { byte })
            .collect(),
    ] {
        assert!(inbox.put(bad).is_err());
    }
}

#[test]
fn put_without_credit_in_order_behind_held_chunks_waits_for_room() {
    let inbox = inbox();
    let large = vec![0; 60_000];
    let chunk = |index| payload(index, DeviceChunkKind::Data { initial_ends: false }, &large);
    for index in 0..3 {
        inbox.put(chunk(index)).unwrap();
    }

    std::thread::scope(|scope| {
        let fourth = scope.spawn(|| inbox.put(chunk(3)));
        for _ in 0..4 {
            let chunk = next_of(&inbox);
            inbox.loaded(chunk, Duration::ZERO);
        }
        fourth.join().unwrap().unwrap();
    });

    assert!(inbox.statistics().peak_bytes <= CEILING);
}

#[test]
fn put_without_credit_that_fills_a_gap_always_has_room() {
    let inbox = inbox();
    let large = vec![0; 60_000];
    let chunk = |index| payload(index, DeviceChunkKind::Data { initial_ends: false }, &large);
    inbox.put(chunk(1)).unwrap();
    inbox.put(chunk(2)).unwrap();
    let why = refusal(&inbox, chunk(3));
    assert!(matches!(why, BadChunk::NoRoom { index: 3, next: 0, .. }), "room is kept for chunk 0: {why}");

    inbox.put(chunk(0)).unwrap();

    assert_eq!(std::iter::repeat_with(|| inbox.loaded(next_of(&inbox), Duration::ZERO)).take(3).count(), 3);
    assert!(inbox.statistics().peak_bytes <= CEILING);
}

#[test]
fn stream_of_a_lost_session_goes_on_behind_what_was_loaded() {
    let inbox = inbox();
    assert!(inbox.begin() && !inbox.begin(), "its device is told once");
    let first = inbox.begin_credit();
    for index in [0, 1, 3] {
        let mut buffer = inbox.buffer(data(index).len() as u32).unwrap();
        buffer.copy_from_slice(&data(index));
        inbox.put(buffer).unwrap();
    }
    let loaded = next_of(&inbox);
    inbox.loaded(loaded, Duration::ZERO);
    inbox.stop();

    inbox.suspend();

    assert!(!inbox.begin(), "it goes on");
    assert_eq!(inbox.begin_credit() - first, data(0).len() as u64, "where, the first grant says");
    assert_eq!(refusal(&inbox, data(0)), BadChunk::Twice { index: 0 });
    for index in [3, 1, 2] {
        inbox.put(data(index)).unwrap();
    }
    inbox.put(end(4)).unwrap();
    inbox.all_came().unwrap();
}

#[test]
fn chunk_that_is_with_its_device_when_the_connection_is_lost_is_loaded_and_one_half_come_is_not() {
    let inbox = inbox();
    inbox.begin();
    let first = inbox.begin_credit();
    let put = |index| {
        let mut buffer = inbox.buffer(data(index).len() as u32).unwrap();
        buffer.copy_from_slice(&data(index));
        inbox.put(buffer).unwrap();
    };
    put(0);
    put(1);
    let with_device = next_of(&inbox);
    // The lane's channel closes before the rest of the payload.
    drop(inbox.buffer(data(2).len() as u32).unwrap());
    inbox.stop();
    assert!(inbox.take().is_none(), "what waits is not loaded any more");
    inbox.loaded(with_device, Duration::ZERO);

    inbox.suspend();

    assert_eq!(inbox.begin_credit() - first, data(0).len() as u64);
    assert_eq!(inbox.progress(), (data(0).len() as u64, data(0).len() as u64), "nothing else has come");
    put(2);
    put(1);
    for index in [1, 2] {
        let chunk = next_of(&inbox);
        assert_eq!(chunk.data(), &data(index)[data(index).len() - chunk.data().len()..]);
        inbox.loaded(chunk, Duration::ZERO);
    }
    inbox.put(end(3)).unwrap();
    inbox.all_came().unwrap();
}

#[test]
fn stream_that_begins_anew_waits_until_what_was_loaded_is_forgotten() {
    let inbox = Arc::new(inbox());
    inbox.begin();
    inbox.put(data(0)).unwrap();
    let loaded = next_of(&inbox);
    inbox.loaded(loaded, Duration::ZERO);
    let waiting = Arc::clone(&inbox);
    let anew = std::thread::spawn(move || waiting.begin_anew());
    assert!(matches!(inbox.take(), Some(Next::BeginsAnew)));
    assert!(!anew.is_finished());
    inbox.has_forgotten();
    assert!(anew.join().unwrap());
    inbox.put(data(0)).unwrap();
    assert_eq!(next_of(&inbox).data(), b"abc");
    inbox.stop();
    assert!(!inbox.begin_anew(), "all stops");
}
