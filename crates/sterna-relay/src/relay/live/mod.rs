//! A session that runs: its state, and what its threads wait for.
//!
//! | file | contents |
//! | --- | --- |
//! | `carriers` | carriers that come and are lost, frames |
//! | `vmms` | the VMMs' connections, bytes |
//! | `direct` | bytes that one thread passes on, without another |
//! | `places` | the connections, and what waits at them |
//! | `wakes` | who is woken |
//! | `time` | what the thread for time looks at |
//! | `ends` | the end of the session |
//! | `news` | what the session's machine and the operator need to learn |

mod carriers;
mod direct;
mod ends;
mod news;
mod places;
mod time;
mod vmms;
mod wakes;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sterna_transport::CancelFlag;

use super::figures::{Figures, SessionStatus};
use super::limit::Share;
use super::main_flow::MainFlow;
use super::meter::Meter;
use super::options::{Notice, Options};
use super::packing::Packing;
use crate::frame::{RouteName, SessionId, SessionKey};
use crate::phase::Phase;
use crate::session::{Buffers, CarrierId, Counters, Role, Session, Settings};

pub(in crate::relay) use places::{Passing, Sending};

use places::{CarrierPlace, VmmPlace};

/// One session, shared by its threads.
pub(in crate::relay) struct Live {
    pub(in crate::relay) id: SessionId,
    pub(in crate::relay) role: Role,
    pub(in crate::relay) route: RouteName,
    pub(in crate::relay) key: SessionKey,
    pub(in crate::relay) options: Arc<Options>,
    /// Ends connects that wait.
    pub(in crate::relay) cancel: CancelFlag,
    pub(in crate::relay) share: Share,
    pub(in crate::relay) buffers: Buffers,
    began: Instant,
    state: Mutex<State>,
    /// The connector waits for flows.
    connector: Condvar,
}

pub(in crate::relay) struct State {
    pub(in crate::relay) session: Session,
    pub(in crate::relay) main: MainFlow,
    pub(in crate::relay) packing: Packing,
    vmms: HashMap<u32, VmmPlace>,
    carriers: HashMap<CarrierId, CarrierPlace>,
    /// Flows to connect, at the acceptor.
    connects: VecDeque<u32>,
    /// The number of the last attempt of each lane.
    attempts: HashMap<u8, u32>,
    /// When the last carrier was lost, and why.
    lost: Option<(Instant, String)>,
    pub(in crate::relay) status: LiveStatus,
    over_at: Option<Instant>,
    idle_since: Option<Instant>,
    phase: Option<Phase>,
    meter: Meter,
    /// The other relay.
    peer: Option<String>,
}

impl State {
    /// An attempt to connect failed: the reason why there is still no carrier.
    pub(in crate::relay) fn note_failure(&mut self, why: &str) {
        if let Some((_, reason)) = &mut self.lost {
            why.clone_into(reason);
        }
    }
}

/// Whether a session relays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::relay) enum LiveStatus {
    Running,
    /// The VMM is kept waiting.
    Waiting,
    /// The VMMs' connections are closed.
    Over,
}

impl Live {
    pub(in crate::relay) fn new(
        id: SessionId,
        role: Role,
        route: RouteName,
        key: SessionKey,
        options: Arc<Options>,
    ) -> Arc<Self> {
        let session = Session::new(id, role, Settings::new(options.buffer_bytes));
        let state = State {
            session,
            main: MainFlow::new(role, &options),
            packing: Packing::default(),
            vmms: HashMap::new(),
            carriers: HashMap::new(),
            connects: VecDeque::new(),
            attempts: HashMap::new(),
            lost: Some((Instant::now(), "it has not been reached yet".to_owned())),
            status: LiveStatus::Running,
            over_at: None,
            idle_since: Some(Instant::now()),
            phase: None,
            meter: Meter::default(),
            peer: None,
        };
        options.notices.send(Notice::Began { session: id, route: route.clone() });
        Arc::new(Self {
            id,
            role,
            route,
            key,
            share: options.limit.share(),
            buffers: Buffers::default(),
            options,
            cancel: CancelFlag::new(),
            began: Instant::now(),
            state: Mutex::new(state),
            connector: Condvar::new(),
        })
    }

    pub(in crate::relay) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(in crate::relay) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(in crate::relay) fn is_over(&self) -> bool {
        self.lock().status == LiveStatus::Over
    }

    /// Whether the session takes no more flows.
    pub(in crate::relay) fn is_closed(&self) -> bool {
        let state = self.lock();
        state.status != LiveStatus::Running || state.session.is_over()
    }

    /// What is known about the session now.
    pub(in crate::relay) fn figures(&self) -> Figures {
        self.figures_of(&self.lock())
    }

    fn figures_of(&self, state: &State) -> Figures {
        let (now, counters) = (self.now(), state.session.counters());
        let (processed, answered) = self.passed(&counters);
        let (downtime, is_downtime_over) = state.meter.downtime(now);
        let (stored, waiting) = state.session.held_bytes();
        let packed = state.packing.figures();
        let is_over = state.status == LiveStatus::Over;
        Figures {
            peer: state.peer.clone(),
            status: match state.status {
                LiveStatus::Running => SessionStatus::Running,
                LiveStatus::Waiting => SessionStatus::Waiting,
                LiveStatus::Over => SessionStatus::Over,
            },
            phase: state.phase.clone(),
            round: state.meter.round,
            age: now,
            ram_bytes: state.meter.ram_bytes,
            remaining_bytes: state.meter.remaining_bytes,
            dirty_rate: state.meter.dirty_rate,
            processed_bytes: processed,
            rate: if is_over { 0 } else { state.meter.rate(now, processed) },
            answered_bytes: answered,
            downtime,
            is_downtime_over,
            sent_bytes: counters.sent,
            sent_payload_bytes: counters.sent.saturating_sub(packed.plain) + packed.sent,
            resent_bytes: counters.resent,
            lost_carriers: counters.lost_carriers,
            reconnections: state.meter.reconnections,
            carriers: if is_over { 0 } else { state.carriers.len() as u32 },
            lost_for: state.lost.as_ref().filter(|_| !is_over).map(|(since, _)| since.elapsed()),
            open_flows: state.session.open_flows() as u32,
            flows: counters.flows,
            held_bytes: stored + waiting,
            ..Figures::begun(self.id, self.role, self.route.clone())
        }
    }

    /// Bytes from the source's VMM, and bytes to it.
    fn passed(&self, counters: &Counters) -> (u64, u64) {
        match self.role {
            Role::Dialer => (counters.taken, counters.delivered),
            Role::Acceptor => (counters.delivered, counters.taken),
        }
    }

    /// Runs `change` on the session, and acts on what follows.
    pub(in crate::relay) fn with(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        self.settle(&mut state);
    }
}
