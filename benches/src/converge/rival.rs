//! Compares QEMU and Sterna with the same guest, KVM and link: the largest dirty rate at which their
//! migrations end.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::clock::ticks_per_second;
use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::Peer;
use sterna_interop::{LONGEST_GAP_ADDRESS, PACE_ADDRESS};

use crate::{Args, median, pages_per_second};

/// Dirty rates, in percent of the pages that the link carries.
const RATES: [u64; 9] = [40, 60, 70, 80, 85, 90, 95, 100, 110];
/// A migration that has not ended after this time counts as endless.
const PATIENCE: Duration = Duration::from_secs(12);

pub fn all(lab: &Lab, args: &Args) -> Result<Value, Failure> {
    if !lab.kvm {
        return Err("there is no KVM".into());
    }
    let place = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
    let sector = place.path().join("sector");
    lab.boot_sector(args.ram << 20, &sector)?;
    let limit = args.rival_limit;
    println!(
        "downtime-limit {limit} ms, multifd 2, link of {} MB/s, {} MiB of RAM, half of it swept",
        args.link, args.ram
    );
    println!(
        "side | dirty rate, % of the link | ended | limit kept | seconds, median | pause of the guest ms, median"
    );
    let (mut rows, mut sides) = (Vec::new(), Vec::new());
    for side in [Side::Qemu, Side::Sterna] {
        let (mut most_ended, mut most_kept) = (0, 0);
        for percent in RATES {
            let mut tries = Vec::new();
            for _ in 0..args.tries {
                tries.push(once(lab, args, side, &sector, percent)?);
            }
            let ended: Vec<(f64, f64)> = tries.into_iter().flatten().collect();
            let (took, pause): (Vec<f64>, Vec<f64>) = ended.iter().copied().unzip();
            let kept = pause.iter().filter(|pause| **pause <= limit as f64).count();
            println!(
                "{side:?} | {percent:>3} | {}/{tries} | {kept}/{tries} | {:.2} | {:.1}",
                ended.len(),
                median(&took),
                median(&pause),
                tries = args.tries
            );
            rows.push(json!({
                "side": format!("{side:?}"), "percent": percent, "tries": args.tries, "kept": kept, "seconds": took,
                "pause_ms": pause,
            }));
            let most = |count: usize| count * 2 > args.tries;
            if most(kept) {
                most_kept = percent;
            }
            if !most(ended.len()) {
                break;
            }
            most_ended = percent;
        }
        println!(
            "{side:?}: ends up to {most_ended} % of the link; {limit} ms are kept {}",
            if most_kept > 0 { format!("up to {most_kept} %") } else { "at no rate".to_owned() }
        );
        sides.push(json!({
            "side": format!("{side:?}"), "ends_up_to_percent": most_ended, "kept_up_to_percent": most_kept,
        }));
    }
    Ok(json!({ "limit_ms": limit, "link_mb": args.link, "ram_mib": args.ram, "sides": sides, "rows": rows }))
}

/// One migration: seconds, and the guest's downtime in ms. `None` if it did not end.
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
        let parameters =
            json!({"max-bandwidth": 0, "downtime-limit": args.rival_limit, "multifd-channels": 2});
        peer.execute("migrate-set-parameters", parameters)?;
        peer.forget_events()?;
    }
    destination.execute("cont", Value::Null)?;
    source.execute("cont", Value::Null)?;
    // The guest first writes at full speed.
    source.wait_for_ticks(2)?;
    let pace = (ticks_per_second() / pages_per_second(args, percent)).max(1) as u32;
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
