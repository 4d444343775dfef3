//! How fast guests move over soft-RoCE: Sterna and QEMU in all pairs, beside what the device can do ([`raw`]), in one boot.
//!
//! One emulated core does everything, populating memory included, so it is software that is compared here: in one boot, by
//! ratios. Repetitions are interleaved; medians are told.
#![allow(clippy::print_stdout)]

mod content;
mod pair;
mod process;
mod raw;
mod rows;

use serde_json::json;

use crate::Failure;
use crate::lab::RESULTS;
use crate::lab::rdma::way::Way;
pub(super) use content::Load;
pub(super) use pair::Machines;
use pair::Pair;
pub(super) use process::Machine;
pub(in crate::lab) use process::serve;
use rows::{Row, median};

const MIB: u64 = 1 << 20;
/// RAM of the guests, and its block.
const MEMORY_MIB: u64 = 512;
const BLOCK: &str = "ram0";
/// Windows of the raw loop, MiB.
const RAW_WINDOWS_MIB: [u64; 3] = [1, 8, 512];
/// Chunk sizes that are compared several times, and those that are looked at once; 0: all memory is pinned.
const CORE_CHUNKS_MIB: [u64; 4] = [1, 8, 64, 1024];
const OTHER_CHUNKS_MIB: [u64; 4] = [2, 32, 256, 0];
const REPETITIONS: usize = 5;
/// What only two Sternas do: multifd channels, and the limit of pinned memory, MiB.
const LANES: [u8; 4] = [0, 1, 2, 4];
const PINNED_LIMIT_MIB: u64 = 64;
const OTHER_REPETITIONS: usize = 3;

/// Runs the bench and prints its results. The number of migrations that failed.
pub(in crate::lab) fn run(is_quick: bool) -> i32 {
    match measured(is_quick) {
        Ok(failures) => failures,
        Err(why) => {
            println!("LAB bench: {why}");
            -1
        }
    }
}

fn measured(is_quick: bool) -> Result<i32, Failure> {
    let (chunks, repetitions) =
        if is_quick { (&[1, 64][..], 1) } else { (&CORE_CHUNKS_MIB[..], REPETITIONS) };
    let mut raw: Vec<(u64, Vec<f64>)> = RAW_WINDOWS_MIB.map(|window| (window, Vec::new())).into();
    let mut core = rows(chunks, Load::Random);
    let mut machines = Machines::start(Load::Random)?;
    for repetition in 0..repetitions {
        for (window, found) in &mut raw {
            found.push(raw::limit(MEMORY_MIB * MIB, *window * MIB)?);
            println!("LAB raw, windows of {window} MiB: {:.1} MiB/s", found[repetition]);
        }
        core.iter_mut().for_each(|row| row.repeat(&mut machines, repetition == 0));
    }
    let raw: Vec<_> = raw.iter().map(|(window, found)| (*window, median(found))).collect();
    let limit = raw.iter().map(|(_, found)| *found).fold(0.0, f64::max);
    // Now, for whoever does not wait for the rest.
    let told = |rows: &[Row]| rows.iter().for_each(|row| println!("LAB {}", row.line(limit)));
    told(&core);
    if !is_quick {
        let compared = core.len();
        let mut others = rows(&OTHER_CHUNKS_MIB, Load::Random);
        others.iter_mut().for_each(|row| row.repeat(&mut machines, true));
        core.extend(others);
        let mut others = between_sternas();
        for _ in 0..OTHER_REPETITIONS {
            others.iter_mut().for_each(|row| row.repeat(&mut machines, true));
        }
        core.extend(others);
        drop(machines);
        for load in [Load::HalfZero, Load::EverySecondPage] {
            let mut machines = Machines::start(load)?;
            let mut others = rows(&[1], load);
            others.iter_mut().for_each(|row| row.repeat(&mut machines, true));
            core.extend(others);
        }
        told(&core[compared..]);
    }
    let raw: Vec<_> =
        raw.iter().map(|(window, found)| json!({ "window_mib": window, "mib_s": found })).collect();
    let results = json!({
        "ram_mib": MEMORY_MIB,
        "repetitions": repetitions,
        "limit_mib_s": limit,
        "raw": raw,
        "rows": core.iter().map(Row::json).collect::<Vec<_>>(),
    });
    println!("{RESULTS}{results}");
    Ok(core.iter().map(|row| row.failures.len() as i32).sum())
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

/// What no QEMU does.
fn between_sternas() -> Vec<Row> {
    let plain = Way { chunks_mib: [8, 8], return_path: false, ..Way::PLAIN };
    let lanes = LANES.map(|lanes| Way { lanes, ..plain });
    let limited = [0, 2].map(|lanes| Way { lanes, pinned_limit_mib: PINNED_LIMIT_MIB, ..plain });
    let ways = lanes.into_iter().chain(limited);
    ways.map(|way| Row::new(Pair::STERNAS, way, Load::Random)).collect()
}

/// In which the kernel tells programs times, on every machine that the lab is.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU seconds of a process so far.
fn cpu_of(pid: u32) -> Result<f64, Failure> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    // After the name, which may contain anything: state, and ten words more before the two times.
    let words: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok());
    let (user, system) = (ticks(11), ticks(12));
    Ok((user.ok_or("no user time")? + system.ok_or("no system time")?) / TICKS_PER_SECOND)
}
