//! The limits of a link: the rate of a plain copy between sockets, and the time from a short request to a
//! page.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::Failure;

/// Size of a write in bytes, the same as a packet's payload.
const PIECE_BYTES: usize = 512 << 10;
const QUESTION_BYTES: usize = 16;
const PAGE_BYTES: usize = 4096;
const QUESTIONS: usize = 500;

/// Measurements of a link.
#[derive(Debug, Clone, Copy)]
pub struct Raw {
    /// Rate of a copy through one connection.
    pub bytes_per_second: f64,
    /// Median time from a request to the last byte of a page. The link is idle.
    pub round_trip: Duration,
}

/// Measures with `bytes` bytes the loopback of that network namespace, or of this process's own.
pub fn measure(namespace: Option<&str>, bytes: u64) -> Result<Raw, Failure> {
    let namespace = namespace.map(str::to_owned);
    // A namespace applies to one thread, and sockets stay in the namespace of their creation.
    let made = thread::spawn(move || connection(namespace.as_deref())).join();
    let pair = made.map_err(|_| "the raw link panicked".to_owned())?;
    let (mut here, mut there) = pair.map_err(|error| format!("the raw link: {error}"))?;
    let measured = round_trip(&mut here, &mut there).and_then(|round_trip| {
        Ok(Raw {
            bytes_per_second: bytes as f64 / copy(&mut here, &mut there, bytes)?.as_secs_f64(),
            round_trip,
        })
    });
    measured.map_err(|error| format!("the raw link: {error}"))
}

fn connection(namespace: Option<&str>) -> io::Result<(TcpStream, TcpStream)> {
    if let Some(name) = namespace {
        let file = File::open(Path::new("/run/netns").join(name))?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let here = TcpStream::connect(listener.local_addr()?)?;
    let (there, _) = listener.accept()?;
    here.set_nodelay(true)?;
    there.set_nodelay(true)?;
    Ok((here, there))
}

fn round_trip(here: &mut TcpStream, there: &mut TcpStream) -> io::Result<Duration> {
    thread::scope(|scope| {
        let answers = scope.spawn(|| {
            let (mut question, page) = ([0; QUESTION_BYTES], [1; PAGE_BYTES]);
            (0..QUESTIONS).try_for_each(|_| {
                there.read_exact(&mut question)?;
                there.write_all(&page)
            })
        });
        let (mut times, mut page) = (Vec::new(), [0; PAGE_BYTES]);
        for _ in 0..QUESTIONS {
            let asked = Instant::now();
            here.write_all(&[2; QUESTION_BYTES])?;
            here.read_exact(&mut page)?;
            times.push(asked.elapsed());
        }
        answers.join().map_err(|_| io::Error::other("it panicked"))??;
        times.sort_unstable();
        Ok(times[QUESTIONS / 2])
    })
}

fn copy(here: &mut TcpStream, there: &mut TcpStream, bytes: u64) -> io::Result<Duration> {
    let pieces = bytes.div_ceil(PIECE_BYTES as u64);
    let began = Instant::now();
    thread::scope(|scope| {
        let sends = scope.spawn(|| {
            let mut piece = vec![0; PIECE_BYTES];
            // Random bytes, because a hypervisor below this machine may merge equal pages.
            fastrand::Rng::with_seed(1).fill(&mut piece);
            (0..pieces).try_for_each(|_| here.write_all(&piece))
        });
        let mut piece = vec![0; PIECE_BYTES];
        (0..pieces).try_for_each(|_| there.read_exact(&mut piece))?;
        sends.join().map_err(|_| io::Error::other("it panicked"))?
    })?;
    Ok(began.elapsed())
}
