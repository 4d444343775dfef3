//! The thread of a device whose driver is ready. It waits for kicks and for the device's own events.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_INT_CONFIG;
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::backend::Backend;
use super::interrupt::Interrupt;
use super::ring::{Broken, Ring};
use super::space::ConfigurationSpace;
use crate::hardware::memory::VmRam;

/// State that the vCPU threads and the device's thread share.
pub(crate) struct Signals {
    /// The device's status, as the driver reads it.
    pub(crate) status: AtomicU32,
    pub(crate) interrupt: Interrupt,
    pub(crate) space: ConfigurationSpace,
    /// How many times the device needed a reset.
    pub(crate) failures: AtomicU32,
    /// One eventfd per queue.
    pub(crate) kicks: Vec<EventFd>,
}

/// The back end and queues of a device. The worker holds their lock while it works.
pub(crate) struct Parts {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) queues: Vec<Queue>,
}

/// A running device thread.
pub(crate) struct Worker {
    stop: EventFd,
    thread: JoinHandle<()>,
}

/// Event numbers that belong to no queue.
const STOP: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

impl Signals {
    /// Reports that the driver broke a rule or the host failed. The device does nothing until it is reset.
    pub(super) fn needs_reset(&self) {
        self.status.fetch_or(VIRTIO_CONFIG_S_NEEDS_RESET, Ordering::SeqCst);
        self.interrupt.raise(VIRTIO_MMIO_INT_CONFIG);
    }
}

impl Worker {
    /// Starts a device's thread. `name` is for messages.
    pub(crate) fn spawn(
        name: &str,
        ram: &Arc<VmRam>,
        signals: &Arc<Signals>,
        parts: &Arc<Mutex<Parts>>,
        features: u64,
    ) -> io::Result<Self> {
        let stop = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        let (stopped, theirs) = (stop.try_clone()?, name.to_owned());
        let (ram, signals, parts) = (Arc::clone(ram), Arc::clone(signals), Arc::clone(parts));
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let mut parts = parts.lock();
            if let Err(error) = work(&ram, &signals, &mut parts, features, &stopped) {
                // Logs at powers of two only, because a guest can trigger this without limit.
                let before = signals.failures.fetch_add(1, Ordering::Relaxed);
                if (before + 1).is_power_of_two() {
                    let times = before + 1;
                    tracing::warn!(device = theirs, %error, times, "the device needs to be reset by its driver");
                }
                signals.needs_reset();
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Stops the thread. Returns after the device has finished its requests in flight.
    pub(crate) fn stop(self, name: &str, signals: &Signals) {
        if let Err(error) = self.stop.write(1) {
            tracing::error!(device = name, %error, "cannot tell the device's thread to stop");
        }
        if self.thread.join().is_err() {
            tracing::error!(device = name, "the device's thread panicked");
            signals.needs_reset();
        }
    }
}

fn work(
    ram: &VmRam,
    signals: &Signals,
    parts: &mut Parts,
    features: u64,
    stop: &EventFd,
) -> Result<(), Broken> {
    let Parts { backend, queues } = parts;
    let mut rings = Vec::new();
    // A driver need not use all queues. It uses the first ones.
    for (index, queue) in queues.iter_mut().enumerate().take_while(|(_, queue)| queue.ready()) {
        rings.push(Ring::new(index, ram.memory(), queue, &signals.interrupt)?);
    }
    let mut session = backend.begin(features, &signals.space)?;
    let epoll = Epoll::new()?;
    let add = |fd: &dyn AsRawFd, flags, data| {
        epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), EpollEvent::new(EventSet::IN | flags, data))
    };
    add(stop, EventSet::empty(), STOP)?;
    let kicked = if session.takes_kicks() { rings.len() } else { 0 };
    for (index, kick) in signals.kicks.iter().enumerate().take(kicked) {
        add(kick, EventSet::empty(), index as u64)?;
    }
    for fd in session.wakes() {
        add(&fd, EventSet::EDGE_TRIGGERED, WAKE)?;
    }
    session.begun(&mut rings)?;
    let mut events = [EpollEvent::default(); 8];
    loop {
        let patience = if session.has_more() { 0 } else { -1 };
        let count = match epoll.wait(patience, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            other => other?,
        };
        for event in &events[..count] {
            match event.data() {
                STOP => return session.finish(&mut rings),
                WAKE => session.woken(&mut rings)?,
                queue => {
                    let queue = queue as usize;
                    // An error means that another thread has read the event. Checking the queue does no harm.
                    let _ = signals.kicks[queue].read();
                    session.kicked(&mut rings, queue)?;
                }
            }
        }
        if session.has_more() {
            session.woken(&mut rings)?;
        }
    }
}
