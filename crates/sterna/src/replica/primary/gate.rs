//! Where a protected guest's output waits until the checkpoint after it is held.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::MigrationError;
use crate::threads;

/// How often output that may not leave is looked at again, unless somebody says something.
const LOOK: Duration = Duration::from_millis(50);

/// Whether output of this epoch (the first is 1) may leave, now. Asked for every piece at the moment at which it leaves: this process may
/// have stood still since it was released.
pub type MaySay = Box<dyn Fn(u64) -> bool + Send + Sync>;

/// Holds what a guest says. No method may wait for the network, or for whoever reads the output: the lease is watched by the same thread.
pub trait EpochGate: Send + Sync {
    /// Holds output from now on. The guest stands: what it has said before leaves.
    fn close(&self, may_say: MaySay);
    /// An epoch ends. The guest stands: what it has said so far is in this epoch or an earlier one.
    fn end_epoch(&self, epoch: u64);
    /// Output of this epoch and earlier ones may leave.
    fn release(&self, epoch: u64);
    /// Everything may leave, now and later.
    fn open(&self);
    /// Forgets what waits.
    fn drop_output(&self);
    /// What waits, and how many bytes the guest had said before. A checkpoint carries it, and the side that goes on says it again.
    fn unsaid(&self) -> (u64, Vec<u8>) {
        (0, Vec::new())
    }
    /// What waits, now.
    fn statistics(&self) -> GateStatistics {
        GateStatistics::default()
    }
}

/// What waits in a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GateStatistics {
    /// Pieces that wait.
    pub waiting: u64,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Pieces that left.
    pub released: u64,
    /// How long the last one that left had waited.
    pub last_delay: Duration,
}

/// The gate of a guest that says nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoOutput;

impl EpochGate for NoOutput {
    fn close(&self, _: MaySay) {}
    fn end_epoch(&self, _: u64) {}
    fn release(&self, _: u64) {}
    fn open(&self) {}
    fn drop_output(&self) {}
}

/// Holds pieces of bytes (a console's), in order. Each leaves once. While nothing is held, bytes are written at once, by whoever says them.
pub struct ByteGate {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Writes what leaves. It may take as long as it likes.
type Write = Box<dyn FnMut(&[u8]) + Send>;

struct Shared {
    /// Locked after `state`, or without it.
    write: Mutex<Write>,
    state: Mutex<State>,
    changed: Condvar,
    limit_bytes: u64,
}

#[derive(Default)]
struct State {
    /// `None`: the gate is open.
    may_say: Option<Arc<dyn Fn(u64) -> bool + Send + Sync>>,
    /// What is said now belongs to this epoch.
    epoch: u64,
    released_epoch: u64,
    waiting: VecDeque<Piece>,
    /// A piece is being written.
    is_writing: bool,
    /// Bytes that left, or leave now.
    position: u64,
    has_ended: bool,
    counts: GateStatistics,
}

struct Piece {
    /// 0: it was said when nothing was held.
    epoch: u64,
    bytes: Vec<u8>,
    came: Instant,
}

impl ByteGate {
    /// A gate that is open. What leaves goes to `write`, by a thread of the gate's own. Whoever says something while more than `limit_bytes`
    /// wait is slowed down.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub fn new(limit_bytes: u64, write: impl FnMut(&[u8]) + Send + 'static) -> Result<Self, MigrationError> {
        let write: Write = Box::new(write);
        let (write, state) = (Mutex::new(write), Mutex::default());
        let shared = Arc::new(Shared { write, state, changed: Condvar::new(), limit_bytes });
        let lets_out = Arc::clone(&shared);
        let thread = threads::spawn("gate", move || lets_out.let_out(), |_| {})?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The guest says this.
    pub fn put(&self, bytes: &[u8]) {
        let mut state = self.shared.state.lock();
        if state.may_say.is_none() && state.waiting.is_empty() && !state.is_writing {
            state.position += bytes.len() as u64;
            return (self.shared.write.lock())(bytes);
        }
        let epoch = if state.may_say.is_some() { state.epoch } else { 0 };
        state.counts.waiting += 1;
        state.counts.waiting_bytes += bytes.len() as u64;
        let is_over = state.counts.waiting_bytes > self.shared.limit_bytes;
        match state.waiting.back_mut() {
            // A guest that says byte by byte costs no piece for each.
            Some(last) if last.epoch == epoch && last.bytes.len() < 4096 => {
                last.bytes.extend_from_slice(bytes);
                state.counts.waiting -= 1;
            }
            _ => state.waiting.push_back(Piece { epoch, bytes: bytes.to_vec(), came: Instant::now() }),
        }
        drop(state);
        self.shared.changed.notify_all();
        if is_over {
            // Not for long: a vCPU that waits here must be able to stop for the checkpoint that lets the output go.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The guest comes from a checkpoint: says what it had said and nobody may have heard. `position`: how many bytes it had said before.
    pub fn say_again(&self, position: u64, bytes: &[u8]) {
        self.shared.state.lock().position = position;
        self.put(bytes);
    }

    /// Waits until nothing waits, no longer than `most`. True: nothing does.
    pub fn wait_until_empty(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        let mut state = self.shared.state.lock();
        while !state.waiting.is_empty() || state.is_writing {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                return state.waiting.is_empty() && !state.is_writing;
            }
        }
        true
    }
}

impl EpochGate for ByteGate {
    fn close(&self, may_say: MaySay) {
        let mut state = self.shared.state.lock();
        state.may_say = Some(may_say.into());
        (state.epoch, state.released_epoch) = (1, 0);
    }

