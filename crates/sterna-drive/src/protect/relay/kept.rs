//! Keeps pieces of checkpoints in memory until they are written to the standby. So QEMU does not wait for the
//! network.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

/// Pieces of all channels.
pub(super) struct Kept {
    most_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// For each channel: its pieces, in the order of the stream.
    queues: Vec<VecDeque<Vec<u8>>>,
    bytes: u64,
    is_closed: bool,
}

impl Kept {
    /// Creates an empty store for at most `most_bytes`.
    pub(super) fn new(most_bytes: u64) -> Self {
        Self { most_bytes, state: Mutex::default(), changed: Condvar::new() }
    }

    /// The limit of the kept bytes.
    pub(super) fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    /// Adds a channel and returns its index.
    pub(super) fn add_channel(&self) -> usize {
        let queues = &mut self.state.lock().queues;
        queues.push(VecDeque::new());
        queues.len() - 1
    }

    /// Keeps a piece of `channel`, after waiting for room. A channel without kept pieces always has room, because the
    /// standby may wait for this channel while another one fills the memory. False if the store is closed.
    pub(super) fn put(&self, channel: usize, piece: Vec<u8>) -> bool {
        let mut state = self.state.lock();
        while !state.is_closed
            && !state.queues[channel].is_empty()
            && state.bytes + piece.len() as u64 > self.most_bytes
        {
            self.changed.wait(&mut state);
        }
        state.bytes += piece.len() as u64;
        state.queues[channel].push_back(piece);
        self.changed.notify_all();
        !state.is_closed
    }

    /// Passes each piece of `channel` to `write`, in order, until it fails. `None` when closed.
    /// A piece counts as kept until it is written.
    pub(super) fn drain<E>(
        &self,
        channel: usize,
        mut write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Option<E> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            let Some(piece) = state.queues[channel].front_mut().map(std::mem::take) else {
                self.changed.wait(&mut state);
                continue;
            };
            drop(state);
            let written = write(&piece);
            state = self.state.lock();
            state.queues[channel].pop_front();
            state.bytes -= piece.len() as u64;
            self.changed.notify_all();
            if let Err(error) = written {
                return Some(error);
            }
        }
    }

    /// Number of kept bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Closes the store and wakes all waiting threads.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn memory_is_bounded_and_every_channel_gets_on() {
        let kept = Arc::new(Kept::new(10));
        let (first, second) = (kept.add_channel(), kept.add_channel());
        assert!(kept.put(first, vec![1; 8]));
        assert!(kept.put(second, vec![2; 8]), "a channel of which nothing is kept has room");
        let (says, hears) = channel();
        let waits = Arc::clone(&kept);
        let putter = std::thread::spawn(move || {
            assert!(waits.put(first, vec![3; 2]));
            says.send(()).unwrap();
        });
        assert!(hears.recv_timeout(Duration::from_millis(100)).is_err(), "there is no room");

        let mut written = Vec::new();
        let stopped = kept.drain(first, |piece| {
            written.push(piece.to_vec());
            if written.len() == 2 { Err("enough") } else { Ok(()) }
        });
        assert_eq!((stopped, written), (Some("enough"), vec![vec![1; 8], vec![3; 2]]));
        hears.recv_timeout(PATIENCE).unwrap();
        putter.join().unwrap();
        assert_eq!(kept.bytes(), 8, "what is written does not count");
    }

    #[test]
    fn nobody_waits_when_it_is_closed() {
        let kept = Arc::new(Kept::new(1));
        let only = kept.add_channel();
        assert!(kept.put(only, vec![0; 5]));
        let waits = Arc::clone(&kept);
        let putter = std::thread::spawn(move || waits.put(only, vec![0]));
        kept.close();
        assert!(!putter.join().unwrap());
        assert_eq!(kept.drain(only, |_| Err(())), None);
    }
}
