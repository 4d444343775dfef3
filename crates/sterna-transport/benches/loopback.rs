//! Speed of pages over loopback between two pre-touched blocks, with 1, 2 and 4 channels. Each write has 512 KiB
//! and is received in place.
//!
//! The first column is the channel's method (MSG_WAITALL, the kernel's default buffers). The other columns are
//! alternatives: receiving without MSG_WAITALL, and socket buffers of 4 MiB.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use sterna_ram::{Backing, PAGE_SIZE, RamBlock};
use sterna_transport::{CancelFlag, Channel, IoPart, Listener};

const CHUNK: usize = 512 << 10;
const BYTES: u64 = 1 << 30;

#[derive(Clone, Copy)]
enum Way {
    Channel,
    Readv,
    BigBuffers,
}

fn main() {
    let block = |name: &str| {
        let block = RamBlock::new(name, BYTES, Backing::Memfd).expect("memory for the bench");
        for page in 0..block.pages() {
            block.write_u64(page * PAGE_SIZE as u64, page + 1).expect("in the block");
        }
        block
    };
    let (from, to) = (block("from"), block("to"));
    let mut table = String::from("streams   channel     readv   4 MiB buffers   (GB/s, best of 3)\n");
    for streams in [1, 2, 4] {
        let rate = |way| (0..3).map(|_| run(&from, &to, streams, way)).fold(0.0, f64::max);
        table += &format!(
            "{streams:7} {:9.2} {:9.2} {:15.2}\n",
            rate(Way::Channel),
            rate(Way::Readv),
            rate(Way::BigBuffers)
        );
    }
    use std::io::Write;
    let _ = std::io::stdout().write_all(table.as_bytes());
}

/// Sends all of `from` to `to`; returns GB/s.
fn run(from: &RamBlock, to: &RamBlock, streams: u64, way: Way) -> f64 {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().expect("an address")).expect("a port");
    let flag = CancelFlag::new();
    let limit = Duration::from_secs(10);
    let pairs: Vec<(Channel, Channel)> = (0..streams)
        .map(|_| {
            let one = Channel::connect(&listener.local_address(), limit, &flag).expect("loopback");
            let other = listener.accept(Some(limit), &flag).expect("loopback");
            if matches!(way, Way::BigBuffers) {
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(
                    one.socket().expect("a socket"),
                    4 << 20,
                );
                let _ = rustix::net::sockopt::set_socket_recv_buffer_size(
                    other.socket().expect("a socket"),
                    4 << 20,
                );
            }
            (one, other)
        })
        .collect();
    let share = BYTES / streams;
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (index, (one, other)) in pairs.iter().enumerate() {
            let start = index as u64 * share;
            scope.spawn(move || {
                for at in (start..start + share).step_by(CHUNK) {
                    let pages = (at..at + CHUNK as u64).step_by(PAGE_SIZE);
                    let parts: Vec<IoPart<'_>> =
                        pages.map(|at| IoPart::Ram(from.slice(at, PAGE_SIZE).expect("inside"))).collect();
                    one.write_parts(&parts).expect("loopback");
                }
            });
            scope.spawn(move || {
                for at in (start..start + share).step_by(CHUNK) {
                    let window = to.slice(at, CHUNK).expect("inside");
                    match way {
                        Way::Readv => readv(other, window),
                        _ => other.read_into_ram(&[window]).expect("loopback"),
                    }
                }
            });
        }
    });
    BYTES as f64 / began.elapsed().as_secs_f64() / 1e9
}

fn readv(channel: &Channel, window: sterna_ram::RamSlice<'_>) {
    let mut done = 0;
    while done < window.len() {
        let rest = window.part(done, window.len() - done).expect("inside");
        let vector = libc::iovec { iov_base: rest.as_ptr().cast(), iov_len: rest.len() };
        let got =
            // SAFETY: the vector names a window of a live block.
            unsafe { libc::readv(channel.socket().expect("a socket").as_raw_fd(), &raw const vector, 1) };
        assert!(got > 0, "loopback");
        done += got as usize;
    }
}
