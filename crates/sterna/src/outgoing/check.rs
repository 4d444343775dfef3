//! Which settings go together.

use sterna_transport::{Address, TlsEndpoint};

use crate::params::{Capabilities, Compression, Parameters};
use crate::settings_error::SettingsError;
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
    if capabilities.auto_converge && capabilities.dirty_limit {
        return Err(SettingsError::TwoThrottles);
    }
    if capabilities.switchover_ack && !capabilities.return_path {
        return Err(SettingsError::AckNeedsReturnPath);
    }
    Ok(())
}

/// What does not go with a destination that is a standby.
pub(super) fn check_protected(
    to: &Address,
    capabilities: &Capabilities,
    vm: &dyn SourceVm,
) -> Result<(), SettingsError> {
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
