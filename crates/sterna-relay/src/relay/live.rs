//! A session that runs: its state, and what its threads wait for.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sterna_transport::{CancelFlag, Channel};

use super::main_flow::{MainFlow, Refusal};
use super::options::{Notice, Options};
use super::readiness::is_hung_up;
use crate::frame::{Frame, ResetReason, RouteName, SessionId, SessionKey, Verdict};
use crate::phase::{Closing, Heard, Phase, StreamKind, StreamState};
use crate::session::{CarrierId, Event, OutgoingFrame, Piece, Role, Session, SessionError, Settings};

/// Interval in which time is looked at.
const TICK: Duration = Duration::from_millis(50);
/// How long a session without flows stays open, for a main channel that is recovered.
const LINGER: Duration = Duration::from_secs(2);
/// How long OVER may take to be sent.
const FAREWELL: Duration = Duration::from_secs(2);
const OVER: &str = "all flows are over";
const GONE: &str = "the source's VMM has closed its connections while the other relay was away";
/// Frames and bytes that one write of a carrier may have.
const BATCH_FRAMES: usize = 16;
const BATCH_BYTES: usize = 128 << 10;

/// One session, shared by its threads.
pub(super) struct Live {
    pub(super) id: SessionId,
    pub(super) role: Role,
    pub(super) route: RouteName,
    pub(super) key: SessionKey,
    pub(super) options: Arc<Options>,
    /// Ends connects that wait.
    pub(super) cancel: CancelFlag,
    began: Instant,
    state: Mutex<State>,
    /// Carriers wait for frames, VMMs' readers for room, VMMs' writers and the connector for deliveries.
    to_carriers: Condvar,
    room: Condvar,
    to_vmms: Condvar,
}

pub(super) struct State {
    pub(super) session: Session,
    pub(super) main: MainFlow,
    vmms: HashMap<u32, Arc<Channel>>,
    carriers: HashMap<CarrierId, Arc<Channel>>,
    /// Flows to connect, at the acceptor.
    connects: VecDeque<u32>,
    /// The number of the last attempt of each lane.
    attempts: HashMap<u8, u32>,
    /// When the last carrier was lost, and why.
    lost: Option<(Instant, String)>,
    pub(super) status: LiveStatus,
    over_at: Option<Instant>,
    idle_since: Option<Instant>,
    phase: Option<Phase>,
}

impl State {
    /// An attempt to connect failed: the reason why there is still no carrier.
    pub(super) fn note_failure(&mut self, why: &str) {
        if let Some((_, reason)) = &mut self.lost {
            why.clone_into(reason);
        }
    }
}

/// Whether a session relays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LiveStatus {
    Running,
    /// The VMM is kept waiting.
    Waiting,
    /// The VMMs' connections are closed.
    Over,
}

