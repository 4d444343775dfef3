//! Loads the devices, and the blocks that are in no file, into the waiting VM.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna::MigrationError;
use sterna_image::{ImageError, LegacyWriter, PageVisitor};
use sterna_qmp::ClientError;
use sterna_standby::HeldGuest;

use crate::{Changed, DriveError, Settings, Vm, blocks, pipe, save};

const NAME: &str = "sterna-takeover";
/// Interval between two queries.
const LOOK: Duration = Duration::from_millis(2);
/// How long loading may take. The stream contains only devices and ROMs.
const LOAD_LIMIT: Duration = Duration::from_secs(60);

/// Refuses a VM whose monitor shows before loading that its machine differs from the guest's.
pub(super) fn check(vm: &mut Vm, machine_type: &str, blocks: &[(String, u64)]) -> Result<(), DriveError> {
    let state = vm.run_state()?;
    if state != "inmigrate" {
        return Err(DriveError::Unfit(format!("it is `{state}` and does not wait for a guest")));
    }
    if Settings::read(vm)?.capability("x-ignore-shared").is_none() {
        return Err(DriveError::Unfit(format!(
            "{} does not know the capability x-ignore-shared: use QEMU 11",
            vm.version()
        )));
    }
    let machine = vm.machine_type()?;
    if machine != machine_type {
        return Err(DriveError::Unfit(format!(
            "it is a {machine}, but the guest's machine is a {machine_type}: start it with the primary's machine type"
        )));
    }
    let Some(there) = vm.blocks()? else { return Ok(()) };
    for (name, length) in blocks {
        match there.iter().find(|block| block.name == *name) {
            None => {
                return Err(DriveError::Unfit(format!(
                    "it does not have the guest's RAM block {name:?}: {}",
                    blocks::advice(name)
                )));
            }
            Some(block) if block.used_bytes != *length && block.most_bytes < *length => {
                return Err(DriveError::Unfit(format!(
                    "its RAM block {name:?} has {} bytes, but the guest's has {length}: {}",
                    block.most_bytes,
                    blocks::advice(name)
                )));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Loads the guest, which stays paused. `is_in_file`: blocks that the VM maps already. Returns the changed settings.
pub(super) fn load(vm: &mut Vm, guest: &HeldGuest, is_in_file: &[bool]) -> Result<Changed, DriveError> {
    let stream = stream(guest, is_in_file).map_err(|error| DriveError::Failed(error.to_string()))?;
    let settings = Settings::read(vm)?;
    let mut capabilities: Vec<(&str, bool)> = save::OFF.iter().map(|name| (*name, false)).collect();
    capabilities.retain(|(name, _)| !matches!(*name, "x-ignore-shared" | "validate-uuid"));
    capabilities.extend([
        ("x-ignore-shared", true),
        ("validate-uuid", guest.shape().configuration.uuid.is_some()),
        // The VM must not open the disks before the guest runs: until then the primary may use them.
        ("late-block-activate", true),
    ]);
    let mut parameters = Map::new();
    parameters.insert("tls-creds".into(), json!(""));
    let changed = settings.change(vm, &capabilities, &parameters)?;
    // While the VM waits, `stop` only means that the guest does not start by itself.
    vm.execute("stop", Value::Null)?;
    let (theirs, ours) = pipe()?;
    vm.send_fd(NAME, theirs.as_fd())?;
    drop(theirs);
    let mut ours = File::from(ours);
    let feeding = std::thread::Builder::new().name("feeding".into()).spawn(move || ours.write_all(&stream));
    let feeding = feeding.map_err(|error| DriveError::Failed(format!("cannot start a thread: {error}")))?;
    vm.migrate_incoming(&format!("fd:{NAME}"))?;
    let loaded = wait_until_loaded(vm);
    // If loading has failed, the VM has closed its end, so the writing thread ends, too.
    let fed = feeding.join();
    loaded?;
    if !matches!(fed, Ok(Ok(()))) {
        return Err(DriveError::Failed("it ended loading before it had read all of the devices".into()));
    }
    match vm.run_state()?.as_str() {
        "paused" | "prelaunch" => Ok(changed),
        state => Err(DriveError::Failed(format!("it is `{state}` after loading instead of paused"))),
    }
}

fn wait_until_loaded(vm: &mut Vm) -> Result<(), DriveError> {
    let until = Instant::now() + LOAD_LIMIT;
    loop {
        let progress = vm.progress()?;
        match progress.status.as_str() {
            "completed" => return Ok(()),
            "failed" => {
                let why = progress.error.unwrap_or_else(|| "no reason was given".to_owned());
                return Err(DriveError::Failed(format!("it did not load the guest: {why}")));
            }
            _ if Instant::now() > until => {
                return Err(DriveError::Failed(format!("it has not loaded the guest within {LOAD_LIMIT:?}")));
            }
            _ => std::thread::sleep(LOOK),
        }
    }
}

/// The guest encoded as a stream with `x-ignore-shared`.
fn stream(guest: &HeldGuest, is_in_file: &[bool]) -> Result<Vec<u8>, MigrationError> {
    let mut shape = guest.shape().clone();
    shape.configuration.capabilities = vec!["x-ignore-shared".to_owned()];
    for block in &mut shape.ram.blocks {
        // The block of a memory backend has address 0. The addresses of other blocks are not read.
        block.address = Some(0);
    }
    let failed = |error: ImageError| MigrationError::system(error.to_string(), error);
    let mut writer = LegacyWriter::new(Vec::new(), "the guest's devices", &shape).map_err(failed)?;
    for index in (0..shape.ram.blocks.len()).filter(|index| is_in_file.get(*index) != Some(&true)) {
        guest.visit_pages(index, |page, content| writer.pages(index, page, content).map_err(failed))?;
    }
    writer.finish(&shape).map_err(failed)
}

/// Starts the guest. An error with `true` means that the guest may run nevertheless.
pub(super) fn start(vm: &mut Vm) -> Result<(), (DriveError, bool)> {
    match vm.execute("cont", Value::Null) {
        Ok(_) => Ok(()),
        Err(error @ DriveError::Monitor { error: ClientError::Refused { .. }, .. }) => Err((error, false)),
        Err(error) => Err((error, true)),
    }
}
