//! Accepts VMMs at the sockets of the guests, and receives their messages.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::time::Timespec;
use sterna_ram::peer_memory::PeerMemory;
use sterna_transport::UnixPath;

use crate::error::{GuestError, PagerError};
use crate::guest::Guest;
use crate::handshake::{Handshake, HandshakeError};
use crate::options::SocketPlan;
use crate::owner::Owner;
use crate::receive::Arrival;

/// Limit for a VMM's message.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two looks at the limits, while messages are awaited.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };
/// The event of the pager's end.
const STOP: u64 = u64::MAX;
/// Events of arrivals have this bit; the others are of sockets.
const ARRIVAL: u64 = 1 << 32;

/// A listening socket. The file is removed when it is dropped.
struct Socket {
    plan: SocketPlan,
    listener: OwnedFd,
    /// Guests that may still connect.
    left: u32,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.plan.path);
    }
}

/// A VMM that has handed its memory over, or that could not.
pub(crate) trait Arrivals {
    /// Takes a guest whose message has arrived.
    fn arrived(&self, guest: Guest);

    /// Notes a peer that cannot be served. `is_vmm`: it has sent something, and probably waits for pages.
    fn refused(&self, socket: &str, arrival: Arrival, why: GuestError, is_vmm: bool);

    /// Bytes of the image's memory.
    fn memory_bytes(&self) -> u64;
}

/// The sockets of all guests.
pub(crate) struct Reception {
    epoll: OwnedFd,
    sockets: Vec<Option<Socket>>,
    arrivals: HashMap<u64, Pending>,
    next: u64,
}

struct Pending {
    socket: usize,
    arrival: Arrival,
    deadline: Instant,
}

