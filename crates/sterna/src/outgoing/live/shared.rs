//! State that the thread of a live save shares with its handles.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_ram::{CustodyClaim, GuestRam, TrackingClaim};
use sterna_transport::{Address, CancelFlag, Channel};

use super::options::{LiveSaveOptions, LiveSaved};
use crate::bell::Bell;
use crate::error::MigrationError;
use crate::events::{Event, Observer, Status};
use crate::outgoing::lanes::limiter::Limiter;
use crate::outgoing::measure::Counters;
use crate::params::Parameters;
use crate::stats::Statistics;
use crate::threads;
use crate::vm::SourceVm;

pub(super) struct Shared {
    pub(super) vm: Arc<dyn SourceVm>,
    pub(super) ram: GuestRam,
    pub(super) to: Address,
    pub(super) options: LiveSaveOptions,
    pub(super) counters: Arc<Counters>,
    pub(super) limiter: Limiter,
    pub(super) cancel: CancelFlag,
    pub(super) bell: Bell,
    params: Mutex<Parameters>,
    observer: Arc<dyn Observer>,
    channel: Mutex<Option<Arc<Channel>>>,
    /// The rights to the guest and to its dirty source, until the end.
    claims: Mutex<Option<(CustodyClaim, Option<TrackingClaim>)>>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    status: Status,
    began: Instant,
    setup: Option<Duration>,
    total: Option<Duration>,
    pause: Option<Duration>,
    remaining_bytes: u64,
    end: Option<Result<LiveSaved, MigrationError>>,
}

impl Shared {
    pub(super) fn new(
        (vm, ram): (Arc<dyn SourceVm>, GuestRam),
        to: Address,
        (params, options): (Parameters, LiveSaveOptions),
        observer: Arc<dyn Observer>,
        claims: (CustodyClaim, Option<TrackingClaim>),
    ) -> Self {
        let state = State {
            status: Status::Setup,
            began: Instant::now(),
            setup: None,
            total: None,
            pause: None,
            remaining_bytes: ram.total_bytes(),
            end: None,
        };
        Self {
            vm,
            ram,
            to,
            options,
            counters: Arc::default(),
            limiter: Limiter::new(params.max_bandwidth_bytes),
            cancel: CancelFlag::new(),
            bell: Bell::default(),
            params: Mutex::new(params),
            observer,
            channel: Mutex::default(),
            claims: Mutex::new(Some(claims)),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    pub(super) fn params(&self) -> Parameters {
        self.params.lock().clone()
    }

    pub(super) fn change_params<T>(&self, change: impl FnOnce(&mut Parameters) -> T) -> T {
        let mut params = self.params.lock();
        let changed = change(&mut params);
        self.limiter.set(params.max_bandwidth_bytes);
        changed
    }

    /// Keeps the channel, so that a cancel ends its waits.
    pub(super) fn adopt(&self, channel: &Arc<Channel>) {
        *self.channel.lock() = Some(Arc::clone(channel));
        if self.cancel.is_cancelled() {
            channel.shutdown();
        }
    }

    /// Ends the save soon. False: it has ended.
    pub(super) fn cancel(&self) -> bool {
        {
            let mut state = self.state.lock();
            if state.end.is_some() {
                return false;
            }
            state.status = Status::Cancelling;
        }
        self.cancel.cancel();
        self.interrupt();
        true
    }

    /// Ends all waits for the target.
    pub(super) fn interrupt(&self) {
        self.limiter.open();
        if let Some(channel) = &*self.channel.lock() {
            channel.shutdown();
        }
    }

    pub(super) fn check(&self) -> Result<(), MigrationError> {
        if self.cancel.is_cancelled() { Err(MigrationError::Cancelled) } else { Ok(()) }
    }

    pub(super) fn status(&self, status: Status) {
        {
            let mut state = self.state.lock();
            if state.status == Status::Cancelling {
                return;
            }
            state.status = status;
            if status == Status::Active {
                state.setup = Some(state.began.elapsed());
            }
        }
        self.tell(&Event::Status(status));
    }

    pub(super) fn paused(&self, pause: Duration) {
        self.state.lock().pause = Some(pause);
    }

    pub(super) fn remaining(&self, bytes: u64) {
        self.state.lock().remaining_bytes = bytes;
    }

    /// Records the end, after the guest is free again.
    pub(super) fn end(&self, end: Result<LiveSaved, MigrationError>) {
        let end = match end {
            // The target's error is only the effect of a cancel.
            Err(_) if self.cancel.is_cancelled() => Err(MigrationError::Cancelled),
            end => end,
        };
        self.channel.lock().take();
        if let Some((custody, tracking)) = self.claims.lock().take() {
            drop(tracking);
            custody.give_back();
        }
        let status = match &end {
            Ok(_) => Status::Completed,
            Err(MigrationError::Cancelled) => Status::Cancelled,
            Err(_) => Status::Failed,
        };
        {
            let mut state = self.state.lock();
            state.total = Some(state.began.elapsed());
            state.status = status;
            state.end = Some(end);
        }
        self.changed.notify_all();
        self.tell(&Event::Status(status));
    }

    pub(super) fn now(&self) -> Status {
        self.state.lock().status
    }

    pub(super) fn result(&self) -> Option<Result<LiveSaved, MigrationError>> {
        self.state.lock().end.clone()
    }

    pub(super) fn wait(&self, limit: Option<Duration>) -> Option<Result<LiveSaved, MigrationError>> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.state.lock();
        while state.end.is_none() {
            match deadline {
                Some(deadline) if self.changed.wait_until(&mut state, deadline).timed_out() => break,
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
        state.end.clone()
    }

    pub(super) fn statistics(&self) -> Statistics {
        let counts = self.counters.now();
        let state = self.state.lock();
        Statistics {
            status: state.status,
            error: match &state.end {
                Some(Err(error)) => Some(error.to_string()),
                _ => None,
            },
            total_time: state.total.unwrap_or_else(|| state.began.elapsed()),
            setup_time: state.setup.unwrap_or_default(),
            downtime: state.pause,
            ram_total_bytes: self.ram.total_bytes(),
            ram_remaining_bytes: state.remaining_bytes,
            transferred_bytes: counts.main_bytes,
            zero_pages: counts.zero_pages,
            normal_pages: counts.normal_pages,
            missing_bytes: self.ram.missing_bytes(),
            ..Statistics::default()
        }
    }

    fn tell(&self, event: &Event) {
        threads::tell(&*self.observer, event);
        self.bell.ring();
    }
}
