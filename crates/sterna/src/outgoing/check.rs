//! Which settings go together.

use sterna_ram::GuestRam;
use sterna_transport::{Address, Channel, TlsEndpoint};

use crate::params::{Capabilities, Compression, MigrationMode, NonConvergence, Parameters};
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::vm::SourceVm;

/// Whether they go together, and with `to`.
pub(super) fn check(
    to: &Address,
    params: &Parameters,
    capabilities: &Capabilities,
) -> Result<(), SettingsError> {
    if capabilities.multifd && params.multifd_channels == 0 {
        return Err(SettingsError::NoChannels);
    }
    let is_file = matches!(to, Address::File { .. });
    if is_file && capabilities.multifd && !capabilities.mapped_ram {
        return Err(SettingsError::FileIsOneChannel);
    }
    if is_file && params.tls.is_some() {
        return Err(SettingsError::FileHasNoTls);
    }
    if is_file && capabilities.switchover_ack {
        return Err(SettingsError::FileDoesNotAnswer);
    }
    if matches!(to, Address::Rdma { .. }) {
        check_rdma(params, capabilities)?;
    }
    if capabilities.mapped_ram && !is_file {
        return Err(SettingsError::MappedNeedsFile);
    }
    if capabilities.mapped_ram && capabilities.multifd && params.multifd_compression != Compression::None {
        return Err(SettingsError::MappedIsUncompressed);
    }
    if capabilities.multifd && to.is_descriptor() {
        return Err(SettingsError::DescriptorIsOneChannel);
    }
    if params.tls.as_ref().is_some_and(|tls| tls.credentials.endpoint() != TlsEndpoint::Client) {
        return Err(SettingsError::WrongCredentials { needed: TlsEndpoint::Client });
    }
    if params.mode == MigrationMode::CprTransfer {
        check_cpr(to, params, capabilities)?;
    }
    if capabilities.auto_converge && capabilities.dirty_limit {
        return Err(SettingsError::TwoThrottles);
    }
    if capabilities.switchover_ack && !capabilities.return_path {
        return Err(SettingsError::AckNeedsReturnPath);
    }
    Ok(())
}

/// What does not go with a guest that runs at its destination before its pages are there. `is_live`: it leaves this process's
/// memory for good.
pub(super) fn check_postcopy(
    to: &Address,
    params: &Parameters,
    capabilities: &Capabilities,
    vm: &dyn SourceVm,
    is_live: bool,
) -> Result<(), SettingsError> {
    if !capabilities.postcopy_ram {
        let needs = [
            (capabilities.postcopy_preempt, "postcopy_preempt"),
            (capabilities.postcopy_blocktime, "postcopy_blocktime"),
            (params.non_convergence == NonConvergence::Postcopy, "non_convergence postcopy"),
            (!params.postcopy_after.is_zero(), "postcopy_after"),
            (params.postcopy_after_rounds > 0, "postcopy_after_rounds"),
        ];
        return match needs.into_iter().find(|(is_set, _)| *is_set) {
            Some((_, what)) => Err(SettingsError::NeedsPostcopy { what }),
            None => Ok(()),
        };
    }
    let excluded = [
        (matches!(to, Address::File { .. }), "a file"),
        (matches!(to, Address::Rdma { .. }), "rdma:"),
        (capabilities.postcopy_preempt && to.is_descriptor(), "postcopy_preempt over a descriptor"),
        (params.mode == MigrationMode::CprTransfer, "mode cpr-transfer"),
        (!capabilities.return_path, "a missing return_path"),
        (capabilities.mapped_ram, "mapped_ram"),
        (capabilities.xbzrle, "xbzrle"),
        (!is_live, "an image or a standby"),
    ];
    if let Some((_, what)) = excluded.into_iter().find(|(is_set, _)| *is_set) {
        return Err(SettingsError::PostcopyExcludes { what });
    }
    match vm.shares_ram_with() {
        Some(device) => Err(SettingsError::PostcopyExcludesDevice { device }),
        None => Ok(()),
    }
}

