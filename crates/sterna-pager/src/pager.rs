//! The handle of a pager, and its threads.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Mutex, RwLock};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use sterna_ram::threads::{NewThread, ThreadRole};

use crate::answer::Service;
use crate::content::Content;
use crate::error::{GuestError, PagerError};
use crate::fetch;
use crate::fetches::Fetches;
use crate::fill;
use crate::fill_order::FillOrder;
use crate::guest::Guest;
use crate::load::FaultLoad;
use crate::options::{FillRate, PagerOptions, SocketPlan};
use crate::own::{self, OwnGuest};
use crate::owner::Owner;
use crate::receive::Arrival;
use crate::reception::{Arrivals, Reception};
use crate::source::{HUGE_BYTES, PageSource};
use crate::statistics::{GuestEnd, GuestStage, GuestStatistics};
use crate::working_set::{Recorder, WorkingSet};

/// The event of the pager's end.
const STOP: u64 = u64::MAX;

/// Serves the guests of one image, until it is dropped.
///
/// A guest that still lacks pages when the pager is dropped is killed, because it would wait for them without end.
/// [`guests`](Self::guests) says which do. If this process runs the guest, its threads must have ended before.
pub struct Pager {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// The threads besides the one that accepts.
struct Workers {
    fault_threads: usize,
    reader_threads: usize,
    rate: FillRate,
}

struct Shared {
    service: Service,
    guests: RwLock<Vec<Arc<Guest>>>,
    refused: Mutex<Vec<GuestStatistics>>,
    /// Events of the guests' memory and sockets.
    epoll: OwnedFd,
    stop: OwnedFd,
}

impl Pager {
    /// Listens at the sockets, and serves the guests that connect.
    ///
    /// Threads: one that accepts, one that fills, and [`PagerOptions::fault_threads`] and
    /// [`PagerOptions::reader_threads`], for any number of guests.
    ///
    /// # Errors
    /// [`PagerError`]; no socket is left behind then.
    pub fn start(
        source: Arc<dyn PageSource>,
        sockets: &[SocketPlan],
        options: PagerOptions,
    ) -> Result<Self, PagerError> {
        let (mut pager, fill) = Self::prepare(source, options)?;
        let reception = Reception::listen(sockets, &pager.shared.stop)?;
        pager.spawn(NewThread::from(ThreadRole::Reception), |shared| reception.work(shared))?;
        pager.spawn_workers(&fill)?;
        Ok(pager)
    }

    /// Serves the memory of a guest that this process runs. Call it before any thread may touch the memory.
    ///
    /// A page fault of any thread of this process is answered, also of the kernel on its behalf. While pages are missing, none of
    /// them counts as absent ([`Filling`](sterna_ram::Filling)). [`GuestRam::complete`](sterna_ram::GuestRam::complete) fills
    /// the memory without pauses, at any [`FillRate`].
    ///
    /// # Errors
    /// [`PagerError`]; the memory is as before then.
    pub fn serve_own(
        source: Arc<dyn PageSource>,
        guest: OwnGuest,
        options: PagerOptions,
    ) -> Result<Self, PagerError> {
        let blocks: Vec<_> = guest.ram.blocks().to_vec();
        let starts = own::starts(&guest, source.len_bytes())?;
        let (mut pager, fill) = Self::prepare(source, options)?;
        let guest = Arc::new(own::register(guest, &starts)?);
        own::begin(&guest, &blocks, &starts, &pager.shared.service.order);
        pager.shared.enter(Arc::clone(&guest));
        let spawned = pager.spawn_workers(&fill);
        if spawned.is_err() {
            blocks.iter().for_each(sterna_ram::RamBlock::end_filling);
        }
        spawned.map(|()| pager)
    }

