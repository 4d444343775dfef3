//! Measures how fast guests move over soft-RoCE, with Sterna and QEMU in all pairs. It also measures the
//! device's limit ([`raw`]) in the same boot.
//!
//! One emulated core does all the work, including populating memory. The bench therefore compares software,
//! by ratios within one boot. Repetitions are interleaved, and medians are reported. Most guests are stopped.
//! Other parts use guests that write all the time ([`writers`]), and compare the barriers that tell a
//! destination that pages have arrived ([`barrier`]).
#![allow(clippy::print_stdout)]

mod barrier;
mod content;
mod pair;
mod process;
mod raw;
mod rows;
mod writers;

use serde_json::{Value, json};

use crate::Failure;
use crate::lab::rdma::way::Way;
use crate::lab::{RESULTS, Selection};
pub(super) use content::Load;
pub(super) use pair::Machines;
use pair::Pair;
pub(super) use process::Machine;
pub(in crate::lab) use process::serve;
use rows::{Row, median};
pub(in crate::lab) use writers::serve as serve_writer;

const MIB: u64 = 1 << 20;
/// Size of the guests' RAM, and name of its block.
const MEMORY_MIB: u64 = 512;
const BLOCK: &str = "ram0";
/// Window sizes of the raw loop, MiB.
const RAW_WINDOWS_MIB: [u64; 3] = [1, 8, 512];
/// Chunk sizes that are compared several times, and chunk sizes that are measured once; 0: all memory is
/// pinned.
const CORE_CHUNKS_MIB: [u64; 4] = [1, 8, 64, 1024];
const OTHER_CHUNKS_MIB: [u64; 4] = [2, 32, 256, 0];
const REPETITIONS: usize = 5;
/// Settings that only two Sternas have: multifd channels, and the limit of pinned memory in MiB.
const LANES: [u8; 4] = [0, 1, 2, 4];
const PINNED_LIMIT_MIB: u64 = 64;
const OTHER_REPETITIONS: usize = 3;

/// Names of the bench's parts, for `--only`.
const ROWS: &str = "rows";
const WRITERS: &str = "writers";
const BARRIER: &str = "barrier";

/// Runs the selected parts of the bench and prints the results. Returns the number of failed migrations.
pub(in crate::lab) fn run(selection: &Selection) -> i32 {
    match measured(selection) {
        Ok(failures) => failures,
        Err(why) => {
            println!("LAB bench: {why}");
            -1
        }
    }
}

fn measured(selection: &Selection) -> Result<i32, Failure> {
    let mut table =
        Table { repetitions: if selection.is_quick() { 1 } else { REPETITIONS }, ..Table::default() };
    if selection.takes(ROWS, false) {
        table.measure(selection.is_quick())?;
    }
    let (is_long, mut failures) = (selection.is_quick(), table.failures());
    let barriers = if selection.takes(BARRIER, is_long) { barrier::rows()? } else { Vec::new() };
    let mut rows: Vec<Value> = table.rows.iter().map(Row::json).collect();
    if selection.takes(WRITERS, is_long) {
        let found = writers::rows();
        failures += found.iter().filter(|row| row["failures"] != json!([])).count();
        rows.extend(found);
    }
    let raw: Vec<_> =
        table.raw.iter().map(|(window, found)| json!({ "window_mib": window, "mib_s": found })).collect();
    let results = json!({
        "ram_mib": MEMORY_MIB,
        "repetitions": table.repetitions,
        "limit_mib_s": table.limit(),
        "raw": raw,
        "rows": rows,
        "barriers": barriers,
    });
    println!("{RESULTS}{results}");
    Ok(failures as i32)
}

/// Results with stopped guests.
#[derive(Default)]
struct Table {
    repetitions: usize,
    /// Window sizes of the raw loop in MiB, each with its median.
    raw: Vec<(u64, f64)>,
    rows: Vec<Row>,
}

impl Table {
    fn measure(&mut self, is_quick: bool) -> Result<(), Failure> {
        let chunks = if is_quick { &[1, 64][..] } else { &CORE_CHUNKS_MIB[..] };
        let mut raw: Vec<(u64, Vec<f64>)> = RAW_WINDOWS_MIB.map(|window| (window, Vec::new())).into();
        let mut core = rows(chunks, Load::Random);
        let mut machines = Machines::start(Load::Random)?;
        for repetition in 0..self.repetitions {
            for (window, found) in &mut raw {
                found.push(raw::limit(MEMORY_MIB * MIB, *window * MIB)?);
                println!("LAB raw, windows of {window} MiB: {:.1} MiB/s", found[repetition]);
            }
            core.iter_mut().for_each(|row| row.repeat(&mut machines, repetition == 0));
        }
        self.raw = raw.iter().map(|(window, found)| (*window, median(found))).collect();
        // Prints the main rows now, because the other rows take long.
        self.tell(core);
        if is_quick {
            return Ok(());
        }
        let mut others = rows(&OTHER_CHUNKS_MIB, Load::Random);
        others.iter_mut().for_each(|row| row.repeat(&mut machines, true));
        self.tell(others);
        let mut others = between_sternas();
        for _ in 0..OTHER_REPETITIONS {
            others.iter_mut().for_each(|row| row.repeat(&mut machines, true));
        }
        self.tell(others);
        drop(machines);
        for load in [Load::HalfZero, Load::EverySecondPage] {
            let mut machines = Machines::start(load)?;
            let mut others = rows(&[1], load);
            others.iter_mut().for_each(|row| row.repeat(&mut machines, true));
            self.tell(others);
        }
        Ok(())
    }

    fn tell(&mut self, rows: Vec<Row>) {
        let limit = self.limit();
        rows.iter().for_each(|row| println!("LAB {}", row.line(limit)));
        self.rows.extend(rows);
    }

    fn limit(&self) -> f64 {
        self.raw.iter().map(|(_, found)| *found).fold(0.0, f64::max)
    }

    fn failures(&self) -> usize {
        self.rows.iter().map(|row| row.failures.len()).sum()
    }
}

fn rows(chunks_mib: &[u64], load: Load) -> Vec<Row> {
    let way = |chunk: u64| Way {
        chunks_mib: [chunk.max(1); 2],
        pin_all: chunk == 0,
        return_path: false,
        ..Way::PLAIN
    };
    chunks_mib.iter().flat_map(|chunk| Pair::ALL.map(|pair| Row::new(pair, way(*chunk), load))).collect()
}

/// Rows of settings that no QEMU has.
fn between_sternas() -> Vec<Row> {
    let plain = Way { chunks_mib: [8, 8], return_path: false, ..Way::PLAIN };
    let lanes = LANES.map(|lanes| Way { lanes, ..plain });
    let limited = [0, 2].map(|lanes| Way { lanes, pinned_limit_mib: PINNED_LIMIT_MIB, ..plain });
    let ways = lanes.into_iter().chain(limited);
    ways.map(|way| Row::new(Pair::STERNAS, way, Load::Random)).collect()
}

/// Unit in which the kernel reports CPU time to programs. It is the same on every machine of the lab.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU seconds of a process so far.
fn cpu_of(pid: u32) -> Result<f64, Failure> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    // The name may contain any character. After it follow the state, ten more words, and the two times.
    let words: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok());
    let (user, system) = (ticks(11), ticks(12));
    Ok((user.ok_or("no user time")? + system.ok_or("no system time")?) / TICKS_PER_SECOND)
}
