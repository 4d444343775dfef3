//! The relay at the source: VMMs connect to it, and it connects carriers to the other relay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::RecvFlags;
use sterna_transport::{Address, CancelFlag, Channel, Listener, TransportError};

use super::control_flow::ControlFlow;
use super::error::RelayError;
use super::figures::Figures;
use super::greeting::{self, Introduction};
use super::live::Live;
use super::options::{Notice, Options};
use super::readiness::is_readable;
use super::{carrier, codec, vmm};
use crate::frame::{Offer, Purpose, ResetReason, RouteName, SessionId, SessionKey, Status};
use crate::phase::Heard;
use crate::session::{Opening, Role};

/// Limit of one attempt to connect and greet.
const ATTEMPT: Duration = Duration::from_secs(10);
/// The same for a session that had a carrier. After an outage, a new attempt is sooner than the kernel's retries of the old one.
const NEXT_ATTEMPT: Duration = Duration::from_secs(5);
/// Pauses between attempts: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a session that never had a carrier tries to get one, if the window is not shorter.
const FIRST_CONNECT: Duration = Duration::from_secs(30);
/// How long a session that never had a carrier tries again after connections that are closed without an answer, if the
/// window is not shorter. A network that breaks during the greeting looks like a refusal of the secret.
const FIRST_ANSWER: Duration = Duration::from_secs(15);
/// How long a connection beside a main channel may be silent before it is opened at the other end. In this time a
/// second main channel shows itself, which must not reach the destination's VMM.
const SHOWS_ITSELF_MS: i64 = 50;
const MAIN: [u8; 4] = *b"QEVM";

/// A relay that listens for VMMs at one address and sends to one route.
pub struct Dialer {
    shared: Arc<Shared>,
    address: Address,
}

struct Shared {
    listener: Listener,
    to: Address,
    route: RouteName,
    options: Arc<Options>,
    live: Mutex<Option<Arc<Live>>>,
    cancel: CancelFlag,
    /// No session begins any more.
    is_closing: AtomicBool,
    /// The other relay has answered that it does not know the version that offers compression.
    is_older: AtomicBool,
}

