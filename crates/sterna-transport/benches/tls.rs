//! Speed of TLS over loopback TCP, compared with rustls's own stream and a plain channel. Sterna's channels use
//! guest RAM at both ends.
//!
//! The three alternate in one run. `cargo bench -p sterna-transport --bench tls [-- STREAMS [MIB]]`.
#![allow(clippy::print_stdout)]

#[path = "../tests/support/certificates.rs"]
#[allow(dead_code)]
mod certificates;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use sterna_ram::{Backing, RamBlock};
use sterna_transport::{CancelFlag, Channel, IoPart, Listener, Tls, TlsCredentials, TlsEndpoint};

/// Payload of one write of a lane: 128 pages. A header precedes it.
const PACKET: usize = 128 * 4096;
const HEADER: usize = 1344;
const ROUNDS: usize = 7;
const LIMIT: Duration = Duration::from_secs(10);

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let mut number = |default| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (streams, mib) = (number(1), number(1024));
    let directory = certificates::good_directory();
    let packets = (mib << 20) / PACKET / streams;
    let mut figures =
        ["plain channel", "rustls's stream", "TLS channel"].map(|name| (name, Vec::new(), Vec::new()));
    for round in 0..=ROUNDS {
        let took = [
            channels(directory.path(), false, streams, packets),
            raw(directory.path(), streams, packets),
            channels(directory.path(), true, streams, packets),
        ];
        // The first round only warms up, and is not counted.
        if round > 0 {
            let gigabytes = (packets * PACKET * streams) as f64 / 1e9;
            for (figure, spent) in figures.iter_mut().zip(took) {
                figure.1.push(gigabytes / spent.wall.as_secs_f64());
                figure.2.push(spent.processor.as_secs_f64() / gigabytes);
            }
        }
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let mut medians = Vec::new();
    for (name, rates, costs) in &mut figures {
        let (rate, cost) = (median(rates), median(costs));
        println!(
            "{streams} x {name:<16} {rate:5.2} GB/s  ({:.2} to {:.2})  {cost:.2} CPU s/GB",
            rates[0],
            rates[rates.len() - 1]
        );
        medians.push((rate, cost));
    }
    println!(
        "TLS channel / rustls's stream: {:.2} of its speed at {:.2} of its CPU seconds",
        medians[2].0 / medians[1].0,
        medians[2].1 / medians[1].1
    );
}

/// Elapsed time and processor time of both ends.
struct Spent {
    wall: Duration,
    processor: Duration,
}

struct Began(Instant, Duration);

impl Began {
    fn now() -> Self {
        Began(Instant::now(), processor())
    }

    fn spent(self) -> Spent {
        Spent { wall: self.0.elapsed(), processor: processor() - self.1 }
    }
}

fn processor() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn channels(directory: &Path, tls: bool, streams: usize, packets: usize) -> Spent {
    let of = |endpoint| {
        Tls::new(Arc::new(TlsCredentials::from_directory(directory, endpoint, true).expect("credentials")))
    };
    let (client, server) = (of(TlsEndpoint::Client), of(TlsEndpoint::Server));
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().expect("an address")).expect("bound");
    let flag = CancelFlag::new();
    let pairs: Vec<(Arc<Channel>, Channel)> = (0..streams)
        .map(|_| {
            std::thread::scope(|scope| {
                let accepted = scope.spawn(|| {
                    let channel = listener.accept(Some(LIMIT), &flag).expect("accepted");
                    if tls {
                        channel.start_tls(&server, TlsEndpoint::Server, None, LIMIT, &flag).expect("server");
                    }
                    channel
                });
                let client = tls.then_some(&client);
                let out = Channel::connect_with(&listener.local_address(), client, LIMIT, &flag, Arc::new)
                    .expect("client");
                (out, accepted.join().expect("no panic"))
            })
        })
        .collect();
    let blocks: Vec<RamBlock> =
        (0..2 * streams).map(|_| RamBlock::new("ram", PACKET as u64, Backing::Memfd).expect("RAM")).collect();
    for block in &blocks {
        block.write(0, &noise()).expect("written");
    }
    let began = Began::now();
    std::thread::scope(|scope| {
        for ((out, into), blocks) in pairs.iter().zip(blocks.chunks(2)) {
            scope.spawn(move || {
                let header = [7; HEADER];
                let pages = blocks[0].slice(0, PACKET).expect("inside");
                for _ in 0..packets {
                    out.write_parts(&[IoPart::Bytes(&header), IoPart::Ram(pages)]).expect("written");
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
    began.spent()
}

fn raw(directory: &Path, streams: usize, packets: usize) -> Spent {
    let read = |name: &str| directory.join(name);
    let chain = |name| vec![CertificateDer::from_pem_file(read(name)).expect("a certificate")];
    let key = |name| PrivateKeyDer::from_pem_file(read(name)).expect("a key");
    let mut roots = RootCertStore::empty();
    roots.add(chain("ca-cert.pem").remove(0)).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    // Use the same cipher as the channels.
    let mut provider = Arc::unwrap_or_clone(provider);
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    let provider = Arc::new(provider);
    let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain("server-cert.pem"), key("server-key.pem"))
        .expect("a server");
    // The client never reads tickets. Unread tickets would turn its close into a reset.
    server.send_tls13_tickets = 0;
    let (client, server) = (Arc::new(client), Arc::new(server));
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let pairs: Vec<_> = (0..streams)
        .map(|_| {
            let out = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
            let into = listener.accept().expect("accepted").0;
            out.set_nodelay(true).expect("set");
            let name = ServerName::try_from("localhost").expect("a name");
            let client = ClientConnection::new(Arc::clone(&client), name).expect("client");
            let server = ServerConnection::new(Arc::clone(&server)).expect("server");
            let (mut out, mut into) = (StreamOwned::new(client, out), StreamOwned::new(server, into));
            std::thread::scope(|scope| {
                scope.spawn(|| out.write_all(&[1]).and_then(|()| out.flush()).expect("greeted"));
                into.read_exact(&mut [0; 1]).expect("greeted");
            });
            (out, into)
        })
        .collect();
    let bytes = noise();
    let began = Began::now();
    std::thread::scope(|scope| {
        for (mut out, mut into) in pairs {
            let bytes = &bytes;
            scope.spawn(move || {
                let header = [7; HEADER];
                for _ in 0..packets {
                    out.write_all(&header).and_then(|()| out.write_all(bytes)).expect("written");
                }
                out.flush().expect("written");
            });
            scope.spawn(move || {
                let mut header = [0; HEADER];
                let mut pages = vec![0; PACKET];
                for _ in 0..packets {
                    into.read_exact(&mut header).and_then(|()| into.read_exact(&mut pages)).expect("read");
                }
            });
        }
    });
    began.spent()
}

fn noise() -> Vec<u8> {
    let mut bytes = vec![0; PACKET];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    bytes
}
