//! The connections between primary and standby: a proxy that recognises each line, cuts it, holds bytes back,
//! and counts pieces.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use sterna::Address;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    Contact,
    Main,
    Lane,
}

/// A selection of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    All,
    Only(Line),
}

/// Direction in which bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    ToStandby,
    ToPrimary,
}

/// Notifies a thread when this many more pieces have arrived. The last one is forwarded afterwards.
pub(super) struct Awaited {
    pub(super) line: Line,
    pub(super) way: Way,
    pub(super) pieces: u64,
    pub(super) tell: Sender<()>,
}

pub(super) struct Wire {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Connection {
    /// Recognised by the first bytes of the connection.
    line: Arc<Mutex<Option<Line>>>,
    both_ends: [TcpStream; 2],
}

#[derive(Default)]
struct State {
    connections: Vec<Connection>,
    held: Option<(Which, Option<Way>)>,
    awaited: Option<Awaited>,
    is_closing: bool,
}

struct Shared {
    to: u16,
    state: Mutex<State>,
    changed: Condvar,
    pumps: Mutex<Vec<JoinHandle<()>>>,
}

impl Which {
    fn is(self, line: Option<Line>) -> bool {
        match self {
            Self::All => true,
            Self::Only(only) => line == Some(only),
        }
    }
}

impl Wire {
    pub(super) fn new(to: &Address) -> Result<Self, String> {
        let Address::Tcp { port: to, .. } = *to else { return Err("the standby listens elsewhere".into()) };
        let said = |error: std::io::Error| format!("a proxy: {error}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(said)?;
        let port = listener.local_addr().map_err(said)?.port();
        let shared = Arc::new(Shared {
            to,
            state: Mutex::default(),
            changed: Condvar::new(),
            pumps: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accepting.accept(&listener));
        Ok(Self { port, shared, acceptor: Some(acceptor) })
    }

    /// The address to which the primary connects.
    pub(super) fn address(&self) -> Address {
        Address::Tcp { host: "127.0.0.1".into(), port: self.port }
    }

    pub(super) fn cut(&self, which: Which) {
        self.shared.cut(which);
    }

    /// Receives bytes and forwards nothing, in one direction or both. `None` forwards everything again.
    pub(super) fn hold(&self, what: Option<(Which, Option<Way>)>) {
        self.shared.state.lock().held = what;
        self.shared.changed.notify_all();
    }

    pub(super) fn await_piece(&self, awaited: Awaited) {
        self.shared.state.lock().awaited = Some(awaited);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.shared.state.lock().is_closing = true;
        self.shared.changed.notify_all();
        // This connection wakes the acceptor.
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
        self.shared.cut(Which::All);
        for pump in self.shared.pumps.lock().drain(..) {
            drop(pump.join());
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for connection in listener.incoming() {
            if self.state.lock().is_closing {
                return;
            }
            let Ok(from) = connection else { continue };
            if let Err(error) = self.connect(from) {
                tracing::debug!(%error, "the proxy cannot reach the standby");
            }
        }
    }

    fn connect(self: &Arc<Self>, from: TcpStream) -> std::io::Result<()> {
        let to = TcpStream::connect((Ipv4Addr::LOCALHOST, self.to))?;
        from.set_nodelay(true)?;
        to.set_nodelay(true)?;
        let line = Arc::<Mutex<Option<Line>>>::default();
        let both_ends = [from.try_clone()?, to.try_clone()?];
        self.state.lock().connections.push(Connection { line: Arc::clone(&line), both_ends });
        let back = (to.try_clone()?, from.try_clone()?);
        for (way, (from, to)) in [(Way::ToStandby, (from, to)), (Way::ToPrimary, back)] {
            let (this, line) = (Arc::clone(self), Arc::clone(&line));
            self.pumps.lock().push(std::thread::spawn(move || this.pump(way, &line, from, to)));
        }
        Ok(())
    }

    fn pump(&self, way: Way, line: &Mutex<Option<Line>>, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let read = from.read(&mut bytes).unwrap_or(0);
            let line = match way {
                Way::ToStandby if read > 0 => *line.lock().get_or_insert_with(|| classify(&bytes[..read])),
                _ => line.lock().unwrap_or(Line::Main),
            };
            self.pass(line, way);
            if read == 0 || to.write_all(&bytes[..read]).is_err() {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
        }
    }

    /// Counts a piece, and blocks while its line is held back.
    fn pass(&self, line: Line, way: Way) {
        let mut state = self.state.lock();
        let is_awaited =
            state.awaited.as_mut().filter(|awaited| (awaited.line, awaited.way) == (line, way)).map(
                |awaited| {
                    awaited.pieces = awaited.pieces.saturating_sub(1);
                    awaited.pieces == 0
                },
            );
        if is_awaited == Some(true)
            && let Some(awaited) = state.awaited.take()
        {
            let _ = awaited.tell.send(());
            // The notified thread gets a moment to act while the piece is here.
            drop(state);
            std::thread::sleep(std::time::Duration::from_millis(3));
            state = self.state.lock();
        }
        let is_held = |state: &State| {
            state.held.is_some_and(|(which, held_way)| {
                which.is(Some(line)) && held_way.is_none_or(|held_way| held_way == way)
            })
        };
        while is_held(&state) && !state.is_closing {
            self.changed.wait(&mut state);
        }
    }

    fn cut(&self, which: Which) {
        for connection in &self.state.lock().connections {
            if which.is(*connection.line.lock()) {
                for socket in &connection.both_ends {
                    let _ = socket.shutdown(Shutdown::Both);
                }
            }
        }
    }
}

fn classify(bytes: &[u8]) -> Line {
    match bytes {
        [b'S', b'T', b'N', b'R', ..] => Line::Contact,
        [0x11, 0x22, 0x33, 0x44, ..] => Line::Lane,
        _ => Line::Main,
    }
}
