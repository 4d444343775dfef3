//! A VM's capabilities and parameters: read, changed for a while, put back.

use serde_json::{Map, Value, json};

use super::error::DriveError;
use super::vm::Vm;

/// What a VM is set to.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

/// What was changed, as it stood before.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "put the operator's settings back"]
pub struct Changed {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

impl Settings {
    /// Asks `vm`.
    pub fn read(vm: &mut Vm) -> Result<Self, DriveError> {
        let list = vm.execute("query-migrate-capabilities", Value::Null)?;
        let capabilities = list
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|entry| Some((entry["capability"].as_str()?.to_owned(), entry["state"].as_bool()?)))
            .collect();
        let parameters = match vm.execute("query-migrate-parameters", Value::Null)? {
            Value::Object(parameters) => parameters,
            _ => Map::new(),
        };
        Ok(Self { capabilities, parameters })
    }

    /// Whether the capability is on; none if this VM does not know it.
    pub fn capability(&self, name: &str) -> Option<bool> {
        self.capabilities.iter().find(|(known, _)| known == name).map(|(_, state)| *state)
    }

    /// The capabilities' names.
    pub fn capability_names(&self) -> impl Iterator<Item = &str> {
        self.capabilities.iter().map(|(name, _)| name.as_str())
    }

    /// A parameter's value; none if this VM does not know it.
    pub fn parameter(&self, name: &str) -> Option<&Value> {
        self.parameters.get(name)
    }

    /// The parameters' names.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// Sets `capabilities` and `parameters` where they differ from these settings. What this VM does not know
    /// is left out: ask [`Settings::capability`] before, where that matters. All or nothing.
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
            // The refusal is what the operator must hear.
            let _ = set_capabilities(vm, &changed.capabilities);
            return Err(error);
        }
        Ok(changed)
    }
}

impl Changed {
    /// Puts everything back.
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
