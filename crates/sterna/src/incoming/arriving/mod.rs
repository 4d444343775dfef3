//! What the threads of an incoming migration share of a guest that runs before its pages are there ([`super::postcopy`]).
//!
//! | module | contains |
//! | --- | --- |
//! | `order` | in which order the source's commands may come. Pure |
//! | `pages` | which pages are missing, and how each is placed once |
//! | `asking` | whether the source can be asked for pages now |
//! | `ways` | on which way each came, where lanes bring pages, too |
//! | `blocktime` | how long is waited |
//! | `failures` | pages that could not be placed. Pure |

mod asking;
mod blocktime;
mod failures;
mod order;
mod pages;
mod ways;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_ram::missing_pages::TakenAhead;
use sterna_transport::Channel;
use sterna_wire::extension;
use sterna_wire::main::MainDecoder;

use crate::stats::{IncomingPostcopy, Series};
pub(super) use asking::Asking;
pub(super) use order::Commands;
pub(super) use pages::ArrivingPages;

/// What an incoming migration keeps of postcopy.
#[derive(Default)]
pub(super) struct Postcopy {
    pub(super) commands: Mutex<Commands>,
    /// What the source has dropped, until LISTEN.
    pub(super) ahead: Mutex<Option<TakenAhead>>,
    /// From LISTEN on.
    arriving: OnceLock<Arc<ArrivingPages>>,
    /// The channel of requested pages, once it is here, and the number of its session.
    pub(super) preempt: Mutex<Option<(u32, Arc<Channel>)>>,
    pub(super) preempt_came: Condvar,
    /// Whether requests go out; held while they do.
    pub(super) asking: Mutex<Asking>,
    /// The number of the connection that took the place of one that was lost, the last time.
    pub(super) recovered_session: Mutex<u32>,
    /// What reads the main channel, while there is none.
    reading: Mutex<Option<KeptReading>>,
    started: Mutex<Started>,
    /// Why the source is not to connect again by itself.
    last_word: Mutex<Option<LastWord>>,
    /// End with the loading.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Ends when no page is missing.
    fault_thread: Mutex<Option<JoinHandle<()>>>,
    requests: AtomicU64,
    /// The same over time.
    faults: Mutex<Series>,
    /// When the guest was started, or taken over paused.
    started_at: OnceLock<Instant>,
}

/// How far the main channel was read when it was lost: another one goes on with the same stream.
pub(super) struct KeptReading {
    pub(super) decoder: MainDecoder,
    /// The source lets this side know that it lives.
    pub(super) keeps_alive: bool,
}

/// Why a source is not to connect again by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastWord {
    /// An operator's wish.
    Paused,
    /// A page cannot be placed.
    PageFailed,
}

impl LastWord {
    /// The value of the SHUT that says it.
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Paused => extension::SHUT_PAUSED,
            Self::PageFailed => extension::SHUT_PAGE_FAILED,
        }
    }
}

/// Whether the source has asked to hear that the guest was started, and whether it was.
#[derive(Default, Clone, Copy)]
struct Started {
    is_asked: bool,
    is_so: bool,
}

impl Postcopy {
    /// The pages that come, from LISTEN on.
    pub(super) fn arriving(&self) -> Option<&Arc<ArrivingPages>> {
        self.arriving.get()
    }

    /// From now on pages come.
    pub(super) fn set_arriving(&self, arriving: &Arc<ArrivingPages>) {
        // LISTEN comes once.
        let _ = self.arriving.set(Arc::clone(arriving));
    }

    /// The main channel is not read any more.
    pub(super) fn keep_reading(&self, reading: KeptReading) {
        *self.reading.lock() = Some(reading);
    }

    /// Another main channel is to be read.
    pub(super) fn take_reading(&self) -> Option<KeptReading> {
        self.reading.lock().take()
    }

    /// An operator wants the connection to end, or not any more.
    pub(super) fn set_paused(&self, is_so: bool) {
        *self.last_word.lock() = is_so.then_some(LastWord::Paused);
    }

    /// What the source is told when the connection ends from here.
    pub(super) fn last_word(&self) -> Option<LastWord> {
        let has_failed = self.arriving().is_some_and(|arriving| arriving.fails_again());
        let said = *self.last_word.lock();
        said.or(has_failed.then_some(LastWord::PageFailed))
    }

    /// No thread of the lost channels is left.
    pub(super) fn forget_channels(&self) {
        // Whoever is about to ask over the lost main channel ends with it.
        *self.asking.lock() = Asking::default();
        *self.preempt.lock() = None;
    }

    /// A thread that ends with the loading.
    pub(super) fn keep_thread(&self, thread: JoinHandle<()>) {
        self.threads.lock().push(thread);
    }

    /// The thread that ends when no page is missing.
    pub(super) fn keep_fault_thread(&self, thread: JoinHandle<()>) {
        *self.fault_thread.lock() = Some(thread);
    }

    /// The source asks to hear that the guest was started. True: it is to be told now.
    pub(super) fn is_asked_for_start(&self) -> bool {
        self.is_to_be_told(|started| started.is_asked = true)
    }

    /// The guest was started, or taken over paused. True: the source is to be told now.
    pub(super) fn has_started(&self) -> bool {
        self.started_at.get_or_init(Instant::now);
        self.is_to_be_told(|started| started.is_so = true)
    }

    fn is_to_be_told(&self, change: impl FnOnce(&mut Started)) -> bool {
        let mut started = self.started.lock();
        let before = started.is_asked && started.is_so;
        change(&mut started);
        started.is_asked && started.is_so && !before
    }

    /// Ends the channel of requested pages.
    pub(super) fn shut_preempt(&self) {
        if let Some((_, channel)) = &*self.preempt.lock() {
            channel.shutdown();
        }
        self.preempt_came.notify_all();
    }

    /// Lets everybody go on who waits for a page: all are in place, or no guest runs.
    pub(super) fn let_go(&self) {
        if let Some(arriving) = self.arriving() {
            arriving.end();
        }
        let thread = self.fault_thread.lock().take();
        // One that panicked has said so.
        let _ = thread.map(JoinHandle::join);
    }

    /// The connection was lost before LISTEN, and the source comes back: it begins with ADVISE.
    pub(super) fn begin_again(&self) {
        *self.commands.lock() = Commands::default();
        *self.ahead.lock() = None;
        *self.preempt.lock() = None;
    }

    /// Waits for the threads that end with the loading.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// So many pages were asked for.
    pub(super) fn has_asked(&self, count: u64) {
        let Some(arriving) = self.arriving().filter(|_| count > 0) else { return };
        self.requests.fetch_add(count, Ordering::Relaxed);
        self.faults.lock().add(arriving.began().elapsed(), count);
    }

    pub(super) fn statistics(&self) -> Option<IncomingPostcopy> {
        let arriving = self.arriving()?;
        Some(IncomingPostcopy {
            missing_pages: arriving.left(),
            requests: self.requests.load(Ordering::Relaxed),
            times: arriving.blocktime().map(blocktime::Blocktime::snapshot),
            faults: self.faults.lock().snapshot(Duration::ZERO),
            started: self.started_at.get().map(|at| at.saturating_duration_since(arriving.began())),
            complete: arriving.complete().map(|at| at.saturating_duration_since(arriving.began())),
        })
    }
}