impl Live {
    pub(super) fn new(
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
            vmms: HashMap::new(),
            carriers: HashMap::new(),
            connects: VecDeque::new(),
            attempts: HashMap::new(),
            lost: Some((Instant::now(), "it has not been reached yet".to_owned())),
            status: LiveStatus::Running,
            over_at: None,
            idle_since: Some(Instant::now()),
            phase: None,
        };
        options.notices.send(Notice::Began { session: id, route: route.clone() });
        Arc::new(Self {
            id,
            role,
            route,
            key,
            options,
            cancel: CancelFlag::new(),
            began: Instant::now(),
            state: Mutex::new(state),
            to_carriers: Condvar::new(),
            room: Condvar::new(),
            to_vmms: Condvar::new(),
        })
    }

    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn is_over(&self) -> bool {
        self.lock().status == LiveStatus::Over
    }

    /// Whether the session takes no more flows.
    pub(super) fn is_closed(&self) -> bool {
        let state = self.lock();
        state.status != LiveStatus::Running || state.session.is_over()
    }

    // ---- carriers

    /// A carrier has finished its greeting. `None`: its attempt is not newer than another one of its lane.
    pub(super) fn attach(&self, lane: u8, attempt: u32, channel: &Arc<Channel>) -> Option<CarrierId> {
        let mut state = self.lock();
        let last = state.attempts.entry(lane).or_default();
        if attempt <= *last {
            return None;
        }
        *last = attempt;
        let id = state.session.carrier_up(lane, self.now());
        state.carriers.insert(id, Arc::clone(channel));
        if state.status == LiveStatus::Waiting && !state.session.is_over() {
            state.status = LiveStatus::Running;
        }
        if let Some((since, _)) = state.lost.take()
            && state.session.counters().lost_carriers > 0
        {
            self.options.notices.send(Notice::Back { session: self.id, after: since.elapsed() });
        }
        self.settle(&mut state);
        Some(id)
    }

    /// A carrier is lost.
    pub(super) fn detach(&self, id: CarrierId, why: &str) {
        let mut state = self.lock();
        if let Some(channel) = state.carriers.remove(&id) {
            channel.shutdown();
        }
        state.session.carrier_down(id, self.now());
        if state.carriers.is_empty() && state.lost.is_none() {
            state.lost = Some((Instant::now(), why.to_owned()));
            if state.status == LiveStatus::Running && !state.session.is_over() {
                self.options.notices.send(Notice::Lost { session: self.id, why: why.to_owned() });
            }
        }
        self.settle(&mut state);
    }

    /// Waits for frames of this carrier. False: the carrier is closed.
    pub(super) fn next_frames(&self, id: CarrierId, frames: &mut Vec<OutgoingFrame>) -> bool {
        frames.clear();
        let mut state = self.lock();
        loop {
            if !state.carriers.contains_key(&id) {
                return false;
            }
            let mut bytes = 0;
            while frames.len() < BATCH_FRAMES && bytes < BATCH_BYTES {
                let Some(frame) = state.session.next_frame(id, self.now()) else { break };
                bytes += frame.payload.as_ref().map_or(0, |payload| payload.len());
                if let Frame::Data { flow, .. } = frame.frame {
                    // Before the bytes leave: from now on they may arrive.
                    let (sent, delivered) = state.session.progress(flow).unwrap_or_default();
                    state.main.sent(flow, sent, delivered);
                }
                frames.push(frame);
            }
            let has_changed = self.settle(&mut state);
            if !frames.is_empty() {
                return true;
            }
            // What this thread has settled may be work for it, and its own notification would be lost.
            if !has_changed {
                self.to_carriers.wait(&mut state);
            }
        }
    }

    /// Takes a frame of a carrier.
    pub(super) fn receive(
        &self,
        id: CarrierId,
        frame: Frame,
        payload: Option<Piece>,
    ) -> Result<(), SessionError> {
        let mut state = self.lock();
        let acknowledged =
            if let Frame::Ack { flow, delivered, .. } = frame { Some((flow, delivered)) } else { None };
        let result = state.session.receive(id, frame, payload, self.now());
        if let Some((flow, delivered)) = acknowledged {
            let (sent, _) = state.session.progress(flow).unwrap_or_default();
            state.main.sent(flow, sent, delivered);
            if self.role == Role::Acceptor {
                state.main.answers_arrived(flow, Some(delivered));
            }
        }
        if let Err(error) = &result {
            let text = error.to_string();
            self.give_up(&mut state, &text);
            let verdict = state.main.verdict();
            state.session.end(verdict, &text);
        }
        self.settle(&mut state);
        result
    }

    // ---- VMMs

    /// Registers the connection of a flow. False: the flow is over.
    pub(super) fn plug(&self, flow: u32, channel: &Arc<Channel>) -> bool {
        let mut state = self.lock();
        if state.status == LiveStatus::Over || state.session.delivered_bytes(flow).is_none() {
            return false;
        }
        state.vmms.insert(flow, Arc::clone(channel));
        self.settle(&mut state);
        true
    }

    /// The next flow to connect, at the acceptor. `None`: the session is over.
    pub(super) fn next_connect(&self) -> Option<u32> {
        let mut state = self.lock();
        loop {
            if state.status == LiveStatus::Over {
                return None;
            }
            if let Some(flow) = state.connects.pop_front() {
                return Some(flow);
            }
            self.to_vmms.wait(&mut state);
        }
    }

    /// Waits until the flow may take bytes. 0: it is over. Returns at least every 100 ms, with `None`.
    pub(super) fn wait_for_room(&self, flow: u32) -> Option<u64> {
        let mut state = self.lock();
        for _ in 0..2 {
            let is_gone = !state.vmms.contains_key(&flow) || state.session.is_over();
            if is_gone || state.session.progress(flow).is_none() {
                return Some(0);
            }
            match state.session.room(flow, self.now()) {
                0 => {}
                room => return Some(room),
            }
            self.room.wait_for(&mut state, Duration::from_millis(100));
        }
        None
    }

    /// Takes bytes of a VMM.
    pub(super) fn take(&self, flow: u32, piece: Piece) -> Result<(), Refusal> {
        let mut state = self.lock();
        match self.role {
            Role::Dialer => {
                let kind = state.main.stream(flow, &piece)?;
                if let Some(kind) = kind {
                    state.session.set_priority(flow, kind.priority());
                    self.note_kind(kind);
                }
            }
            Role::Acceptor => state.main.answers(flow, &piece),
        }
        state.session.take(flow, piece, self.now());
        self.note_phase(&mut state);
        self.settle(&mut state);
        Ok(())
    }

    /// Waits for a delivery of the flow. `None`: the flow is over.
    pub(super) fn next_delivery(&self, flow: u32) -> Result<Option<crate::session::Delivery>, Refusal> {
        let mut state = self.lock();
        loop {
            if !state.vmms.contains_key(&flow) {
                return Ok(None);
            }
            if let Some(delivery) = state.session.next_delivery(flow) {
                if let crate::session::Delivery::Bytes(piece) = &delivery {
                    if self.role == Role::Acceptor {
                        // Before the bytes are written: from then on the VMM may act on them.
                        state.main.stream(flow, piece)?;
                    }
                    self.note_phase(&mut state);
                }
                return Ok(Some(delivery));
            }
            self.to_vmms.wait(&mut state);
        }
    }

    /// The VMM has taken these bytes.
    pub(super) fn delivered(&self, flow: u32, piece: &[u8]) {
        let mut state = self.lock();
        if self.role == Role::Dialer {
            state.main.answers(flow, piece);
        }
        state.session.delivered(flow, piece.len() as u64);
        self.settle(&mut state);
    }

    /// Runs `change` on the session, and acts on what follows.
    pub(super) fn with(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        self.settle(&mut state);
    }

    // ---- ends

    /// The other relay has said how its session ended, in the answer to a hello.
    pub(super) fn heard(&self, heard: Heard, why: &str) {
        let mut state = self.lock();
        let closing = state.main.heard(heard);
        self.act(&mut state, closing, why);
        self.settle(&mut state);
    }

    /// Ends the session if the migration permits it.
    pub(super) fn stop(&self, why: &str) {
        let mut state = self.lock();
        self.give_up(&mut state, why);
        self.settle(&mut state);
    }

    /// Looks at the time until the session is over. One thread runs it.
    pub(super) fn keep_time(&self) {
        loop {
            std::thread::sleep(TICK);
            let mut state = self.lock();
            state.session.tick(self.now());
            self.settle(&mut state);
            if let Some(over_at) = state.over_at {
                if over_at.elapsed() > FAREWELL || state.carriers.is_empty() {
                    let carriers: Vec<_> = state.carriers.drain().collect();
                    carriers.iter().for_each(|(_, channel)| channel.shutdown());
                    self.wake();
                    return;
                }
                continue;
            }
            if state.status == LiveStatus::Waiting {
                match state.main.flow() {
                    None => {
                        let in_order = state.main.state() == StreamState::Answered;
                        self.close(&mut state, "the migration is over", in_order);
                    }
                    // The destination's VMM may have closed after its answer, which still has to arrive.
                    Some(flow) if self.role == Role::Dialer && self.is_hung_up(&state, flow) => {
                        self.close(&mut state, "the VMM has closed the connection", false);
                    }
                    Some(_) => {}
                }
            }
            let lost = state.lost.as_ref().filter(|_| state.status == LiveStatus::Running);
            if let Some((since, why)) = lost
                && since.elapsed() > self.options.reconnect_window
            {
                let window = self.options.reconnect_window.as_secs_f64();
                let why =
                    format!("the other relay was not reached for {window} s (--reconnect-window): {why}");
                self.give_up(&mut state, &why);
            }
            self.look_for_the_end(&mut state);
            self.settle(&mut state);
        }
    }

    /// Ends a session whose flows are over, or whose VMMs have gone while there is no carrier.
    fn look_for_the_end(&self, state: &mut State) {
        if state.status != LiveStatus::Running {
            return;
        }
        let is_lost = state.lost.is_some();
        let is_answered = state.main.state() == StreamState::Answered;
        if state.session.open_flows() > 0 {
            state.idle_since = None;
            // A source that has its answer needs nothing more, and its destination neither. A source without an answer
            // has failed. Other VMMs may close their connections before their bytes have arrived.
            let may_end = is_answered || (self.role == Role::Dialer && state.main.has_main());
            let have_gone =
                !state.vmms.is_empty() && state.vmms.keys().all(|flow| self.is_hung_up(state, *flow));
            if is_lost && may_end && have_gone {
                let why = if is_answered { OVER } else { GONE };
                self.close(state, why, is_answered);
            }
            return;
        }
        let since = *state.idle_since.get_or_insert_with(Instant::now);
        if since.elapsed() <= LINGER {
            return;
        }
        // The acceptor waits for the dialer's OVER, unless it cannot arrive any more.
        if self.role == Role::Dialer || (is_lost && is_answered) {
            self.close(state, OVER, true);
        }
    }

    fn is_hung_up(&self, state: &State, flow: u32) -> bool {
        state.vmms.get(&flow).is_none_or(|channel| is_hung_up(channel))
    }

    fn give_up(&self, state: &mut State, why: &str) {
        let closing = state.main.give_up();
        self.act(state, closing, why);
    }

    fn act(&self, state: &mut State, closing: Closing, why: &str) {
        match closing {
            Closing::Close | Closing::Nothing => self.close(state, why, false),
            Closing::Wait if state.status == LiveStatus::Running => {
                state.status = LiveStatus::Waiting;
                let advice = format!("{why}. {}", self.advice());
                self.options.notices.send(Notice::Waiting { session: self.id, advice });
            }
            Closing::Wait => {}
        }
    }

    fn advice(&self) -> &'static str {
        match self.role {
            Role::Dialer => {
                "The end of the guest's stream was sent, so the destination may run the guest. The source's VMM is kept \
                 waiting, and its guest stays stopped. Look at the destination: if the guest runs there, end the source's \
                 VMM. If it does not and never will, cancel the migration at the source, which resumes its guest"
            }
            Role::Acceptor => {
                "The end of the guest's stream was passed on, so the guest may run here, and the source does not know it. \
                 Keep this relay running until the other one has reached it. If the other relay does not come back and the \
                 guest runs here, end the source's VMM"
            }
        }
    }

    fn close(&self, state: &mut State, why: &str, in_order: bool) {
        if state.status == LiveStatus::Over {
            return;
        }
        state.status = LiveStatus::Over;
        state.over_at = Some(Instant::now());
        self.cancel.cancel();
        for flow in state.vmms.keys().copied().collect::<Vec<_>>() {
            state.session.reset(flow, ResetReason::SessionOver);
        }
        let verdict = state.main.verdict();
        state.session.end(verdict, why);
        state.vmms.drain().for_each(|(_, channel)| channel.shutdown());
        let how = match state.main.state() {
            StreamState::Postcopy if !in_order => format!(
                "{why}. Both VMMs have paused the postcopy migration: when the network is back, run migrate-recover at the \
                 destination and migrate with resume at the source, through this relay"
            ),
            StreamState::Open | StreamState::Closed if !in_order && self.role == Role::Dialer => {
                format!("{why}. The guest runs at the source")
            }
            _ => why.to_owned(),
        };
        self.options.notices.send(Notice::Ended { session: self.id, how, in_order });
    }

    /// Acts on the news of the session. Returns whether there were any.
    fn settle(&self, state: &mut State) -> bool {
        let mut has_changed = false;
        loop {
            let events = state.session.take_events();
            if events.is_empty() {
                return has_changed;
            }
            has_changed = true;
            for event in events {
                match event {
                    Event::Send => {
                        self.to_carriers.notify_all();
                    }
                    Event::Room => {
                        self.room.notify_all();
                    }
                    Event::Deliver(_) => {
                        self.to_vmms.notify_all();
                    }
                    Event::Connect(flow) => {
                        state.connects.push_back(flow);
                        self.to_vmms.notify_all();
                    }
                    Event::Stopped(flow) => {
                        if let Some(channel) = state.vmms.get(&flow) {
                            channel.finish_reading();
                        }
                        self.room.notify_all();
                    }
                    Event::Gone(flow) => {
                        state.main.gone(flow);
                        if let Some(channel) = state.vmms.remove(&flow) {
                            channel.shutdown();
                        }
                        self.wake();
                    }
                    Event::Close(id) => {
                        if let Some(channel) = state.carriers.remove(&id) {
                            channel.shutdown();
                        }
                        state.session.carrier_down(id, self.now());
                        if state.carriers.is_empty() && state.lost.is_none() {
                            let why = "it was silent for too long".to_owned();
                            state.lost = Some((Instant::now(), why.clone()));
                            self.options.notices.send(Notice::Lost { session: self.id, why });
                        }
                        self.to_carriers.notify_all();
                    }
                    Event::Over(verdict, text) => self.peer_is_over(state, verdict, &text),
                }
            }
        }
    }

    fn peer_is_over(&self, state: &mut State, verdict: Verdict, text: &str) {
        let why = format!("the other relay has ended the session: {text}");
        match self.role {
            Role::Dialer => {
                let heard = if verdict == Verdict::Never { Heard::Never } else { Heard::Passed };
                let closing = state.main.heard(heard);
                self.act(state, closing, &why);
            }
            // The dialer ends a session only when its VMM's connections are closed, or may be closed.
            Role::Acceptor => {
                let in_order = state.session.open_flows() == 0;
                state.main.give_up();
                self.close(state, &why, in_order);
            }
        }
    }

    fn note_kind(&self, kind: StreamKind) {
        if kind == StreamKind::Opaque {
            let phase = "the stream cannot be read (encrypted, or not QEMU's): it is relayed without phases"
                .to_owned();
            self.options.notices.send(Notice::Phase { session: self.id, phase });
        }
    }

    fn note_phase(&self, state: &mut State) {
        let Some(phase) = state.main.phase() else { return };
        if state.phase.as_ref() == Some(phase) {
            return;
        }
        let phase = phase.clone();
        let text = match &phase {
            Phase::Setup => "setup".to_owned(),
            Phase::Ram { round } => format!("RAM, round {round}"),
            Phase::Switchover => "switchover: the guest is stopped".to_owned(),
            Phase::Devices => "devices".to_owned(),
            Phase::Ended => "end of the stream".to_owned(),
            Phase::Postcopy => "postcopy: the guest runs at the destination".to_owned(),
            Phase::Unread { why } => {
                format!("the stream cannot be read any more, and is relayed without phases: {why}")
            }
        };
        state.phase = Some(phase);
        self.options.notices.send(Notice::Phase { session: self.id, phase: text });
    }

    fn wake(&self) {
        self.to_carriers.notify_all();
        self.room.notify_all();
        self.to_vmms.notify_all();
    }
}
