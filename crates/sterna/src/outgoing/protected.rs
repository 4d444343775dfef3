//! What `sterna-standby` asks of a migration that seeds and feeds a protection. Hidden from the documentation.

use std::sync::Arc;

use sterna_proto::source::{Event as Fed, State};
use sterna_transport::Address;

use super::Migration;
use super::check::check;
use super::guest_source::LiveVm;
use super::protection::{Protecting, Withholder};
use super::shared::Shared;
use crate::error::VmError;
use crate::events::Observer;
use crate::params::{Capabilities, Parameters};
use crate::rules::Feature;
use crate::settings_error::SettingsError;
use crate::start_error::StartError;
use crate::vm::SourceVm;

impl Migration {
    /// Ends the migration that seeds and feeds a protection, after the protection has ended.
    #[doc(hidden)]
    pub fn end_protection(&self, guest_is_here: bool) {
        let is_protected = self.shared.driver.inspect(|machine| machine.state() == State::Protected);
        if is_protected {
            self.shared.report(Fed::ProtectionEnded { guest_is_here });
        } else if let Err(refusal) = self.cancel() {
            // The migration has ended by itself.
            tracing::debug!(%refusal, "a seeding");
        }
    }

    /// Stops the guest for the protection's machine, which decides which side runs it.
    #[doc(hidden)]
    pub fn withhold_guest(&self) -> Result<(), VmError> {
        self.protecting(|shared, protecting| shared.withhold_guest(protecting, Withholder::Overseer))
    }

    /// Gives the guest back after [`Migration::withhold_guest`]. It resumes if it ran before.
    #[doc(hidden)]
    pub fn give_guest_back(&self) -> Result<(), VmError> {
        self.protecting(|shared, protecting| shared.give_guest_back(protecting, Withholder::Overseer))
    }

    fn protecting(
        &self,
        act: impl FnOnce(&Shared, &Protecting) -> Result<(), VmError>,
    ) -> Result<(), VmError> {
        self.shared.protecting.as_ref().map_or(Ok(()), |protecting| act(&self.shared, protecting))
    }

    /// Checks whether the guest can be protected with these settings, before any connection is made.
    ///
    /// # Errors
    /// The reason why it cannot be protected.
    #[doc(hidden)]
    pub fn check_protected(
        to: &Address,
        params: &Parameters,
        capabilities: &Capabilities,
        vm: &dyn SourceVm,
    ) -> Result<(), StartError> {
        Ok(check_protected(to, params, capabilities, vm)?)
    }

    /// Starts to seed a standby at `to` with the guest of `vm`, which stays here. Checkpoints follow.
    ///
    /// The caller has called [`Migration::check_protected`] before.
    #[doc(hidden)]
    pub fn begin_protected(
        vm: Arc<dyn SourceVm>,
        to: &Address,
        params: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
        protecting: Arc<Protecting>,
    ) -> Result<Self, StartError> {
        let source = Arc::new(LiveVm::new(vm));
        Self::begin_as(source, to, params, capabilities, observer, Some(protecting))
    }
}

/// Checks for settings that a standby as the destination does not support.
fn check_protected(
    to: &Address,
    params: &Parameters,
    capabilities: &Capabilities,
    vm: &dyn SourceVm,
) -> Result<(), SettingsError> {
    check(to, params, capabilities, |features| features.with(Feature::Protection, true))?;
    let with_stream = vm
        .devices()
        .into_iter()
        .find(|device| device.stream().is_some_and(|stream| stream.epochs().is_none()));
    match with_stream {
        Some(device) => Err(SettingsError::DeviceCannotBeProtected { device: device.name() }),
        None => Ok(()),
    }
}
