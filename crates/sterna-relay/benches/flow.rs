//! CPU time of two relays for one flow, beside two processes that only copy. Each relay and each copier is a process of its own.
//!
//! `cargo bench -p sterna-relay --bench flow [-- [MIB [ROUNDS [WAY…]]]]`. The ways: `copy`, `raw`, `stream`, `tls`. The bytes of `stream`
//! and `tls` are the main channel of a QEMU. The source writes and the destination reads without pauses, over Unix sockets and loopback.
//! `-- latency` measures page requests instead. For a link of a limited rate, run it in a network namespace whose loopback has a token
//! bucket.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

#[path = "../../sterna-transport/tests/support/certificates.rs"]
#[allow(dead_code)]
mod certificates;
#[path = "flow/latency.rs"]
mod latency;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sterna_relay::frame::RouteName;
use sterna_relay::relay::{Acceptor, Compress, Dialer, Limit, Notices, Options, Routes, Security};
use sterna_relay::session::Settings;
use sterna_transport::{Address, Tls, TlsEndpoint};
use sterna_wire::PAGE_SIZE;
use sterna_wire::main::{Command as StreamCommand, Configuration, FileHeader, SectionHeader};
use sterna_wire::main::{encode_footer, encode_section_part};
use sterna_wire::ram::{BlockEntry, BlockList, RamRecordWriter};

const RAM: u32 = 2;
const BLOCK: &str = "pc.ram";
/// Pages in one write of the source.
const PAGES: usize = 31;
/// The buffer with which a QEMU reads.
const READ_BYTES: usize = 32 << 10;
const COPY_BYTES: usize = 1 << 20;
const WAYS: [&str; 4] = ["copy", "raw", "stream", "tls"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|one| one != "--bench").collect();
    if let [role, way, place, rest @ ..] = arguments.as_slice()
        && ["near", "far"].contains(&role.as_str())
    {
        return relay_or_copy(role == "near", way, Path::new(place), rest.first().map(String::as_str));
    }
    if arguments.first().is_some_and(|one| one == "latency") {
        return latency::measure();
    }
    let number = |at: usize, usual| arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (mib, rounds) = (number(0, 2048), number(1, 3_u64));
    let wanted: Vec<&str> = WAYS
        .into_iter()
        .filter(|way| arguments.len() < 3 || arguments[2..].iter().any(|one| one == *way))
        .collect();
    println!(
        "| way | GB/s | CPU s/GB of both | near | far | waits per MB |\n| --- | --- | --- | --- | --- | --- |"
    );
    for _ in 0..rounds {
        for way in &wanted {
            let spent = once(way, mib << 20);
            let gigabytes = (mib << 20) as f64 / 1e9;
            let [near, far] = spent.processor.map(|time| time.as_secs_f64() / gigabytes);
            println!(
                "| {way} | {:.2} | {:.2} | {near:.2} | {far:.2} | {:.1} |",
                gigabytes / spent.wall.as_secs_f64(),
                near + far,
                spent.waits as f64 / gigabytes / 1e3,
            );
        }
    }
}

struct Spent {
    wall: Duration,
    processor: [Duration; 2],
    /// Voluntary context switches of both processes' threads.
    waits: u64,
}

fn once(way: &str, bytes: u64) -> Spent {
    let directory = certificates::good_directory();
    let place = directory.path();
    let target = UnixListener::bind(place.join("target")).expect("a socket");
    let (far, address) = start("far", way, place, None);
    let (near, _) = start("near", way, place, Some(&address));
    let mut source = UnixStream::connect(place.join("source")).expect("the relay listens");
    let began = Instant::now();
    let (setup, section) = stream();
    let all = bytes + setup.len() as u64;
    let writer = std::thread::spawn(move || {
        source.write_all(&setup).expect("it takes bytes");
        let mut left = bytes;
        while left > 0 {
            let here = left.min(section.len() as u64) as usize;
            source.write_all(&section[..here]).expect("it takes bytes");
            left -= here as u64;
        }
        source
    });
    let (mut sink, _) = target.accept().expect("the relay connects");
    let mut buffer = vec![0; READ_BYTES];
    let mut arrived = 0;
    while arrived < all {
        match sink.read(&mut buffer).expect("bytes") {
            0 => panic!("the flow ended after {arrived} bytes"),
            count => arrived += count as u64,
        }
    }
    let wall = began.elapsed();
    let (processor, waits) =
        ([&near, &far].map(|one| processor_time(&one.0)), waits(&near.0) + waits(&far.0));
    drop(writer.join().expect("no panic"));
    Spent { wall, processor, waits }
}

