//! The output of a QEMU's network card, held outside of QEMU.
//!
//! Two `filter-redirector`s bring every packet to this program and take it back: one has its `outdev`, the other its `indev` in a
//! socket of ours. A packet is a u32 with its length, and its bytes. Packets keep their order, and none leaves twice.
//!
//! QEMU's main loop writes to the first socket and blocks if nobody reads. So a thread reads all the time, and when more waits
//! than may, further packets are dropped, as a network may do.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use sterna::replica::LastTimes;

/// Longer than any packet: what follows the length is no packet's.
const LONGEST_BYTES: usize = 1 << 20;
/// How often a packet that may not leave is looked at again, unless somebody says something.
const LOOK: Duration = Duration::from_millis(50);

/// Holds packets of one network card.
pub struct OutputGate {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What a gate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GateStatistics {
    /// Packets that wait.
    pub waiting: u64,
    /// Their bytes.
    pub waiting_bytes: u64,
    /// Packets that left.
    pub released: u64,
    /// Packets that were dropped because too much waited.
    pub dropped: u64,
    /// How long the last one that left had waited.
    pub last_delay: Duration,
    /// How long half of the last 1024 that left had waited at most.
    pub delay_p50: Duration,
    /// How long 99 of a hundred had.
    pub delay_p99: Duration,
}

struct Shared {
    from_guest: UnixStream,
    to_network: UnixStream,
    may_say: Box<dyn Fn(u64) -> bool + Send + Sync>,
    most_bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Bytes of a packet that has not come whole.
    partial: Vec<u8>,
    /// What is read now belongs to this epoch.
    epoch: u64,
    waiting: VecDeque<Packet>,
    released_epoch: u64,
    is_open: bool,
    /// One is on its way to QEMU.
    is_leaving: bool,
    /// Why nothing comes or leaves any more.
    ended: Option<String>,
    counts: GateStatistics,
    /// Of what has left since it was closed.
    delays: LastTimes,
}

struct Packet {
    epoch: u64,
    /// With its length.
    bytes: Vec<u8>,
    came: Instant,
}

impl OutputGate {
    /// A gate that is open. Packets come from `from_guest` and leave to `to_network`; at most `most_bytes` wait. `may_say` is asked
    /// for every packet with its epoch (the first is 1) at the moment at which it would leave.
    ///
    /// # Errors
    /// The host refuses a thread, or the sockets.
    pub fn new(
        from_guest: UnixStream,
        to_network: UnixStream,
        most_bytes: u64,
        may_say: impl Fn(u64) -> bool + Send + Sync + 'static,
    ) -> io::Result<Self> {
        from_guest.set_nonblocking(true)?;
        let state = State {
            partial: Vec::new(),
            epoch: 1,
            waiting: VecDeque::new(),
            released_epoch: 0,
            is_open: true,
            is_leaving: false,
            ended: None,
            counts: GateStatistics::default(),
            delays: LastTimes::default(),
        };
        let shared = Arc::new(Shared {
            from_guest,
            to_network,
            may_say: Box::new(may_say),
            most_bytes,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let mut gate = Self { shared, threads: Vec::new() };
        gate.spawn("gate in", Shared::read)?;
        gate.spawn("gate out", Shared::write)?;
        Ok(gate)
    }

    fn spawn(&mut self, name: &str, act: fn(&Shared)) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || act(&shared))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Holds packets from now on, until their epoch is released. Call it while the guest stands: what it has said before
    /// leaves, what it says from then on belongs to the next epoch.
    pub fn close(&self) {
        let mut state = self.shared.state.lock();
        self.shared.drain(&mut state);
        state.released_epoch = state.released_epoch.max(state.epoch);
        state.epoch += 1;
        state.is_open = false;
        state.delays.clear();
        self.shared.changed.notify_all();
    }

    /// An epoch ends. Call it while the guest stands: everything that it has said so far is in this epoch or an earlier one. Its
    /// number.
    pub fn end_epoch(&self) -> u64 {
        let mut state = self.shared.state.lock();
        self.shared.drain(&mut state);
        state.epoch += 1;
        state.epoch - 1
    }

    /// Packets of this epoch and earlier ones may leave.
    pub fn release(&self, epoch: u64) {
        let mut state = self.shared.state.lock();
        state.released_epoch = state.released_epoch.max(epoch);
        self.shared.changed.notify_all();
    }

    /// Every packet may leave, now and later.
    pub fn open(&self) {
        self.shared.state.lock().is_open = true;
        self.shared.changed.notify_all();
    }

    /// Forgets what waits.
    pub fn drop_waiting(&self) {
        let mut state = self.shared.state.lock();
        self.shared.drain(&mut state);
        state.waiting.clear();
        (state.counts.waiting, state.counts.waiting_bytes) = (0, 0);
    }

    /// Waits until nothing waits and QEMU's socket has taken what left, no longer than `most`. True: it is so.
    pub fn wait_until_empty(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        let mut state = self.shared.state.lock();
        loop {
            self.shared.drain(&mut state);
            let is_empty = state.waiting.is_empty() && !state.is_leaving;
            if is_empty || state.ended.is_some() {
                return is_empty;
            }
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                return state.waiting.is_empty() && !state.is_leaving;
            }
        }
    }

