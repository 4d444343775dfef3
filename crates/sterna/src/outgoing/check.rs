//! Checks whether a guest can be migrated with the given settings.

use std::sync::Arc;

use sterna_ram::GuestRam;
use sterna_transport::{Address, Channel, TlsEndpoint};

use crate::params::{Capabilities, Parameters};
use crate::rules::{self, Feature, Features, Side};
use crate::settings_error::SettingsError;
use crate::start_error::Unsharable;
use crate::vm::SourceVm;

/// Checks whether settings fit together, and fit the features that `of_guest` adds.
pub(super) fn check(
    to: &Address,
    params: &Parameters,
    capabilities: &Capabilities,
    of_guest: impl FnOnce(Features) -> Features,
) -> Result<(), SettingsError> {
    if capabilities.multifd && params.multifd_channels == 0 {
        return Err(SettingsError::NoChannels);
    }
    if params.tls.as_ref().is_some_and(|tls| tls.endpoint() != TlsEndpoint::Client) {
        return Err(SettingsError::WrongCredentials { needed: TlsEndpoint::Client });
    }
    rules::check(of_guest(Features::of(to, params, capabilities)), Side::Source)
}

/// Checks whether the guest can run at the destination before its pages arrive.
///
/// The check applies only if postcopy is possible.
pub(super) fn check_postcopy(capabilities: &Capabilities, vm: &dyn SourceVm) -> Result<(), SettingsError> {
    match vm.shares_ram_with().filter(|_| capabilities.postcopy_ram) {
        Some(device) => Err(SettingsError::PostcopyExcludesDevice { device }),
        None => Ok(()),
    }
}

/// Checks whether a destination that was lost in postcopy can be at `to`.
pub(super) fn check_resume(to: &Address, capabilities: &Capabilities) -> Result<(), SettingsError> {
    let features = Features::of_address(to).with(Feature::Recovery, true);
    let over_descriptor = capabilities.postcopy_preempt && to.is_descriptor();
    rules::check(features.with(Feature::PreemptOverDescriptor, over_descriptor), Side::Source)
}

/// Checks whether the guest's memory can be handed to another process on this host.
pub(super) fn check_sharable(vm: &dyn SourceVm, ram: &GuestRam) -> Result<(), Unsharable> {
    if let Some(device) = vm.cannot_follow() {
        return Err(Unsharable::MappedByDevice { device });
    }
    for block in ram.blocks() {
        block.sharable().map_err(|error| Unsharable::Block(Arc::new(error)))?;
    }
    if ram.blocks().len() > Channel::MOST_DESCRIPTORS {
        let (blocks, most) = (ram.blocks().len(), Channel::MOST_DESCRIPTORS);
        return Err(Unsharable::TooManyBlocks { blocks, most });
    }
    Ok(())
}

/// Checks that the VM has the throttle that the settings need. Otherwise a guest that does not converge would
/// never be slowed.
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