/// The begin of a QEMU's main channel, and a section of RAM that is one write.
fn stream() -> (Vec<u8>, Vec<u8>) {
    let (mut setup, mut section) = (Vec::new(), Vec::new());
    let mut records = RamRecordWriter::default();
    FileHeader.encode(&mut setup);
    let machine = Configuration { machine_type: "pc-q35-11.1".into(), ..Configuration::default() };
    machine.encode(&mut setup).expect("a short name");
    StreamCommand::OpenReturnPath.encode(&mut setup).expect("a command");
    SectionHeader { id: RAM, name: "ram", instance: 0, version: 4 }.encode_start(&mut setup).expect("short");
    let block = BlockEntry::new(BLOCK, (PAGES * PAGE_SIZE) as u64);
    BlockList { blocks: vec![block] }.encode(&mut setup).expect("one block");
    RamRecordWriter::eos(&mut setup);
    encode_footer(RAM, &mut setup);
    let page: Vec<u8> =
        (0..PAGE_SIZE as u32).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    encode_section_part(RAM, false, &mut section);
    for at in 0..PAGES {
        records.page_header(0, BLOCK, (at * PAGE_SIZE) as u64, &mut section).expect("a page of the block");
        section.extend_from_slice(&page);
    }
    RamRecordWriter::eos(&mut section);
    encode_footer(RAM, &mut section);
    (setup, section)
}

/// A child process, killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a relay or a copier. Returns it and what it says first.
fn start(role: &str, way: &str, place: &Path, more: Option<&str>) -> (Process, String) {
    let own = std::env::current_exe().expect("a program");
    let mut command = Command::new(own);
    command.args([role, way]).arg(place).args(more).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.spawn().expect("a process");
    let mut said = String::new();
    let out = process.stdout.take().expect("it is piped");
    BufReader::new(out).read_line(&mut said).expect("a line");
    (Process(process), said.trim().to_owned())
}

fn relay_or_copy(is_near: bool, way: &str, place: &Path, far: Option<&str>) {
    let (source, target) = (place.join("source"), place.join("target"));
    if way == "copy" {
        if is_near {
            let listener = UnixListener::bind(source).expect("a socket");
            println!("ready");
            let (from, _) = listener.accept().expect("a source");
            copy(from, TcpStream::connect(far.expect("an address")).expect("the other copier"));
        } else {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            println!("{}", listener.local_addr().expect("a port"));
            let (from, _) = listener.accept().expect("the other copier");
            copy(from, UnixStream::connect(target).expect("a sink"));
        }
        return;
    }
    let route: RouteName = "vm".parse().expect("a name");
    let endpoint = if is_near { TlsEndpoint::Client } else { TlsEndpoint::Server };
    let tls = (way == "tls").then(|| Tls::from_directory(place, endpoint).expect("certificates"));
    let options = Options {
        security: Security { tls, ..Security::default() },
        carriers: 2,
        reconnect_window: Duration::from_secs(60),
        buffer_bytes: Settings::USUAL_BUFFER,
        unconfirmed: false,
        is_raw: way == "raw",
        compress: Compress::off(),
        limit: Limit::default(),
        notices: Notices::new(|_| ()),
    };
    let kept: Box<dyn std::any::Any> = if is_near {
        let to = far.expect("an address").parse().expect("an address");
        let relay = Dialer::start(&Address::Unix(source), to, route, options).expect("a relay");
        println!("ready");
        Box::new(relay)
    } else {
        let routes = Routes { table: [(route, Address::Unix(target))].into(), directory: None };
        let relay = Acceptor::start(&"tcp:127.0.0.1:0".parse().expect("an address"), routes, options)
            .expect("a relay");
        println!("{}", relay.address());
        Box::new(relay)
    };
    // Until the parent ends.
    let _ = std::io::stdin().read(&mut [0]);
    drop(kept);
}

fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; COPY_BYTES];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

/// User and system time of a process.
fn processor_time(process: &Child) -> Duration {
    let about = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).expect("it runs");
    let fields: Vec<&str> = about.rsplit(") ").next().expect("a name").split(' ').collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("ticks")).sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// How often the threads of a process have waited.
fn waits(process: &Child) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{}/task", process.id())).expect("it runs");
    let texts =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("status")).ok());
    texts
        .filter_map(|text| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?
                .trim()
                .to_owned();
            line.parse::<u64>().ok()
        })
        .sum()
}
