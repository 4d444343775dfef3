//! Migrations over loopback between two machines.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_interop::ticks::ticks;

use crate::Failure;
use crate::figures::Sample;
use crate::machines::{Chain, Lab, Role, Side};
use crate::peer::{Peer, Settings};

/// A guest may take so long for its next lines.
const LIFE_LIMIT: Duration = Duration::from_secs(60);

/// Moves a stopped guest; timed from the command until both sides say that it is over.
pub fn idle(chain: &Chain<'_>, settings: &Settings, role: Role, check: bool) -> Result<Sample, Failure> {
    let mut source = chain.source()?;
    let mut destination = chain.destination(role)?;
    let sample = migrate(&mut source, &mut destination, settings)?;
    drop(source);
    chain.arrived(destination, check)?;
    Ok(sample)
}

/// Moves a guest that writes half of its RAM over and over, and sees to it that it goes on.
pub fn writing(
    lab: &Lab,
    side: Side,
    bytes: u64,
    sector: &std::path::Path,
    settings: &Settings,
) -> Result<Sample, Failure> {
    let mut source = lab.start_writer(side, Role::Source, bytes, sector)?;
    let mut destination = lab.start_writer(side, Role::Destination, bytes, sector)?;
    // The destination goes on by itself, as operators have it.
    destination.execute("cont", Value::Null)?;
    source.execute("cont", Value::Null)?;
    wait_for_life(&source, 2)?;
    let mut sample = migrate(&mut source, &mut destination, settings)?;
    let query = source.execute("query-migrate", Value::Null)?;
    sample.downtime = query["downtime"].as_u64().map(Duration::from_millis);
    drop(source);
    wait_for_life(&destination, 2)?;
    Ok(sample)
}

fn migrate(source: &mut Peer, destination: &mut Peer, settings: &Settings) -> Result<Sample, Failure> {
    destination.prepare(settings)?;
    source.prepare(settings)?;
    let address = destination.listen()?;
    let (cpu, began) = (source.cpu() + destination.cpu(), Instant::now());
    source.execute("migrate", json!({ "uri": address }))?;
    source.wait_until_completed()?;
    destination.wait_until_completed()?;
    let took = began.elapsed();
    Ok(Sample { took, cpu: (source.cpu() + destination.cpu()).saturating_sub(cpu), ..Sample::default() })
}

/// Waits for lines of the guest on the serial port, all of them good.
fn wait_for_life(peer: &Peer, lines: usize) -> Result<(), Failure> {
    let deadline = Instant::now() + LIFE_LIMIT;
    loop {
        let said = std::fs::read(peer.directory().join("serial")).unwrap_or_default();
        let ticks = ticks(&String::from_utf8_lossy(&said));
        if let Some(bad) = ticks.iter().find(|tick| !tick.ok) {
            return Err(format!("the guest's memory changed: its line {} says so", bad.number));
        }
        if ticks.len() >= lines {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err("the guest shows no life".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
