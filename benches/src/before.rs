//! Measures the cost of new features for a migration that uses none of them. It compares an earlier `sterna`
//! with this one.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Failure;
use crate::goal::{Bound, Goal};
use crate::machines::{Lab, Role, Side};
use crate::peer::{Peer, Settings};
use serde_json::{Value, json};

const PIECE_BYTES: usize = 1 << 20;
const CHANNELS: u8 = 2;

/// Results of one program's migrations.
pub struct Migrations {
    /// Durations, sorted.
    pub times: Vec<Duration>,
    /// Bytes of RAM that the last migration sent.
    pub bytes: u64,
}

/// Runs `tries` migrations of each program, alternating. Returns the results of the earlier program, then of
/// this one.
pub fn measure(before: &Path, now: &Path, bytes: u64, tries: u32) -> Result<[Migrations; 2], Failure> {
    let (mut times, mut sent) = ([Vec::new(), Vec::new()], [0, 0]);
    for turn in 0..tries {
        // The order within a pair alternates, so that neither program always runs first.
        let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            let (took, bytes) = migrate([before, now][which], bytes)?;
            times[which].push(took);
            sent[which] = bytes;
        }
    }
    let mut sent = sent.into_iter();
    Ok(times.map(|mut times| {
        times.sort_unstable();
        Migrations { times, bytes: sent.next().unwrap_or_default() }
    }))
}

impl Migrations {
    /// Median duration in ms.
    fn median_ms(&self) -> f64 {
        let middle = self.times.get(self.times.len().saturating_sub(1).div_ceil(2));
        middle.map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    }
}

/// Goals that compare both programs in `what`.
pub fn goals([before, now]: &[Migrations; 2], what: &str) -> Vec<Goal> {
    let (earlier, later) = (before.median_ms(), now.median_ms());
    vec![
        Goal {
            measured: format!("{:.3} ({later:.0} ms, {earlier:.0} before)", later / earlier),
            ..Goal::of(
                &format!("{what}: median time against that before"),
                later / earlier,
                "",
                Bound::AtMost(1.01),
            )
        },
        Goal {
            what: format!("{what}: bytes of RAM"),
            measured: format!("{}, {} before", now.bytes, before.bytes),
            goal: "the same".to_owned(),
            is_short: now.bytes != before.bytes,
        },
    ]
}

/// Migrates a stopped guest whose memory does not compress.
fn migrate(sterna: &Path, bytes: u64) -> Result<(Duration, u64), Failure> {
    let lab = Lab { root: None, sterna: sterna.to_owned(), kvm: false, namespace: None };
    let mut source = lab.start(Side::Sterna, Role::Source, bytes)?;
    let mut destination = lab.start(Side::Sterna, Role::Destination, bytes)?;
    fill(&source)?;
    let settings = Settings { channels: Some(CHANNELS), ..Settings::default() };
    source.prepare(&settings)?;
    destination.prepare(&settings)?;
    let address = destination.listen()?;
    let began = Instant::now();
    source.execute("migrate", json!({ "uri": address }))?;
    source.wait_until_completed()?;
    destination.wait_until_completed()?;
    let took = began.elapsed();
    let query = source.execute("query-migrate", Value::Null)?;
    let sent = query["ram"]["transferred"].as_u64();
    Ok((took, sent.ok_or_else(|| format!("it does not say what was transferred: {query}"))?))
}

fn fill(peer: &Peer) -> Result<(), Failure> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut piece = vec![0; PIECE_BYTES];
    for ram in peer.ram()? {
        let length = ram.metadata().map_err(|error| error.to_string())?.len();
        for at in (0..length).step_by(PIECE_BYTES) {
            random.fill(&mut piece);
            ram.write_all_at(&piece, at).map_err(|error| format!("guest RAM: {error}"))?;
        }
    }
    Ok(())
}
