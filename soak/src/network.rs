//! The network between the two sides: a proxy that can cut connections and can be down.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use sterna::Address;

use crate::stage::Stage;
use crate::stop::Stop;

/// Forwards connections until it is dropped.
pub struct Network {
    inner: Arc<Inner>,
    port: u16,
    listener: Option<JoinHandle<()>>,
}

struct Inner {
    to: Address,
    stage: Arc<Stage>,
    down: AtomicBool,
    silent: AtomicBool,
    closing: AtomicBool,
    accepted: AtomicUsize,
    sockets: Mutex<Vec<TcpStream>>,
    pumps: Mutex<Vec<JoinHandle<()>>>,
}

impl Network {
    /// Makes a network that forwards to `to`.
    pub fn new(to: Address, stage: Arc<Stage>) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let inner = Arc::new(Inner {
            to,
            stage,
            down: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            accepted: AtomicUsize::new(0),
            sockets: Mutex::default(),
            pumps: Mutex::default(),
        });
        let accepting = Arc::clone(&inner);
        let listener = std::thread::spawn(move || accepting.accept(&listener));
        Ok(Self { inner, port, listener: Some(listener) })
    }

    /// The address to which the source connects.
    pub fn address(&self) -> Address {
        Address::Tcp { host: "127.0.0.1".into(), port: self.port }
    }

    /// The destination's own address, without this network.
    pub fn destination(&self) -> &Address {
        &self.inner.to
    }

    /// Cuts every connection; bytes in transit are lost. With `down`, new connections are cut immediately.
    pub fn cut(&self, down: bool) {
        self.inner.down.store(down, Ordering::SeqCst);
        self.inner.cut();
    }

    /// Swallows every byte from now on, also on new connections, and closes no connection.
    pub fn silence(&self) {
        self.inner.silent.store(true, Ordering::SeqCst);
    }

    /// Accepts and forwards new connections again.
    pub fn heal(&self) {
        if self.inner.silent.load(Ordering::SeqCst) {
            self.inner.cut();
        }
        self.inner.silent.store(false, Ordering::SeqCst);
        self.inner.down.store(false, Ordering::SeqCst);
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.inner.closing.store(true, Ordering::SeqCst);
        // This connection wakes the listener.
        drop(TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)));
        if let Some(listener) = self.listener.take() {
            drop(listener.join());
        }
        self.inner.cut();
        for pump in self.inner.pumps.lock().drain(..) {
            drop(pump.join());
        }
    }
}

impl Inner {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for connection in listener.incoming() {
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            let Ok(from) = connection else { continue };
            if self.down.load(Ordering::SeqCst) {
                continue;
            }
            if let Err(error) = self.connect(from) {
                tracing::debug!(%error, "the network cannot reach the destination");
            }
        }
    }

    fn connect(self: &Arc<Self>, from: TcpStream) -> std::io::Result<()> {
        let Address::Tcp { host, port } = &self.to else {
            return Err(std::io::ErrorKind::Unsupported.into());
        };
        let to = TcpStream::connect((host.as_str(), *port))?;
        from.set_nodelay(true)?;
        to.set_nodelay(true)?;
        let first = self.accepted.fetch_add(1, Ordering::SeqCst) == 0;
        let mut sockets = self.sockets.lock();
        sockets.push(from.try_clone()?);
        sockets.push(to.try_clone()?);
        drop(sockets);
        let (back_from, back_to) = (to.try_clone()?, from.try_clone()?);
        let (there, back) = (Arc::clone(self), Arc::clone(self));
        let mut pumps = self.pumps.lock();
        pumps.push(std::thread::spawn(move || there.pump(from, to, None)));
        pumps.push(std::thread::spawn(move || {
            back.pump(back_from, back_to, first.then_some(Stop::Identifying))
        }));
        Ok(())
    }

    /// Forwards bytes. The first bytes pass `stop`.
    fn pump(&self, mut from: TcpStream, mut to: TcpStream, mut stop: Option<Stop>) {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let read = from.read(&mut bytes);
            if let Some(stop) = stop.take() {
                self.stage.at(stop);
            }
            match read {
                // A silent network forwards neither bytes nor the end of a connection.
                Ok(0) if self.silent.load(Ordering::SeqCst) => return,
                Ok(_) if self.silent.load(Ordering::SeqCst) => {}
                Ok(0) => {
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
                Ok(read) if to.write_all(&bytes[..read]).is_ok() => {}
                _ => {
                    let _ = to.shutdown(Shutdown::Both);
                    let _ = from.shutdown(Shutdown::Both);
                    return;
                }
            }
        }
    }

    fn cut(&self) {
        for socket in self.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
