//! Chunks of device streams between the reading save threads and the writing lanes.
//!
//! Each device has a few buffers. Therefore a slow network blocks its save thread, and memory use does not grow.
//! Lanes take chunks from the devices in turn. With credit, any lane may take any chunk, because the destination
//! has room for it. Without credit, one lane sends all chunks of a device in order. Then the destination needs no
//! room to reorder them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use sterna_wire::multifd::DEVICE_STATE_PACKET_BYTES;

use crate::error::{BadGrant, MigrationError};
use crate::interruption::Break;

/// Buffers per device: one is read into, one is sent, and two wait in between.
const BUFFERS: usize = 4;
/// The most bytes of a device's chunks that are kept until they are loaded.
///
/// The destination decides how many bytes it may lack (`x-sterna-device-queue-size`, default 64 MiB). Beyond this
/// limit no chunk of that stream is kept, and after a lost connection the stream starts again from its beginning.
const MOST_KEPT_BYTES: u64 = 1 << 30;

/// A chunk in its packet, ready to be written.
pub(in crate::outgoing) struct Chunk {
    pub device: usize,
    pub packet: Vec<u8>,
}

pub(in crate::outgoing) struct Outbox {
    state: Mutex<OutboxState>,
    /// Each device's save thread waits here for buffers and credit. One condition per device wakes only one
    /// thread.
    changed: Vec<Condvar>,
    /// The number of chunks that wait for a lane; readable without the lock.
    waiting: AtomicUsize,
    /// Whether the destination grants credit.
    has_credit: bool,
    /// Whether chunks are kept until they are loaded.
    keeps: bool,
    /// The limit of kept bytes per device.
    most_kept_bytes: u64,
    lanes: usize,
}

struct OutboxState {
    devices: Vec<Queue>,
    /// The device whose chunk is taken next.
    turn: usize,
    is_closed: bool,
}

pub(in crate::outgoing) struct Queue {
    ready: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    /// The number of chunks that lanes write now.
    sending: usize,
    /// Total bytes of payloads that were granted, and were sent. `limit` is the first grant: the destination's
    /// buffer size.
    granted: u64,
    limit: u64,
    sent: u64,
    /// Chunks that the destination may not have loaded. The next field: the payload bytes up to their end.
    kept: VecDeque<Kept>,
    kept_end: u64,
    /// The destination may lack more chunks than are kept.
    lacks_kept: bool,
}

/// A kept copy of a chunk.
struct Kept {
    index: u32,
    /// The payload bytes of the stream up to the chunk's end.
    end: u64,
    packet: Vec<u8>,
}

impl Kept {
    fn payload_bytes(&self) -> u64 {
        (self.packet.len() - DEVICE_STATE_PACKET_BYTES) as u64
    }
}

impl OutboxState {
    fn is_empty(&self) -> bool {
        self.devices.iter().all(|queue| queue.ready.is_empty() && queue.sending == 0)
    }
}

impl Queue {
    fn new(granted: u64) -> Self {
        let spare = (0..BUFFERS).map(|_| Vec::new()).collect();
        Self {
            ready: VecDeque::new(),
            spare,
            sending: 0,
            granted,
            limit: granted,
            sent: 0,
            kept: VecDeque::new(),
            kept_end: 0,
            lacks_kept: false,
        }
    }

    /// The queue for another session. The first grant shows which kept chunks were not loaded and must be sent
    /// again.
    #[cfg(feature = "reconnect")]
    fn resumed(self) -> Self {
        Self { limit: self.limit, kept: self.kept, kept_end: self.kept_end, ..Self::new(0) }
    }

