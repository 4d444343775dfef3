//! The machine's limits: plain copies over loopback, and a plain scan for zero pages.

use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use sterna::Address;
use sterna_ram::{GuestRam, PAGE_SIZE, RamSlice};
use sterna_transport::{CancelFlag, Channel, IoPart, Listener, TransportError};

use crate::sample::{Sample, time};

/// Size of a write in bytes, the same as a packet's payload.
const WRITE_BYTES: usize = 512 * 1024;

/// Touched memory for plain copies, one part for each socket.
pub struct CopyBuffers {
    parts: Vec<(Vec<u8>, parking_lot::Mutex<Vec<u8>>)>,
}

impl CopyBuffers {
    pub fn new(bytes_per_socket: u64, sockets: usize) -> Self {
        // Random bytes, like the guest's RAM. A hypervisor below this machine may merge equal pages.
        let buffer = |seed: u64| {
            let mut buffer = vec![0; bytes_per_socket as usize];
            fastrand::Rng::with_seed(seed).fill(&mut buffer);
            buffer
        };
        Self { parts: (0..sockets).map(|_| (buffer(3), buffer(5).into())).collect() }
    }

    /// Copies every part over its own TCP connection: vectored writes of 512 KiB, received in place.
    pub fn run(&self) -> io::Result<Sample> {
        let bytes: usize = self.parts.iter().map(|(from, _)| from.len()).sum();
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        time(bytes as u64, || {
            thread::scope(|scope| {
                let mut workers = Vec::new();
                for (from, to) in &self.parts {
                    let mut sender = TcpStream::connect(address)?;
                    let (mut receiver, _) = listener.accept()?;
                    sender.set_nodelay(true)?;
                    workers.push(scope.spawn(move || send(&mut sender, from)));
                    workers.push(scope.spawn(move || {
                        let mut to = to.lock();
                        receiver.read_exact(&mut to)
                    }));
                }
                workers
                    .into_iter()
                    .try_for_each(|worker| worker.join().map_err(|_| io::Error::other("a copy panicked"))?)
            })
        })
    }
}

fn send(to: &mut TcpStream, from: &[u8]) -> io::Result<()> {
    for chunk in from.chunks(WRITE_BYTES) {
        let mut left = chunk;
        while !left.is_empty() {
            let sent = to.write_vectored(&[IoSlice::new(left)])?;
            left = &left[sent..];
        }
    }
    Ok(())
}

/// Copies RAM to RAM over sockets, 512 KiB at a time, without any other work.
pub fn plain_copy(from: &GuestRam, to: &GuestRam, sockets: usize) -> Result<Sample, TransportError> {
    let listener = Listener::bind(&Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 })?;
    let (limit, never) = (Duration::from_secs(10), CancelFlag::new());
    time(from.total_bytes(), || {
        thread::scope(|scope| {
            let mut workers = Vec::new();
            for socket in 0..sockets {
                let sender = Channel::connect(&listener.local_address(), limit, &never)?;
                let receiver = listener.accept(Some(limit), &never)?;
                workers.push(scope.spawn(move || {
                    windows(from, socket, sockets).try_for_each(|w| sender.write_parts(&[IoPart::Ram(w)]))
                }));
                workers.push(scope.spawn(move || {
                    windows(to, socket, sockets).try_for_each(|w| receiver.read_into_ram(&[w]))
                }));
            }
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Ok(())))
        })
    })
}

/// Every `sockets`th window of 512 KiB, starting with number `socket`.
fn windows(ram: &GuestRam, socket: usize, sockets: usize) -> impl Iterator<Item = RamSlice<'_>> {
    let bytes = ram.block(0).len_bytes();
    (0..bytes / WRITE_BYTES as u64)
        .skip(socket)
        .step_by(sockets)
        .filter_map(|n| ram.block(0).slice(n * WRITE_BYTES as u64, WRITE_BYTES).ok())
}

/// Scans every page with `threads` threads, as lanes do.
pub fn zero_scan(ram: &GuestRam, threads: usize) -> Sample {
    let scanned = time(ram.total_bytes(), || -> Result<(), std::convert::Infallible> {
        thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || {
                    for block in ram.blocks() {
                        let pages = (thread as u64..block.pages()).step_by(threads);
                        let zero = pages.filter(|page| {
                            block
                                .slice(page * PAGE_SIZE as u64, PAGE_SIZE)
                                .is_ok_and(|window| window.is_zero().unwrap_or(false))
                        });
                        std::hint::black_box(zero.count());
                    }
                });
            }
        });
        Ok(())
    });
    match scanned {
        Ok(sample) => sample,
        Err(never) => match never {},
    }
}
