//! Sends the configuration from which the destination makes its VM (specs/extension.md §15).

use sterna_wire::extension::{CONFIGURATION_PING, ConfigurationRefusal, SourceConfiguration};
use sterna_wire::main::Command;

use super::main_channel::MainChannel;
use super::shared::Shared;
use crate::error::{ConfigurationDifference, MigrationError};
use crate::shared_settings;
use crate::threads::call;

/// Sends the VM's configuration, and the settings that both sides must share. The destination's answer is read on the
/// return path.
pub(super) fn send(shared: &Shared, main: &MainChannel) -> Result<(), MigrationError> {
    let configuration = call("SourceVm::configuration", || shared.guest.vm.configuration());
    let configuration = configuration.ok_or(ConfigurationDifference::NoneHere)?;
    let settings = shared_settings::of(&shared.params(), &shared.capabilities);
    let body = SourceConfiguration { settings, configuration }.encode();
    let body = body.map_err(MigrationError::wire("main channel"))?;
    let (name, version) = (SourceConfiguration::SECTION_NAME, SourceConfiguration::SECTION_VERSION);
    main.with(|stream| {
        stream.full_section((name, SourceConfiguration::SECTION_INSTANCE, version), &body, true)?;
        stream.commands(&[Command::Ping(CONFIGURATION_PING)])
    })
}

/// The error for a destination that has made no VM.
pub(super) fn refused(shared: &Shared, refusal: ConfigurationRefusal) -> MigrationError {
    match refusal {
        ConfigurationRefusal::Setting { name, limit } => {
            let settings = shared_settings::of(&shared.params(), &shared.capabilities);
            let value = settings.get(&name).cloned();
            ConfigurationDifference::Setting { setting: name, value, limit }.into()
        }
        ConfigurationRefusal::Vm(why) | ConfigurationRefusal::Other(why) => {
            MigrationError::NotConfigured { why }
        }
    }
}
