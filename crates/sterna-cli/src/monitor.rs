//! The monitor of one VM, Sterna's or QEMU's, with typed calls for the commands.

use std::time::Duration;

use serde_json::{Map, Value};
use sterna::Statistics;
use sterna::stats::IncomingPostcopy;
pub use sterna_drive::Progress;
use sterna_drive::{ANSWER_LIMIT, DriveError, MonitorAddress, Settings, Temporary, Vm};
use sterna_libvirt::LibvirtError;
use sterna_qmp::migration::Unit;
use sterna_qmp::{ClientError, Endpoint};

use crate::exit::{Status, Stop};
use crate::interrupts::until_interrupted;
use crate::units;

/// Help text for commands whose VM may have its monitor occupied by another command.
pub const SECOND_MONITOR: &str = "\
A QEMU serves one client per monitor, and `sterna migrate` uses the monitor until it ends. To use `sterna info` and \
`sterna cancel` in the meantime, start QEMU with a second monitor and give them that one:
  qemu-system-x86_64 … -qmp unix:/run/a.qmp,server=on,wait=off -qmp unix:/run/a-2.qmp,server=on,wait=off
A Sterna VM serves several clients at one monitor.";

/// The error for a monitor that does not answer, with advice.
pub fn unreachable(endpoint: &Endpoint, error: &ClientError) -> Stop {
    let hint = match error {
        ClientError::Cancelled { .. } => {
            return Stop::with(Status::Cancelled, format!("{}; nothing was changed", sentence(error)));
        }
        ClientError::Connect { error, .. } if error.kind() == std::io::ErrorKind::TimedOut => {
            "Check that the VM's process is not stopped or hanging, and that no other client uses this monitor."
        }
        // The error already names the limit of a socket's path and the remedy.
        ClientError::Connect { error: cause, .. } if cause.kind() == std::io::ErrorKind::InvalidInput => {
            return Stop::usage(sentence(error));
        }
        ClientError::Connect { .. } => "Check that the VM is running, and that this is its QMP socket.",
        ClientError::TimedOut { limit, .. } => {
            return Stop::failed(format!(
                "{endpoint} accepts connections but sends no greeting within {limit:?}: most likely another client (a \
                 running `sterna migrate`, libvirt) uses this monitor, because a QEMU serves one client per monitor; \
                 otherwise the VM hangs. Wait until the other client ends, or start QEMU with a second `-qmp \
                 unix:PATH,server=on,wait=off` and give that socket."
            ));
        }
        _ => "Give the socket of a QMP monitor (`sterna run --qmp`, `qemu -qmp`).",
    };
    Stop::failed(format!("{}. {hint}", sentence(error)))
}

/// An address that a command has: of a socket, or of any monitor.
#[derive(Debug, Clone, Copy)]
pub enum MonitorRef<'a> {
    /// A QMP socket.
    Socket(&'a Endpoint),
    /// A domain of libvirt.
    Domain(&'a MonitorAddress),
}

impl<'a> From<&'a Endpoint> for MonitorRef<'a> {
    fn from(endpoint: &'a Endpoint) -> Self {
        Self::Socket(endpoint)
    }
}

impl<'a> From<&'a MonitorAddress> for MonitorRef<'a> {
    fn from(address: &'a MonitorAddress) -> Self {
        match address {
            MonitorAddress::Socket(endpoint) => Self::Socket(endpoint),
            MonitorAddress::Domain(_) => Self::Domain(address),
        }
    }
}

/// A negotiated connection to a monitor.
pub struct Monitor {
    vm: Vm,
    endpoint: MonitorAddress,
}

