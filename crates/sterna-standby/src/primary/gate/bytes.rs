//! The gate of a console's output.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use sterna::error::MigrationError;
use sterna::internals::threads::ThreadRole;

use super::epoch_gate::{EpochGate, GateStatistics, MaySay};
use super::outlet::{Exit, Leaving, Outlet, State, gate_of_outlet};
use super::waiting::Piece;

/// Most bytes of a piece. A guest that outputs single bytes then needs no piece per byte.
const MOST_TOGETHER: usize = 4096;
/// How long a writer waits for room at the limit, if it has not registered with `when_room`.
const FULL_WAIT: Duration = Duration::from_millis(50);

/// Keeps bytes (a console's output) in order, until they are released. Each byte leaves once. While the gate is open
/// and empty, the calling thread writes bytes immediately.
pub struct ByteGate {
    outlet: Arc<Outlet<Writes>>,
    _leaving: Leaving<Writes>,
}

/// Writes released bytes. It may block.
type Write = Box<dyn FnMut(&[u8]) + Send>;

/// Called by any thread when a full gate has room again.
type Told = Box<dyn Fn() + Send + Sync>;

struct Writes {
    /// Lock order: after the gate's state, or without it.
    write: Mutex<Write>,
    told: RwLock<Vec<Told>>,
}

impl Exit for Writes {
    fn leave(&self, piece: &Piece) {
        (self.write.lock())(&piece.bytes);
    }

    /// Calls the registered functions, if a writer waits for room and there is some.
    fn changed(&self, state: &Mutex<State>) {
        let mut state = state.lock();
        let is_due = state.is_awaited && state.waiting.has_room();
        state.is_awaited &= !is_due;
        drop(state);
        if is_due {
            self.told.read().iter().for_each(|told| told());
        }
    }
}

impl ByteGate {
    /// Creates an open gate. Its own thread passes released bytes to `write`.
    ///
    /// When `limit_bytes` are waiting, the gate requests a checkpoint, and the guest must wait: see
    /// [`ByteGate::is_full`].
    ///
    /// # Errors
    /// The host cannot create a thread.
    pub fn new(limit_bytes: u64, write: impl FnMut(&[u8]) + Send + 'static) -> Result<Self, MigrationError> {
        let writes = Writes { write: Mutex::new(Box::new(write)), told: RwLock::default() };
        let (outlet, _leaving) = Outlet::begin(ThreadRole::ByteGate, limit_bytes, writes)?;
        Ok(Self { outlet, _leaving })
    }

    /// Whether the gate has reached its limit. The guest must then output nothing more until there is room. The
    /// functions of [`ByteGate::when_room`] are called at that time.
    pub fn is_full(&self) -> bool {
        let mut state = self.outlet.state.lock();
        let is_full = !state.waiting.has_room();
        state.is_awaited |= is_full;
        is_full
    }

    /// Registers `told`: any thread calls it when there is room after [`ByteGate::is_full`] has returned true. From
    /// now on [`ByteGate::put`] does not wait. The caller must check for room before it lets the guest output more.
    pub fn when_room(&self, told: impl Fn() + Send + Sync + 'static) {
        self.outlet.exit.told.write().push(Box::new(told));
    }

    /// Adds output of the guest. It is always accepted. At the limit, the call waits up to 50 ms for room, unless
    /// [`ByteGate::when_room`] was called.
    pub fn put(&self, bytes: &[u8]) {
        let mut state = self.outlet.state.lock();
        if state.waiting.is_open() && state.is_empty() {
            state.position += bytes.len() as u64;
            return (self.outlet.exit.write.lock())(bytes);
        }
        state.waiting.push(0, bytes, MOST_TOGETHER);
        let (is_full, ask) = (!state.waiting.has_room(), state.waiting.ask());
        drop(state);
        self.outlet.changed.notify_all();
        if let Some(ask) = ask {
            ask();
        }
        if is_full && self.outlet.exit.told.read().is_empty() {
            // Short, because a vCPU that waits here must be able to stop for the checkpoint that releases the output.
            self.outlet.wait_until(FULL_WAIT, |state| state.waiting.has_room());
        }
    }

    /// Repeats output after a takeover: bytes that the checkpoint contains and the primary may not have released.
    /// `position` is the number of bytes output before.
    pub fn say_again(&self, position: u64, bytes: &[u8]) {
        self.outlet.state.lock().position = position;
        self.put(bytes);
    }

    /// Waits, at most `most`, until the gate is empty. Returns whether it is.
    pub fn wait_until_empty(&self, most: Duration) -> bool {
        self.outlet.wait_until(most, |state| state.is_empty())
    }
}

gate_of_outlet!(ByteGate {
    fn unsaid(&self) -> (u64, Vec<u8>) {
        let state = self.outlet.state.lock();
        let leaving = state.leaving.iter().map(|piece| piece.bytes.as_slice());
        let pieces: Vec<_> = leaving.chain(state.waiting.bytes()).collect();
        (state.position, pieces.concat())
    }
});

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use std::time::Instant;

    use super::super::waiting::LOOK;
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

        // The epoch was released, but the lease has ended since.
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
        assert!(gate.statistics().delay_p99 >= 3 * LOOK);
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
    fn what_is_still_being_written_is_said_again() {
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (go, may_go) = std::sync::mpsc::channel::<()>();
        let write = move |_: &[u8]| {
            let _ = begun.send(());
            let _ = may_go.recv();
        };
        let gate = ByteGate::new(1 << 20, write).unwrap();
        gate.close(Box::new(|_| true));
        gate.put(b"half ");
        gate.release(1);
        has_begun.recv_timeout(PATIENCE).expect("it leaves");
        gate.put(b"whole");

        // The primary may fail at this moment.
        assert_eq!(gate.unsaid(), (0, b"half whole".to_vec()));

        drop(go);
        assert!(gate.wait_until_empty(PATIENCE));
        assert_eq!(gate.unsaid(), (10, Vec::new()));
    }

    #[test]
    fn writer_that_looks_for_room_never_exceeds_the_limit_by_more_than_a_piece() {
        let (gate, said) = gate();
        let rooms = Arc::new(AtomicU64::new(0));
        let told = Arc::clone(&rooms);
        gate.when_room(move || {
            told.fetch_add(1, Ordering::SeqCst);
        });
        gate.close(Box::new(|_| true));
        let piece = vec![b'x'; 64 << 10];

        while !gate.is_full() {
            gate.put(&piece);
        }

        assert_eq!(gate.statistics().waiting_bytes, 1 << 20);
        gate.end_epoch(1);
        gate.release(1);
        assert!(gate.wait_until_empty(PATIENCE));
        assert_eq!((rooms.load(Ordering::SeqCst), said.lock().len()), (1, 1 << 20), "told once");
        assert!(!gate.is_full());
    }

    #[test]
    fn writer_that_does_not_look_is_held_up_at_the_limit() {
        let (gate, _) = gate();
        gate.close(Box::new(|_| false));
        let (piece, begin) = (vec![b'x'; 64 << 10], Instant::now());

        while begin.elapsed() < Duration::from_secs(1) {
            gate.put(&piece);
        }

        let waiting = gate.statistics().waiting_bytes;
        assert!(waiting <= (1 << 20) + 21 * (64 << 10), "{waiting}");
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
