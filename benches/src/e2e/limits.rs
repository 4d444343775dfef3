//! What the machine can do: a plain copy over loopback, a plain scan for zero pages.

use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use sterna_ram::{GuestRam, PAGE_SIZE};

use crate::sample::{Sample, time};

/// As a packet's payload.
const WRITE_BYTES: usize = 512 * 1024;

/// Pre-touched memory for plain copies: one part for each socket.
pub struct CopyBuffers {
    parts: Vec<(Vec<u8>, std::sync::Mutex<Vec<u8>>)>,
}

impl CopyBuffers {
    pub fn new(bytes_per_socket: u64, sockets: usize) -> Self {
        let buffer = |seed: u8| {
            let mut buffer = vec![seed; bytes_per_socket as usize];
            buffer.iter_mut().step_by(PAGE_SIZE).for_each(|byte| *byte ^= 1);
            buffer
        };
        Self { parts: (0..sockets).map(|_| (buffer(3), buffer(5).into())).collect() }
    }

    /// Copies every part through a TCP connection of its own: 512 KiB vectored writes, received in place.
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
                        let mut to = to.lock().map_err(|_| io::Error::other("a receiver panicked"))?;
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

/// Looks at every page with `threads` threads, as lanes do.
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
                                .is_ok_and(|window| window.is_zero())
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
