//! One VM's monitor, Sterna's or QEMU's, with what the commands ask of it as typed calls.

use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna::Statistics;
use sterna::stats::IncomingPostcopy;
pub use sterna_qmp::drive::Progress;
use sterna_qmp::drive::{ANSWER_LIMIT, DriveError, Settings, Vm};
use sterna_qmp::{ClientError, Endpoint};

use crate::exit::Stop;
use crate::units;

/// A negotiated connection.
pub struct Monitor {
    vm: Vm,
    endpoint: Endpoint,
}

impl Monitor {
    /// Connects to `endpoint`.
    pub fn connect(endpoint: &Endpoint) -> Result<Self, Stop> {
        let vm = Vm::connect(endpoint).map_err(|error| {
            let hint = match &error {
                ClientError::Connect { .. } => "Is the VM running, and is this its QMP socket?",
                _ => "Name the socket of a QMP monitor (`sterna run --qmp`, `qemu -qmp`).",
            };
            Stop::failed(format!("{}. {hint}", sentence(&error)))
        })?;
        Ok(Self { vm, endpoint: endpoint.clone() })
    }

    /// Where it is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What drivers work with.
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// For a driver that keeps it.
    pub fn into_vm(self) -> Vm {
        self.vm
    }

    /// Whether Sterna's VMM answers.
    pub fn is_sterna(&self) -> bool {
        self.vm.is_sterna()
    }

    /// The monitor's version in words.
    pub fn version(&self) -> String {
        self.vm.version()
    }

    /// Executes a command; a refusal or a broken connection ends ours with a sentence.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Stop> {
        self.vm.execute(command, arguments).map_err(Stop::from)
    }

    /// Executes a command whose refusal means something to the caller.
    pub fn try_execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.vm.try_execute(command, arguments)
    }

    /// The sentence for an error of [`Monitor::try_execute`].
    pub fn stop(&self, error: ClientError) -> Stop {
        DriveError::Monitor { at: self.endpoint.to_string(), error }.into()
    }

    /// The commands' limit; longer for those that check all of a guest's RAM.
    pub fn set_limit(&mut self, limit: Option<Duration>) {
        self.vm.client().set_limit(limit.unwrap_or(ANSWER_LIMIT));
    }

    /// `query-status`'s word.
    pub fn run_state(&mut self) -> Result<String, Stop> {
        Ok(self.vm.run_state()?)
    }

    /// `query-migrate`.
    pub fn progress(&mut self) -> Result<Progress, Stop> {
        Ok(self.vm.progress()?)
    }

    /// All that the engine knows about the migration away from there; none from QEMU, which has no such
    /// command, and before the first one.
    pub fn statistics(&mut self) -> Result<Option<Statistics>, Stop> {
        if !self.is_sterna() {
            return Ok(None);
        }
        let mut answer = self.execute("x-sterna-migration-statistics", Value::Null)?;
        let outgoing = answer["outgoing"].take();
        if outgoing.is_null() {
            return Ok(None);
        }
        serde_json::from_value(outgoing).map(Some).map_err(|error| {
            Stop::failed(format!("{} sent statistics that cannot be read: {error}", self.endpoint))
        })
    }

    /// What a Sterna knows of a guest that went on there before its pages were there. None from others.
    pub fn arrival(&mut self) -> Option<IncomingPostcopy> {
        if !self.is_sterna() {
            return None;
        }
        let mut answer = self.execute("x-sterna-migration-statistics", Value::Null).ok()?;
        serde_json::from_value(answer["incoming"]["postcopy"].take()).ok()
    }

    /// What the precopy policy of the migration away from there was told, as JSON in one line; none from QEMU, from an
    /// older Sterna, and before pages moved.
    pub fn recording(&mut self) -> Option<String> {
        if !self.is_sterna() {
            return None;
        }
        let answer = self.execute("x-sterna-migration-recording", Value::Null).ok()?;
        (!answer.is_null()).then(|| answer.to_string())
    }

    /// Switches capabilities on.
    pub fn switch_on(&mut self, capabilities: &[String]) -> Result<(), Stop> {
        if capabilities.is_empty() {
            return Ok(());
        }
        let settings = Settings::read(&mut self.vm)?;
        if let Some(unknown) = capabilities.iter().find(|name| settings.capability(name).is_none()) {
            let names: Vec<&str> = settings.capability_names().collect();
            return Err(Stop::usage(format!(
                "--cap {unknown}: {} does not know this capability; it knows {}",
                self.endpoint,
                names.join(", ")
            )));
        }
        let states: Vec<Value> =
            capabilities.iter().map(|name| json!({"capability": name, "state": true})).collect();
        self.change("migrate-set-capabilities", json!({ "capabilities": states }))
    }

    /// Parameters from `NAME=VALUE` pairs. What a value is, the monitor's present one says: a number may carry a size's
    /// suffix.
    pub fn parameters(&mut self, pairs: &[(String, String)]) -> Result<Map<String, Value>, Stop> {
        let mut parameters = Map::new();
        if pairs.is_empty() {
            return Ok(parameters);
        }
        let present = self.execute("query-migrate-parameters", Value::Null)?;
        for (name, value) in pairs {
            parameters.insert(name.clone(), parameter(&present, name, value)?);
        }
        Ok(parameters)
    }

    /// Sets parameters from `NAME=VALUE` pairs.
    pub fn set_parameters(&mut self, pairs: &[(String, String)]) -> Result<(), Stop> {
        if pairs.is_empty() {
            return Ok(());
        }
        let changes = self.parameters(pairs)?;
        self.change("migrate-set-parameters", Value::Object(changes))
    }

    /// Settings from the command line.
    fn change(&mut self, command: &str, arguments: Value) -> Result<(), Stop> {
        let Err(error) = self.try_execute(command, arguments) else { return Ok(()) };
        // What was asked for may be good another time.
        if matches!(error, ClientError::Refused { .. }) && !self.progress()?.is_over() {
            return Err(self.stop(error));
        }
        Err(Stop::of_settings(&self.endpoint.to_string(), error))
    }
}

