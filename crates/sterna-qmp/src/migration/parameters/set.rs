//! What an operator has set.

use serde_json::{Map, Value};
use sterna::Parameters;

use super::spec::{Change, ParameterSpec};
use super::table::{PARAMETERS, index_of};
use super::typed::Typed;
use crate::error::QmpError;

/// The value of every parameter, as an operator has set it.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSet(Vec<Value>);

impl Default for ParameterSet {
    fn default() -> Self {
        Self(PARAMETERS.iter().map(ParameterSpec::default_value).collect())
    }
}

impl ParameterSet {
    /// Sets what `changes` names and leaves the rest. `busy` freezes what a migration has read already.
    ///
    /// # Errors
    /// An unknown name, a value of another type or outside its range, a change of something frozen. Then
    /// nothing has changed.
    pub fn set(&mut self, changes: &Map<String, Value>, busy: bool) -> Result<(), QmpError> {
        let mut next = self.clone();
        for (name, value) in changes {
            let at = index_of(name).ok_or_else(|| QmpError::unexpected(name))?;
            let spec = &PARAMETERS[at];
            let value = spec.check(value)?;
            if busy && spec.change == Change::Frozen && next.0[at] != value {
                return Err(QmpError::generic(format!(
                    "Parameter '{name}' cannot change during a migration or while one is expected; \
                     end it with 'migrate_cancel' first"
                )));
            }
            next.0[at] = value;
        }
        let Parameters { max_cpu_throttle, cpu_throttle_initial, .. } = next.to_engine();
        if max_cpu_throttle < cpu_throttle_initial {
            return Err(QmpError::expects(
                "max-cpu-throttle",
                "an integer in the range of cpu-throttle-initial to 99",
            ));
        }
        *self = next;
        Ok(())
    }

    /// All of them: the answer to `query-migrate-parameters`.
    pub fn to_json(&self) -> Value {
        let members = PARAMETERS.iter().zip(&self.0);
        Value::Object(members.map(|(spec, value)| (spec.name.to_owned(), value.clone())).collect())
    }

    /// One by its name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        index_of(name).map(|at| &self.0[at])
    }

    /// In the engine's types.
    pub fn to_engine(&self) -> Parameters {
        self.typed().engine
    }

    /// In types.
    pub(in crate::migration) fn typed(&self) -> Typed {
        let mut typed = Typed::default();
        for (spec, value) in PARAMETERS.iter().zip(&self.0) {
            (spec.field.write)(&mut typed, value);
        }
        typed
    }
}
