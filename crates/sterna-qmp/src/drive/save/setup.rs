//! What must hold before a save, and what the VM is set to for it.

use serde_json::{Map, Value, json};
use sterna_image::Form;

use super::request::SaveRequest;
use crate::drive::{Changed, DriveError, Settings, Vm};

/// Capabilities that a save into a file must not have, for they are refused with it, fail it at the end
/// (`return-path`), destroy the guest's RAM on the way (`release-ram`) or give another image
/// (specs/mapped-ram.md §5).
pub(crate) const OFF: [&str; 16] = [
    "xbzrle",
    "rdma-pin-all",
    "auto-converge",
    "postcopy-ram",
    "postcopy-preempt",
    "postcopy-blocktime",
    "x-colo",
    "release-ram",
    "return-path",
    "pause-before-switchover",
    "x-ignore-shared",
    "validate-uuid",
    "background-snapshot",
    "zero-copy-send",
    "switchover-ack",
    "dirty-limit",
];

/// Refuses what cannot be saved, before anything is changed. Gives back the run state.
pub(super) fn check(vm: &mut Vm, settings: &Settings, request: &SaveRequest) -> Result<String, DriveError> {
    let unfit = |text: String| Err(DriveError::Unfit(text));
    if request.format.form == Form::Mapped && settings.capability("mapped-ram").is_none() {
        return unfit(format!(
            "{} ({}) does not support mapped-ram; save as legacy or libvirt-raw",
            vm.at(),
            vm.version()
        ));
    }
    if request.format.is_libvirt != request.domain.is_some() {
        return Err(DriveError::Request(if request.format.is_libvirt {
            format!(
                "{} needs the domain's XML: virsh dumpxml --migratable --inactive DOMAIN, and its name here",
                request.format
            )
        } else {
            format!("only libvirt's formats contain XML and cookie; {} does not", request.format)
        }));
    }
    if request.channels == Some(0) {
        return Err(DriveError::Request("0 channels cannot carry pages: use 1 to 255".into()));
    }
    let state = vm.run_state()?;
    if state == "inmigrate" {
        return unfit(format!("{} waits for a migration and has no guest to save", vm.at()));
    }
    if state == "postmigrate" {
        return unfit(format!(
            "the guest of {} is stopped because it was migrated or saved before, and is not saved twice: `cont` \
             there first, if it runs nowhere else",
            vm.at()
        ));
    }
    let progress = vm.progress()?;
    if !progress.is_over() {
        return unfit(format!(
            "{} already migrates (`{}`): wait for its end or cancel it (`sterna cancel`)",
            vm.at(),
            progress.status
        ));
    }
    Ok(state)
}

/// Threads that carry pages of this form. QEMU's each have one piece on its way: their number is the depth of the
/// disk's queue, and has little to do with processors. The writer gains nothing from more than four.
pub(crate) fn channels(form: Form, wanted: Option<u8>, default: u8) -> u32 {
    match form {
        Form::Mapped => wanted.unwrap_or(default).into(),
        Form::Legacy => 1,
    }
}

/// Threads that write pages if nobody says how many.
pub(super) const WRITERS: u8 = 4;
/// Threads that read pages if nobody says how many.
pub(crate) const READERS: u8 = 8;

/// Sets the VM up. `is_direct`: its page descriptors go past the page cache.
pub(super) fn change(
    vm: &mut Vm,
    settings: &Settings,
    request: &SaveRequest,
    is_direct: bool,
) -> Result<Changed, DriveError> {
    let is_mapped = request.format.form == Form::Mapped;
    let mut capabilities: Vec<(&str, bool)> = OFF.iter().map(|name| (*name, false)).collect();
    capabilities.extend([("events", true), ("mapped-ram", is_mapped), ("multifd", is_mapped)]);
    let mut parameters = Map::new();
    let mut set = |name: &str, value: Value| parameters.insert(name.to_owned(), value);
    set("max-bandwidth", json!(0));
    set("tls-creds", json!(""));
    if is_mapped {
        set("multifd-channels", json!(channels(request.format.form, request.channels, WRITERS)));
        set("multifd-compression", json!("none"));
        set("zero-page-detection", json!("multifd"));
    }
    // Always said: QEMU 11.1 crashes if it is on from before and finds no descriptor for it
    // (specs/libvirt-save.md §9).
    set("direct-io", json!(is_direct));
    settings.change(vm, &capabilities, &parameters)
}
