//! The connections between the two sides: a proxy that strikes at a byte position or when a side reports a
//! mark.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::Address;
use sterna_testing::handover::{self, Place, Watch};

use super::messages::MessageCut;
use super::side::is_status;
use super::trouble::{Trouble, Way, What, Which};
use crate::stop::Side;

/// Time after which a receiver has acted on a message.
const SETTLED: Duration = Duration::from_millis(30);

/// Forwards connections until it is dropped.
pub(super) struct Cable {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    /// Troubles that a network cannot cause, such as a kill or an order. The player of the case performs
    /// these.
    pub(super) others: Receiver<What>,
}

/// A handle to a cable, for callbacks of the two sides.
#[derive(Clone)]
pub(super) struct Hand(Arc<Shared>);

/// A trouble that occurred, and the state of both sides at that time.
#[derive(Debug, Clone)]
pub(super) struct Struck {
    pub(super) what: What,
    /// The last status that each side reported.
    pub(super) statuses: [String; 2],
    /// Whether the source had begun to send pages.
    pub(super) has_begun: bool,
    /// Number of marks that both sides had reported.
    told: usize,
}

/// First bytes of a main channel that does not replace a lost one.
const MAIN: &[u8] = &[0x51, 0x45, 0x56, 0x4d];

struct Shared {
    state: Mutex<State>,
    others: Sender<What>,
    pumps: Mutex<Vec<JoinHandle<()>>>,
    /// While set, no byte is forwarded.
    is_held: AtomicBool,
}

#[derive(Default)]
struct State {
    to: u16,
    connections: Vec<[TcpStream; 2]>,
    down_until: Option<Instant>,
    /// Troubles in their order; the first one is awaited.
    troubles: VecDeque<Trouble>,
    /// The message at which every connection is cut, until it has arrived.
    awaited: Option<(MessageCut, Watch)>,
    /// Bytes until the first trouble strikes.
    left: Option<u64>,
    forwarded: u64,
    statuses: [String; 2],
    marks: Vec<(Side, String)>,
    struck: Vec<Struck>,
    /// Number of marks that were reported before the source was ordered to switch to postcopy.
    switched: Option<usize>,
    is_closing: bool,
}

impl Cable {
    /// Makes a cable to a port of the loopback, which [`Hand::lead_to`] sets.
    pub(super) fn new(troubles: &[Trouble], cut: Option<MessageCut>) -> Result<Self, String> {
        let said = |error: std::io::Error| format!("a proxy: {error}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(said)?;
        let port = listener.local_addr().map_err(said)?.port();
        let (tell, others) = channel();
        let state = State {
            troubles: troubles.iter().copied().collect(),
            awaited: cut.map(|cut| (cut, Watch::new(cut.message))),
            ..State::default()
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            others: tell,
            pumps: Mutex::default(),
            is_held: AtomicBool::new(false),
        });
        shared.state.lock().await_first();
        let accepting = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accepting.accept(&listener));
        Ok(Self { port, shared, acceptor: Some(acceptor), others })
    }

    /// The address to which the source connects.
    pub(super) fn address(&self) -> Address {
        Address::Tcp { host: "127.0.0.1".into(), port: self.port }
    }

    pub(super) fn hand(&self) -> Hand {
        Hand(Arc::clone(&self.shared))
    }

    /// Number of bytes that were forwarded to the destination.
    pub(super) fn forwarded(&self) -> u64 {
        self.shared.state.lock().forwarded
    }

    /// Records that the source was ordered to switch to postcopy.
    pub(super) fn switched(&self) {
        let mut state = self.shared.state.lock();
        state.switched = Some(state.marks.len());
    }

    /// Whether the source may have noticed `struck` only after the order to switch.
    pub(super) fn may_meet_switch(&self, struck: &Struck) -> bool {
        let state = self.shared.state.lock();
        state.switched.is_some_and(|switched| {
            let between = state.marks.get(struck.told..switched).unwrap_or_default();
            !between.iter().any(|(side, mark)| *side == Side::Source && mark == "lost")
        })
    }

    pub(super) fn struck(&self) -> Vec<Struck> {
        self.shared.state.lock().struck.clone()
    }

    /// Whether a side has ever reported this mark.
    pub(super) fn has_told(&self, side: Side, mark: &str) -> bool {
        self.shared.state.lock().marks.iter().any(|(told, known)| *told == side && known == mark)
    }
}

impl Hand {
    /// Sets the destination's address.
    pub(super) fn lead_to(&self, to: &Address) {
        if let Address::Tcp { port, .. } = to {
            self.0.state.lock().to = *port;
        }
    }

    /// Handles a mark of `side`, which continues when this returns. Returns a trouble that a network cannot
    /// cause.
    pub(super) fn told(&self, side: Side, mark: &str) -> Option<What> {
        let mut state = self.0.state.lock();
        if is_status(mark) {
            state.statuses[usize::from(side == Side::Destination)] = mark.to_owned();
        }
        state.marks.push((side, mark.to_owned()));
        let first = *state.troubles.front()?;
        if state.left.is_some() || (first.moment.side, first.moment.mark) != (side, mark) {
            return None;
        }
        match first.moment.bytes {
            Some((_, bytes)) => {
                state.left = Some(bytes);
                None
            }
            None => state.strike(),
        }
    }