/// A parameter's value from its text: of the kind that the present one is.
pub fn parameter(present: &Value, name: &str, value: &str) -> Result<Value, Stop> {
    let known = present.get(name).ok_or_else(|| {
        let names: Vec<&str> =
            present.as_object().into_iter().flat_map(Map::keys).map(String::as_str).collect();
        Stop::usage(format!("unknown parameter `{name}`; known are {}", names.join(", ")))
    })?;
    let wrong = |what: &str| Stop::usage(format!("--set {name}={value}: `{value}` is not {what}"));
    match known {
        Value::Number(_) => match value.parse::<u64>() {
            Ok(number) => Ok(number.into()),
            Err(_) => units::parse_size(value).map(Value::from).map_err(|_| wrong("a number or a size")),
        },
        Value::Bool(_) => match value {
            "on" | "true" => Ok(true.into()),
            "off" | "false" => Ok(false.into()),
            _ => Err(wrong("on or off")),
        },
        _ => Ok(value.into()),
    }
}

/// An error's words without a full stop, so that ours can go on.
fn sentence(error: &impl std::fmt::Display) -> String {
    error.to_string().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_takes_the_kind_of_the_present_value() {
        let present = json!({"max-bandwidth": 1, "multifd-compression": "none", "x": true});

        assert_eq!(parameter(&present, "max-bandwidth", "1G"), Ok(json!(1u64 << 30)));
        assert_eq!(parameter(&present, "max-bandwidth", "77"), Ok(json!(77)));
        assert_eq!(parameter(&present, "multifd-compression", "zstd"), Ok(json!("zstd")));
        assert_eq!(parameter(&present, "x", "off"), Ok(json!(false)));
    }

    #[test]
    fn parameter_that_is_unknown_or_misfits_says_what_there_is() {
        let present = json!({"max-bandwidth": 1, "x": true});

        assert!(parameter(&present, "bandwidth", "1").unwrap_err().message.contains("max-bandwidth"));
        assert!(parameter(&present, "max-bandwidth", "fast").is_err());
        assert!(parameter(&present, "x", "2").is_err());
    }
}
