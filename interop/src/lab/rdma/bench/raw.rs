//! Measures the limit of soft-RoCE here: consecutive WRITEs of 1 MiB from resident memory into untouched
//! memory. Both are registered in windows on the way, as in a migration.

use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sterna_ram::{Backing, RamBlock};
use sterna_transport::CancelFlag;
use sterna_transport::rdma::{
    Access, Adapter, ConnectParameters, Connection, Endpoint, EndpointSizes, Fabric, Memory, Registration,
    VerbsFabric, Write,
};

use super::MIB;
use super::content::{Load, fill};
use crate::Failure;
use crate::lab::rdma::ADDRESS;

const LIMIT: Duration = Duration::from_secs(60);
/// There are no messages: the sides are two threads, which exchange keys in memory.
const SIZES: EndpointSizes = EndpointSizes::messages(64, 1, 1).with_writes(32);

/// MiB per second for `bytes` bytes in windows of `window` bytes.
pub(super) fn limit(bytes: u64, window: u64) -> Result<f64, Failure> {
    let (source, destination) = joined(&SIZES)?;
    let from = memory("raw-source", bytes)?;
    fill(&from, Load::Random)?;
    let into = memory("raw-destination", bytes)?;
    let began = Instant::now();
    write_all(&source, &destination, &from, &into, window)?;
    let took = began.elapsed();
    Ok(bytes as f64 / MIB as f64 / took.as_secs_f64())
}

fn write_all(
    source: &Endpoint,
    destination: &Endpoint,
    from: &RamBlock,
    into: &RamBlock,
    window: u64,
) -> Result<(), Failure> {
    let windows = || (0..from.len_bytes()).step_by(window as usize);
    let length = |at: u64| window.min(from.len_bytes() - at);
    std::thread::scope(|scope| {
        let (sender, keys) = channel();
        let registering = scope.spawn(move || {
            let adapter = destination.connection().adapter();
            let mut kept = Vec::new();
            for at in windows() {
                let made = registered(&*adapter, into, at, length(at), Access::REMOTE_WRITE)?;
                if sender.send((made.memory().address(), made.rkey())).is_err() {
                    break;
                }
                kept.push(made);
            }
            Ok::<_, Failure>(kept)
        });
        let adapter = source.connection().adapter();
        let mut kept = Vec::new();
        for at in windows() {
            let local = registered(&*adapter, from, at, length(at), Access::SOURCE)?;
            let Ok((address, rkey)) = keys.recv() else { break };
            for offset in (0..length(at)).step_by(MIB as usize) {
                let length = MIB.min(length(at) - offset) as u32;
                let piece = local.piece(offset as usize, length).ok_or("a piece outside of its window")?;
                let write = Write { from: piece, address: address + offset, rkey };
                source.write(&[write], Some(LIMIT)).map_err(said)?;
            }
            kept.push(local);
        }
        source.flush(Some(LIMIT)).map_err(said)?;
        let theirs = registering.join().map_err(|_| "registering panicked")??;
        // The registrations are dropped only after all writes. This adds little to the measured time.
        drop((theirs, kept));
        Ok(())
    })
}

pub(super) fn registered(
    adapter: &dyn Adapter,
    block: &RamBlock,
    at: u64,
    length: u64,
    access: Access,
) -> Result<Registration, Failure> {
    let memory = Memory::of_block(block, at, length as usize).map_err(said)?;
    adapter.register(memory, access).map_err(said)
}

pub(super) fn memory(name: &str, bytes: u64) -> Result<RamBlock, Failure> {
    RamBlock::new(name, bytes, Backing::Anonymous).map_err(said)
}

/// Two connected endpoints: source and destination.
pub(super) fn joined(sizes: &EndpointSizes) -> Result<(Endpoint, Endpoint), Failure> {
    static FABRICS: OnceLock<[Arc<dyn Fabric>; 2]> = OnceLock::new();
    let [ours, theirs] =
        FABRICS.get_or_init(|| [0, 1].map(|_| Arc::new(VerbsFabric::new()) as Arc<dyn Fabric>));
    let address = ADDRESS.parse().map_err(said)?;
    let listener = theirs.listen(SocketAddr::new(address, 0), 4).map_err(said)?;
    let to = SocketAddr::new(address, listener.local_address().port());
    let flag = CancelFlag::new();
    let source =
        ours.resolve(to, LIMIT, &flag).and_then(|route| route.open(&sizes.attributes())).map_err(said)?;
    let accept = || -> Result<Arc<dyn Connection>, Failure> {
        let request = listener.accept(Some(LIMIT), &flag).map_err(said)?;
        let connection = request.open(&sizes.attributes().with_remote_write()).map_err(said)?;
        connection.establish(&ConnectParameters::accept(b""), LIMIT, &flag).map_err(said)?;
        Ok(connection)
    };
    let destination = std::thread::scope(|scope| {
        let accepting = scope.spawn(accept);
        source.establish(&ConnectParameters::connect(b""), LIMIT, &flag).map_err(said)?;
        accepting.join().map_err(|_| "accepting panicked".to_owned())?
    })?;
    let end = |connection| Endpoint::new(connection, sizes).map_err(said);
    Ok((end(source)?, end(destination)?))
}

pub(super) fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