    /// Whether every packet of this epoch and earlier ones was handed to QEMU's socket.
    pub(super) fn has_released(&self, epoch: u64) -> bool {
        let state = self.shared.state.lock();
        let waits = state.waiting.front().is_some_and(|packet| packet.epoch <= epoch);
        state.ended.is_some() || !(waits || state.is_leaving)
    }

    /// What it counts, now.
    pub fn statistics(&self) -> GateStatistics {
        let state = self.shared.state.lock();
        let [delay_p50, delay_p99] = state.delays.at_most([500, 990]);
        GateStatistics { delay_p50, delay_p99, ..state.counts }
    }

    /// Why nothing comes or leaves any more, if that is so. Then no packet leaves.
    pub fn ended(&self) -> Option<String> {
        self.shared.state.lock().ended.clone()
    }
}

impl Drop for OutputGate {
    fn drop(&mut self) {
        self.shared.end("the gate was taken away");
        for thread in self.threads.drain(..) {
            // One that panicked has ended, too.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn read(&self) {
        loop {
            let mut ready = [PollFd::from_borrowed_fd(self.from_guest.as_fd(), PollFlags::IN)];
            if let Err(error) = poll(&mut ready, None)
                && error != rustix::io::Errno::INTR
            {
                return self.end(&format!("waiting for QEMU's packets: {error}"));
            }
            let mut state = self.state.lock();
            self.drain(&mut state);
            if state.ended.is_some() {
                return;
            }
        }
    }

    /// Takes all that lies in the socket.
    fn drain(&self, state: &mut State) {
        let mut bytes = [0; 64 << 10];
        while state.ended.is_none() {
            match (&self.from_guest).read(&mut bytes) {
                Ok(0) => self.end_with(state, "QEMU has closed the socket of its packets"),
                Ok(length) => {
                    state.partial.extend_from_slice(&bytes[..length]);
                    self.split(state);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => self.end_with(state, &format!("reading QEMU's packets: {error}")),
            }
        }
    }

    /// Makes packets of the bytes that have come.
    fn split(&self, state: &mut State) {
        let mut at = 0;
        while let Some(length) = state.partial[at..].first_chunk() {
            let length = u32::from_be_bytes(*length) as usize;
            if length > LONGEST_BYTES {
                let why = format!("QEMU announced a packet of {length} bytes, more than {LONGEST_BYTES}");
                return self.end_with(state, &why);
            }
            let Some(bytes) = state.partial.get(at..at + 4 + length) else { break };
            let packet = Packet { epoch: state.epoch, bytes: bytes.to_vec(), came: Instant::now() };
            at += 4 + length;
            let size = packet.bytes.len() as u64;
            if state.counts.waiting_bytes + size > self.most_bytes {
                state.counts.dropped += 1;
                continue;
            }
            state.counts.waiting += 1;
            state.counts.waiting_bytes += size;
            state.waiting.push_back(packet);
        }
        if at > 0 {
            state.partial.drain(..at);
            self.changed.notify_all();
        }
    }

    fn write(&self) {
        while let Some(packet) = self.next() {
            if let Err(error) = (&self.to_network).write_all(&packet.bytes) {
                return self.end(&format!("giving QEMU its packets back: {error}"));
            }
            let mut state = self.state.lock();
            state.is_leaving = false;
            state.counts.released += 1;
            let delay = packet.came.elapsed();
            state.counts.last_delay = delay;
            state.delays.note(delay);
            self.changed.notify_all();
        }
    }

    /// Waits for a packet that may leave; none when all is over.
    fn next(&self) -> Option<Packet> {
        let mut state = self.state.lock();
        loop {
            if state.ended.is_some() {
                return None;
            }
            let epoch = state.waiting.front().map(|packet| packet.epoch);
            let may = epoch.is_some_and(|epoch| {
                // Looked at for every packet: this process may have stood still since it was released.
                (state.is_open || epoch <= state.released_epoch) && (self.may_say)(epoch)
            });
            if may && let Some(packet) = state.waiting.pop_front() {
                state.counts.waiting -= 1;
                state.counts.waiting_bytes -= packet.bytes.len() as u64;
                state.is_leaving = true;
                return Some(packet);
            }
            match epoch {
                Some(_) => drop(self.changed.wait_for(&mut state, LOOK)),
                None => self.changed.wait(&mut state),
            }
        }
    }

    fn end(&self, why: &str) {
        self.end_with(&mut self.state.lock(), why);
    }

    /// The first cause counts.
    fn end_with(&self, state: &mut State, why: &str) {
        state.ended.get_or_insert_with(|| why.to_owned());
        // Both may be closed already, which is as well.
        let _ = self.from_guest.shutdown(Shutdown::Both);
        let _ = self.to_network.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
