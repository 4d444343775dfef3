//! The gate of a console.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::epoch_gate::{EpochGate, GateStatistics, MaySay};
use super::outlet::{Exit, Leaving, Outlet, gate_of_outlet};
use super::waiting::Piece;
use crate::error::MigrationError;

/// A guest that says byte by byte costs no piece for each.
const MOST_TOGETHER: usize = 4096;

/// Holds pieces of bytes (a console's), in order. Each leaves once. While nothing is held, bytes are written at once, by whoever says them.
pub struct ByteGate {
    outlet: Arc<Outlet<Writes>>,
    _leaving: Leaving<Writes>,
}

/// Writes what leaves. It may take as long as it likes.
type Write = Box<dyn FnMut(&[u8]) + Send>;

/// Locked after the gate's state, or without it.
struct Writes(Mutex<Write>);

impl Exit for Writes {
    fn leave(&self, piece: &Piece) {
        (self.0.lock())(&piece.bytes);
    }
}

impl ByteGate {
    /// A gate that is open. What leaves goes to `write`, by a thread of the gate's own. Whoever says something while more than `limit_bytes`
    /// wait is slowed down, and a checkpoint is asked for.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub fn new(limit_bytes: u64, write: impl FnMut(&[u8]) + Send + 'static) -> Result<Self, MigrationError> {
        let (outlet, _leaving) = Outlet::begin("gate", limit_bytes, Writes(Mutex::new(Box::new(write))))?;
        Ok(Self { outlet, _leaving })
    }

    /// The guest says this.
    pub fn put(&self, bytes: &[u8]) {
        let mut state = self.outlet.state.lock();
        if state.waiting.is_open() && state.is_empty() {
            state.position += bytes.len() as u64;
            return (self.outlet.exit.0.lock())(bytes);
        }
        state.waiting.push(0, bytes, MOST_TOGETHER);
        let (is_full, ask) = (!state.waiting.has_room(), state.waiting.ask());
        drop(state);
        self.outlet.changed.notify_all();
        if let Some(ask) = ask {
            ask();
        }
        if is_full {
            // Not for long: a vCPU that waits here must be able to stop for the checkpoint that lets the output go.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The guest comes from a checkpoint: says what it had said and nobody may have heard. `position`: how many bytes it had said before.
    pub fn say_again(&self, position: u64, bytes: &[u8]) {
        self.outlet.state.lock().position = position;
        self.put(bytes);
    }

    /// Waits until nothing waits, no longer than `most`. True: nothing does.
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

        // The process may die here.
        assert_eq!(gate.unsaid(), (0, b"half whole".to_vec()));

        drop(go);
        assert!(gate.wait_until_empty(PATIENCE));
        assert_eq!(gate.unsaid(), (10, Vec::new()));
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
