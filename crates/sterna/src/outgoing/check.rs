//! Which settings go together.

use sterna_transport::{Address, TlsEndpoint};

use crate::params::{Capabilities, Compression, Parameters};
use crate::start_error::StartError;
use crate::vm::SourceVm;

/// Whether they go together, and with `to`.
pub(super) fn check(
    to: &Address,
    params: &Parameters,
    capabilities: &Capabilities,
) -> Result<(), StartError> {
    let refuse = |rule: &str| Err(StartError::Settings(rule.to_owned()));
    if capabilities.multifd && params.multifd_channels == 0 {
        return refuse("multifd-channels is 0: give 1 to 255, or switch multifd off");
    }
    let is_file = matches!(to, Address::File { .. });
    if is_file && capabilities.multifd && !capabilities.mapped_ram {
        return refuse("Migration requires multi-channel URIs: switch multifd off, or mapped-ram on");
    }
    if is_file && params.tls.is_some() {
        return refuse("a file does not support TLS: leave tls-creds empty");
    }
    if is_file && capabilities.switchover_ack {
        return refuse(
            "switchover-ack needs a destination that answers, which a file does not: switch it off",
        );
    }
    if capabilities.mapped_ram && !is_file {
        return refuse("Migration requires seekable transport (e.g. file:) with mapped-ram: switch it off");
    }
    if capabilities.mapped_ram && capabilities.multifd && params.multifd_compression != Compression::None {
        return refuse("Cannot use compression with mapped-ram: set multifd-compression to none");
    }
    if capabilities.multifd && to.is_descriptor() {
        return refuse("a descriptor (fd:) is one channel: switch multifd off, or give tcp: or unix:");
    }
    if params.tls.as_ref().is_some_and(|tls| tls.credentials.endpoint() != TlsEndpoint::Client) {
        return refuse(
            "tls-creds are for the endpoint server, and a source connects: give it ones for client",
        );
    }
    if capabilities.auto_converge && capabilities.dirty_limit {
        return refuse("dirty-limit conflicts with auto-converge: switch one of them off");
    }
    if capabilities.switchover_ack && !capabilities.return_path {
        return refuse("switchover-ack needs return-path: the acknowledgement comes on it");
    }
    Ok(())
}

/// What is asked for must be there: else a guest that does not converge would go on as if nothing had been said.
pub(super) fn check_throttle(vm: &dyn SourceVm, capabilities: &Capabilities) -> Result<(), StartError> {
    let refuse = |rule: &str| Err(StartError::Settings(rule.to_owned()));
    let throttle = vm.throttle();
    if capabilities.auto_converge && throttle.is_none() {
        return refuse("this VM cannot be slowed down: switch auto-converge off");
    }
    if capabilities.dirty_limit && !throttle.is_some_and(|throttle| throttle.can_limit_dirty_rate()) {
        return refuse(
            "dirty-limit needs a VM that counts what each vCPU dirties: start it with a dirty ring \
             (dirty-ring-size), or use auto-converge",
        );
    }
    Ok(())
}