    /// # Errors The first grant of a session reports other loaded bytes than were sent.
    fn grant(&mut self, bytes: u64) -> Result<(), BadGrant> {
        let is_first = self.granted == 0;
        self.granted = self.granted.max(bytes);
        if self.limit == 0 {
            self.limit = bytes;
        }
        let loaded = self.granted.saturating_sub(self.limit);
        while self.kept.front().is_some_and(|kept| kept.end <= loaded) {
            self.kept.pop_front();
        }
        if is_first {
            let begins = self.kept.front().map_or(self.kept_end, |kept| kept.end - kept.payload_bytes());
            if begins != loaded {
                return Err(BadGrant::Gap { loaded, kept_from: begins });
            }
            self.sent = loaded;
        }
        Ok(())
    }
}

impl Outbox {
    pub(crate) fn new(devices: usize, lanes: usize, has_credit: bool) -> Self {
        let granted = if has_credit { 0 } else { u64::MAX };
        let changed = (0..devices).map(|_| Condvar::new()).collect();
        let devices = (0..devices).map(|_| Queue::new(granted)).collect();
        Self {
            state: Mutex::new(OutboxState { devices, turn: 0, is_closed: false }),
            changed,
            waiting: AtomicUsize::new(0),
            has_credit,
            keeps: false,
            most_kept_bytes: MOST_KEPT_BYTES,
            lanes: lanes.max(1),
        }
    }

    /// Keeps chunks until they are loaded. It needs credit, which limits the kept bytes.
    pub(crate) fn keeping(self, keeps: bool) -> Self {
        Self { keeps: keeps && self.has_credit, ..self }
    }

    /// Takes the queues with the kept chunks, after no thread uses the outbox any more.
    #[cfg(feature = "reconnect")]
    pub(crate) fn take_queues(&self) -> Vec<Queue> {
        std::mem::take(&mut self.state.lock().devices)
    }

    /// An outbox that continues with the kept chunks of an earlier session.
    #[cfg(feature = "reconnect")]
    pub(crate) fn resumed(queues: Vec<Queue>, lanes: usize) -> Self {
        let outbox = Self::new(queues.len(), lanes, true).keeping(true);
        outbox.state.lock().devices = queues.into_iter().map(Queue::resumed).collect();
        outbox
    }

    /// Keeps a copy of a chunk that was read. The chunk may be sent only afterwards.
    pub(crate) fn keep(&self, device: usize, index: u32, packet: &[u8]) {
        if self.keeps {
            let queue = &mut self.state.lock().devices[device];
            let begins = queue.kept.front().map_or(queue.kept_end, |kept| kept.end - kept.payload_bytes());
            queue.kept_end += (packet.len() - DEVICE_STATE_PACKET_BYTES) as u64;
            if queue.lacks_kept || queue.kept_end - begins > self.most_kept_bytes {
                queue.lacks_kept = true;
                queue.kept.clear();
                return;
            }
            queue.kept.push_back(Kept { index, end: queue.kept_end, packet: packet.to_vec() });
        }
    }

    /// Whether every chunk is kept that the destination may lack.
    ///
    /// Then the streams can continue in a new session.
    #[cfg(feature = "reconnect")]
    pub(crate) fn keeps_all(&self) -> bool {
        self.keeps && self.state.lock().devices.iter().all(|queue| !queue.lacks_kept)
    }

    /// The first kept chunk from `index` on.
    pub(crate) fn kept_from(&self, device: usize, index: u32) -> Option<(u32, Vec<u8>)> {
        let state = self.state.lock();
        let kept = state.devices[device].kept.iter().find(|kept| kept.index >= index)?;
        Some((kept.index, kept.packet.clone()))
    }

    /// Waits for a free buffer of the device.
    pub(crate) fn buffer(&self, device: usize) -> Result<Vec<u8>, Break> {
        self.wait(device, |queue| queue.spare.pop())
    }

    /// Returns a buffer that is not used any more.
    pub(crate) fn give_back(&self, device: usize, buffer: Vec<u8>) {
        self.state.lock().devices[device].spare.push(buffer);
    }

    /// Waits for the first grant, and gives the size of the destination's buffer in bytes.
    pub(crate) fn first_grant(&self, device: usize) -> Result<u64, Break> {
        self.wait(device, |queue| (queue.granted > 0).then_some(queue.limit))
    }