impl Reception {
    /// Listens at all sockets. `stop` becomes readable when the pager ends.
    pub(crate) fn listen(plans: &[SocketPlan], stop: &OwnedFd) -> Result<Self, PagerError> {
        let failed = |call| move |error: Errno| PagerError::system(call)(error.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create1"))?;
        epoll::add(&epoll, stop, EventData::new_u64(STOP), EventFlags::IN).map_err(failed("epoll_ctl"))?;
        let mut sockets = Vec::with_capacity(plans.len());
        for (index, plan) in plans.iter().enumerate() {
            let listener = bind(&plan.path)
                .map_err(|source| PagerError::Listen { path: plan.path.display().to_string(), source })?;
            let socket = Socket { plan: plan.clone(), listener, left: plan.guests };
            epoll::add(&epoll, &socket.listener, EventData::new_u64(index as u64), EventFlags::IN)
                .map_err(failed("epoll_ctl"))?;
            sockets.push(Some(socket));
        }
        Ok(Self { epoll, sockets, arrivals: HashMap::new(), next: 0 })
    }

    /// Serves the sockets until `stop` is readable, or no guest can connect any more.
    pub(crate) fn work(mut self, to: &dyn Arrivals) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        while self.sockets.iter().any(Option::is_some) || !self.arrivals.is_empty() {
            events.clear();
            let limit = (!self.arrivals.is_empty()).then_some(&LOOK);
            match epoll::wait(&self.epoll, spare_capacity(&mut events), limit) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("no further guest is accepted: epoll_wait: {error}");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    number if number & ARRIVAL != 0 => self.receive(number, to),
                    number => self.accept(number as usize),
                }
            }
            self.refuse_late(to);
        }
    }

    fn accept(&mut self, index: usize) {
        let Some(Some(socket)) = self.sockets.get_mut(index) else { return };
        // Guests that may still come, less those whose message is awaited.
        let pending = self.arrivals.values().filter(|pending| pending.socket == index).count();
        if pending as u32 >= socket.left {
            // The listener is watched again when a message turns out to be wrong.
            let _ = epoll::delete(&self.epoll, &socket.listener);
            return;
        }
        let accepted = match accept_with(&socket.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(accepted) => accepted,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(error) => {
                tracing::error!("{}: accept: {error}", socket.plan.path.display());
                // Without descriptors, the same event would come again without a pause.
                std::thread::sleep(Duration::from_millis(50));
                return;
            }
        };
        let number = ARRIVAL | self.next;
        self.next = (self.next + 1) % ARRIVAL;
        let flags = EventFlags::IN | EventFlags::RDHUP;
        if let Err(error) = epoll::add(&self.epoll, &accepted, EventData::new_u64(number), flags) {
            tracing::error!("{}: epoll_ctl: {error}", socket.plan.path.display());
            return;
        }
        let pending =
            Pending { socket: index, arrival: Arrival::new(accepted), deadline: Instant::now() + PATIENCE };
        self.arrivals.insert(number, pending);
    }

    fn receive(&mut self, number: u64, to: &dyn Arrivals) {
        let Some(pending) = self.arrivals.get_mut(&number) else { return };
        match pending.arrival.receive() {
            Ok(None) => {}
            Ok(Some((handshake, memory))) => {
                let Some(pending) = self.arrivals.remove(&number) else { return };
                let _ = epoll::delete(&self.epoll, &pending.arrival.socket);
                match handshake.check(to.memory_bytes()) {
                    Ok(()) => self.arrived(pending, handshake, memory, to),
                    Err(why) => self.refuse(pending, why.into(), to),
                }
            }
            Err(why) => {
                let Some(pending) = self.arrivals.remove(&number) else { return };
                self.refuse(pending, why, to);
            }
        }
    }

    fn arrived(&mut self, pending: Pending, handshake: Handshake, memory: PeerMemory, to: &dyn Arrivals) {
        let Arrival { socket, peer, .. } = pending.arrival;
        let owner = Owner::Peer { socket, peer };
        to.arrived(Guest::new(handshake, memory, owner, self.name(pending.socket)));
        let entry = &mut self.sockets[pending.socket];
        if let Some(socket) = entry {
            socket.left -= 1;
            if socket.left == 0 {
                // A VMM that connects too late is refused by the kernel, and does not hang.
                *entry = None;
            }
        }
    }

    fn refuse(&mut self, pending: Pending, why: GuestError, to: &dyn Arrivals) {
        let is_vmm = pending.arrival.has_spoken();
        to.refused(&self.name(pending.socket), pending.arrival, why, is_vmm);
        if let Some(Some(socket)) = self.sockets.get(pending.socket) {
            let data = EventData::new_u64(pending.socket as u64);
            // It fails if the listener is watched already.
            let _ = epoll::add(&self.epoll, &socket.listener, data, EventFlags::IN);
        }
    }

    fn refuse_late(&mut self, to: &dyn Arrivals) {
        let now = Instant::now();
        let late = self.arrivals.iter().filter(|(_, pending)| pending.deadline <= now);
        let late: Vec<u64> = late.map(|(number, _)| *number).collect();
        for number in late {
            let Some(pending) = self.arrivals.remove(&number) else { continue };
            let why = if pending.arrival.lacks_descriptor() {
                HandshakeError::Descriptors { count: 0 }
            } else {
                HandshakeError::Late { seconds: PATIENCE.as_secs(), bytes: pending.arrival.bytes() }
            };
            self.refuse(pending, why.into(), to);
        }
    }

    fn name(&self, index: usize) -> String {
        let socket = self.sockets.get(index).and_then(Option::as_ref);
        socket.map_or_else(String::new, |socket| socket.plan.path.display().to_string())
    }
}

/// Binds and listens. A socket file that an ended process has left is replaced.
pub(crate) fn bind(path: &Path) -> io::Result<OwnedFd> {
    let short = UnixPath::new(path)?;
    let bind = || std::os::unix::net::UnixListener::bind(short.as_path());
    let listener = match bind() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !sterna_transport::is_abandoned(path).unwrap_or(false) {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            bind()?
        }
        bound => bound?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}
