//! What the threads of an incoming migration share of a guest that runs before its pages are there ([`super::postcopy`]).
//!
//! | module | contains |
//! | --- | --- |
//! | `order` | in which order the source's commands may come. Pure |
//! | `pages` | which pages are missing, and how each is placed once |
//! | `blocktime` | how long is waited |

mod blocktime;
mod order;
mod pages;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;

use crate::stats::IncomingPostcopy;
pub(super) use order::Commands;
pub(super) use pages::ArrivingPages;

/// What an incoming migration keeps of postcopy.
#[derive(Default)]
pub(super) struct Postcopy {
    pub(super) commands: Mutex<Commands>,
    /// From LISTEN on.
    arriving: OnceLock<Arc<ArrivingPages>>,
    /// The channel of requested pages, once it is here.
    pub(super) preempt: Mutex<Option<Arc<Channel>>>,
    pub(super) preempt_came: Condvar,
    started: Mutex<Started>,
    /// End with the loading.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Ends when no page is missing.
    fault_thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) requests: AtomicU64,
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
        if let Some(channel) = &*self.preempt.lock() {
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
        *self.preempt.lock() = None;
    }

    /// Waits for the threads that end with the loading.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }

    pub(super) fn statistics(&self) -> Option<IncomingPostcopy> {
        let arriving = self.arriving()?;
        Some(IncomingPostcopy {
            missing_pages: arriving.left(),
            requests: self.requests.load(Ordering::Relaxed),
            times: arriving.blocktime().map(blocktime::Blocktime::snapshot),
        })
    }
}
