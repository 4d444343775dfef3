//! One direction of a link: a thread takes packets from one TUN device and passes them to the other
//! with the link's delays.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use tun_rs::SyncDevice;

use crate::shaper::{Shape, Shaper};

/// An upper bound of a packet's size in bytes.
const LARGEST: usize = 65536;

pub(crate) struct Way {
    shared: Arc<Shared>,
    /// Closed to end the forwarding thread.
    closing: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// The moment from which the shaper's times count.
    began: Instant,
    shaper: Mutex<Shaper>,
    delivered: AtomicU64,
}

impl Way {
    /// Starts a thread that forwards packets from `from` to `to`.
    pub(crate) fn new(
        from: Arc<SyncDevice>,
        to: Arc<SyncDevice>,
        shape: Shape,
        seed: u64,
    ) -> Result<Self, String> {
        let shaper = Mutex::new(Shaper::new(shape, seed));
        let shared = Arc::new(Shared { began: Instant::now(), shaper, delivered: AtomicU64::new(0) });
        let (ends, closing) = rustix::pipe::pipe().map_err(|error| format!("pipe: {error}"))?;
        let forwarder = Forwarder { from, to, shared: Arc::clone(&shared), waiting: VecDeque::new() };
        let thread = std::thread::Builder::new().name("link".into()).spawn(move || forwarder.run(&ends));
        let thread = thread.map_err(|error| format!("no thread for the link: {error}"))?;
        Ok(Self { shared, closing: Some(closing), thread: Some(thread) })
    }

    pub(crate) fn set(&self, shape: Shape) {
        self.shared.shaper.lock().shape = shape;
    }

    pub(crate) fn queue(&self) -> Duration {
        self.shared.shaper.lock().queue(self.shared.began.elapsed())
    }

    pub(crate) fn delivered_bytes(&self) -> u64 {
        self.shared.delivered.load(Ordering::Relaxed)
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        self.closing = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Forwarder {
    from: Arc<SyncDevice>,
    to: Arc<SyncDevice>,
    shared: Arc<Shared>,
    /// Packets that are under way, with the time of their arrival.
    waiting: VecDeque<(Duration, Vec<u8>)>,
}

impl Forwarder {
    fn run(mut self, ends: &OwnedFd) {
        let began = self.shared.began;
        let mut packet = vec![0; LARGEST];
        loop {
            self.deliver(began.elapsed());
            let wait = self.waiting.front().map(|(arrival, _)| arrival.saturating_sub(began.elapsed()));
            let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
            let (device, end) = (&*self.from, ends.as_fd());
            let mut polled = [
                PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(end, PollFlags::IN),
            ];
            // A signal only ends the wait early, so the result is ignored.
            let _ = rustix::event::poll(&mut polled, wait.as_ref());
            if !polled[1].revents().is_empty() {
                return;
            }
            while let Ok(len) = self.from.recv(&mut packet) {
                let arrival = self.shared.shaper.lock().arrival(began.elapsed(), len);
                self.waiting.extend(arrival.map(|arrival| (arrival, packet[..len].to_vec())));
                self.deliver(began.elapsed());
            }
        }
    }

    fn deliver(&mut self, now: Duration) {
        while self.waiting.front().is_some_and(|(arrival, _)| *arrival <= now) {
            let Some((_, packet)) = self.waiting.pop_front() else { return };
            // A device whose queue is full drops the packet, as a network does.
            if self.to.send(&packet).is_ok() {
                self.shared.delivered.fetch_add(packet.len() as u64, Ordering::Relaxed);
            }
        }
    }
}
