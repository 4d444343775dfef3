//! Reads, temporarily changes and restores a VM's capabilities and parameters.

use serde_json::{Map, Value, json};

use super::error::DriveError;
use super::vm::Vm;

/// The capabilities and parameters of a VM at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

/// The earlier values of changed settings.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "restore the operator's settings"]
pub struct Changed {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

impl Settings {
    /// Queries the settings of `vm`.
    pub fn read(vm: &mut Vm) -> Result<Self, DriveError> {
        let capabilities = vm.execute("query-migrate-capabilities", Value::Null)?;
        let parameters = vm.execute("query-migrate-parameters", Value::Null)?;
        Ok(Self::from_answers(&capabilities, parameters))
    }

    /// Reads the answers to `query-migrate-capabilities` and `query-migrate-parameters`.
    pub(super) fn from_answers(capabilities: &Value, parameters: Value) -> Self {
        let state =
            |entry: &Value| Some((entry["capability"].as_str()?.to_owned(), entry["state"].as_bool()?));
        let capabilities = capabilities.as_array().into_iter().flatten().filter_map(state).collect();
        let parameters = match parameters {
            Value::Object(parameters) => parameters,
            _ => Map::new(),
        };
        Self { capabilities, parameters }
    }

    /// Whether the capability is on. None if this VM does not know it.
    pub fn capability(&self, name: &str) -> Option<bool> {
        self.capabilities.iter().find(|(known, _)| known == name).map(|(_, state)| *state)
    }

    /// The names of the capabilities that this VM knows.
    pub fn capability_names(&self) -> impl Iterator<Item = &str> {
        self.capabilities.iter().map(|(name, _)| name.as_str())
    }

    /// The value of a parameter. None if this VM does not know it.
    pub fn parameter(&self, name: &str) -> Option<&Value> {
        self.parameters.get(name)
    }

    /// The names of the parameters that this VM knows.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// Finds which of these capabilities and parameters have changed since, so that they can be restored.
    pub fn changed_since<'a>(
        &self,
        vm: &mut Vm,
        capabilities: &[&str],
        parameters: impl Iterator<Item = &'a String>,
    ) -> Result<Changed, DriveError> {
        let now = Self::read(vm)?;
        let capabilities = capabilities.iter().filter_map(|name| {
            let before = self.capability(name).filter(|before| now.capability(name) != Some(*before))?;
            Some(((*name).to_owned(), before))
        });
        let parameters = parameters.filter_map(|name| {
            let before = self.parameter(name).filter(|before| now.parameter(name) != Some(before))?;
            Some((name.clone(), before.clone()))
        });
        Ok(Changed { capabilities: capabilities.collect(), parameters: parameters.collect() })
    }

    /// Sets `capabilities` and `parameters` where they differ from these settings, all or none. Settings that this VM
    /// does not know are left out: call [`Settings::capability`] first if that matters.
    pub fn change(
        &self,
        vm: &mut Vm,
        capabilities: &[(&str, bool)],
        parameters: &Map<String, Value>,
    ) -> Result<Changed, DriveError> {
        let mut changed = Changed::default();
        for (name, state) in capabilities {
            if self.capability(name) == Some(!state) {
                changed.capabilities.push(((*name).to_owned(), !state));
            }
        }
        let mut wanted = Map::new();
        for (name, value) in parameters {
            if let Some(before) = self.parameters.get(name).filter(|before| *before != value) {
                changed.parameters.insert(name.clone(), before.clone());
                wanted.insert(name.clone(), value.clone());
            }
        }
        let turned: Vec<_> =
            changed.capabilities.iter().map(|(name, state)| (name.clone(), !state)).collect();
        set_capabilities(vm, &turned)?;
        if let Err(error) = set_parameters(vm, &wanted) {
            // The caller must get the refusal, not an error of the undo.
            let _ = set_capabilities(vm, &changed.capabilities);
            return Err(error);
        }
        Ok(changed)
    }
}

impl Changed {
    /// Restores the earlier values.
    pub fn undo(self, vm: &mut Vm) -> Result<(), DriveError> {
        let capabilities = set_capabilities(vm, &self.capabilities);
        set_parameters(vm, &self.parameters).and(capabilities)
    }
}

fn set_capabilities(vm: &mut Vm, states: &[(String, bool)]) -> Result<(), DriveError> {
    if states.is_empty() {
        return Ok(());
    }
    let states: Vec<Value> =
        states.iter().map(|(name, state)| json!({"capability": name, "state": state})).collect();
    vm.execute("migrate-set-capabilities", json!({ "capabilities": states })).map(drop)
}

fn set_parameters(vm: &mut Vm, values: &Map<String, Value>) -> Result<(), DriveError> {
    if values.is_empty() {
        return Ok(());
    }
    vm.execute("migrate-set-parameters", Value::Object(values.clone())).map(drop)
}
