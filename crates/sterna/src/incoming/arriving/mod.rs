//! State that the threads of an incoming migration share while the guest runs and pages are missing
//! ([`super::postcopy`]).
//!
//! | module | contains |
//! | --- | --- |
//! | `order` | the order in which the source may send commands. Pure |
//! | `pages` | the missing pages, each of which is placed once |
//! | `asking` | whether the source accepts requests for pages now |
//! | `ways` | the path by which each page arrived, if lanes carry pages as well |
//! | `blocktime` | how long threads wait for pages |
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

use crate::error::MigrationError;
use crate::stats::{IncomingPostcopy, Series};
pub(super) use asking::Asking;
pub(super) use order::Commands;
pub(super) use pages::ArrivingPages;

/// The postcopy part of an incoming migration's state.
#[derive(Default)]
pub(super) struct Postcopy {
    pub(super) commands: Mutex<Commands>,
    /// Pages that the source has discarded before LISTEN.
    pub(super) ahead: Mutex<Option<TakenAhead>>,
    /// Set from LISTEN on.
    arriving: OnceLock<Arc<ArrivingPages>>,
    /// The preempt channel, once it is connected, and the number of its session.
    pub(super) preempt: Mutex<Option<(u32, Arc<Channel>)>>,
    pub(super) preempt_came: Condvar,
    /// Whether requests may be sent. The lock is kept while a request is written.
    pub(super) asking: Mutex<Asking>,
    /// The number of the connection that replaced a lost one most recently.
    pub(super) recovered_session: Mutex<u32>,
    /// The reader's state while no main channel is connected.
    reading: Mutex<Option<KeptReading>>,
    started: Mutex<Started>,
    /// Why the source must not reconnect by itself.
    last_word: Mutex<Option<LastWord>>,
    /// Threads that end when loading ends.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The thread that ends when no page is missing.
    fault_thread: Mutex<Option<JoinHandle<()>>>,
    requests: AtomicU64,
    /// The number of requests over time.
    faults: Mutex<Series>,
    /// When the guest was started, or taken over paused.
    started_at: OnceLock<Instant>,
}

/// The position in the stream at which the main channel was lost. The next main channel continues the same
/// stream.
pub(super) struct KeptReading {
    pub(super) decoder: MainDecoder,
    /// The source sends keep-alive messages.
    pub(super) keeps_alive: bool,
}

/// Why the source must not reconnect by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastWord {
    /// An operator has paused the migration.
    Paused,
    /// A page cannot be placed.
    PageFailed,
}

impl LastWord {
    /// The value of SHUT that carries this reason.
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Paused => extension::SHUT_PAUSED,
            Self::PageFailed => extension::SHUT_PAGE_FAILED,
        }
    }
}

/// Whether the source has requested a message about the guest's start, and whether the guest was started.
#[derive(Default, Clone, Copy)]
struct Started {
    is_asked: bool,
    is_so: bool,
}

impl Postcopy {
    /// The missing pages, from LISTEN on.
    pub(super) fn arriving(&self) -> Option<&Arc<ArrivingPages>> {
        self.arriving.get()
    }

    /// Stores the missing pages at LISTEN.
    pub(super) fn set_arriving(&self, arriving: &Arc<ArrivingPages>) {
        // Never set twice, because LISTEN is accepted once.
        let _ = self.arriving.set(Arc::clone(arriving));
    }

    /// Checks that the stream may end now.
    pub(super) fn end_is_read(&self) -> Result<(), MigrationError> {
        self.commands.lock().ends()
    }

    /// Keeps the reader's state after the main channel was lost.
    pub(super) fn keep_reading(&self, reading: KeptReading) {
        *self.reading.lock() = Some(reading);
    }

    /// Takes the reader's state for the next main channel.
    pub(super) fn take_reading(&self) -> Option<KeptReading> {
        self.reading.lock().take()
    }

    /// Records that an operator has paused the migration, or withdraws it.
    pub(super) fn set_paused(&self, is_so: bool) {
        *self.last_word.lock() = is_so.then_some(LastWord::Paused);
    }

    /// The reason that the source receives when this side ends the connection.
    pub(super) fn last_word(&self) -> Option<LastWord> {
        let has_failed = self.arriving().is_some_and(|arriving| arriving.fails_again());
        let said = *self.last_word.lock();
        said.or(has_failed.then_some(LastWord::PageFailed))
    }

    /// Forgets the lost channels after all their threads have ended.
    pub(super) fn forget_channels(&self) {
        // A thread that is about to send a request on the lost main channel ends with that channel.
        *self.asking.lock() = Asking::default();
        *self.preempt.lock() = None;
    }

    /// Keeps a thread that ends when loading ends.
    pub(super) fn keep_thread(&self, thread: JoinHandle<()>) {
        self.threads.lock().push(thread);
    }

    /// Keeps the thread that ends when no page is missing.
    pub(super) fn keep_fault_thread(&self, thread: JoinHandle<()>) {
        *self.fault_thread.lock() = Some(thread);
    }

    /// The source requests a message when the guest was started. True: send the message now.
    pub(super) fn is_asked_for_start(&self) -> bool {
        self.is_to_be_told(|started| started.is_asked = true)
    }

    /// The guest was started, or taken over paused. True: send the source the message now.
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

    /// Closes the preempt channel.
    pub(super) fn shut_preempt(&self) {
        if let Some((_, channel)) = &*self.preempt.lock() {
            channel.shutdown();
        }
        self.preempt_came.notify_all();
    }

    /// Wakes all threads that wait for a page: all pages are in place, or no guest runs.
    pub(super) fn let_go(&self) {
        if let Some(arriving) = self.arriving() {
            arriving.end();
        }
        let thread = self.fault_thread.lock().take();
        // An error of the join is ignored: a panic in the thread was already reported.
        let _ = thread.map(JoinHandle::join);
    }

    /// Resets the state for a source that reconnects after a loss before LISTEN. It begins with ADVISE.
    pub(super) fn begin_again(&self) {
        *self.commands.lock() = Commands::default();
        *self.ahead.lock() = None;
        *self.preempt.lock() = None;
    }

    /// Waits for the threads that end when loading ends.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// Counts `count` requested pages.
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
