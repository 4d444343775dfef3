//! The connections between the two sides: a proxy that strikes at a byte or when a side tells something.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use sterna::Address;

use super::side::is_status;
use super::trouble::{Trouble, Way, What, Which};
use crate::stop::Side;

/// Forwards connections until it is dropped.
pub(super) struct Cable {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    /// What is struck and cannot be done by a network.
    pub(super) others: Receiver<What>,
}

/// A hand on a cable.
#[derive(Clone)]
pub(super) struct Hand(Arc<Shared>);

/// Something that went wrong, and where the two sides stood.
#[derive(Debug, Clone)]
pub(super) struct Struck {
    pub(super) what: What,
    /// What each side told last of its status.
    pub(super) statuses: [String; 2],
    /// Whether the source had begun to send pages.
    pub(super) has_begun: bool,
    /// How much both sides had told.
    told: usize,
}

struct Shared {
    state: Mutex<State>,
    others: Sender<What>,
    pumps: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct State {
    to: u16,
    connections: Vec<[TcpStream; 2]>,
    down_until: Option<Instant>,
    /// The first is awaited.
    troubles: VecDeque<Trouble>,
    /// Bytes until the first strikes.
    left: Option<u64>,
    forwarded: u64,
    statuses: [String; 2],
    marks: Vec<(Side, String)>,
    struck: Vec<Struck>,
    /// How much both sides had told when the source was told to switch.
    switched: Option<usize>,
    is_closing: bool,
}

impl Cable {
    /// To a port of the loopback that [`Hand::lead_to`] names.
    pub(super) fn new(troubles: &[Trouble]) -> Result<Self, String> {
        let said = |error: std::io::Error| format!("a proxy: {error}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(said)?;
        let port = listener.local_addr().map_err(said)?.port();
        let (tell, others) = channel();
        let state = State { troubles: troubles.iter().copied().collect(), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), others: tell, pumps: Mutex::default() });
        shared.state.lock().await_first();
        let accepting = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accepting.accept(&listener));
        Ok(Self { port, shared, acceptor: Some(acceptor), others })
    }

    /// Where the source connects.
    pub(super) fn address(&self) -> Address {
        Address::Tcp { host: "127.0.0.1".into(), port: self.port }
    }

    pub(super) fn hand(&self) -> Hand {
        Hand(Arc::clone(&self.shared))
    }

    /// Bytes that have gone to the destination.
    pub(super) fn forwarded(&self) -> u64 {
        self.shared.state.lock().forwarded
    }

    /// From now on the source is told to have been switched.
    pub(super) fn switched(&self) {
        let mut state = self.shared.state.lock();
        state.switched = Some(state.marks.len());
    }

    /// Whether the source may have noticed it only after it was told to switch.
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

    /// Whether a side has ever told this.
    pub(super) fn has_told(&self, side: Side, mark: &str) -> bool {
        self.shared.state.lock().marks.iter().any(|(told, known)| *told == side && known == mark)
    }
}

impl Hand {
    /// From now on it ends there.
    pub(super) fn lead_to(&self, to: &Address) {
        if let Address::Tcp { port, .. } = to {
            self.0.state.lock().to = *port;
        }
    }

    /// A side tells this, and goes on when this returns. Gives what was struck and cannot be done by a network.
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

    /// The same; what cannot be done by a network is for whoever plays the case.
    pub(super) fn tell(&self, side: Side, mark: &str) {
        if let Some(other) = self.told(side, mark) {
            let _ = self.0.others.send(other);
        }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.shared.state.lock().is_closing = true;
        // Wakes the acceptor.
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
        let mut pumps = self.pumps.lock();
        for (way, (from, to)) in [(Way::Forward, (from, to)), (Way::Back, back)] {
            let this = Arc::clone(self);
            pumps.push(std::thread::spawn(move || this.pump(way, from, to)));
        }
        Ok(())
    }

    fn pump(&self, way: Way, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
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
                // Another connection may be the one that was cut.
                if to.write_all(rest).is_err() {
                    break;
                }
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
}

impl State {
    /// So many bytes are about to pass. If it strikes within them: behind how many.
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
        // Others do not strike meanwhile.
        self.left = Some(u64::MAX);
        // What is not cut goes through.
        Some(if matches!(first.what, What::Cut(..)) { left } else { count })
    }

    fn await_first(&mut self) {
        let first = self.troubles.front().map(|trouble| trouble.moment);
        self.left =
            first.filter(|moment| moment.mark.is_empty()).and_then(|it| it.bytes).map(|(_, left)| left);
    }

    fn strike(&mut self) -> Option<What> {
        let what = self.troubles.pop_front()?.what;
        self.await_first();
        self.struck.push(Struck {
            what,
            statuses: self.statuses.clone(),
            has_begun: self.marks.iter().any(|(side, mark)| *side == Side::Source && mark == "round"),
            told: self.marks.len(),
        });
        let What::Cut(which, down) = what else { return Some(what) };
        self.down_until = Some(Instant::now() + down);
        self.cut(which);
        None
    }

    fn cut(&mut self, which: Which) {
        self.connections.retain(|ends| {
            // One that has ended by itself is not there to be cut.
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