    /// Like [`told`](Self::told), but sends such a trouble to the player of the case.
    pub(super) fn tell(&self, side: Side, mark: &str) {
        if let Some(other) = self.told(side, mark) {
            let _ = self.0.others.send(other);
        }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.shared.state.lock().is_closing = true;
        // This connection wakes the acceptor.
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
        self.shared.state.lock().cut(Which::All);
        for pump in self.shared.pumps.lock().drain(..) {
            drop(pump.join());
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for connection in listener.incoming() {
            let state = self.state.lock();
            if state.is_closing {
                return;
            }
            let (is_down, to) = (state.down_until.is_some_and(|until| Instant::now() < until), state.to);
            drop(state);
            let Ok(from) = connection else { continue };
            if is_down {
                continue;
            }
            if let Err(error) = self.connect(from, to) {
                tracing::debug!(%error, "the proxy cannot reach the destination");
            }
        }
    }

    fn connect(self: &Arc<Self>, from: TcpStream, to: u16) -> std::io::Result<()> {
        let to = TcpStream::connect((Ipv4Addr::LOCALHOST, to))?;
        from.set_nodelay(true)?;
        to.set_nodelay(true)?;
        self.state.lock().connections.push([from.try_clone()?, to.try_clone()?]);
        let back = (to.try_clone()?, from.try_clone()?);
        let is_main = Arc::new(AtomicBool::new(false));
        let mut pumps = self.pumps.lock();
        for (way, (from, to)) in [(Way::Forward, (from, to)), (Way::Back, back)] {
            let (this, is_main) = (Arc::clone(self), Arc::clone(&is_main));
            pumps.push(std::thread::spawn(move || this.pump(way, &is_main, from, to)));
        }
        Ok(())
    }

    fn pump(&self, way: Way, is_main: &AtomicBool, mut from: TcpStream, mut to: TcpStream) {
        let (mut bytes, mut is_first) = (vec![0; 64 << 10], true);
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            while self.is_held.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if std::mem::take(&mut is_first) && way == Way::Forward {
                is_main.store(bytes[..count].starts_with(MAIN), Ordering::SeqCst);
            }
            if is_main.load(Ordering::SeqCst) {
                let message = self.state.lock().message_in(way, &bytes[..count]);
                if let Some((at, place)) = message {
                    self.is_held.store(place == Place::After, Ordering::SeqCst);
                    let _ = to.write_all(&bytes[..at]);
                    if place == Place::After {
                        std::thread::sleep(SETTLED);
                    }
                    self.state.lock().strike_message();
                    self.is_held.store(false, Ordering::SeqCst);
                    break;
                }
            }
            let passing = self.state.lock().passing(way, count as u64);
            let (now, rest) = bytes[..count].split_at(passing.unwrap_or(count as u64) as usize);
            if to.write_all(now).is_err() {
                break;
            }
            if passing.is_some() {
                let other = self.state.lock().strike();
                if let Some(other) = other {
                    let _ = self.others.send(other);
                }
                // The cut may have closed another connection, so the rest is forwarded.
                if to.write_all(rest).is_err() {
                    break;
                }
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}

impl State {
    /// Counts `count` bytes that are about to pass. Returns the number of bytes before the trouble strikes.
    fn passing(&mut self, way: Way, count: u64) -> Option<u64> {
        if way == Way::Forward {
            self.forwarded += count;
        }
        let first = self.troubles.front()?;
        if first.moment.bytes.is_none_or(|(awaited, _)| awaited != way) {
            return None;
        }
        let left = self.left?;
        if left > count {
            self.left = Some(left - count);
            return None;
        }
        // Prevents another connection from striking as well in the meantime.
        self.left = Some(u64::MAX);
        // Without a cut, all bytes are forwarded.
        Some(if matches!(first.what, What::Cut(..)) { left } else { count })
    }

    fn await_first(&mut self) {
        let first = self.troubles.front().map(|trouble| trouble.moment);
        self.left =
            first.filter(|moment| moment.mark.is_empty()).and_then(|it| it.bytes).map(|(_, left)| left);
    }

    /// The number of bytes before the cut, if these bytes contain the awaited message. The bytes are of a
    /// main channel.
    fn message_in(&mut self, way: Way, bytes: &[u8]) -> Option<(usize, Place)> {
        let (cut, watch) = self.awaited.as_mut()?;
        let goes = match cut.message.way {
            handover::Way::Forward => Way::Forward,
            handover::Way::Back => Way::Back,
        };
        let at = if goes == way { watch.passes(bytes, cut.place)? } else { return None };
        Some((at, cut.place))
    }

    /// Cuts every connection, because the awaited message has arrived.
    fn strike_message(&mut self) {
        if let Some((cut, _)) = self.awaited.take() {
            self.note(What::Cut(Which::All, cut.down));
            self.down_until = Some(Instant::now() + cut.down);
            self.cut(Which::All);
        }
    }

    fn note(&mut self, what: What) {
        self.struck.push(Struck {
            what,
            statuses: self.statuses.clone(),
            has_begun: self.marks.iter().any(|(side, mark)| *side == Side::Source && mark == "round"),
            told: self.marks.len(),
        });
    }

    fn strike(&mut self) -> Option<What> {
        let what = self.troubles.pop_front()?.what;
        self.await_first();
        self.note(what);
        let What::Cut(which, down) = what else { return Some(what) };
        self.down_until = Some(Instant::now() + down);
        self.cut(which);
        None
    }

    fn cut(&mut self, which: Which) {
        self.connections.retain(|ends| {
            // A connection that has ended by itself cannot be cut.
            ends.iter().all(|end| end.peer_addr().is_ok())
        });
        let cut: Vec<_> = match which {
            Which::All => self.connections.drain(..).collect(),
            Which::One(_) if self.connections.is_empty() => Vec::new(),
            Which::One(index) => vec![self.connections.remove(index % self.connections.len())],
        };
        for end in cut.iter().flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}
