//! QEMU and Sterna, the same guest, the same KVM, the same link: up to which dirty rate they come to an end.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::clock::ticks_per_second;
use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::Peer;
use sterna_interop::{LONGEST_GAP_ADDRESS, PACE_ADDRESS};

use crate::{Args, median};

const LIMIT_MS: u64 = 100;
/// Dirty rates, in percent of what the link carries.
const RATES: [u64; 9] = [40, 60, 70, 80, 85, 90, 95, 100, 110];
/// What has not ended then does not end.
const PATIENCE: Duration = Duration::from_secs(12);
const PAGE_BYTES: u64 = 4096;

pub fn all(lab: &Lab, args: &Args) -> Result<Value, Failure> {
    if !lab.kvm {
        return Err("there is no KVM".into());
    }
    let place = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
    let sector = place.path().join("sector");
    lab.boot_sector(args.ram << 20, &sector)?;
    println!(
        "downtime-limit {LIMIT_MS} ms, multifd 2, link of {} MB/s, {} MiB of RAM, half of it swept",
        args.link, args.ram
    );
    println!("side | dirty rate, % of the link | ended | seconds, median | pause of the guest ms, median");
    let mut rows = Vec::new();
    for side in [Side::Qemu, Side::Sterna] {
        let mut best = 0;
        for percent in RATES {
            let mut tries = Vec::new();
            for _ in 0..args.tries {
                tries.push(once(lab, args, side, &sector, percent)?);
            }
            let ended: Vec<(f64, f64)> = tries.into_iter().flatten().collect();
            let (took, pause): (Vec<f64>, Vec<f64>) = ended.iter().copied().unzip();
            println!(
                "{side:?} | {percent:>3} | {}/{} | {:.2} | {:.1}",
                ended.len(),
                args.tries,
                median(&took),
                median(&pause)
            );
            rows.push(json!({
                "side": format!("{side:?}"), "percent": percent, "tries": args.tries, "seconds": took, "pause_ms": pause,
            }));
            if ended.len() * 2 <= args.tries {
                break;
            }
            best = percent;
        }
        println!("{side:?}: up to {best} % of the link");
    }
    Ok(rows.into())
}

/// One migration: seconds and the guest's pause in ms; None if it did not end.
fn once(
    lab: &Lab,
    args: &Args,
    side: Side,
    sector: &Path,
    percent: u64,
) -> Result<Option<(f64, f64)>, Failure> {
    let mut source = lab.start_writer(side, Role::Source, args.ram << 20, sector)?;
    let mut destination = lab.start_writer(side, Role::Destination, args.ram << 20, sector)?;
    for peer in [&mut source, &mut destination] {
        let on = ["events", "multifd"].map(|name| json!({"capability": name, "state": true}));
        peer.execute("migrate-set-capabilities", json!({ "capabilities": on }))?;
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": LIMIT_MS, "multifd-channels": 2});
        peer.execute("migrate-set-parameters", parameters)?;
        peer.forget_events()?;
    }
    destination.execute("cont", Value::Null)?;
    source.execute("cont", Value::Null)?;
    // At full speed at first.
    source.wait_for_ticks(2)?;
    let rate = args.link * 1_000_000 * percent / 100 / PAGE_BYTES;
    let pace = (ticks_per_second() / rate).max(1) as u32;
    write_word(&source, PACE_ADDRESS, pace)?;
    std::thread::sleep(Duration::from_millis(300));
    let address = destination.listen()?;
    write_word(&source, LONGEST_GAP_ADDRESS, 0)?;
    let began = Instant::now();
    source.execute("migrate", json!({ "uri": address }))?;
    if let Err(why) = source.wait_until_over(PATIENCE) {
        let query = source.execute("query-migrate", Value::Null)?;
        if query["status"] != "active" {
            return Err(why);
        }
        return Ok(None);
    }
    let took = began.elapsed().as_secs_f64();
    destination.wait_until_completed()?;
    destination.wait_for_ticks(1)?;
    let gap = f64::from(read_word(&destination, LONGEST_GAP_ADDRESS)?);
    Ok(Some((took, gap / ticks_per_second() as f64 * 1e3)))
}

fn write_word(peer: &Peer, address: u64, value: u32) -> Result<(), Failure> {
    low_ram(peer)?.write_all_at(&value.to_le_bytes(), address).map_err(|error| format!("guest RAM: {error}"))
}

fn read_word(peer: &Peer, address: u64) -> Result<u32, Failure> {
    let mut word = [0; 4];
    low_ram(peer)?.read_exact_at(&mut word, address).map_err(|error| format!("guest RAM: {error}"))?;
    Ok(u32::from_le_bytes(word))
}

/// The memory file whose first byte is physical address 0.
fn low_ram(peer: &Peer) -> Result<std::fs::File, Failure> {
    peer.ram()?.into_iter().next().ok_or_else(|| "a machine without memory files".to_owned())
}
