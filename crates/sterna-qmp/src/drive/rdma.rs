//! What `rdma:` needs of both sides, found on their monitors before anything is changed (specs/rdma.md §6.5).
//!
//! Neither side learns of the other's settings on the wire, so what does not match would show in the middle of the
//! migration, as an error that does not name it.

use serde_json::{Map, Value};
use sterna::Address;

use super::handover::ReturnPath;
use super::{DriveError, Settings, Vm};

const CHUNK_SIZE: &str = "x-rdma-chunk-size";
/// The chunk of a QEMU whose chunk size cannot be set.
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

/// What an operator wants for a migration over `rdma:`, on both sides.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Capabilities that will be switched on.
    pub capabilities: &'a [String],
    /// Parameters that will be set.
    pub parameters: &'a Map<String, Value>,
    /// Whether both sides will get TLS credentials.
    pub has_tls: bool,
}

/// One side's monitor, with what it will be set to.
struct Side<'a> {
    at: String,
    version: String,
    is_sterna: bool,
    listens: bool,
    settings: Settings,
    /// Nothing is set any more at a destination that listens already.
    wanted: Option<Wanted<'a>>,
}

/// What a migration over `rdma:` needs besides what the operator wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// The destination must have `return-path` before it listens.
    pub return_path_there: bool,
    /// What the source must have.
    pub return_path: ReturnPath,
}

/// Refuses what cannot work over `address`, which is of the kind `rdma:`, between `source` and `destination`, if that
/// has a monitor; else says what is needed.
///
/// # Errors
/// [`DriveError::Unfit`] with what does not match and what mends it. Nothing was changed.
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
    let Some(destination) = destination.filter(|destination| !destination.is_sterna) else {
        return Ok(Needs::default());
    };
    refuse_open_port(&destination, address)?;
    if !source.is_sterna {
        compare_chunks(&source, &destination)?;
    }
    return_path(&source, &destination)
}

impl<'a> Side<'a> {
    fn ask(vm: &mut Vm, wanted: Wanted<'a>) -> Result<Self, DriveError> {
        let listens = vm.progress()?.status == "setup";
        Ok(Self {
            at: vm.at().to_owned(),
            version: vm.version(),
            is_sterna: vm.is_sterna(),
            listens,
            settings: Settings::read(vm)?,
            wanted: (!listens).then_some(wanted),
        })
    }

    fn has(&self, capability: &str) -> bool {
        let is_wanted = |wanted: &Wanted<'_>| wanted.capabilities.iter().any(|name| name == capability);
        self.settings.capability(capability) == Some(true) || self.wanted.as_ref().is_some_and(is_wanted)
    }

    fn has_tls(&self) -> bool {
        let credentials = self.parameter("tls-creds").and_then(Value::as_str);
        credentials.is_some_and(|id| !id.is_empty()) || self.wanted.is_some_and(|wanted| wanted.has_tls)
    }

    /// What it will be; `None` if this VM does not know the parameter.
    fn parameter(&self, name: &str) -> Option<&Value> {
        let present = self.settings.parameter(name)?;
        self.wanted.and_then(|wanted| wanted.parameters.get(name)).or(Some(present))
    }

    /// Bytes that a QEMU registers at once.
    fn chunk(&self) -> u64 {
        self.parameter(CHUNK_SIZE).and_then(Value::as_u64).unwrap_or(FIXED_CHUNK)
    }
}

fn refuse_tls(sides: &[&Side<'_>]) -> Result<(), DriveError> {
    let Some(side) = sides.iter().find(|side| side.has_tls()) else { return Ok(()) };
    Err(DriveError::Unfit(format!(
        "TLS cannot protect rdma:, since adapters write memory as it is ({} has tls-creds): unset tls-creds, or migrate \
         over tcp:",
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

/// QEMU takes an address of RDMA with port 0 and never says which one it got.
fn refuse_open_port(destination: &Side<'_>, address: &Address) -> Result<(), DriveError> {
    match address {
        Address::Rdma { port: 0, .. } => Err(DriveError::Unfit(format!(
            "{} ({}) does not tell the port that it chooses itself: give rdma:HOST:PORT a port above 0",
            destination.at, destination.version
        ))),
        _ => Ok(()),
    }
}

/// Between two QEMUs the source asks for as much as its own chunk and the destination registers no more than its own,
/// so that the first WRITE beyond it ends the migration.
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
        "{CHUNK_SIZE} is {} MiB at {} and {} MiB at {}: the source's must not be larger between two QEMUs, or the \
         migration fails in the middle; {mend}, or use `--cap rdma-pin-all`, with which the sizes may differ",
        ours >> 20,
        source.at,
        theirs >> 20,
        destination.at
    )))
}

/// Over RDMA the return path is a connection of its own, which a QEMU destination accepts only with the capability. Towards
/// one, a QEMU source may use it before it was accepted, which ends the migration: so it gets none that nobody asked for.
fn return_path(source: &Side<'_>, destination: &Side<'_>) -> Result<Needs, DriveError> {
    let return_path = if source.is_sterna { ReturnPath::On } else { ReturnPath::AsSet };
    if !source.has("return-path") || destination.has("return-path") {
        return Ok(Needs { return_path_there: false, return_path });
    }
    if destination.listens {
        return Err(DriveError::Unfit(format!(
            "{} listens without return-path, and so does not accept the return path's own connection over rdma:: \
             switch it on there before it listens, or leave migrate-incoming to this command",
            destination.at
        )));
    }
    Ok(Needs { return_path_there: true, return_path })
}