impl Monitor {
    /// Connects to `address`. Ctrl-C cancels the connection.
    pub fn connect<'a>(address: impl Into<MonitorRef<'a>>) -> Result<Self, Stop> {
        match address.into() {
            MonitorRef::Socket(endpoint) => {
                let connected = until_interrupted(|cancel| Vm::connect_unless(endpoint, cancel));
                Self::of(endpoint, connected)
            }
            MonitorRef::Domain(address) => {
                let vm = until_interrupted(|cancel| Vm::connect_to(address, cancel));
                let vm = vm.map_err(|error| match error {
                    DriveError::Libvirt { error: LibvirtError::Cancelled, .. } => {
                        Stop::with(Status::Cancelled, format!("{}; nothing was changed", sentence(&error)))
                    }
                    error => error.into(),
                })?;
                Ok(Self { vm, endpoint: address.clone() })
            }
        }
    }

    /// Whether the VM is a domain of libvirt.
    pub fn is_libvirt(&self) -> bool {
        self.endpoint.domain().is_some()
    }

    /// As [`connect`](Self::connect), with out-of-band execution if the monitor supports it.
    /// For a machine that may be blocked while it waits for memory.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect). No command needs this for a domain of libvirt, which is refused.
    pub fn connect_oob<'a>(address: impl Into<MonitorRef<'a>>) -> Result<Self, Stop> {
        let endpoint = match address.into() {
            MonitorRef::Socket(endpoint) => endpoint,
            MonitorRef::Domain(address) => {
                return Err(Stop::usage(format!("{address} is a domain of libvirt: give a QMP socket")));
            }
        };
        let connected = until_interrupted(|cancel| Vm::connect_oob_unless(endpoint, cancel));
        Self::of(endpoint, connected)
    }

    fn of(endpoint: &Endpoint, connected: Result<Vm, ClientError>) -> Result<Self, Stop> {
        let vm = connected.map_err(|error| unreachable(endpoint, &error))?;
        Ok(Self { vm, endpoint: endpoint.clone().into() })
    }

    /// The address of the monitor.
    pub fn endpoint(&self) -> &MonitorAddress {
        &self.endpoint
    }

    /// The connection in the form that drivers use.
    pub fn vm(&mut self) -> &mut Vm {
        &mut self.vm
    }

    /// The connection, for a driver that keeps it.
    pub fn into_vm(self) -> Vm {
        self.vm
    }

    /// Whether the VM is Sterna's own.
    pub fn is_sterna(&self) -> bool {
        self.vm.is_sterna()
    }

    /// Name and version of the program that answers.
    pub fn version(&self) -> String {
        self.vm.version()
    }

    /// Executes a command. A refusal or a broken connection becomes a [`Stop`].
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Stop> {
        self.vm.execute(command, arguments).map_err(Stop::from)
    }

    /// Executes a command whose refusal the caller handles.
    pub fn try_execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.vm.try_execute(command, arguments)
    }

    /// The stop for an error of [`Monitor::try_execute`].
    pub fn stop(&self, error: ClientError) -> Stop {
        DriveError::Monitor { at: self.endpoint.to_string(), error }.into()
    }

    /// Sets how long an answer may take; none: the default. Commands that check all of a guest's RAM need
    /// longer.
    pub fn set_limit(&mut self, limit: Option<Duration>) {
        self.vm.client().set_limit(limit.unwrap_or(ANSWER_LIMIT));
    }

    /// The status from `query-status`.
    pub fn run_state(&mut self) -> Result<String, Stop> {
        Ok(self.vm.run_state()?)
    }

    /// A sentence about a guest that stays `here`, such as "at the source".
    pub fn where_guest_is(&mut self, here: &str) -> String {
        match self.run_state().as_deref() {
            Ok("running") => format!("the guest continues to run {here}"),
            Ok(state) => format!("the guest is {here}, and its state there is `{state}`"),
            Err(_) => format!("the guest is {here}, and its monitor does not answer"),
        }
    }

    /// The state of the migration from `query-migrate`.
    pub fn progress(&mut self) -> Result<Progress, Stop> {
        Ok(self.vm.progress()?)
    }

    /// The engine's statistics of the outgoing migration.
    /// None from QEMU, which has no such command, and none before the first migration.
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

    /// Statistics of a guest that arrived here in postcopy; none from QEMU.
    pub fn arrival(&mut self) -> Option<IncomingPostcopy> {
        if !self.is_sterna() {
            return None;
        }
        let mut answer = self.execute("x-sterna-migration-statistics", Value::Null).ok()?;
        serde_json::from_value(answer["incoming"]["postcopy"].take()).ok()
    }

    /// The measurements that the precopy policy of the outgoing migration received, as one line of JSON.
    /// None from QEMU, from an older Sterna, and before pages moved.
    pub fn recording(&mut self) -> Option<String> {
        if !self.is_sterna() {
            return None;
        }
        let answer = self.execute("x-sterna-migration-recording", Value::Null).ok()?;
        (!answer.is_null()).then(|| answer.to_string())
    }

    /// Switches capabilities on or off permanently.
    pub fn switch(&mut self, capabilities: &[(String, bool)]) -> Result<(), Stop> {
        let mut settings = Temporary::begin(&mut self.vm)?;
        self.switch_for(&mut settings, capabilities)
    }

    /// Switches capabilities until `settings` are restored. If one is named twice, the last entry counts.
    pub fn switch_for(
        &mut self,
        settings: &mut Temporary,
        capabilities: &[(String, bool)],
    ) -> Result<(), Stop> {
        self.check_known(settings.before(), capabilities)?;
        let mut states: Vec<(&str, bool)> = Vec::new();
        for (name, is_on) in capabilities {
            states.retain(|(earlier, _)| earlier != name);
            states.push((name, *is_on));
        }
        settings.switch(&mut self.vm, &states).or_else(|error| self.refused(error))
    }

    /// Refuses a capability that this VM does not know.
    pub fn check_known(&self, settings: &Settings, capabilities: &[(String, bool)]) -> Result<(), Stop> {
        let unknown = |(name, _): &&(String, bool)| settings.capability(name).is_none();
        let Some((unknown, _)) = capabilities.iter().find(unknown) else { return Ok(()) };
        let names: Vec<&str> = settings.capability_names().collect();
        Err(Stop::usage(format!(
            "--cap {unknown}: {} does not know this capability; it knows {}",
            self.endpoint,
            names.join(", ")
        )))
    }

    /// Parameters from `NAME=VALUE` pairs.
    /// The type of a value is the type of the monitor's present value; a number may have a size's suffix.
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

    /// Sets parameters from `NAME=VALUE` pairs until `settings` are restored.
    pub fn set_parameters_for(
        &mut self,
        settings: &mut Temporary,
        pairs: &[(String, String)],
    ) -> Result<(), Stop> {
        let changes = self.parameters(pairs)?;
        settings.set(&mut self.vm, &changes).or_else(|error| self.refused(error))
    }

    /// The error for settings of the command line that the VM refused.
    fn refused(&mut self, error: ClientError) -> Result<(), Stop> {
        // During a migration, the VM may refuse settings that are otherwise valid, so this is no usage error.
        if matches!(error, ClientError::Refused { .. }) && !self.progress()?.is_over() {
            return Err(self.stop(error));
        }
        Err(Stop::of_settings(&self.endpoint.to_string(), error))
    }
}