    /// A pager without threads, and what they need.
    fn prepare(source: Arc<dyn PageSource>, options: PagerOptions) -> Result<(Self, Workers), PagerError> {
        let memory_bytes = source.len_bytes();
        let working_set = options.working_set.or_else(|| source.working_set());
        let working_set = working_set.unwrap_or(WorkingSet { memory_bytes, runs: Vec::new() });
        if working_set.memory_bytes != memory_bytes {
            let recorded = working_set.memory_bytes;
            return Err(PagerError::OtherWorkingSet { recorded, image: memory_bytes });
        }
        let order = FillOrder::new(working_set.frames(source.frame_bytes()), options.fill == FillRate::Off);
        let failed = |call| move |error: Errno| PagerError::system(call)(error.into());
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed("eventfd"))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create1"))?;
        epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN).map_err(failed("epoll_ctl"))?;
        let service = Service {
            content: Content::new(source, options.cache_limit_bytes.max(PagerOptions::LEAST_CACHE_BYTES)),
            fetches: Fetches::default(),
            order: Arc::new(order),
            load: FaultLoad::default(),
            recorder: options.record.then(|| Recorder::new(memory_bytes)),
        };
        let (guests, refused) = (RwLock::default(), Mutex::default());
        let shared = Arc::new(Shared { service, guests, refused, epoll, stop });
        let workers = Workers {
            fault_threads: options.fault_threads.max(1),
            reader_threads: options.reader_threads.max(1),
            rate: options.fill,
        };
        Ok((Self { shared, threads: Vec::new() }, workers))
    }

    fn spawn_workers(&mut self, workers: &Workers) -> Result<(), PagerError> {
        for number in 0..workers.fault_threads {
            self.spawn(ThreadRole::ServeFaults.of(number), Shared::answer)?;
        }
        for number in 0..workers.reader_threads {
            self.spawn(ThreadRole::Reader.of(number), |shared| {
                fetch::work(&shared.service, HUGE_BYTES as usize);
            })?;
        }
        // Also with `FillRate::Off`: an operation may need all of the memory.
        let rate = workers.rate;
        self.spawn(NewThread::from(ThreadRole::Fill), move |shared| {
            fill::work(&shared.service, rate, HUGE_BYTES as usize);
        })
    }

    /// The figures of all guests, in the order in which they connected, and of peers that were refused.
    ///
    /// A peer that closed its connection without a word is not listed.
    pub fn guests(&self) -> Vec<GuestStatistics> {
        let guests = self.shared.guests.read();
        let mut all: Vec<_> = guests.iter().map(|guest| guest.statistics()).collect();
        all.extend(self.shared.refused.lock().iter().cloned());
        all
    }

    /// The pages that guests have touched, if they are recorded.
    pub fn working_set(&self) -> Option<WorkingSet> {
        self.shared.service.recorder.as_ref().map(Recorder::recorded)
    }

    fn spawn(
        &mut self,
        thread: NewThread,
        work: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<(), PagerError> {
        let shared = Arc::clone(&self.shared);
        let spawned = thread.spawn(move || work(&shared)).map_err(PagerError::system("clone"))?;
        self.threads.push(spawned);
        Ok(())
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        let shared = &self.shared;
        // An eventfd whose counter is set accepts a write.
        let _ = rustix::io::write(&shared.stop, &1u64.to_ne_bytes());
        shared.service.fetches.close();
        shared.service.order.close();
        for thread in self.threads.drain(..) {
            // A panic in the thread was already reported.
            let _ = thread.join();
        }
        for guest in shared.guests.read().iter() {
            if guest.is_over() {
                guest.discard_events();
            } else if guest.is_own() {
                guest.finish(|_| GuestEnd::PeerEnded);
            } else {
                shared.service.give_up(guest, GuestError::Stopped);
            }
        }
    }
}

impl Shared {
    /// The body of a thread that answers faults.
    fn answer(&self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(16);
        let mut buffer = vec![0; HUGE_BYTES as usize];
        loop {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("a thread that answers faults ends: epoll_wait: {error}");
                    return;
                }
            }
            for event in &events {
                let number = event.data.u64();
                if number == STOP {
                    return;
                }
                let guest = self.guests.read().get((number >> 1) as usize).cloned();
                let Some(guest) = guest else { continue };
                if number & 1 == 0 {
                    self.service.serve(&guest, &mut buffer);
                } else {
                    self.closed(&guest);
                }
            }
        }
    }

    /// The guest's VMM has ended.
    fn closed(&self, guest: &Guest) {
        if guest.finish(|_| GuestEnd::PeerEnded) {
            tracing::info!("{}: its VMM has ended", guest.name());
        }
        self.forget(guest);
    }

    /// Serves a guest from now on.
    fn enter(&self, guest: Arc<Guest>) {
        if !guest.is_own() {
            tracing::info!("{}: a guest has connected", guest.name());
        }
        let number = {
            let mut guests = self.guests.write();
            guests.push(Arc::clone(&guest));
            (guests.len() as u64 - 1) << 1
        };
        let memory = EventData::new_u64(number);
        let socket = EventData::new_u64(number | 1);
        // Edges, so that one event wakes one thread. That thread reads until nothing is left.
        let watched = epoll::add(&self.epoll, &guest.memory, memory, EventFlags::IN | EventFlags::ET)
            .and_then(|()| match &guest.owner {
                Owner::Peer { socket: end, .. } => {
                    epoll::add(&self.epoll, end, socket, EventFlags::RDHUP | EventFlags::ET)
                }
                Owner::Own(_) => Ok(()),
            });
        if let Err(error) = watched {
            self.service.give_up(&guest, GuestError::Events(Arc::new(error.into())));
            return;
        }
        self.service.order.add(&guest);
    }

    fn forget(&self, guest: &Guest) {
        if let Owner::Peer { socket, .. } = &guest.owner {
            let _ = epoll::delete(&self.epoll, socket);
        }
        let _ = epoll::delete(&self.epoll, &guest.memory);
    }
}

impl Arrivals for Shared {
    fn arrived(&self, guest: Guest) {
        self.enter(Arc::new(guest));
    }

    fn refused(&self, socket: &str, arrival: Arrival, why: GuestError, is_vmm: bool) {
        if !is_vmm {
            tracing::warn!("{socket}: a connection was closed: {why}");
            return;
        }
        let killed = arrival.peer.kill();
        let name =
            arrival.peer.pid().map_or_else(|| socket.to_owned(), |pid| format!("{socket} (pid {pid})"));
        match &killed {
            Ok(()) => tracing::error!("{name}: killed, because it cannot be served: {why}"),
            Err(refusal) => tracing::error!(
                "{name}: it cannot be served: {why}; it hangs now and must be killed by the operator, because this process \
                 cannot kill it: {refusal}"
            ),
        }
        let is_killed = killed.is_ok();
        self.refused.lock().push(GuestStatistics {
            socket: socket.to_owned(),
            pid: arrival.peer.pid(),
            stage: GuestStage::Ended(GuestEnd::GivenUp { why, is_killed }),
            total_pages: 0,
            missing_pages: 0,
            page_bytes: 0,
            faults: 0,
            content_pages: 0,
            zero_pages: 0,
            removed_pages: 0,
            time: std::time::Duration::ZERO,
        });
    }

    fn memory_bytes(&self) -> u64 {
        self.service.content.source.len_bytes()
    }
}
