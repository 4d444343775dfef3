//! Migrations over loopback between two machines.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Failure;
use crate::chain::Chain;
use crate::figures::Sample;
use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::{Peer, Settings};

/// Moves a stopped guest. The time is from the command until both sides report the end.
pub fn idle(chain: &Chain<'_>, settings: &Settings, role: Role, check: bool) -> Result<Sample, Failure> {
    let mut source = chain.source()?;
    let mut destination = chain.destination(role)?;
    let sample = migrate(&mut source, &mut destination, settings)?;
    drop(source);
    chain.arrived(destination, check)?;
    Ok(sample)
}

/// Moves a guest that repeatedly writes half of its RAM. Checks that the guest keeps running.
pub fn writing(
    lab: &Lab,
    side: Side,
    bytes: u64,
    sector: &std::path::Path,
    settings: &Settings,
) -> Result<Sample, Failure> {
    let mut source = lab.start_writer(side, Role::Source, bytes, sector)?;
    let mut destination = lab.start_writer(side, Role::Destination, bytes, sector)?;
    // With `cont` in advance, the destination starts the guest by itself, as is usual in operation.
    destination.execute("cont", Value::Null)?;
    source.execute("cont", Value::Null)?;
    source.wait_for_ticks(2)?;
    let mut sample = migrate(&mut source, &mut destination, settings)?;
    let query = source.execute("query-migrate", Value::Null)?;
    sample.downtime = query["downtime"].as_u64().map(Duration::from_millis);
    drop(source);
    destination.wait_for_ticks(2)?;
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
