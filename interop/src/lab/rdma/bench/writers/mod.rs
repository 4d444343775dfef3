//! Compares migrations of a guest that writes all the time, with Sterna and with QEMU. Chunks have 1 GiB.
//!
//! Both guests do the same. One thread sweeps half of RAM in a scattered order of pages. It compares each
//! page with its content from the previous pass, and writes three words. It never sleeps, has a pace, and
//! catches up after a delay. In QEMU, it is a boot sector under TCG. In Sterna, it is a thread of the
//! source's process that marks a dirty log. The written amount is read from memory on both sides in the same
//! way: from the words at the start and at the end of the migration. QEMU's guest gets a nominal pace.
//! Sterna's guest gets the pace that QEMU's guest reached.
#![allow(clippy::print_stdout)]

mod guest;
mod process;
mod qemu;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{BLOCK, MEMORY_MIB, MIB, cpu_of};
use crate::Failure;
use crate::lab::inside::WRITER;
use crate::lab::rdma::blocks::address_of;
use crate::lab::rdma::child::{self, Sterna};
use crate::lab::rdma::way::Way;
use crate::workload::{PLACES, Sweep};
use guest::sweep;

const CHUNK_MIB: u64 = 1024;
/// Pages that a guest writes per second if it gets enough CPU time: low, middle, high.
const STRENGTHS: [(&str, u64); 3] = [("low", 250), ("middle", 500), ("high", 1_000)];
/// A migration that takes longer does not converge.
const LIMIT: Duration = Duration::from_secs(120);
const PAGES_PER_MIB: f64 = 256.0;
const PAGE_BYTES: u64 = 4096;

/// Runs the process: performs orders from standard input.
pub(in crate::lab) fn serve() {
    let mut process = process::Process::default();
    child::serve(|order| process.perform(order));
}

/// Measures each strength once in both programs, as rows of the table. A failure also gets a row.
pub(super) fn rows() -> Vec<Value> {
    let mut rows = Vec::new();
    for (name, pages_per_second) in STRENGTHS {
        let mut asked_mib_s = pages_per_second as f64 / PAGES_PER_MIB;
        for (pair, is_sterna) in [("QEMU→QEMU", false), ("Sterna→Sterna", true)] {
            let way = Way { chunks_mib: [CHUNK_MIB; 2], return_path: is_sterna, ..Way::PLAIN };
            let pace = Duration::from_secs(1).div_f64((asked_mib_s * PAGES_PER_MIB).max(1.0));
            let found = if is_sterna { between_sternas(way, pace) } else { between_qemus(way, pace) };
            let found = found.unwrap_or_else(|why| Found { failure: Some(why), ..Found::default() });
            let load = format!("writer, {name}");
            println!("LAB {pair}, {CHUNK_MIB} MiB, {load} ({asked_mib_s:.1} MiB/s): {}", found.line());
            let about = json!({
                "pair": pair, "chunk_mib": CHUNK_MIB, "mode": way.registration(), "load": load,
                "asked_mib_s": asked_mib_s,
            });
            rows.push(merged(about, found.json()));
            if found.dirtied_mib_s > 0.0 {
                asked_mib_s = found.dirtied_mib_s;
            }
        }
    }
    rows
}

fn merged(mut into: Value, from: Value) -> Value {
    if let (Value::Object(into), Value::Object(from)) = (&mut into, from) {
        into.extend(from);
    }
    into
}

/// Measurements of one migration.
#[derive(Default)]
struct Found {
    seconds: f64,
    cpu: [f64; 2],
    rounds: u64,
    /// Downtime as the source reports it.
    downtime_ms: f64,
    /// The longest time between two steps, as the guest measured it.
    longest_gap_ms: Option<f64>,
    /// Rate of the guest's writes while it ran, from its words in memory.
    dirtied_mib_s: f64,
    /// Number of pages at the destination that differ from the guest's writes.
    wrong_pages: u64,
    rdma: Value,
    pinned_bytes: Value,
    /// The parts of the switchover.
    switchover: Value,
    /// Reason why the guest did not arrive.
    failure: Option<Failure>,
}

impl Found {
    fn line(&self) -> String {
        let Self { seconds, rounds, downtime_ms, dirtied_mib_s, wrong_pages, .. } = self;
        let gap = self.longest_gap_ms.map_or(String::new(), |gap| format!(", longest gap {gap:.0} ms"));
        let failure = self.failure.as_ref().map_or(String::new(), |why| format!("; FAILED: {why}"));
        format!(
            "{seconds:.1} s, {rounds} rounds, pause {downtime_ms:.0} ms{gap}, {dirtied_mib_s:.1} MiB/s written, {wrong_pages} pages \
             wrong, CPU {:.1} + {:.1} s{failure}",
            self.cpu[0], self.cpu[1]
        )
    }

    fn json(&self) -> Value {
        json!({
            "mib_s": MEMORY_MIB as f64 / self.seconds,
            "seconds": self.seconds,
            "source_cpu_s": self.cpu[0],
            "destination_cpu_s": self.cpu[1],
            "rounds": self.rounds,
            "downtime_ms": self.downtime_ms,
            "longest_gap_ms": self.longest_gap_ms,
            "dirtied_mib_s": self.dirtied_mib_s,
            "wrong_pages": self.wrong_pages,
            "writes": self.rdma["writes"],
            "registrations": self.rdma["registrations"],
            "exchanges": self.rdma["exchanges"],
            "pinned_bytes": self.pinned_bytes,
            "switchover": self.switchover,
            "failures": self.failure.iter().collect::<Vec<_>>(),
        })
    }
}

