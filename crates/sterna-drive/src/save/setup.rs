//! Checks the requirements of a save, and changes the VM's settings for it.

use serde_json::{Map, Value, json};
use sterna_image::model::{Domain, DomainMachine};
use sterna_image::{Form, Format};

use super::request::SaveRequest;
use crate::{Changed, DriveError, Settings, Vm, readiness};

/// Capabilities that must be off during a save into a file. They are refused, make the save fail at its end
/// (`return-path`), destroy the guest's RAM meanwhile (`release-ram`), or change the image's format
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

/// Where the VM writes the pages: an image in Sterna's own format is made here, from a stream.
pub(super) fn form(request: &SaveRequest) -> Form {
    if request.format == Format::Sterna { Form::Legacy } else { request.format.form() }
}

/// Refuses a VM that cannot be saved, before anything is changed. Returns the run state.
pub(super) fn check(vm: &mut Vm, settings: &Settings, request: &SaveRequest) -> Result<String, DriveError> {
    let unfit = |text: String| Err(DriveError::Unfit(text));
    if form(request) == Form::Mapped && settings.capability("mapped-ram").is_none() {
        return unfit(format!(
            "{} ({}) does not support mapped-ram; save as legacy or libvirt-raw",
            vm.at(),
            vm.version()
        ));
    }
    if request.format.is_libvirt() != request.domain.is_some() {
        return Err(DriveError::Request(if request.format.is_libvirt() {
            format!(
                "{} needs the domain's XML: write it with `virsh dumpxml --migratable --inactive DOMAIN` and give the \
                 file with --xml",
                request.format
            )
        } else {
            format!("only libvirt's formats contain XML and cookie; {} does not", request.format)
        }));
    }
    if request.channels == Some(0) {
        return Err(DriveError::Request("0 channels cannot carry pages: use 1 to 255".into()));
    }
    if let Some(domain) = request.domain.as_ref().filter(|_| !request.replace) {
        check_domain(vm, &domain.xml)?;
    }
    readiness::may_leave(vm, "save")
}

/// Refuses XML of another machine, because libvirt would fail at the restore.
fn check_domain(vm: &mut Vm, xml: &[u8]) -> Result<(), DriveError> {
    let machine_type = vm.machine_type()?;
    let blocks = vm.blocks()?.unwrap_or_default();
    let blocks: Vec<_> = blocks.into_iter().map(|block| (block.name, block.used_bytes)).collect();
    let uuid = vm.uuid()?;
    let machine = DomainMachine { machine_type: &machine_type, uuid, blocks: &blocks };
    match Domain::of_xml(xml).misfit(machine) {
        Some(why) => Err(DriveError::Unfit(format!("{why}: give the XML of {}, or --force", vm.at()))),
        None => Ok(()),
    }
}

/// Number of threads that transfer pages of this form. Each of QEMU's threads has one request under way, so their
/// number is the depth of the disk's queue, almost independent of the CPUs. More than four writers have no advantage.
pub(crate) fn channels(form: Form, wanted: Option<u8>, default: u8) -> u32 {
    match form {
        Form::Mapped => wanted.unwrap_or(default).into(),
        Form::Legacy => 1,
    }
}

/// Default number of threads that write pages.
pub(super) const WRITERS: u8 = 4;
/// Default number of threads that read pages.
pub(crate) const READERS: u8 = 8;

/// Changes the VM's settings for the save. `is_direct`: one of the descriptors bypasses the page cache.
pub(super) fn change(
    vm: &mut Vm,
    settings: &Settings,
    request: &SaveRequest,
    is_direct: bool,
) -> Result<Changed, DriveError> {
    let is_mapped = form(request) == Form::Mapped;
    let mut capabilities: Vec<(&str, bool)> = OFF.iter().map(|name| (*name, false)).collect();
    capabilities.extend([("events", true), ("mapped-ram", is_mapped), ("multifd", is_mapped)]);
    let mut parameters = Map::new();
    let mut set = |name: &str, value: Value| parameters.insert(name.to_owned(), value);
    set("max-bandwidth", json!(0));
    set("tls-creds", json!(""));
    if is_mapped {
        set("multifd-channels", json!(channels(form(request), request.channels, WRITERS)));
        set("multifd-compression", json!("none"));
        set("zero-page-detection", json!("multifd"));
    }
    // Always set: QEMU 11.1 crashes if `direct-io` is still on from before and no descriptor bypasses the page cache
    // (specs/libvirt-save.md §9).
    set("direct-io", json!(is_direct));
    settings.change(vm, &capabilities, &parameters)
}
