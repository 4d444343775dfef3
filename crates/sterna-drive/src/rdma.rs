//! Checks on both monitors the requirements of `rdma:`, before anything is changed (specs/rdma.md §6.5).
//!
//! The wire does not transfer the other side's settings. So a mismatch would appear in the middle of the migration, as
//! an error that does not name the setting.

use serde_json::Value;
use sterna::Address;

use super::handover::ReturnPath;
use super::side::Side;
pub use super::side::Wanted;
use super::{DriveError, Vm};

const CHUNK_SIZE: &str = "x-rdma-chunk-size";
/// The chunk size, in bytes, of a QEMU that has no parameter for it.
const FIXED_CHUNK: u64 = 1 << 20;
/// Capabilities with which a QEMU refuses `rdma:`, or fails in the middle.
const NOT_OF_QEMU: [&str; 7] = [
    "multifd",
    "zero-copy-send",
    "xbzrle",
    "postcopy-ram",
    "postcopy-preempt",
    "mapped-ram",
    "x-ignore-shared",
];

/// Settings that a migration over `rdma:` needs in addition to the operator's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// The destination must have `return-path` on before it listens.
    pub return_path_there: bool,
    /// The use of `return-path` at the source.
    pub return_path: ReturnPath,
}

/// Refuses settings that cannot work over `address`, which is an `rdma:` address. Returns the additional settings that
/// are needed. `destination` is None if its monitor is unknown.
///
/// # Errors
/// [`DriveError::Unfit`] with the mismatch and how to remove it. Nothing was changed.
pub fn compare(
    source: &mut Vm,
    destination: Option<&mut Vm>,
    address: &Address,
    wanted: Wanted<'_>,
) -> Result<Needs, DriveError> {
    let source = Side::ask(source, wanted)?;
    let destination = destination.map(|destination| Side::ask(destination, wanted)).transpose()?;
    let sides: Vec<&Side<'_>> = [Some(&source), destination.as_ref()].into_iter().flatten().collect();
    refuse_tls(&sides)?;
    refuse_capabilities(&sides)?;
    let Some(destination) = destination else {
        // Without its monitor, assume that the destination may be a QEMU.
        let return_path = if source.is_sterna { ReturnPath::On } else { ReturnPath::AsSet };
        return Ok(Needs { return_path, ..Needs::default() });
    };
    if destination.is_sterna {
        return Ok(Needs::default());
    }
    refuse_open_port(&destination, address)?;
    if !source.is_sterna {
        compare_chunks(&source, &destination)?;
    }
    return_path(&source, &destination)
}

impl Side<'_> {
    /// Bytes that a QEMU registers in one request.
    fn chunk(&self) -> u64 {
        self.parameter(CHUNK_SIZE).and_then(Value::as_u64).unwrap_or(FIXED_CHUNK)
    }
}

fn refuse_tls(sides: &[&Side<'_>]) -> Result<(), DriveError> {
    let Some(side) = sides.iter().find(|side| side.has_tls()) else { return Ok(()) };
    Err(DriveError::Unfit(format!(
        "TLS cannot protect rdma:, because adapters write memory unencrypted ({} has tls-creds): unset tls-creds, or \
         migrate over tcp:",
        side.at
    )))
}

fn refuse_capabilities(sides: &[&Side<'_>]) -> Result<(), DriveError> {
    let Some(qemu) = sides.iter().find(|side| !side.is_sterna) else { return Ok(()) };
    for name in NOT_OF_QEMU {
        if let Some(side) = sides.iter().find(|side| side.has(name)) {
            return Err(DriveError::Unfit(format!(
                "{} ({}) does not support {name} with rdma:, and it is on at {}: switch it off there, and leave out \
                 --cap {name}",
                qemu.at, qemu.version, side.at
            )));
        }
    }
    Ok(())
}

/// Refuses port 0, because a QEMU does not report which port it chose for RDMA.
fn refuse_open_port(destination: &Side<'_>, address: &Address) -> Result<(), DriveError> {
    match address {
        Address::Rdma { port: 0, .. } => Err(DriveError::Unfit(format!(
            "{} ({}) does not report a port that it chooses itself: give rdma:HOST:PORT a port above 0",
            destination.at, destination.version
        ))),
        _ => Ok(()),
    }
}

/// Refuses two QEMUs with a larger chunk at the source. The source requests its own chunk size, and the destination
/// registers at most its own, so the first larger WRITE ends the migration.
fn compare_chunks(source: &Side<'_>, destination: &Side<'_>) -> Result<(), DriveError> {
    let (ours, theirs) = (source.chunk(), destination.chunk());
    if ours <= theirs || source.has("rdma-pin-all") {
        return Ok(());
    }
    let is_known = destination.settings.parameter(CHUNK_SIZE).is_some();
    let mend = match (is_known, destination.listens) {
        (true, false) => format!("`--set {CHUNK_SIZE}={}M` sets both sides", ours >> 20),
        (true, true) => format!(
            "{} listens already, so set it there to {ours} with migrate-set-parameters",
            destination.at
        ),
        (false, _) => {
            format!("{} cannot change it, so use `--set {CHUNK_SIZE}={}M`", destination.version, theirs >> 20)
        }
    };
    Err(DriveError::Unfit(format!(
        "{CHUNK_SIZE} is {} MiB at {} and {} MiB at {}: between two QEMUs the source's value must not be larger, or \
         the running migration fails; {mend}, or use `--cap rdma-pin-all`, with which the sizes may differ",
        ours >> 20,
        source.at,
        theirs >> 20,
        destination.at
    )))
}

/// Chooses the use of `return-path`. Over RDMA it is a separate connection, which a QEMU destination accepts only with
/// the capability. A QEMU source may use the connection before the destination accepts it, which ends the migration.
/// So it is only switched on for such a source if the operator requests it.
fn return_path(source: &Side<'_>, destination: &Side<'_>) -> Result<Needs, DriveError> {
    let return_path = if source.is_sterna { ReturnPath::On } else { ReturnPath::AsSet };
    if !source.has("return-path") || destination.has("return-path") {
        return Ok(Needs { return_path_there: false, return_path });
    }
    if destination.listens {
        return Err(DriveError::Unfit(format!(
            "{} listens without return-path, and therefore does not accept the return path's connection over rdma:. \
             Switch return-path on there before it listens, or leave migrate-incoming to this command",
            destination.at
        )));
    }
    Ok(Needs { return_path_there: true, return_path })
}