fn between_qemus(way: Way, pace: Duration) -> Result<Found, Failure> {
    let (mut source, words) = qemu::boot(pace)?;
    let mut destination = qemu::machine()?.incoming_defer().spawn()?;
    let uri = way.uri();
    way.set_destination(&mut destination)?;
    destination.start_incoming(&uri)?;
    way.set_source(&mut source)?;
    source.capabilities(&["events"])?;
    let mut found = Found::default();
    measured(&mut found, [source.pid(), destination.pid()], &words, |found| {
        source.start_migration(&uri)?;
        (found.rounds, found.downtime_ms) = qemu::sent(&mut source)?;
        qemu::arrived(&mut destination)
    })?;
    if found.failure.is_some() {
        return Ok(found);
    }
    destination.stop()?;
    let address = address_of(&mut destination, BLOCK)?;
    found.wrong_pages = Words::of(destination.pid(), address)?.late_pages(words.steps()?)?;
    Ok(found)
}

fn between_sternas(way: Way, pace: Duration) -> Result<Found, Failure> {
    let (mut source, mut destination) = (Sterna::start(WRITER)?, Sterna::start(WRITER)?);
    let order = json!({
        "uri": way.uri(), "way": way.to_json(), "pace_ns": pace.as_nanos() as u64, "limit_s": LIMIT.as_secs(),
    });
    let to = |what: &str| merged(order.clone(), json!({ "do": what }));
    let booted = source.ask(&to("boot"))?;
    let waiting = destination.ask(&to("receive"))?;
    let words = Words::of(source.pid(), booted["address"].as_u64().ok_or("no address")?)?;
    std::thread::sleep(Duration::from_millis(600));
    let mut found = Found::default();
    measured(&mut found, [source.pid(), destination.pid()], &words, |found| {
        let sent = source.ask(&to("send"))?;
        destination.ask(&to("await"))?;
        found.rounds = sent["rounds"].as_u64().ok_or("no rounds")?;
        found.downtime_ms = sent["downtime_ms"].as_f64().ok_or("no downtime")?;
        [found.rdma, found.pinned_bytes, found.switchover] =
            ["rdma", "pinned_bytes", "switchover"].map(|name| sent[name].clone());
        Ok(())
    })?;
    if found.failure.is_some() {
        return Ok(found);
    }
    // The guest must take a step at the destination, so that it measures the downtime.
    std::thread::sleep(Duration::from_secs(1));
    let stopped = destination.ask(&to("stop"))?;
    found.longest_gap_ms = stopped["gap_ns"].as_u64().map(|gap| gap as f64 / 1e6);
    let there = Words::of(destination.pid(), waiting["address"].as_u64().ok_or("no address")?)?;
    found.wrong_pages = stopped["wrong_pages"].as_u64().ok_or("no count of wrong pages")?;
    found.wrong_pages += there.late_pages(words.steps()?)?;
    Ok(found)
}

/// Times a migration of the guest whose memory is `words`.
fn measured(
    found: &mut Found,
    processes: [u32; 2],
    words: &Words,
    migrate: impl FnOnce(&mut Found) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let [source, destination] = processes;
    let (cpu, steps, began) = ([cpu_of(source)?, cpu_of(destination)?], words.steps()?, Instant::now());
    found.failure = migrate(found).err();
    found.seconds = began.elapsed().as_secs_f64();
    found.cpu = [cpu_of(source)? - cpu[0], cpu_of(destination)? - cpu[1]];
    // The source's memory keeps its state from the time when its guest stopped.
    let ran = found.seconds - found.downtime_ms / 1e3;
    found.dirtied_mib_s = (words.steps()? - steps) as f64 / PAGES_PER_MIB / ran;
    Ok(())
}

/// Memory of a guest in another process.
struct Words {
    memory: File,
    address: u64,
}

impl Words {
    fn of(pid: u32, address: u64) -> Result<Self, Failure> {
        let path = format!("/proc/{pid}/mem");
        let memory = OpenOptions::new().read(true).write(true).open(&path);
        Ok(Self { memory: memory.map_err(|error| format!("{path}: {error}"))?, address })
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.memory.write_all_at(bytes, self.address + at).map_err(|error| format!("guest RAM: {error}"))
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Result<(), Failure> {
        self.memory.read_exact_at(to, self.address + at).map_err(|error| format!("guest RAM: {error}"))
    }

    fn word(&self, at: u64) -> Result<u32, Failure> {
        let mut bytes = [0; 4];
        self.read(at, &mut bytes).map(|()| u32::from_le_bytes(bytes))
    }

    /// Number of steps that the guest has taken.
    fn steps(&self) -> Result<u64, Failure> {
        sweep().steps_in(|at| self.word(at))
    }

    /// Number of pages that are older than their state after `steps` steps.
    fn late_pages(&self, steps: u64) -> Result<u64, Failure> {
        let (mut late, mut bytes) = (0, vec![0; MIB as usize]);
        let first = sweep().end() - u64::from(sweep().pages()) * PAGE_BYTES;
        let passes = sweep().passes_after(steps);
        for (at, passes) in
            (first..).step_by(bytes.len()).zip(passes.chunks(bytes.len() / PAGE_BYTES as usize))
        {
            self.read(at, &mut bytes)?;
            for ((address, page), pass) in
                (at..).step_by(PAGE_BYTES as usize).zip(bytes.chunks(PAGE_BYTES as usize)).zip(passes)
            {
                let words = PLACES.map(|place| {
                    page[place as usize..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
                });
                late += u64::from(!Sweep::is_as_of(address, words, *pass));
            }
        }
        Ok(late)
    }
}
