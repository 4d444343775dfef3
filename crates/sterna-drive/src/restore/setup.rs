//! Checks the requirements of a restore, and changes the VM's settings for it.

use serde_json::{Map, json};
use sterna_image::Form;

use super::{RestoreRequest, Subject};
use crate::{Changed, DriveError, Settings, Vm, save};

/// Refuses a VM that cannot receive a guest.
pub(super) fn check(vm: &mut Vm, settings: &Settings, request: &RestoreRequest) -> Result<(), DriveError> {
    if request.channels == Some(0) {
        return Err(DriveError::Request("0 channels cannot carry pages: use 1 to 255".into()));
    }
    check_waits(vm, settings)
}

/// Refuses a VM that does not wait for a guest, or that already listens at an address.
pub(super) fn check_waits(vm: &mut Vm, settings: &Settings) -> Result<(), DriveError> {
    let state = vm.run_state()?;
    if state != "inmigrate" {
        return Err(DriveError::Unfit(format!(
            "{} is `{state}` and cannot receive a guest: start a VM with `-incoming defer` there",
            vm.at()
        )));
    }
    let status = vm.progress()?.status;
    if status != "none" || settings.capability("multifd").is_none() {
        return Err(DriveError::Unfit(format!(
            "{} already waits for a guest at another address (`{status}`): start it with `-incoming defer`",
            vm.at()
        )));
    }
    Ok(())
}

/// Number of threads that read pages.
pub(super) fn channels(subject: &Subject, request: &RestoreRequest) -> u32 {
    save::channels(subject.form(), request.channels, save::READERS)
}

/// Changes the VM's settings for the restore.
pub(super) fn change(
    vm: &mut Vm,
    settings: &Settings,
    subject: &Subject,
    request: &RestoreRequest,
    is_direct: bool,
) -> Result<Changed, DriveError> {
    let is_mapped = subject.form() == Form::Mapped;
    if is_mapped && settings.capability("mapped-ram").is_none() {
        return Err(DriveError::Unfit(format!(
            "{} ({}) does not support mapped-ram: convert the image to the legacy format (`sterna convert`)",
            vm.at(),
            vm.version()
        )));
    }
    let shape = subject.shape();
    let mut capabilities: Vec<(&str, bool)> = save::OFF.iter().map(|name| (*name, false)).collect();
    // These two capabilities must have the values that the image was saved with.
    capabilities.retain(|(name, _)| !matches!(*name, "x-ignore-shared" | "validate-uuid"));
    capabilities.extend([
        ("x-ignore-shared", shape.has_capability("x-ignore-shared")),
        ("validate-uuid", shape.configuration.uuid.is_some()),
        ("events", true),
        ("mapped-ram", is_mapped),
        ("multifd", is_mapped),
    ]);
    let mut parameters = Map::new();
    parameters.insert("tls-creds".into(), json!(""));
    parameters.insert("direct-io".into(), json!(is_direct));
    if is_mapped {
        parameters.insert("multifd-channels".into(), json!(channels(subject, request)));
        parameters.insert("multifd-compression".into(), json!("none"));
    }
    settings.change(vm, &capabilities, &parameters)
}
