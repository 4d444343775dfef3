//! A TCP proxy between source and destination that cuts, delays or changes the forwarded bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna::Address;

/// Kind of a connection, determined by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    Main,
    /// A multifd channel with its id.
    Lane(u8),
    /// A status question, or an unknown connection.
    Other,
}

/// Direction of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Forward,
    Back,
}

/// What the proxy does with a piece and with later bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    /// Forwards this piece, then closes every connection of the migration.
    Cut,
    /// Forwards this piece, gives the receiver time to act, then closes every connection of the migration. No other
    /// piece is forwarded meanwhile.
    CutSettled,
    /// Forwards this piece, then closes this connection only.
    CutThis,
    /// Forwards this piece, then nothing more in this direction.
    Hold,
    /// Asks the filter again later. Other pieces are forwarded meanwhile.
    Later,
}

/// Time in which a receiver has acted on a message.
const SETTLED: Duration = Duration::from_millis(30);

/// Decides about each piece, by connection, direction and byte offset; may change the piece.
pub type Filter = Box<dyn FnMut(Line, Way, u64, &mut Vec<u8>) -> Verdict + Send>;

pub struct Proxy {
    address: Address,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    to: u16,
    filter: Mutex<Filter>,
    sockets: Mutex<Vec<TcpStream>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Whether new connections are rejected.
    refuses: AtomicBool,
    ends: AtomicBool,
}

impl Proxy {
    pub fn new(to: &Address, filter: Filter) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            to: super::port(to),
            filter: Mutex::new(filter),
            sockets: Mutex::default(),
            threads: Mutex::default(),
            refuses: AtomicBool::new(false),
            ends: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = spawn(move || accept(&accepting, &listener));
        Self { address: format!("tcp:127.0.0.1:{own}").parse().unwrap(), shared, acceptor: Some(acceptor) }
    }

    pub fn address(&self) -> Address {
        self.address.clone()
    }

    /// From now on closes new connections immediately; with `false`, accepts them again.
    pub fn refuse(&self, on: bool) {
        self.shared.refuses.store(on, Ordering::SeqCst);
    }

    pub fn cut(&self) {
        self.shared.cut();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        self.shared.cut();
        // Wakes the accepting thread.
        let _ = TcpStream::connect(("127.0.0.1", super::port(&self.address)));
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.join().unwrap();
        }
        self.shared.cut();
        let threads = std::mem::take(&mut *self.shared.threads.lock().unwrap());
        for thread in threads {
            thread.join().unwrap();
        }
    }
}

impl Shared {
    fn cut(&self) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    std::thread::Builder::new().name("proxy".into()).spawn(work).unwrap()
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    while let Ok((from, _)) = listener.accept() {
        if shared.ends.load(Ordering::SeqCst) {
            return;
        }
        if shared.refuses.load(Ordering::SeqCst) {
            continue;
        }
        let Ok(to) = TcpStream::connect(("127.0.0.1", shared.to)) else { continue };
        from.set_nodelay(true).unwrap();
        to.set_nodelay(true).unwrap();
        let mut sockets = shared.sockets.lock().unwrap();
        sockets.extend([from.try_clone().unwrap(), to.try_clone().unwrap()]);
        drop(sockets);
        let line = Arc::new(Mutex::new(None));
        for (way, from, to) in
            [(Way::Forward, from.try_clone().unwrap(), to.try_clone().unwrap()), (Way::Back, to, from)]
        {
            let (shared, line) = (Arc::clone(shared), Arc::clone(&line));
            let thread = spawn({
                let shared = Arc::clone(&shared);
                move || pump(&shared, way, &line, from, to)
            });
            shared.threads.lock().unwrap().push(thread);
        }
    }
}

