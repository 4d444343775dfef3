//! Settings of a VM that last for one job.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna_qmp::ClientError;

use super::error::DriveError;
use super::settings::Settings;
use super::vm::Vm;

/// How long a VM may refuse its earlier settings because its migration is still being cleaned up.
const REFUSAL_LIMIT: Duration = Duration::from_secs(2);

/// The changes that one job has made at a VM, and the settings that the VM had before.
///
/// A job calls [`put_back`](Self::put_back) on every way out. A setting that stays would affect the VM's next
/// migration, in which the other side does not expect it.
#[derive(Debug)]
#[must_use = "restore the operator's settings"]
pub struct Temporary {
    before: Settings,
    capabilities: Vec<String>,
    parameters: Vec<String>,
    objects: Vec<String>,
}

impl Temporary {
    /// Reads the settings of `vm`. Changes nothing.
    pub fn begin(vm: &mut Vm) -> Result<Self, DriveError> {
        Ok(Self {
            before: Settings::read(vm)?,
            capabilities: Vec::new(),
            parameters: Vec::new(),
            objects: Vec::new(),
        })
    }

    /// The settings that the VM had when the job began.
    pub fn before(&self) -> &Settings {
        &self.before
    }

    /// Whether a capability is on now. None if this VM does not know it.
    pub fn capability(&self, name: &str) -> Option<bool> {
        // A changed capability differs from its earlier state.
        self.before.capability(name).map(|before| before != self.capabilities.iter().any(|it| it == name))
    }

    /// Switches capabilities, all or none. A capability that this VM does not know is left out: ask
    /// [`capability`](Self::capability) first where that matters.
    pub fn switch(&mut self, vm: &mut Vm, states: &[(&str, bool)]) -> Result<(), ClientError> {
        let turned = |(name, state): &&(&str, bool)| self.capability(name) == Some(!*state);
        let turned: Vec<(&str, bool)> = states.iter().filter(turned).copied().collect();
        if turned.is_empty() {
            return Ok(());
        }
        let earlier = self.capabilities.clone();
        for (name, state) in &turned {
            self.capabilities.retain(|changed| changed != name);
            if self.before.capability(name) != Some(*state) {
                self.capabilities.push((*name).to_owned());
            }
        }
        let list: Vec<Value> =
            turned.iter().map(|(name, state)| json!({"capability": name, "state": state})).collect();
        let done = vm.try_execute("migrate-set-capabilities", json!({ "capabilities": list }));
        // A command whose answer did not arrive may have been executed.
        if let Err(ClientError::Refused { .. }) = &done {
            self.capabilities = earlier;
        }
        done.map(drop)
    }

    /// Sets parameters, all or none.
    pub fn set(&mut self, vm: &mut Vm, parameters: &Map<String, Value>) -> Result<(), ClientError> {
        if parameters.is_empty() {
            return Ok(());
        }
        let earlier = self.parameters.clone();
        let is_new = |name: &String| !earlier.contains(name);
        self.parameters.extend(parameters.keys().filter(|name| is_new(name)).cloned());
        let done = vm.try_execute("migrate-set-parameters", Value::Object(parameters.clone()));
        if let Err(ClientError::Refused { .. }) = &done {
            self.parameters = earlier;
        }
        done.map(drop)
    }

    /// Adds an object. An object with the same id is the remains of an interrupted job, and is deleted first.
    pub fn add_object(
        &mut self,
        vm: &mut Vm,
        id: &str,
        object: Map<String, Value>,
    ) -> Result<(), ClientError> {
        match vm.try_execute("object-del", json!({ "id": id })) {
            Ok(_) | Err(ClientError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        self.objects.push(id.to_owned());
        let done = vm.try_execute("object-add", Value::Object(object));
        if let Err(ClientError::Refused { .. }) = &done {
            self.objects.pop();
        }
        done.map(drop)
    }

    /// The names of the changed capabilities, parameters and objects, for use in a sentence. Empty if there are none.
    pub fn names(&self) -> String {
        let names = [&self.capabilities, &self.parameters, &self.objects];
        names.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    /// Restores the earlier settings and deletes the job's objects. Every step is tried, even if another fails.
    ///
    /// # Errors
    /// The first failure. [`names`](Self::names) lists the settings that may be left.
    pub fn put_back(&self, vm: &mut Vm) -> Result<(), DriveError> {
        let deadline = Instant::now() + REFUSAL_LIMIT;
        let mut done = Ok(());
        // Parameters first, because they refer to the objects.
        if !self.parameters.is_empty() {
            let earlier: Map<String, Value> =
                self.parameters.iter().map(|name| (name.clone(), self.earlier(name))).collect();
            done = done.and(persist(vm, "migrate-set-parameters", &Value::Object(earlier), deadline));
        }
        for id in &self.objects {
            done = done.and(persist(vm, "object-del", &json!({ "id": id }), deadline));
        }
        if !self.capabilities.is_empty() {
            let state = |name: &String| self.before.capability(name).unwrap_or(false);
            let list: Vec<Value> = self
                .capabilities
                .iter()
                .map(|name| json!({"capability": name, "state": state(name)}))
                .collect();
            let list = json!({ "capabilities": list });
            done = done.and(persist(vm, "migrate-set-capabilities", &list, deadline));
        }
        done
    }

    /// A parameter's earlier value. A VM may omit a text that is not set, so a missing value is the empty text.
    fn earlier(&self, name: &str) -> Value {
        self.before.parameter(name).cloned().unwrap_or_else(|| "".into())
    }
}

/// Repeats a refused command until `deadline`.
fn persist(vm: &mut Vm, command: &str, arguments: &Value, deadline: Instant) -> Result<(), DriveError> {
    loop {
        match vm.try_execute(command, arguments.clone()) {
            Ok(_) => return Ok(()),
            Err(ClientError::Refused { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(vm.error(error)),
        }
    }
}
