//! Holds the output packets of a QEMU's network card, outside of QEMU.
//!
//! Two `filter-redirector`s send every packet to this program and receive it again. The `outdev` of one and the
//! `indev` of the other are sockets of this gate. On the sockets, a packet is a u32 with its length, then its bytes.
//! Packets keep their order, and each leaves at most once.
//!
//! QEMU's main loop writes to the first socket and blocks while its buffer is full. So a thread reads all the time.
//! If more packets wait than the limit allows, further packets are dropped, as a network may do.

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
use sterna_standby::LastTimes;

/// Larger than any packet. A greater length means that the stream is damaged.
const LONGEST_BYTES: usize = 1 << 20;
/// Interval of checks whether the next packet may leave, unless a notification arrives earlier.
const LOOK: Duration = Duration::from_millis(50);

/// Holds the output packets of one network card until their epoch is released.
pub struct OutputGate {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Statistics of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GateStatistics {
    /// Packets that wait in the gate.
    pub waiting: u64,
    /// Bytes of the waiting packets.
    pub waiting_bytes: u64,
    /// Packets that have left the gate.
    pub released: u64,
    /// Packets that were dropped because the waiting ones reached the limit.
    pub dropped: u64,
    /// Waiting time of the last packet that left.
    pub last_delay: Duration,
    /// Median waiting time of the last 1024 packets that left.
    pub delay_p50: Duration,
    /// 99th percentile of the waiting time of these packets.
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
    /// Bytes of a packet that has not arrived completely.
    partial: Vec<u8>,
    /// The epoch of packets that are read now.
    epoch: u64,
    waiting: VecDeque<Packet>,
    released_epoch: u64,
    is_open: bool,
    /// A packet is being written to QEMU.
    is_leaving: bool,
    /// The error after which no packet is read or released any more.
    ended: Option<String>,
    counts: GateStatistics,
    /// Waiting times of the packets that have left since the gate was closed.
    delays: LastTimes,
}

struct Packet {
    epoch: u64,
    /// The packet after its length field, as QEMU reads it.
    bytes: Vec<u8>,
    came: Instant,
}

impl OutputGate {
    /// Creates an open gate. Packets arrive from `from_guest` and leave to `to_network`. At most `most_bytes` wait.
    /// `may_say` is called for every packet immediately before it leaves, with its epoch (the first is 1).
    ///
    /// # Errors
    /// The host refuses a thread, or a socket operation.
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

    /// Holds packets from now on, until their epoch is released. Call it while the guest is paused: packets that the
    /// guest sent before leave, and packets that it sends afterwards belong to the next epoch.
    pub fn close(&self) {
        let mut state = self.shared.state.lock();
        self.shared.drain(&mut state);
        state.released_epoch = state.released_epoch.max(state.epoch);
        state.epoch += 1;
        state.is_open = false;
        state.delays.clear();
        self.shared.changed.notify_all();
    }

    /// Ends an epoch and returns its number. Call it while the guest is paused: every packet that the guest has sent
    /// so far is in this epoch or an earlier one.
    pub fn end_epoch(&self) -> u64 {
        let mut state = self.shared.state.lock();
        self.shared.drain(&mut state);
        state.epoch += 1;
        state.epoch - 1
    }

    /// Allows packets of this epoch and earlier ones to leave.
    pub fn release(&self, epoch: u64) {
        let mut state = self.shared.state.lock();
        state.released_epoch = state.released_epoch.max(epoch);
        self.shared.changed.notify_all();
    }

    /// Allows every packet to leave, now and later.
    pub fn open(&self) {
        self.shared.state.lock().is_open = true;
        self.shared.changed.notify_all();
    }

    /// Drops the waiting packets.
    pub fn drop_waiting(&self) {
        let mut state = self.shared.state.lock();
        self.shared.drain(&mut state);
        state.waiting.clear();
        (state.counts.waiting, state.counts.waiting_bytes) = (0, 0);
    }

    /// Waits at most `most` until no packet waits and QEMU's socket has accepted those that left. False after that
    /// time.
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

    /// Whether every packet of this epoch and earlier ones was written to QEMU's socket.
    pub(super) fn has_released(&self, epoch: u64) -> bool {
        let state = self.shared.state.lock();
        let waits = state.waiting.front().is_some_and(|packet| packet.epoch <= epoch);
        state.ended.is_some() || !(waits || state.is_leaving)
    }

    /// The present statistics.
    pub fn statistics(&self) -> GateStatistics {
        let state = self.shared.state.lock();
        let [delay_p50, delay_p99] = state.delays.at_most([500, 990]);
        GateStatistics { delay_p50, delay_p99, ..state.counts }
    }

    /// The error that ended the gate, if any. After an error no packet leaves.
    pub fn ended(&self) -> Option<String> {
        self.shared.state.lock().ended.clone()
    }
}

impl Drop for OutputGate {
    fn drop(&mut self) {
        self.shared.end("the gate was removed");
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended, too.
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

    /// Reads all bytes that are in the socket now.
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

    /// Splits the received bytes into packets.
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
                return self.end(&format!("returning the packets to QEMU: {error}"));
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

    /// Waits for a packet that may leave. None when the gate has ended.
    fn next(&self) -> Option<Packet> {
        let mut state = self.state.lock();
        loop {
            if state.ended.is_some() {
                return None;
            }
            let epoch = state.waiting.front().map(|packet| packet.epoch);
            let may = epoch.is_some_and(|epoch| {
                // Checked for every packet: this process may have been suspended since the epoch was released.
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

    /// Ends the gate. The first cause is kept.
    fn end_with(&self, state: &mut State, why: &str) {
        state.ended.get_or_insert_with(|| why.to_owned());
        // An error means that the socket is closed already.
        let _ = self.from_guest.shutdown(Shutdown::Both);
        let _ = self.to_network.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