fn pump(shared: &Shared, way: Way, line: &Mutex<Option<Line>>, mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0; 64 * 1024];
    let mut offset = 0;
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut piece = buffer[..count].to_vec();
        let line = match way {
            Way::Forward => *line.lock().unwrap().get_or_insert_with(|| classify(&piece)),
            Way::Back => line.lock().unwrap().unwrap_or(Line::Other),
        };
        let verdict = loop {
            let mut filter = shared.filter.lock().unwrap();
            let verdict = filter(line, way, offset, &mut piece);
            if verdict == Verdict::CutSettled {
                let _ = to.write_all(&piece);
                // The filter stays locked, so no other thread forwards a piece.
                std::thread::sleep(SETTLED);
                shared.cut();
                return;
            }
            drop(filter);
            if verdict != Verdict::Later || shared.ends.load(Ordering::SeqCst) {
                break verdict;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        offset += count as u64;
        if to.write_all(&piece).is_err() {
            break;
        }
        match verdict {
            Verdict::Pass | Verdict::Later | Verdict::CutSettled => {}
            Verdict::Cut => {
                shared.cut();
                return;
            }
            Verdict::CutThis => {
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
            Verdict::Hold => return,
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

fn classify(piece: &[u8]) -> Line {
    match piece {
        [0x51, 0x45, 0x56, 0x4d, ..] => Line::Main,
        // A connection of a session that replaced a lost one.
        [b'S', b'T', b'N', b'S', ..] => match piece.get(28..32) {
            Some([0, 0, 0, 0]) => Line::Main,
            Some([0, 0, 0, id]) => Line::Lane(id - 1),
            _ => Line::Other,
        },
        [0x11, 0x22, 0x33, 0x44, ..] => Line::Lane(piece.get(24).copied().unwrap_or(u8::MAX)),
        _ => Line::Other,
    }
}

/// Acts when byte `at` of a connection has been forwarded; the piece is cut there.
pub fn at_byte(line: Line, way: Way, at: u64, verdict: Verdict) -> Filter {
    let mut done = false;
    Box::new(move |this, going, offset, piece| {
        if done || this != line || going != way || offset + (piece.len() as u64) < at {
            return Verdict::Pass;
        }
        done = true;
        piece.truncate((at - offset) as usize);
        verdict
    })
}

/// Acts when byte `at` of the return path has been forwarded. Answers to keep-alives do not count, because their
/// number depends on timing.
pub fn at_answer_byte(at: u64, verdict: Verdict) -> Filter {
    const ALIVE: [u8; 8] = [0, 2, 0, 4, 0x53, 0x54, 0x4e, 5];
    let (mut counted, mut done) = (0, false);
    Box::new(move |line, way, _, piece| {
        if done || (line, way) != (Line::Main, Way::Back) {
            return Verdict::Pass;
        }
        let mut from = 0;
        while from < piece.len() {
            let rest = &piece[from..];
            // A message has a type, a length and a value. The destination writes each message in one piece.
            let len = rest
                .get(2..4)
                .map_or(rest.len(), |len| 4 + usize::from(u16::from_be_bytes([len[0], len[1]])));
            let len = len.min(rest.len());
            if !rest.starts_with(&ALIVE) {
                if counted + len as u64 >= at {
                    done = true;
                    piece.truncate(from + (at - counted) as usize);
                    return verdict;
                }
                counted += len as u64;
            }
            from += len;
        }
        Verdict::Pass
    })
}

/// Acts when `pattern` was seen on a connection. The pattern itself is forwarded only with `including`.
pub fn at_pattern(line: Line, way: Way, pattern: &'static [u8], including: bool, verdict: Verdict) -> Filter {
    let mut seen: Vec<u8> = Vec::new();
    let mut done = false;
    Box::new(move |this, going, offset, piece| {
        if done || this != line || going != way {
            return Verdict::Pass;
        }
        seen.extend_from_slice(piece);
        let Some(at) = seen.windows(pattern.len()).position(|window| window == pattern) else {
            return Verdict::Pass;
        };
        done = true;
        let end = (at + if including { pattern.len() } else { 0 }) as u64;
        piece.truncate(end.saturating_sub(offset) as usize);
        verdict
    })
}