impl Dialer {
    /// Listens at `listen`. The first connection there begins a session with the relay at `to`.
    ///
    /// # Errors
    /// The address cannot be listened at; an address that other hosts can reach without certificates, secret or
    /// consent.
    pub fn start(
        listen: &Address,
        to: Address,
        route: RouteName,
        options: Options,
    ) -> Result<Self, RelayError> {
        options.security.check(&to)?;
        // Its clients are VMMs, which prove nothing.
        let own = super::options::Security { insecure: options.security.insecure, ..Default::default() };
        own.check(listen)?;
        let listener = Listener::bind(listen)?;
        let address = listener.local_address();
        // A socket that this process was given shows its address only now.
        own.check(&address)?;
        let shared = Arc::new(Shared {
            listener,
            to,
            route,
            options: Arc::new(options),
            live: Mutex::new(None),
            cancel: CancelFlag::new(),
            is_closing: AtomicBool::new(false),
            is_older: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        vmm::spawn("relay", move || accepting.accept())?;
        Ok(Self { shared, address })
    }

    /// The address at which VMMs connect, with the port that the kernel chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Whether a session is open.
    pub fn is_busy(&self) -> bool {
        self.shared.live.lock().as_ref().is_some_and(|live| !live.is_over())
    }

    /// The figures of the open session.
    pub fn figures(&self) -> Option<Figures> {
        let live = self.shared.live.lock().clone();
        live.filter(|live| !live.is_over()).map(|live| live.figures())
    }

    /// Ends this session as at the end of its window; see [`stop`](Self::stop). False: it is not open here.
    pub fn end_session(&self, session: SessionId, why: &str) -> bool {
        let live = self.shared.live.lock().clone();
        let live = live.filter(|live| live.id == session && !live.is_over());
        live.inspect(|live| live.stop(why)).is_some()
    }

    /// Begins no more sessions. A session that is open continues and takes further connections of its VMM.
    pub fn close(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
    }

    /// Begins no more sessions, and ends the open one as at the end of its window: the VMMs' connections are closed if this
    /// cannot make two guests run. A session that keeps its source waiting stays.
    pub fn stop(&self, why: &str) {
        self.close();
        if let Some(live) = &*self.shared.live.lock() {
            live.stop(why);
        }
    }
}

impl Drop for Dialer {
    fn drop(&mut self) {
        // The socket file of the listener is removed when the thread has ended.
        self.shared.cancel.cancel();
    }
}

impl Shared {
    fn accept(self: &Arc<Self>) {
        loop {
            match self.listener.accept(None, &self.cancel) {
                Ok(channel) => {
                    if let Err(error) = self.connected(Arc::new(channel)) {
                        self.refuse(None, error.to_string());
                    }
                }
                Err(TransportError::Cancelled { .. }) => return,
                Err(error) => {
                    self.refuse(None, error.to_string());
                    // No descriptor is free, for example. Without a pause the loop would only repeat the error.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// A VMM has connected. Connections are opened at the other end in their order.
    fn connected(self: &Arc<Self>, channel: Arc<Channel>) -> Result<(), RelayError> {
        let Some(live) = self.session()? else {
            self.refuse(
                None,
                "the relay is ending, or keeps the last source waiting, and begins no session".to_owned(),
            );
            return Ok(());
        };
        let has_main = live.lock().main.has_main();
        if has_main && shows_main(&channel) {
            let why = super::main_flow::Refusal::SecondMain.to_string();
            self.refuse(Some(live.id), why);
            return Ok(());
        }
        let mut opening = Opening::Refused;
        let control = Arc::new(ControlFlow::new(live.role));
        live.with(|state| opening = state.session.open(live.now()));
        match opening {
            Opening::Flow(flow) if live.plug(flow, &channel, &control) => {
                let started = vmm::start(&live, flow, &channel, &control);
                if started.is_err() {
                    live.with(|state| state.session.reset(flow, ResetReason::Broken));
                }
                started
            }
            _ => {
                self.refuse(Some(live.id), "the session takes no more connections".to_owned());
                Ok(())
            }
        }
    }

    /// The session that runs, or another one if it has ended.
    fn session(self: &Arc<Self>) -> Result<Option<Arc<Live>>, RelayError> {
        let mut current = self.live.lock();
        if let Some(live) = current.as_ref().filter(|live| !live.is_closed()) {
            return Ok(Some(Arc::clone(live)));
        }
        if self.is_closing.load(Ordering::Acquire) {
            return Ok(None);
        }
        // A session that keeps its source waiting uses the address until its source has gone.
        if current.as_ref().is_some_and(|live| !live.is_over()) {
            return Ok(None);
        }
        // The other relay may be another version by now.
        self.is_older.store(false, Ordering::Release);
        let (id, share) = (SessionId(greeting::random()?), greeting::random()?);
        let key = SessionKey::new(self.options.security.secret.as_ref(), id, &share);
        let live = Live::new(id, Role::Dialer, self.route.clone(), key, Arc::clone(&self.options));
        let attempts = Arc::new(Mutex::new(0));
        for lane in 0..self.options.carriers {
            let (shared, live, attempts) = (Arc::clone(self), Arc::clone(&live), Arc::clone(&attempts));
            vmm::spawn("carrier", move || Lane { shared, live, attempts, lane, share }.run())?;
        }
        let timed = Arc::clone(&live);
        vmm::spawn("relay time", move || timed.keep_time())?;
        *current = Some(Arc::clone(&live));
        Ok(Some(live))
    }

    fn refuse(&self, session: Option<SessionId>, why: String) {
        self.options.notices.send(Notice::Refused { session, why });
    }
}

/// Whether a QEMU's header arrives on a connection that was just accepted. Reads nothing.
fn shows_main(channel: &Channel) -> bool {
    let until = Instant::now() + Duration::from_millis(SHOWS_ITSELF_MS as u64);
    let mut first = [0; MAIN.len()];
    while Instant::now() < until {
        let left = until.saturating_duration_since(Instant::now()).as_millis() as i64;
        let Some(socket) = channel.socket().filter(|_| is_readable(channel, left.max(1))) else { break };
        match rustix::net::recv(socket, &mut first, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((count, _)) if first[..count] != MAIN[..count] || count == 0 => return false,
            Ok((count, _)) if count == MAIN.len() => return true,
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    false
}

/// One lane of a session: connects its carrier again whenever it is lost.
struct Lane {
    shared: Arc<Shared>,
    live: Arc<Live>,
    /// Number of the last attempt of all lanes.
    attempts: Arc<Mutex<u32>>,
    lane: u8,
    share: [u8; SessionKey::SHARE_BYTES],
}

impl Lane {
    fn run(self) {
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            if self.live.is_over() {
                return;
            }
            // The first lane begins the session; the others join it.
            let has_begun = self.live.lock().session.was_connected();
            if self.lane > 0 && !has_begun {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            let connected = Instant::now();
            match self.attempt(has_begun) {
                Ok(()) => {}
                Err(error) => {
                    tracing::debug!("carrier {}: {error}", self.lane);
                    self.live.with(|state| state.note_failure(&error.to_string()));
                    self.judge(&error, has_begun);
                    let is_over =
                        |limit: Duration| began.elapsed() > limit.min(self.live.options.reconnect_window);
                    match error {
                        RelayError::Silent { .. } if !has_begun && is_over(FIRST_ANSWER) => {
                            self.live.stop(&error.to_string());
                        }
                        _ if !has_begun && is_over(FIRST_CONNECT) => {
                            self.live.stop(&format!("the other relay cannot be reached: {error}"));
                        }
                        _ => {}
                    }
                }
            }
            if connected.elapsed() > LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Connects and runs one carrier, until it is lost.
    fn attempt(&self, has_begun: bool) -> Result<(), RelayError> {
        let Self { shared, live, lane, .. } = self;
        let tls = shared.options.security.tls.as_ref();
        let limit = if has_begun { NEXT_ATTEMPT } else { ATTEMPT };
        let adopt = |channel: Channel| {
            channel.set_stall_limit(Some(limit));
            Arc::new(channel)
        };
        let channel = Channel::connect_with(&shared.to, tls, limit, &live.cancel, adopt)?;
        let attempt = {
            let mut attempts = self.attempts.lock();
            *attempts += 1;
            *attempts
        };
        let who = Introduction {
            session: live.id,
            purpose: if has_begun { Purpose::Join } else { Purpose::Open },
            lane: *lane,
            lanes: shared.options.carriers,
            attempt,
            share: self.share,
            route: live.route.clone(),
            offer: (live.options.compress.is_on() && !shared.is_older.load(Ordering::Acquire))
                .then_some(Offer { packs: true, cache_pages: 0 }),
        };
        let has_offered = who.offer.is_some();
        let (status, accepted) = greeting::introduce(&channel, who, &live.key)?;
        // An older relay does not know the version that has offers. The next attempt makes none.
        if status == Status::OtherVersion && has_offered {
            shared.is_older.store(true, Ordering::Release);
            return Ok(());
        }
        if status != Status::Welcome {
            let (peer, route) = (channel.peer().to_owned(), live.route.clone());
            return Err(RelayError::Refused { peer, route, status });
        }
        // The session's machine judges silence.
        channel.set_stall_limit(None);
        let codec = codec::codec(live, accepted)?;
        if let Some(id) = live.attach(*lane, attempt, &channel) {
            let error = carrier::run(live, id, *lane, &channel, codec);
            tracing::debug!("carrier {lane}: lost: {error}");
        }
        Ok(())
    }

    /// Acts on a refusal that no further attempt changes.
    fn judge(&self, error: &RelayError, has_begun: bool) {
        let why = error.to_string();
        match error {
            RelayError::Refused { status: Status::OverNever, .. } => self.live.heard(Heard::Never, &why),
            RelayError::Refused { status: Status::OverPassed, .. } => self.live.heard(Heard::Passed, &why),
            RelayError::Refused { status: Status::UnknownSession, .. } => {
                self.live.heard(Heard::Unknown, &why)
            }
            RelayError::Refused { .. } | RelayError::Unproved { .. } | RelayError::Greeting { .. }
                if !has_begun =>
            {
                self.live.stop(&why);
            }
            RelayError::Transport(TransportError::Tls { .. }) if !has_begun => self.live.stop(&why),
            _ => {}
        }
    }
}