/// Parses a parameter's value, with the type of the present value.
pub fn parameter(present: &Value, name: &str, value: &str) -> Result<Value, Stop> {
    let known = present.get(name).ok_or_else(|| {
        let names: Vec<&str> =
            present.as_object().into_iter().flat_map(Map::keys).map(String::as_str).collect();
        Stop::usage(format!("unknown parameter `{name}`; known are {}", names.join(", ")))
    })?;
    let wrong = |what: &str| Stop::usage(format!("--set {name}={value}: `{value}` is not {what}"));
    match known {
        Value::Number(_) => number(name, value).map(Value::from).map_err(|what| wrong(&what)),
        Value::Bool(_) => match value {
            "on" | "true" => Ok(true.into()),
            "off" | "false" => Ok(false.into()),
            _ => Err(wrong("on or off")),
        },
        _ => Ok(value.into()),
    }
}

/// Parses a number in the parameter's own unit, or with a unit. The error describes valid values.
fn number(name: &str, value: &str) -> Result<u64, String> {
    if let Ok(number) = value.parse() {
        return Ok(number);
    }
    match sterna_qmp::migration::parameter(name).map(|spec| spec.unit) {
        Some(Unit::Milliseconds) => {
            let time = units::parse_time(value)
                .map_err(|_| "a number of milliseconds, or a time such as 300ms or 2s".to_owned())?;
            let is_whole = time.subsec_nanos() % 1_000_000 == 0;
            let milliseconds = u64::try_from(time.as_millis()).ok().filter(|_| is_whole);
            milliseconds.ok_or_else(|| "a whole number of milliseconds".to_owned())
        }
        Some(Unit::BytesPerSecond | Unit::BytesPerSecondBare) => {
            units::parse_rate(value).or_else(|_| units::parse_size(value)).map_err(|_| {
                "a number of bytes per second, a rate such as 10Gbit/s or 1GB/s, or a size per second such as 1G"
                    .to_owned()
            })
        }
        _ => units::parse_size(value).map_err(|_| "a number or a size".to_owned()),
    }
}

