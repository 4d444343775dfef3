//! The time that two relays add to a page that a destination's guest waits for: the request on the return path, and the page on the
//! preempt channel. This program is both VMMs; the relays are processes of their own.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sterna_wire::PAGE_SIZE;
use sterna_wire::ram::RamRecordWriter;
use sterna_wire::return_path::ReturnMessage;

use super::{BLOCK, Process, READ_BYTES, certificates, start, stream};

/// Requests of one row, and the pause between two.
const REQUESTS: usize = 2000;
const PAUSE: Duration = Duration::from_millis(1);
/// Bulk data that passes before the first request.
const WARM_UP: Duration = Duration::from_millis(500);

/// Round trips, microseconds.
struct Figures {
    median: f64,
    p99: f64,
}

pub(crate) fn measure() {
    println!("| page requests | median, µs | p99, µs |\n| --- | --- | --- |");
    let shown =
        |way: &str, figures: Figures| println!("| {way} | {:.0} | {:.0} |", figures.median, figures.p99);
    shown("direct", round_trips(Connections::direct(), false));
    for (what, has_bulk) in [("two relays, idle", false), ("two relays, bulk data under way", true)] {
        let directory = certificates::good_directory();
        let (connections, _relays) = Connections::through_relays(directory.path());
        shown(what, round_trips(connections, has_bulk));
    }
}

/// The ends of a main channel and of a preempt channel.
struct Connections {
    main: (UnixStream, UnixStream),
    preempt: (UnixStream, UnixStream),
}

impl Connections {
    /// Over loopback. The sockets are TCP, whatever their type is called.
    fn direct() -> Self {
        let pair = || {
            let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
            let one = TcpStream::connect(listener.local_addr().expect("loopback")).expect("loopback");
            let (other, _) = listener.accept().expect("loopback");
            for end in [&one, &other] {
                end.set_nodelay(true).expect("loopback");
            }
            (UnixStream::from(OwnedFd::from(one)), UnixStream::from(OwnedFd::from(other)))
        };
        let (mut main, preempt) = (pair(), pair());
        begin(&mut main);
        Self { main, preempt }
    }

    fn through_relays(place: &Path) -> (Self, (Process, Process)) {
        let listener = UnixListener::bind(place.join("target")).expect("a socket");
        let (far, address) = start("far", "stream", place, None);
        let (near, _) = start("near", "stream", place, Some(&address));
        let pair = || {
            let source = UnixStream::connect(place.join("source")).expect("the relay listens");
            let (destination, _) = listener.accept().expect("the relay connects");
            (source, destination)
        };
        let mut main = pair();
        // The relay knows the main channel before the preempt channel connects.
        begin(&mut main);
        (Self { main, preempt: pair() }, (near, far))
    }
}

/// Sends the begin of the main channel, and waits until it has arrived.
fn begin((source, destination): &mut (UnixStream, UnixStream)) {
    let (setup, _) = stream();
    source.write_all(&setup).expect("loopback");
    destination.read_exact(&mut vec![0; setup.len()]).expect("loopback");
}

fn round_trips(connections: Connections, has_bulk: bool) -> Figures {
    let Connections { main, preempt } = connections;
    let mut request = Vec::new();
    let wanted = ReturnMessage::RequestPages { block: None, start: 0, length: PAGE_SIZE as u32 };
    wanted.encode(&mut request).expect("loopback");
    let page = page();
    let is_over = Arc::new(AtomicBool::new(false));
    let (source, mut answers) =
        (main.0.try_clone().expect("loopback"), main.0.try_clone().expect("loopback"));
    let (mut bulk, mut urgent, length, answer) = (source, preempt.0, request.len(), page.clone());
    let server = std::thread::spawn(move || {
        let mut wanted = vec![0; length];
        while answers.read_exact(&mut wanted).is_ok() && urgent.write_all(&answer).is_ok() {}
    });
    let mut threads = vec![server];
    let ends = [main.0.try_clone().expect("loopback"), main.1.try_clone().expect("loopback")];
    if has_bulk {
        let ((_, section), stops) = (stream(), Arc::clone(&is_over));
        threads.push(std::thread::spawn(move || {
            while !stops.load(Ordering::Relaxed) && bulk.write_all(&section).is_ok() {}
        }));
        let mut drain = main.1.try_clone().expect("loopback");
        threads.push(std::thread::spawn(move || {
            let mut buffer = vec![0; READ_BYTES];
            while matches!(drain.read(&mut buffer), Ok(1..)) {}
        }));
        std::thread::sleep(WARM_UP);
    }
    let (mut requests, mut pages) = (main.1, preempt.1);
    let mut took = Vec::with_capacity(REQUESTS);
    let mut arrived = vec![0; page.len()];
    for _ in 0..REQUESTS {
        let began = Instant::now();
        requests.write_all(&request).expect("loopback");
        pages.read_exact(&mut arrived).expect("loopback");
        took.push(began.elapsed().as_secs_f64() * 1e6);
        std::thread::sleep(PAUSE);
    }
    is_over.store(true, Ordering::Relaxed);
    for end in ends {
        let _ = end.shutdown(std::net::Shutdown::Both);
    }
    threads.into_iter().for_each(|thread| _ = thread.join());
    took.sort_by(f64::total_cmp);
    Figures { median: took[REQUESTS / 2], p99: took[REQUESTS * 99 / 100] }
}

/// A page on the preempt channel.
fn page() -> Vec<u8> {
    let mut out = Vec::new();
    RamRecordWriter::default().page_header(0, BLOCK, 0, &mut out).expect("a page of the block");
    out.resize(out.len() + PAGE_SIZE, 1);
    out
}