    /// The first device without a grant so far.
    pub(crate) fn without_grant(&self) -> Option<usize> {
        self.state.lock().devices.iter().position(|queue| queue.granted == 0)
    }

    /// Waits until a payload of `bytes` may be sent.
    pub(crate) fn spend(&self, device: usize, bytes: u64) -> Result<(), Break> {
        self.wait(device, |queue| {
            let after = queue.sent.checked_add(bytes).filter(|after| *after <= queue.granted)?;
            queue.sent = after;
            Some(())
        })
    }

    /// Records that the destination grants `bytes` of payloads in total. A smaller total than before has no
    /// effect.
    ///
    /// # Errors
    /// The grant does not fit the end of the previous session.
    pub(crate) fn grant(&self, device: usize, bytes: u64) -> Result<(), MigrationError> {
        self.state.lock().devices[device].grant(bytes)?;
        self.changed[device].notify_all();
        Ok(())
    }

    /// Payload bytes that were sent and not loaded yet, at least; 0 without credit.
    pub(crate) fn unloaded(&self, device: usize) -> u64 {
        let Queue { granted, limit, sent, .. } = self.state.lock().devices[device];
        // The destination grants a quarter of its buffer at a time.
        sent.saturating_sub(granted.saturating_sub(limit)).saturating_sub(limit / 4)
    }

    /// Adds a chunk for the lanes. The caller wakes them.
    pub(crate) fn push(&self, chunk: Chunk) {
        self.state.lock().devices[chunk.device].ready.push_back(chunk.packet);
        self.waiting.fetch_add(1, Ordering::Release);
    }

    /// Whether any lane may take any chunk.
    pub(crate) fn is_for_any(&self) -> bool {
        self.has_credit
    }