/// Whether a destination that was lost in postcopy can be at `to`.
pub(super) fn check_resume(to: &Address, capabilities: &Capabilities) -> Result<(), SettingsError> {
    match to {
        Address::File { .. } | Address::Rdma { .. } => Err(SettingsError::NoWayToRecover),
        _ if to.is_descriptor() && capabilities.postcopy_preempt => Err(SettingsError::NoWayToRecover),
        _ => Ok(()),
    }
}

/// What does not go with a destination that is a standby.
pub(super) fn check_protected(
    to: &Address,
    params: &Parameters,
    capabilities: &Capabilities,
    vm: &dyn SourceVm,
) -> Result<(), SettingsError> {
    if params.mode == MigrationMode::CprTransfer {
        return Err(SettingsError::CprExcludes { what: "a standby (x-colo)" });
    }
    if matches!(to, Address::Rdma { .. } | Address::File { .. }) {
        return Err(SettingsError::NoStandbyThere);
    }
    if !capabilities.return_path {
        return Err(SettingsError::StandbyNeedsReturnPath);
    }
    let with_stream = vm
        .devices()
        .into_iter()
        .find(|device| device.stream().is_some_and(|stream| stream.epochs().is_none()));
    match with_stream {
        Some(device) => Err(SettingsError::DeviceCannotBeProtected { device: device.name() }),
        None => Ok(()),
    }
}

/// What does not go with memory that changes hands as descriptors.
fn check_cpr(to: &Address, params: &Parameters, capabilities: &Capabilities) -> Result<(), SettingsError> {
    if !matches!(to, Address::Unix(_)) {
        return Err(SettingsError::CprNeedsUnix);
    }
    let is_compressed = capabilities.multifd && params.multifd_compression != Compression::None;
    let excluded = [
        // The destination is on this host: whoever can read the socket can read its memory.
        (params.tls.is_some(), "tls"),
        (!capabilities.return_path, "a missing return_path"),
        (capabilities.mapped_ram, "mapped_ram"),
        (capabilities.xbzrle, "xbzrle"),
        (capabilities.auto_converge, "auto_converge"),
        (capabilities.dirty_limit, "dirty_limit"),
        (is_compressed, "multifd_compression"),
    ];
    match excluded.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, what)) => Err(SettingsError::CprExcludes { what }),
        None => Ok(()),
    }
}

/// Whether the guest's memory can be handed to another process of this host.
pub(super) fn check_sharable(vm: &dyn SourceVm, ram: &GuestRam) -> Result<(), StartError> {
    if let Some(device) = vm.cannot_follow() {
        let why = format!(
            "{device} has the guest's memory mapped and cannot follow it into another process: take it off the \
             guest, or set mode to normal"
        );
        return Err(StartError::NotSharable(why));
    }
    for block in ram.blocks() {
        block.sharable().map_err(|error| StartError::NotSharable(error.to_string()))?;
    }
    if ram.blocks().len() > Channel::MOST_DESCRIPTORS {
        let (blocks, most) = (ram.blocks().len(), Channel::MOST_DESCRIPTORS);
        return Err(StartError::NotSharable(format!(
            "the guest has {blocks} RAM blocks, and {most} at most go at once"
        )));
    }
    Ok(())
}

fn check_rdma(params: &Parameters, capabilities: &Capabilities) -> Result<(), SettingsError> {
    if params.tls.is_some() {
        return Err(SettingsError::RdmaHasNoTls);
    }
    if capabilities.multifd && params.multifd_compression != Compression::None {
        return Err(SettingsError::RdmaIsUncompressed);
    }
    Ok(())
}

/// What is asked for must be there: else a guest that does not converge would go on as if nothing had been said.
pub(super) fn check_throttle(vm: &dyn SourceVm, capabilities: &Capabilities) -> Result<(), SettingsError> {
    let throttle = vm.throttle();
    if capabilities.auto_converge && throttle.is_none() {
        return Err(SettingsError::NoThrottle);
    }
    if capabilities.dirty_limit && !throttle.is_some_and(|throttle| throttle.can_limit_dirty_rate()) {
        return Err(SettingsError::NoDirtyLimit);
    }
    Ok(())
}
