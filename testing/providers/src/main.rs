//! Measures a TLS channel over loopback TCP with aws-lc, ring and graviola. The command's default library was chosen by these figures
//! and by the time that each takes to build.
//!
//! The libraries alternate in one run, beside a plain channel. Guest RAM is at both ends.
//! `cargo run --release --manifest-path testing/providers/Cargo.toml [-- STREAMS [MIB]]`.

#[path = "../../../crates/sterna-transport/tests/support/certificates.rs"]
#[allow(dead_code)]
mod certificates;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::CipherSuite;
use rustls::crypto::CryptoProvider;
use sterna_ram::{Backing, RamBlock};
use sterna_transport::{CancelFlag, Channel, IoPart, Listener, Tls, TlsCredentials, TlsEndpoint, TlsFiles};

/// Payload of one write of a lane: 128 pages. A header precedes it.
const PACKET: usize = 128 * 4096;
const HEADER: usize = 1344;
const ROUNDS: usize = 7;
const LIMIT: Duration = Duration::from_secs(10);

type Library = (&'static str, Option<fn() -> CryptoProvider>);
const LIBRARIES: [Library; 4] = [
    ("plain", None),
    ("aws-lc-rs", Some(rustls::crypto::aws_lc_rs::default_provider)),
    ("ring", Some(rustls::crypto::ring::default_provider)),
    ("graviola", Some(rustls_graviola::default_provider)),
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (streams, mib): (usize, usize) = (number(1), number(1024));
    let directory = certificates::good_directory();
    let packets = (mib << 20) / PACKET / streams;
    let gigabytes = (packets * PACKET * streams) as f64 / 1e9;
    let mut figures = LIBRARIES.map(|_| (Vec::new(), Vec::new()));
    // The first round only warms up.
    for round in 0..=ROUNDS {
        for ((_, library), (rates, costs)) in LIBRARIES.iter().zip(&mut figures) {
            let (wall, processor) = channels(directory.path(), *library, streams, packets);
            if round > 0 {
                rates.push(gigabytes / wall.as_secs_f64());
                costs.push(processor.as_secs_f64() / gigabytes);
            }
        }
    }
    for ((name, _), (rates, costs)) in LIBRARIES.iter().zip(&mut figures) {
        rates.sort_by(f64::total_cmp);
        costs.sort_by(f64::total_cmp);
        let (least, median, most) = (rates[0], rates[ROUNDS / 2], rates[ROUNDS - 1]);
        println!("{streams} x {name:<10} {median:5.2} GB/s  ({least:.2} to {most:.2})  {:.2} CPU s/GB", costs[ROUNDS / 2]);
    }
}

fn processor() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn credentials(directory: &Path, endpoint: TlsEndpoint, library: fn() -> CryptoProvider) -> Tls {
    let mut provider = library();
    // The cipher that the engine prefers.
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    let files = TlsFiles::in_directory(directory, endpoint);
    let loaded = TlsCredentials::load_with_provider(&files, endpoint, true, Arc::new(provider));
    Tls::new(Arc::new(loaded.expect("credentials")))
}

/// The elapsed time and the processor time of both ends.
fn channels(
    directory: &Path,
    library: Option<fn() -> CryptoProvider>,
    streams: usize,
    packets: usize,
) -> (Duration, Duration) {
    let of = |endpoint| library.map(|library| credentials(directory, endpoint, library));
    let (client, server) = (of(TlsEndpoint::Client), of(TlsEndpoint::Server));
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().expect("an address")).expect("bound");
    let flag = CancelFlag::new();
    let pairs: Vec<(Arc<Channel>, Channel)> = (0..streams)
        .map(|_| {
            std::thread::scope(|scope| {
                let accepted = scope.spawn(|| {
                    let channel = listener.accept(Some(LIMIT), &flag).expect("accepted");
                    if let Some(server) = &server {
                        channel.start_tls(server, TlsEndpoint::Server, None, LIMIT, &flag).expect("server");
                    }
                    channel
                });
                let address = listener.local_address();
                let out = Channel::connect_with(&address, client.as_ref(), LIMIT, &flag, Arc::new);
                (out.expect("client"), accepted.join().expect("no panic"))
            })
        })
        .collect();
    let block = || RamBlock::new("ram", PACKET as u64, Backing::Memfd).expect("RAM");
    let blocks: Vec<RamBlock> = (0..2 * streams).map(|_| block()).collect();
    let mut noise = vec![0; PACKET];
    fastrand::Rng::with_seed(1).fill(&mut noise);
    for block in &blocks {
        block.write(0, &noise).expect("written");
    }
    let (began, before) = (Instant::now(), processor());
    std::thread::scope(|scope| {
        for ((out, into), blocks) in pairs.iter().zip(blocks.chunks(2)) {
            scope.spawn(move || {
                let pages = blocks[0].slice(0, PACKET).expect("inside");
                for _ in 0..packets {
                    out.write_parts(&[IoPart::Bytes(&[7; HEADER]), IoPart::Ram(pages)]).expect("written");
                }
            });
            scope.spawn(move || {
                let mut header = [0; HEADER];
                let pages = blocks[1].slice(0, PACKET).expect("inside");
                for _ in 0..packets {
                    into.read_exact(&mut header).expect("read");
                    into.read_into_ram(&[pages]).expect("read");
                }
            });
        }
    });
    (began.elapsed(), processor() - before)
}
