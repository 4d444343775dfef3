//! Migrations that are cut at random bytes. Each ends with exactly one running guest.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::forwarder::Forwarder;
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::machines::Lab;
use sterna_benches::peer::Peer;

use crate::Args;
use crate::pair::{Pair, relays_over_a_network};

/// RAM of the guests, bytes: little, so that many cuts lie in the handover.
const RAM_BYTES: u64 = 48 << 20;
/// `--reconnect-window`, seconds. Some outages are longer.
const WINDOW: u64 = 2;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Moved,
    Stayed,
}

pub(crate) fn measure(args: &Args) -> Result<Vec<Goal>, Failure> {
    let lab = args.lab(None)?;
    let own = control(&lab)?;
    println!("\nQEMU itself writes these pages when it loads a guest's devices: {own:?}");
    let (mut moved, mut stayed, mut wrong) = (0, 0, 0);
    for number in 0..u64::from(args.count) {
        let seed = args.seed + number;
        match once(&lab, &own, &mut fastrand::Rng::with_seed(seed)) {
            Ok(End::Moved) => moved += 1,
            Ok(End::Stayed) => stayed += 1,
            Err(why) => {
                wrong += 1;
                println!("seed {seed}: {why}");
            }
        }
        // A long run that is stopped has told how far it was.
        if (number + 1) % 50 == 0 {
            println!("{} migrations: {moved} moved, {stayed} stayed, {wrong} wrong", number + 1);
        }
    }
    println!("\n{} migrations with random cuts: {moved} moved, {stayed} stayed, {wrong} wrong", args.count);
    Ok(vec![Goal::of(
        &format!(
            "{} migrations with random cuts, seed {}: without exactly one running guest",
            args.count, args.seed
        ),
        f64::from(wrong),
        &format!("{moved} moved, {stayed} stayed"),
        Bound::AtMost(0.0),
    )])
}

/// The pages that differ after a migration without relays.
fn control(lab: &Lab) -> Result<Vec<usize>, Failure> {
    let mut pair = Pair::begin(lab, RAM_BYTES)?;
    let target = pair.listen_on_unix()?;
    pair.source.execute("cont", Value::Null)?;
    pair.source.wait_for_ticks(1)?;
    pair.migrate(&target)?;
    differing(&pair.source, &pair.destination)
}

fn once(lab: &Lab, own: &[usize], random: &mut fastrand::Rng) -> Result<End, Failure> {
    let mut pair = Pair::begin(lab, RAM_BYTES)?;
    let target = pair.listen_on_unix()?;
    let place = pair.source.directory().to_owned();
    let (source, network, destination) = relays_over_a_network(lab, &place, &target, WINDOW)?;
    pair.source.execute("migrate-set-parameters", json!({"max-bandwidth": 60_000_000}))?;
    pair.source.execute("cont", Value::Null)?;
    pair.source.wait_for_ticks(1)?;
    let said = || format!("source: {}destination: {}", source.said(), destination.said());
    pair.source.execute("migrate", json!({ "uri": source.address }))?;
    cut(&network, random, &mut pair.source)?;
    verdict(pair, own).map_err(|why| format!("{why}\n{}", said()))
}

/// Cuts one to five times. The guest does not start by itself at the destination, so that its RAM can be compared.
fn cut(network: &Forwarder, random: &mut fastrand::Rng, source: &mut Peer) -> Result<(), Failure> {
    let mut cuts: Vec<u64> = (0..random.u32(1..=5)).map(|_| random.u64(..RAM_BYTES * 11 / 10)).collect();
    cuts.sort_unstable();
    for at in cuts {
        let began = Instant::now();
        while network.carried() < at && began.elapsed() < PATIENCE {
            let query = source.execute("query-migrate", Value::Null)?;
            if matches!(query["status"].as_str(), Some("completed" | "failed")) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        let away = if random.u8(..10) == 0 { 3000 } else { random.u64(..300) };
        if random.bool() { network.cut_one() } else { network.cut(Duration::from_millis(away)) }
    }
    Ok(())
}

fn verdict(mut pair: Pair, own: &[usize]) -> Result<End, Failure> {
    let began = Instant::now();
    loop {
        let source = state(&mut pair.source)?;
        // A QEMU whose incoming migration fails may end.
        let destination = state(&mut pair.destination).unwrap_or_else(|_| "ended".to_owned());
        match (source.as_str(), destination.as_str()) {
            ("postmigrate", "paused") => break,
            ("running", "ended") => {
                let lines = 2;
                pair.source.wait_for_ticks(lines)?;
                return Ok(End::Stayed);
            }
            ("running", _) if is_failed(&mut pair.source)? => {
                pair.source.wait_for_ticks(2)?;
                return if destination == "running" {
                    Err("two guests run".to_owned())
                } else {
                    Ok(End::Stayed)
                };
            }
            ("running" | "finish-migrate" | "postmigrate", "inmigrate" | "paused" | "ended") => {}
            other => return Err(format!("the guests are {other:?}")),
        }
        if began.elapsed() > PATIENCE {
            return Err(format!("no end: source {source}, destination {destination}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut wrong = differing(&pair.source, &pair.destination)?;
    wrong.retain(|page| !own.contains(page));
    if !wrong.is_empty() {
        return Err(format!("pages of RAM differ: {wrong:?}"));
    }
    pair.destination.execute("cont", Value::Null)?;
    pair.destination.wait_for_ticks(1)?;
    Ok(End::Moved)
}

fn state(peer: &mut Peer) -> Result<String, Failure> {
    let status = peer.execute("query-status", Value::Null)?;
    Ok(status["status"].as_str().unwrap_or_default().to_owned())
}

fn is_failed(peer: &mut Peer) -> Result<bool, Failure> {
    Ok(peer.execute("query-migrate", Value::Null)?["status"] == "failed")
}

/// The numbers of the pages in which the machines' RAM differs.
fn differing(one: &Peer, other: &Peer) -> Result<Vec<usize>, Failure> {
    let read = |peer: &Peer| -> Result<Vec<u8>, Failure> {
        let ram = peer.ram()?.into_iter().next().ok_or("a machine without memory files")?;
        let mut bytes = vec![0; RAM_BYTES as usize];
        ram.read_exact_at(&mut bytes, 0).map_err(|error| format!("guest RAM: {error}"))?;
        Ok(bytes)
    };
    let (one, other) = (read(one)?, read(other)?);
    let pairs = one.chunks(4096).zip(other.chunks(4096)).enumerate();
    Ok(pairs.filter(|(_, (one, other))| one != other).map(|(page, _)| page).collect())
}
