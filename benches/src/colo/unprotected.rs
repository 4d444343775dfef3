//! What protections cost a migration that has none: an earlier `sterna` beside this one, in turns.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::{Peer, Settings};

use crate::Failure;
use crate::pauses::Times;
use crate::process::number;

const PIECE_BYTES: usize = 1 << 20;
const CHANNELS: u8 = 2;

/// One program's migrations.
pub(crate) struct Migrations {
    pub(crate) times: Times,
    /// Bytes of RAM that the last one sent.
    pub(crate) bytes: u64,
}

/// So many migrations of each program, in turns: the earlier one's, this one's.
pub(crate) fn measure(before: &Path, now: &Path, bytes: u64, tries: u32) -> Result<[Migrations; 2], Failure> {
    let (mut times, mut sent) = ([Vec::new(), Vec::new()], [0, 0]);
    for turn in 0..tries {
        // The first of a pair is not always the same.
        let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            let (took, bytes) = migrate([before, now][which], bytes)?;
            times[which].push(took);
            sent[which] = bytes;
        }
    }
    let mut sent = sent.into_iter();
    Ok(times.map(|times| Migrations { times: Times::new(times), bytes: sent.next().unwrap_or_default() }))
}

/// A guest that stands, whose memory nothing shrinks.
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
    Ok((took, number(&query["ram"], "transferred")?))
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