    /// Takes a chunk that lane `lane` has to write.
    pub(crate) fn take(&self, lane: usize) -> Option<Chunk> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let count = state.devices.len();
        let turn = state.turn;
        let device = (turn..turn + count).map(|at| at % count).find(|device| {
            let is_ours = self.has_credit || device % self.lanes == lane;
            is_ours && !state.devices[*device].ready.is_empty()
        })?;
        state.turn = device + 1;
        self.take_from(&mut state, device)
    }

    /// Takes the next chunk of `device`, if one is ready.
    pub(crate) fn take_of(&self, device: usize) -> Option<Chunk> {
        self.take_from(&mut self.state.lock(), device)
    }

    /// Records that a chunk is written. Gives whether every pushed chunk is written.
    pub(crate) fn done(&self, chunk: Chunk) -> bool {
        let mut state = self.state.lock();
        let queue = &mut state.devices[chunk.device];
        queue.sending -= 1;
        queue.spare.push(chunk.packet);
        let is_empty = state.is_empty();
        drop(state);
        self.changed[chunk.device].notify_all();
        is_empty
    }

    /// Whether every pushed chunk is written.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().is_empty()
    }

    /// Unblocks all waiting threads. Later waits fail.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        for changed in &self.changed {
            changed.notify_all();
        }
    }

    fn take_from(&self, state: &mut OutboxState, device: usize) -> Option<Chunk> {
        let queue = &mut state.devices[device];
        let packet = queue.ready.pop_front()?;
        queue.sending += 1;
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        Some(Chunk { device, packet })
    }

    /// Waits until `check` gives a value. Interrupted after [`Outbox::close`].
    fn wait<T>(&self, device: usize, mut check: impl FnMut(&mut Queue) -> Option<T>) -> Result<T, Break> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return Err(Break::Interrupted);
            }
            if let Some(got) = check(&mut state.devices[device]) {
                return Ok(got);
            }
            self.changed[device].wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(device: usize, mark: u8) -> Chunk {
        Chunk { device, packet: vec![mark] }
    }

    fn marks(outbox: &Outbox, lane: usize) -> Vec<u8> {
        std::iter::from_fn(|| outbox.take(lane)).map(|chunk| chunk.packet[0]).collect()
    }

    #[test]
    fn take_with_credit_serves_devices_in_turn_on_any_lane() {
        let outbox = Outbox::new(2, 2, true);
        for mark in [1, 2, 3] {
            outbox.push(chunk(0, mark));
        }
        outbox.push(chunk(1, 11));

        assert_eq!(marks(&outbox, 1), [1, 11, 2, 3]);
    }

    #[test]
    fn take_without_credit_keeps_a_device_to_its_lane() {
        let outbox = Outbox::new(2, 2, false);
        outbox.push(chunk(0, 1));
        outbox.push(chunk(1, 11));
        outbox.push(chunk(1, 12));

        assert_eq!(marks(&outbox, 1), [11, 12]);
        assert_eq!(marks(&outbox, 0), [1]);
    }

    #[test]
    fn bytes_that_were_sent_are_loaded_when_their_room_is_granted_again() {
        let outbox = Outbox::new(1, 1, true);
        outbox.grant(0, 1000).unwrap();
        outbox.spend(0, 900).unwrap();
        // One message grants a quarter. So much may be loaded and not reported.
        assert_eq!(outbox.unloaded(0), 650);
        outbox.grant(0, 1600).unwrap();
        assert_eq!(outbox.unloaded(0), 50);
        outbox.grant(0, 1900).unwrap();
        assert_eq!(outbox.unloaded(0), 0);
    }

    /// The destination grants everything in one message, and does not report any chunk as loaded.
    #[test]
    fn what_is_kept_has_a_limit_however_much_is_granted() {
        let outbox = Outbox { most_kept_bytes: 1000, ..Outbox::new(1, 1, true).keeping(true) };
        outbox.grant(0, u64::MAX).unwrap();
        let packet = vec![0; DEVICE_STATE_PACKET_BYTES + 100];
        (0..10).for_each(|index| outbox.keep(0, index, &packet));
        assert!(outbox.keeps_all());
        outbox.keep(0, 10, &packet);
        assert!(!outbox.keeps_all() && outbox.kept_from(0, 0).is_none());
        outbox.keep(0, 11, &packet);
        assert!(outbox.kept_from(0, 0).is_none(), "a part of it is of no use");
    }

    #[test]
    fn is_empty_only_when_what_was_taken_is_done() {
        let outbox = Outbox::new(1, 1, false);
        outbox.push(chunk(0, 1));
        assert!(!outbox.is_empty());

        let taken = outbox.take(0).unwrap();
        assert!(!outbox.is_empty());
        outbox.done(taken);

        assert!(outbox.is_empty());
    }

    #[test]
    fn spend_beyond_the_grant_waits_for_more() {
        let outbox = Outbox::new(1, 1, true);
        outbox.grant(0, 10).unwrap();
        outbox.spend(0, 10).unwrap();

        let spent = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| outbox.spend(0, 1));
            outbox.grant(0, 5).unwrap();
            (0..100).for_each(|_| {
                std::thread::yield_now();
                assert_eq!(outbox.state.lock().devices[0].sent, 10);
            });
            outbox.grant(0, 11).unwrap();
            waiting.join().unwrap()
        });

        spent.unwrap();
        assert_eq!(outbox.state.lock().devices[0].sent, 11);
    }

    #[test]
    fn close_ends_every_wait() {
        let outbox = Outbox::new(1, 1, true);

        let ends = std::thread::scope(|scope| {
            let credit = scope.spawn(|| outbox.spend(0, 1));
            let grant = scope.spawn(|| outbox.first_grant(0));
            outbox.close();
            (credit.join().unwrap(), grant.join().unwrap())
        });

        assert!(matches!(ends, (Err(Break::Interrupted), Err(Break::Interrupted))), "{ends:?}");
        assert!(matches!(outbox.buffer(0), Err(Break::Interrupted)));
    }
}
