//! A network that can be cut: it forwards connections to a port of the loopback.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Failure;
use parking_lot::Mutex;

/// Size of a read, in bytes.
const PIECE: usize = 256 << 10;

/// Its pump threads end with their connections. The accepting thread ends with the process.
pub struct Forwarder {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Bytes forwarded from the source to the destination.
    carried: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connections: Vec<TcpStream>,
    away_until: Option<Instant>,
}

impl Forwarder {
    /// Listens on a free port, and forwards its connections to that port.
    pub fn to(port: u16) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| format!("the network that can be cut: {error}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let own = listener.local_addr().map_err(failed)?.port();
        let shared = Arc::<Shared>::default();
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for source in listener.incoming().flatten() {
                // A connection that cannot be forwarded is closed.
                let _ = accepting.carry(source, port);
            }
        });
        Ok(Self { port: own, shared })
    }

    /// The address to which the source connects.
    pub fn address(&self) -> String {
        format!("tcp:127.0.0.1:{}", self.port)
    }

    /// Bytes received from the source so far.
    pub fn carried(&self) -> u64 {
        self.shared.carried.load(Ordering::Relaxed)
    }

    /// Closes the connection that was made first of those that are open.
    pub fn cut_one(&self) {
        let mut state = self.shared.state.lock();
        // Both ends of a connection were added together.
        let count = state.connections.len().min(2);
        for connection in state.connections.splice(..count, []) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Closes every connection, and refuses new ones for this time.
    pub fn cut(&self, away: Duration) {
        let mut state = self.shared.state.lock();
        state.away_until = Some(Instant::now() + away);
        for connection in state.connections.drain(..) {
            // The connection may be closed already.
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn carry(self: &Arc<Self>, source: TcpStream, port: u16) -> std::io::Result<()> {
        let mut state = self.state.lock();
        if state.away_until.is_some_and(|until| Instant::now() < until) {
            return Ok(());
        }
        let destination = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        for socket in [&source, &destination] {
            socket.set_nodelay(true)?;
            state.connections.push(socket.try_clone()?);
        }
        drop(state);
        let (back, there) = (destination.try_clone()?, source.try_clone()?);
        let counting = Arc::clone(self);
        std::thread::spawn(move || {
            pump(source, destination, |bytes| {
                counting.carried.fetch_add(bytes, Ordering::Relaxed);
            })
        });
        std::thread::spawn(move || pump(back, there, |_| {}));
        Ok(())
    }
}

/// Forwards bytes until either end closes.
fn pump(mut from: TcpStream, mut to: TcpStream, mut note: impl FnMut(u64)) {
    let mut piece = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut piece) {
        if to.write_all(&piece[..count]).is_err() {
            break;
        }
        note(count as u64);
    }
    // An error means that the other end is closed already.
    let _ = to.shutdown(Shutdown::Write);
}
