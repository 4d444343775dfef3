//! The relay at the destination: it accepts carriers, and connects to the VMMs of its routes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_transport::{Address, CancelFlag, Channel, Listener, TlsEndpoint, TransportError};

use super::control_flow::ControlFlow;
use super::error::RelayError;
use super::figures::Figures;
use super::live::Live;
use super::options::{Notice, Options, Routes};
use super::{carrier, codec, greeting, vmm};
use crate::frame::{Answer, Hello, Purpose, ResetReason, RouteName, SessionId, SessionKey, Status, Verdict};
use crate::phase::StreamState;
use crate::session::Role;

/// Connections that may be in their greeting; a further one closes the oldest.
const MOST_GREETINGS: usize = 256;
/// Limit of a greeting.
const GREETING: Duration = Duration::from_secs(10);
/// Limit of a connect to a VMM.
const CONNECT: Duration = Duration::from_secs(10);
/// Most sessions that are open.
const MOST_SESSIONS: usize = 256;
/// Ended sessions that are remembered.
const MOST_ENDED: usize = 1024;

/// A relay that listens for carriers.
pub struct Acceptor {
    shared: Arc<Shared>,
    address: Address,
}

struct Shared {
    listener: Listener,
    routes: Routes,
    options: Arc<Options>,
    sessions: Mutex<Sessions>,
    greetings: Mutex<VecDeque<Arc<Channel>>>,
    cancel: CancelFlag,
    /// No session begins any more.
    is_closing: AtomicBool,
}

#[derive(Default)]
struct Sessions {
    open: HashMap<SessionId, Arc<Live>>,
    ended: VecDeque<(SessionId, SessionKey, Verdict)>,
}

/// What a hello gets.
enum Judgement {
    /// The carrier belongs to this session.
    Join(Arc<Live>),
    /// The hello begins a session with this key and destination.
    Begin(SessionKey, Address),
    /// The answer, and the key for its proof.
    Refuse(Status, SessionKey),
    /// The answer without proof.
    Unknown,
    /// No answer.
    Stranger,
}

