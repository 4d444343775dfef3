//! One side of a migration: its monitor's answers, and the settings that it will have.

use serde_json::{Map, Value};

use super::error::DriveError;
use super::readiness;
use super::settings::Settings;
use super::vm::Vm;

/// The operator's settings for a migration, on both sides.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Capabilities that will be switched. If one is named twice, the last entry counts.
    pub capabilities: &'a [(String, bool)],
    /// Parameters that will be set.
    pub parameters: &'a Map<String, Value>,
    /// Whether both sides will get TLS credentials.
    pub has_tls: bool,
}

/// One side of a migration, with the settings that it will have.
pub(super) struct Side<'a> {
    pub(super) at: String,
    pub(super) version: String,
    pub(super) is_sterna: bool,
    pub(super) listens: bool,
    pub(super) settings: Settings,
    /// None at a destination that listens already, because its settings do not change any more.
    pub(super) wanted: Option<Wanted<'a>>,
}

impl<'a> Side<'a> {
    pub(super) fn ask(vm: &mut Vm, wanted: Wanted<'a>) -> Result<Self, DriveError> {
        let listens = readiness::listens(&vm.execute("query-migrate", Value::Null)?);
        Ok(Self {
            at: vm.at().to_owned(),
            version: vm.version(),
            is_sterna: vm.is_sterna(),
            listens,
            settings: Settings::read(vm)?,
            wanted: (!listens).then_some(wanted),
        })
    }

    pub(super) fn has(&self, capability: &str) -> bool {
        let wanted = self.wanted.iter().flat_map(|wanted| wanted.capabilities);
        match wanted.rev().find(|(name, _)| name == capability) {
            Some((_, is_on)) => *is_on,
            None => self.settings.capability(capability) == Some(true),
        }
    }

    pub(super) fn has_tls(&self) -> bool {
        let credentials = self.parameter("tls-creds").and_then(Value::as_str);
        credentials.is_some_and(|id| !id.is_empty()) || self.wanted.is_some_and(|wanted| wanted.has_tls)
    }

    /// The future value of the parameter. `None` if this VM does not know it.
    pub(super) fn parameter(&self, name: &str) -> Option<&Value> {
        let present = self.settings.parameter(name)?;
        self.wanted.and_then(|wanted| wanted.parameters.get(name)).or(Some(present))
    }
}
