//! The measurements of the bench.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::machine::ROOT_DISK;
use super::super::{guest, network, said};
use super::vmm::{Disk, Kind, Spec, Vmm};
use crate::scenarios::Failure;

const MIB: u64 = 1 << 20;
/// RAM of guests that do little, MiB.
const RAM_MIB: u64 = 512;
/// Size of the disk for `fio`. It is in the lab VM's memory, because no device is as fast.
const FIO_DISK_BYTES: u64 = 1 << 30;
const COPIED_DISK_BYTES: u64 = 2 << 30;
/// Length of the copied disk's pieces with data, and of the holes between them.
const PIECE_BYTES: u64 = 64 * MIB;

/// Time from the start of the program to the guest's first process. Also the VMM's own memory at that time.
pub(super) fn boot(is_quick: bool) -> Result<Value, Failure> {
    let mut found = Found::default();
    for _ in 0..if is_quick { 1 } else { 7 } {
        for kind in Kind::BOTH {
            let spec = Spec { ram_mib: RAM_MIB, guest: Some(guest::waits()), ..Spec::default() };
            let mut vmm = Vmm::start(kind, &spec)?;
            let (_, time) = vmm.wait_for(guest::CPUS)?;
            found.add(kind, "boot_s", time.as_secs_f64());
            found.add(kind, "resident_mib", vmm.resident_bytes()? as f64 / MIB as f64);
        }
    }
    Ok(found.json())
}

/// Results of `fio` on a disk in memory.
pub(super) fn disk(is_quick: bool) -> Result<Value, Failure> {
    let mut found = Found::default();
    for _ in 0..if is_quick { 1 } else { 3 } {
        for kind in Kind::BOTH {
            let path = PathBuf::from("/tmp/fio.img");
            fill(&path, FIO_DISK_BYTES, FIO_DISK_BYTES)?;
            let spec = Spec {
                ram_mib: RAM_MIB,
                disks: vec![root(), Disk { path, migrate: "none" }],
                guest: Some(guest::job::line(guest::job::FIO)),
                ..Spec::default()
            };
            let mut vmm = Vmm::start(kind, &spec)?;
            for (name, _) in guest::job::FIO_RUNS {
                let (rate, _) = vmm.wait_for(&guest::job::result(name))?;
                found.add(kind, name, rate.parse().map_err(said)?);
            }
        }
    }
    Ok(found.json())
}

/// Results of `iperf3` between guest and lab, in both directions, in Mbit/s.
pub(super) fn network(is_quick: bool) -> Result<Value, Failure> {
    network::make_bridge()?;
    let mut server = std::process::Command::new("iperf3");
    let mut server = server.args(["-s"]).stdout(std::process::Stdio::null()).spawn().map_err(said)?;
    let mut found = Found::default();
    let measure = || {
        for _ in 0..if is_quick { 1 } else { 3 } {
            for kind in Kind::BOTH {
                let spec = Spec {
                    ram_mib: RAM_MIB,
                    disks: vec![root()],
                    has_network: true,
                    guest: Some(guest::job::line(guest::job::IPERF)),
                    ..Spec::default()
                };
                let mut vmm = Vmm::start(kind, &spec)?;
                for (name, _) in guest::job::IPERF_RUNS {
                    let (rate, _) = vmm.wait_for(&guest::job::result(name))?;
                    found.add(kind, name, rate.parse().map_err(said)?);
                }
            }
        }
        Ok(())
    };
    let measured: Result<(), Failure> = { measure }();
    let _ = server.kill();
    let _ = server.wait();
    measured.map(|()| found.json())
}

/// Downtime of a nearly idle guest, as its peer measures it. Also the duration of the complete move.
pub(super) fn downtime(is_quick: bool) -> Result<Value, Failure> {
    let (turns, moves) = if is_quick { (1, 3) } else { (5, 10) };
    let mut found = Found::default();
    for _ in 0..turns {
        for kind in Kind::BOTH {
            let peer = network::Peer::start()?;
            let spec =
                Spec { ram_mib: RAM_MIB, has_network: true, guest: Some(guest::paced()), ..Spec::default() };
            let mut here = Vmm::start(kind, &spec)?;
            here.wait_for(guest::CPUS)?;
            peer.wait_for_numbers(100)?;
            for _ in 0..moves {
                let waiting = Spec { guest: None, ..spec.clone() };
                let mut there = Vmm::start(kind, &waiting)?;
                peer.take_longest_gap();
                let info = here.move_to(&mut there, false)?;
                here = there;
                peer.wait_for_numbers(100)?;
                found.add(kind, "gap_ms", peer.take_longest_gap().as_secs_f64() * 1e3);
                found.add(kind, "downtime_ms", info["downtime"].as_f64().unwrap_or(f64::NAN));
                found.add(kind, "total_ms", info["total-time"].as_f64().unwrap_or(f64::NAN));
            }
        }
    }
    Ok(found.json())
}