    fn end_epoch(&self, epoch: u64) {
        self.shared.state.lock().epoch = epoch + 1;
    }

    fn release(&self, epoch: u64) {
        let mut state = self.shared.state.lock();
        state.released_epoch = state.released_epoch.max(epoch);
        self.shared.changed.notify_all();
    }

    fn open(&self) {
        self.shared.state.lock().may_say = None;
        self.shared.changed.notify_all();
    }

    fn drop_output(&self) {
        let mut state = self.shared.state.lock();
        state.waiting.clear();
        (state.counts.waiting, state.counts.waiting_bytes) = (0, 0);
        self.shared.changed.notify_all();
    }

    fn unsaid(&self) -> (u64, Vec<u8>) {
        let state = self.shared.state.lock();
        (state.position, state.waiting.iter().flat_map(|piece| piece.bytes.iter().copied()).collect())
    }

    fn statistics(&self) -> GateStatistics {
        self.shared.state.lock().counts
    }
}

impl Drop for ByteGate {
    fn drop(&mut self) {
        self.shared.state.lock().has_ended = true;
        self.shared.changed.notify_all();
        // One that panicked has ended, too.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn let_out(&self) {
        while let Some(piece) = self.next() {
            (self.write.lock())(&piece.bytes);
            let mut state = self.state.lock();
            state.is_writing = false;
            state.counts.last_delay = piece.came.elapsed();
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Waits for a piece that may leave; none when all is over.
    fn next(&self) -> Option<Piece> {
        let mut state = self.state.lock();
        loop {
            let first = state.waiting.front().map(|piece| piece.epoch);
            let may = first.is_some_and(|epoch| match &state.may_say {
                None => true,
                Some(_) if epoch == 0 => true,
                Some(may_say) => epoch <= state.released_epoch && may_say(epoch),
            });
            if may && let Some(piece) = state.waiting.pop_front() {
                state.counts.waiting -= 1;
                state.counts.waiting_bytes -= piece.bytes.len() as u64;
                state.counts.released += 1;
                state.position += piece.bytes.len() as u64;
                state.is_writing = true;
                self.changed.notify_all();
                return Some(piece);
            }
            if state.has_ended {
                return None;
            }
            match first {
                Some(_) => drop(self.changed.wait_for(&mut state, LOOK)),
                None => self.changed.wait(&mut state),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    impl ByteGate {
        fn wait_until_left(&self, position: u64) -> bool {
            let begin = Instant::now();
            while self.unsaid().0 < position {
                if begin.elapsed() > PATIENCE {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            true
        }
    }

    fn gate() -> (ByteGate, Arc<Mutex<Vec<u8>>>) {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        let gate = ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes)).unwrap();
        (gate, said)
    }

    #[test]
    fn output_leaves_when_its_epoch_is_released_and_the_claim_still_holds() {
        let (gate, said) = gate();
        let may = Arc::new(AtomicU64::new(0));
        gate.put(b"before ");
        let asked = Arc::clone(&may);
        gate.close(Box::new(move |epoch| epoch <= asked.load(Ordering::SeqCst)));
        gate.put(b"one ");
        gate.end_epoch(1);
        gate.put(b"two ");
        gate.end_epoch(2);
        gate.put(b"three");
        assert!(gate.wait_until_left(7));
        assert_eq!(gate.unsaid(), (7, b"one two three".to_vec()));

        // Released by a machine whose lease has ended since.
        gate.release(1);
        std::thread::sleep(3 * LOOK);
        assert!(!said.lock().ends_with(b"one "));
        may.store(1, Ordering::SeqCst);
        while !said.lock().ends_with(b"one ") {
            std::thread::sleep(Duration::from_millis(1));
        }
        may.store(9, Ordering::SeqCst);
        gate.release(2);
        while !said.lock().ends_with(b"two ") {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(gate.statistics().waiting_bytes, 5);
        gate.open();
        assert!(gate.wait_until_empty(PATIENCE));
        drop(gate);
        assert_eq!(*said.lock(), b"before one two three");
    }

    #[test]
    fn survivor_says_again_what_may_not_have_been_heard() {
        let (gate, said) = gate();
        gate.close(Box::new(|_| false));
        gate.put(b"heard by nobody");
        let (position, bytes) = gate.unsaid();
        let (there, heard) = self::gate();
        there.say_again(position, &bytes);
        there.put(b", and on");
        assert_eq!((*heard.lock()).as_slice(), b"heard by nobody, and on");
        assert_eq!(there.unsaid(), (23, Vec::new()));
        assert!(said.lock().is_empty());
    }

    #[test]
    fn dropped_output_never_leaves() {
        let (gate, said) = gate();
        gate.close(Box::new(|_| true));
        gate.put(b"unsaid");
        gate.drop_output();
        gate.open();
        gate.put(b"said");
        drop(gate);
        assert_eq!(*said.lock(), b"said");
    }
}