impl Acceptor {
    /// Listens for carriers at `listen`.
    ///
    /// # Errors
    /// The address cannot be listened at; an address that other hosts can reach without certificates, secret or
    /// consent; a directory of routes that does not exist.
    pub fn start(listen: &Address, routes: Routes, options: Options) -> Result<Self, RelayError> {
        options.security.check(listen)?;
        if let Some(path) = &routes.directory {
            std::fs::read_dir(path)
                .map_err(|source| RelayError::RouteDirectory { path: path.clone(), source })?;
        }
        let listener = Listener::bind(listen)?;
        let address = listener.local_address();
        // A socket that this process was given shows its address only now.
        options.security.check(&address)?;
        let shared = Arc::new(Shared {
            listener,
            routes,
            options: Arc::new(options),
            sessions: Mutex::default(),
            greetings: Mutex::default(),
            cancel: CancelFlag::new(),
            is_closing: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        vmm::spawn("relay", move || accepting.accept())?;
        Ok(Self { shared, address })
    }

    /// The address at which carriers connect, with the port that the kernel chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Number of open sessions.
    pub fn open_sessions(&self) -> usize {
        let mut sessions = self.shared.sessions.lock();
        sessions.sweep();
        sessions.open.len()
    }

    /// The figures of the open sessions.
    pub fn figures(&self) -> Vec<Figures> {
        let mut sessions = self.shared.sessions.lock();
        sessions.sweep();
        let open: Vec<_> = sessions.open.values().cloned().collect();
        drop(sessions);
        open.iter().map(|live| live.figures()).collect()
    }

    /// Ends this session as at the end of its window; see [`stop`](Self::stop). False: it is not open here.
    pub fn end_session(&self, session: SessionId, why: &str) -> bool {
        let live = self.shared.sessions.lock().open.get(&session).cloned();
        live.filter(|live| !live.is_over()).inspect(|live| live.stop(why)).is_some()
    }

    /// Begins no more sessions. Those that are open continue, and their carriers may come back.
    pub fn close(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
    }

    /// Begins no more sessions, and ends the open ones as at the end of their windows. A session whose VMM may have the guest
    /// stays until the other relay has the answer.
    pub fn stop(&self, why: &str) {
        self.close();
        let open: Vec<_> = self.shared.sessions.lock().open.values().cloned().collect();
        open.iter().for_each(|live| live.stop(why));
    }
}

impl Shared {
    fn accept(self: &Arc<Self>) {
        loop {
            match self.listener.accept(None, &self.cancel) {
                Ok(channel) => self.greet(Arc::new(channel)),
                Err(TransportError::Cancelled { .. }) => return,
                Err(error) => {
                    self.refuse(None, error.to_string());
                    // No descriptor is free, for example. Without a pause the loop would only repeat the error.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// Greets a connection on a thread of its own. Too many of them end the oldest.
    fn greet(self: &Arc<Self>, channel: Arc<Channel>) {
        let oldest = {
            let mut greetings = self.greetings.lock();
            greetings.push_back(Arc::clone(&channel));
            if greetings.len() > MOST_GREETINGS { greetings.pop_front() } else { None }
        };
        if let Some(oldest) = oldest {
            oldest.shutdown();
        }
        let shared = Arc::clone(self);
        let greeted = Arc::clone(&channel);
        let thread = vmm::spawn("carrier", move || {
            channel.set_stall_limit(Some(GREETING));
            match shared.carrier(&channel) {
                Ok(()) => {}
                // A connection without a byte is a probe, or was closed because there were too many.
                Err(RelayError::Transport(_)) if channel.bytes_read() == 0 => {}
                Err(error) => shared.refuse(None, error.to_string()),
            }
            shared.greeted(&channel);
        });
        if let Err(error) = thread {
            self.greeted(&greeted);
            self.refuse(None, error.to_string());
        }
    }

    fn greeted(&self, channel: &Arc<Channel>) {
        self.greetings.lock().retain(|other| !Arc::ptr_eq(other, channel));
    }

    fn carrier(self: &Arc<Self>, channel: &Arc<Channel>) -> Result<(), RelayError> {
        if let Some(tls) = &self.options.security.tls {
            channel.start_tls(tls, TlsEndpoint::Server, None, GREETING, &self.cancel)?;
        }
        let Some(hello) = greeting::read_hello(channel)? else { return Ok(()) };
        let judgement = self.judge(&hello, channel);
        let accepts = self.options.compress.accepts();
        let (key, address) = match judgement {
            Judgement::Join(live) => {
                greeting::answer(channel, &hello, Status::Welcome, accepts, &live.key)?;
                self.greeted(channel);
                return self.attach(&live, &hello, channel);
            }
            Judgement::Begin(key, address) => (key, address),
            Judgement::Refuse(status, key) => {
                let why = format!(
                    "{}: session {}, route {}: {status:?}",
                    channel.peer(),
                    hello.session,
                    hello.route
                );
                self.refuse(Some(hello.session), why);
                return greeting::answer(channel, &hello, status, accepts, &key);
            }
            Judgement::Unknown => {
                return greeting::say(channel, &Answer::without_proof(Status::UnknownSession));
            }
            Judgement::Stranger => return Err(RelayError::Unproved { peer: channel.peer().to_owned() }),
        };
        greeting::answer(channel, &hello, Status::Welcome, accepts, &key)?;
        self.greeted(channel);
        let live = self.begin(&hello, key, address)?;
        self.attach(&live, &hello, channel)
    }

    fn judge(&self, hello: &Hello, channel: &Channel) -> Judgement {
        let binding = channel.tls_binding();
        let mut sessions = self.sessions.lock();
        sessions.sweep();
        if let Some(live) = sessions.open.get(&hello.session) {
            let is_theirs = hello.is_authentic(&live.key, &binding) && hello.route == live.route;
            return if is_theirs { Judgement::Join(Arc::clone(live)) } else { Judgement::Stranger };
        }
        if let Some((_, key, verdict)) = sessions.ended.iter().find(|(id, ..)| *id == hello.session) {
            let status = if *verdict == Verdict::Never { Status::OverNever } else { Status::OverPassed };
            let is_theirs = hello.is_authentic(key, &binding);
            return if is_theirs { Judgement::Refuse(status, key.clone()) } else { Judgement::Stranger };
        }
        if hello.purpose == Purpose::Join {
            return Judgement::Unknown;
        }
        let key = SessionKey::new(self.options.security.secret.as_ref(), hello.session, &hello.share);
        if !hello.is_authentic(&key, &binding) {
            return Judgement::Stranger;
        }
        let Some(address) = self.routes.find(&hello.route) else {
            return Judgement::Refuse(Status::UnknownRoute, key);
        };
        if sessions.open.len() >= MOST_SESSIONS || self.is_closing.load(Ordering::Acquire) {
            return Judgement::Refuse(Status::TooManySessions, key);
        }
        if sessions.of_route(&hello.route).is_some_and(|live| !is_left(&live)) {
            return Judgement::Refuse(Status::RouteBusy, key);
        }
        Judgement::Begin(key, address)
    }

    /// Begins the session of a hello that is confirmed.
    fn begin(
        self: &Arc<Self>,
        hello: &Hello,
        key: SessionKey,
        address: Address,
    ) -> Result<Arc<Live>, RelayError> {
        let mut sessions = self.sessions.lock();
        // Another carrier may have begun it, or one of the same route, since the hello was judged.
        if let Some(live) = sessions.open.get(&hello.session) {
            return Ok(Arc::clone(live));
        }
        if let Some(older) = sessions.of_route(&hello.route) {
            if !is_left(&older) {
                let (peer, route) = (hello.session.to_string(), hello.route.clone());
                return Err(RelayError::Refused { peer, route, status: Status::RouteBusy });
            }
            older.stop("its source began another session, and this one has no connection to it");
        }
        let live =
            Live::new(hello.session, Role::Acceptor, hello.route.clone(), key, Arc::clone(&self.options));
        let timed = Arc::clone(&live);
        vmm::spawn("relay time", move || timed.keep_time())?;
        let connecting = Arc::clone(&live);
        vmm::spawn("relay connect", move || connect(&connecting, &address))?;
        sessions.open.insert(hello.session, Arc::clone(&live));
        Ok(live)
    }

    fn attach(&self, live: &Arc<Live>, hello: &Hello, channel: &Arc<Channel>) -> Result<(), RelayError> {
        channel.set_stall_limit(None);
        let agreed =
            hello.offer.map(|offer| if offer.packs { self.options.compress.accepts() } else { offer });
        let codec = codec::codec(live, agreed)?;
        if let Some(id) = live.attach(hello.lane, hello.attempt, channel) {
            let error = carrier::run(live, id, hello.lane, channel, codec);
            if let RelayError::Session(_) = error {
                return Err(error);
            }
        }
        Ok(())
    }

    fn refuse(&self, session: Option<SessionId>, why: String) {
        self.options.notices.send(Notice::Refused { session, why });
    }
}

impl Sessions {
    /// Moves sessions that are over to the ended ones.
    fn sweep(&mut self) {
        let ended = &mut self.ended;
        self.open.retain(|id, live| {
            let is_over = live.is_over();
            if is_over {
                ended.push_back((*id, live.key.clone(), live.lock().main.verdict()));
            }
            !is_over
        });
        let excess = self.ended.len().saturating_sub(MOST_ENDED);
        self.ended.drain(..excess);
    }

    fn of_route(&self, route: &RouteName) -> Option<Arc<Live>> {
        self.open.values().find(|live| live.route == *route && !live.is_over()).cloned()
    }
}

/// Whether the source's relay has left the session, and ending it harms no guest.
fn is_left(live: &Live) -> bool {
    let state = live.lock();
    state.session.carriers() == 0 && matches!(state.main.state(), StreamState::Open | StreamState::Answered)
}

/// Connects to the VMM for each flow, in order.
fn connect(live: &Arc<Live>, address: &Address) {
    while let Some(flow) = live.next_connect() {
        let result =
            Channel::connect(address, CONNECT, &live.cancel).map_err(RelayError::from).and_then(|channel| {
                let channel = Arc::new(channel);
                super::readiness::widen(&channel);
                let control = Arc::new(ControlFlow::new(live.role));
                match live.plug(flow, &channel, &control) {
                    true => vmm::start(live, flow, &channel, &control),
                    false => Ok(()),
                }
            });
        if let Err(error) = result {
            live.options.notices.send(Notice::Refused { session: Some(live.id), why: error.to_string() });
            live.with(|state| state.session.reset(flow, ResetReason::Unreachable));
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        // The socket file of the listener is removed when the thread has ended.
        self.shared.cancel.cancel();
    }
}