/// Move of a disk of 2 GiB, half of it holes. The guest writes 20 MB/s to it meanwhile. Compared with a plain
/// copy of its data.
pub(super) fn copy(is_quick: bool) -> Result<Value, Failure> {
    let bytes = if is_quick { COPIED_DISK_BYTES / 8 } else { COPIED_DISK_BYTES };
    let (from, to) = (PathBuf::from("/tmp/from.img"), PathBuf::from("/tmp/to.img"));
    let mut found = Vec::new();
    for _ in 0..if is_quick { 1 } else { 3 } {
        fill(&from, bytes, PIECE_BYTES)?;
        let plain = plain_copy(&from, &to, bytes)?;
        std::fs::remove_file(&to).map_err(said)?;
        File::create(&to).and_then(|file| file.set_len(bytes)).map_err(said)?;
        let disk = |path: &PathBuf| vec![root(), Disk { path: path.clone(), migrate: "copy" }];
        let spec = Spec {
            ram_mib: RAM_MIB,
            disks: disk(&from),
            guest: Some(guest::job::line(guest::job::WRITES)),
            ..Spec::default()
        };
        let mut here = Vmm::start(Kind::Sterna, &spec)?;
        here.wait_for(&guest::job::result(guest::job::WRITES))?;
        let mut there = Vmm::start(Kind::Sterna, &Spec { guest: None, disks: disk(&to), ..spec.clone() })?;
        let info = here.move_to(&mut there, true)?;
        found.push(json!({
            "plain_copy_s": plain.as_secs_f64(),
            "total_s": info["total-time"].as_f64().unwrap_or(f64::NAN) / 1e3,
            "downtime_ms": info["downtime"],
            "transferred_mib": info["ram"]["transferred"].as_u64().unwrap_or_default() / MIB,
        }));
    }
    Ok(json!(found))
}

/// Bytes sent for a guest of 1 GiB. It has used most of its memory once, and uses little now.
pub(super) fn free(_: bool) -> Result<Value, Failure> {
    let mut found = Vec::new();
    // Linux reports pieces of 2 MiB (order 9) unless its command line sets another order.
    for order in [Some(9), Some(4), Some(0), None] {
        let mut guest = guest::uses_memory(200 * MIB);
        if let Some(order) = order {
            guest.push_str(&format!(" page_reporting.page_reporting_order={order}"));
        }
        let spec = Spec { ram_mib: 1024, reports: order.is_some(), guest: Some(guest), ..Spec::default() };
        let mut here = Vmm::start(Kind::Sterna, &spec)?;
        let (unused, _) = here.wait_for(guest::UNUSED)?;
        // The guest's kernel reports memory two seconds after it was freed.
        std::thread::sleep(Duration::from_secs(20));
        let mut there = Vmm::start(Kind::Sterna, &Spec { guest: None, ..spec.clone() })?;
        let info = here.move_to(&mut there, false)?;
        found.push(json!({
            "reports_pieces_of_order": order,
            "used_mib": spec.ram_mib - unused.parse::<u64>().map_err(said)? / MIB,
            "sent_mib": info["ram"]["transferred"].as_u64().unwrap_or_default() / MIB,
            "total_ms": info["total-time"],
        }));
    }
    Ok(json!(found))
}

fn root() -> Disk {
    Disk { path: ROOT_DISK.into(), migrate: "shared" }
}

/// Makes a file of that length with data in every second piece.
fn fill(path: &Path, bytes: u64, piece: u64) -> Result<(), Failure> {
    let file = File::create(path).map_err(said)?;
    file.set_len(bytes).map_err(said)?;
    let mut data = vec![0; MIB as usize];
    let mut random = fastrand::Rng::with_seed(bytes);
    for at in (0..bytes).step_by(MIB as usize).filter(|at| (at / piece).is_multiple_of(2)) {
        random.fill(&mut data);
        file.write_all_at(&data, at).map_err(said)?;
    }
    Ok(())
}

/// Copies the data of a file through a socket into another file.
fn plain_copy(from: &Path, to: &Path, bytes: u64) -> Result<Duration, Failure> {
    let (mut out, mut into) = UnixStream::pair().map_err(said)?;
    let (from, to) = (File::open(from).map_err(said)?, File::create(to).map_err(said)?);
    to.set_len(bytes).map_err(said)?;
    let pieces = || (0..bytes).step_by(MIB as usize).filter(|at| (at / PIECE_BYTES).is_multiple_of(2));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let mut data = vec![0; MIB as usize];
            for at in pieces() {
                from.read_exact_at(&mut data, at)?;
                out.write_all(&data)?;
            }
            Ok::<_, std::io::Error>(())
        });
        let mut data = vec![0; MIB as usize];
        for at in pieces() {
            into.read_exact(&mut data).map_err(said)?;
            to.write_all_at(&data, at).map_err(said)?;
        }
        sender.join().map_err(|_| "the sender panicked".to_owned())?.map_err(said)
    })?;
    Ok(begin.elapsed())
}

/// Values of both VMMs, in the order of measurement.
#[derive(Default)]
struct Found(Vec<(Kind, &'static str, f64)>);

impl Found {
    fn add(&mut self, kind: Kind, name: &'static str, value: f64) {
        self.0.push((kind, name, value));
    }

    /// For each name: the values, median and 95th percentile of both VMMs, and the ratio of the medians.
    fn json(&self) -> Value {
        let mut names: Vec<&str> = self.0.iter().map(|(_, name, _)| *name).collect();
        names.dedup();
        let mut table = serde_json::Map::new();
        for name in names {
            let of = |kind: Kind| {
                let values = self.0.iter().filter(|value| value.0 == kind && value.1 == name);
                let mut values: Vec<f64> = values.map(|value| value.2).collect();
                values.sort_by(f64::total_cmp);
                values
            };
            let at = |values: &[f64], percent: usize| {
                values
                    .get((values.len() * percent).div_ceil(100).saturating_sub(1))
                    .copied()
                    .unwrap_or(f64::NAN)
            };
            let (ours, theirs) = (of(Kind::Sterna), of(Kind::Qemu));
            table.insert(
                name.to_owned(),
                json!({
                    "sterna": { "p50": at(&ours, 50), "p95": at(&ours, 95), "values": ours },
                    "qemu": { "p50": at(&theirs, 50), "p95": at(&theirs, 95), "values": theirs },
                    "ratio": at(&ours, 50) / at(&theirs, 50),
                }),
            );
        }
        Value::Object(table)
    }
}