/// The text of an error without a full stop, so that more text can follow.
fn sentence(error: &impl std::fmt::Display) -> String {
    error.to_string().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn monitor_whose_name_is_too_long_for_any_address_names_the_limit_and_the_way_out() {
        let endpoint: Endpoint = format!("unix:/tmp/{}", "x".repeat(120)).parse().unwrap();
        let error = Vm::connect(&endpoint).err().expect("no such socket can exist");

        let stop = unreachable(&endpoint, &error);

        assert_eq!(stop.status, Status::Usage);
        for word in ["125 bytes", "107", "shorter name"] {
            assert!(stop.message.contains(word), "{word}: {}", stop.message);
        }
    }

    #[test]
    fn parameter_takes_the_kind_of_the_present_value() {
        let present = json!({"max-bandwidth": 1, "multifd-compression": "none", "x": true});

        assert_eq!(parameter(&present, "max-bandwidth", "1G"), Ok(json!(1u64 << 30)));
        assert_eq!(parameter(&present, "max-bandwidth", "77"), Ok(json!(77)));
        assert_eq!(parameter(&present, "multifd-compression", "zstd"), Ok(json!("zstd")));
        assert_eq!(parameter(&present, "x", "off"), Ok(json!(false)));
    }

    #[test]
    fn parameter_takes_the_unit_of_its_kind() {
        let present = json!({"max-bandwidth": 1, "max-postcopy-bandwidth": 0, "downtime-limit": 300, "xbzrle-cache-size": 1});

        for (name, value, is) in [
            ("downtime-limit", "300ms", 300),
            ("downtime-limit", "1.5s", 1500),
            ("max-bandwidth", "10Gbit/s", 1_250_000_000),
            ("max-bandwidth", "1GB/s", 1_000_000_000),
            ("max-postcopy-bandwidth", "100MiB/s", 100 << 20),
            ("xbzrle-cache-size", "64M", 64 << 20),
        ] {
            assert_eq!(parameter(&present, name, value), Ok(json!(is)), "{name}={value}");
        }
        for (name, value, says) in [
            ("downtime-limit", "1M", "300ms"),
            ("downtime-limit", "500us", "whole number of milliseconds"),
            ("max-bandwidth", "300ms", "10Gbit/s"),
            ("xbzrle-cache-size", "1GB/s", "a size"),
        ] {
            let refused = parameter(&present, name, value).unwrap_err();
            assert_eq!(refused.status, Status::Usage, "{name}={value}");
            assert!(refused.message.contains(says), "{name}={value}: {}", refused.message);
        }
    }

    #[test]
    fn parameter_that_is_unknown_or_misfits_says_what_there_is() {
        let present = json!({"max-bandwidth": 1, "x": true});

        assert!(parameter(&present, "bandwidth", "1").unwrap_err().message.contains("max-bandwidth"));
        assert!(parameter(&present, "max-bandwidth", "fast").is_err());
        assert!(parameter(&present, "x", "2").is_err());
    }
}
