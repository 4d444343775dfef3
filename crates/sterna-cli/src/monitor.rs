//! One VM's monitor, Sterna's or QEMU's, with what the commands ask of it as typed calls.

use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna_qmp::{Client, ClientError, Endpoint};

use crate::exit::Stop;
use crate::figures::Figures;
use crate::units;

/// How long an answer may take. Commands answer at once; only a machine in trouble needs longer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A negotiated connection.
pub struct Monitor {
    client: Client,
    endpoint: Endpoint,
}

/// What `query-migrate` says, as far as both kinds of monitor say it. Nothing yet: all default.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Progress {
    /// QEMU's word; `undecided` and `held` where Sterna says so.
    pub status: String,
    /// Guest RAM, bytes.
    pub total_bytes: u64,
    /// Dirty bytes still to send.
    pub remaining_bytes: u64,
    /// Written so far.
    pub transferred_bytes: u64,
    /// Bytes per second in the last window.
    pub bandwidth_bytes: f64,
    /// Bytes that the guest dirties per second.
    pub dirty_bytes_per_second: f64,
    /// Milliseconds expected, or had.
    pub downtime_ms: Option<u64>,
    /// From 1.
    pub round: u64,
    /// Why it failed, or what must be known.
    pub error: Option<String>,
}

impl Monitor {
    /// Connects to `endpoint`.
    pub fn connect(endpoint: &Endpoint) -> Result<Self, Stop> {
        let client = Client::connect(endpoint, ANSWER_LIMIT).map_err(|error| {
            let hint = match &error {
                ClientError::Connect { .. } => "Is the VM running, and is this its QMP socket?",
                _ => "Name the socket of a QMP monitor (`sterna run --qmp`, `qemu -qmp`).",
            };
            Stop::failed(format!("{}. {hint}", sentence(&error)))
        })?;
        Ok(Self { client, endpoint: endpoint.clone() })
    }

    /// Where it is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether Sterna's VMM answers.
    pub fn is_sterna(&self) -> bool {
        self.client.is_sterna()
    }

    /// The monitor's version in words.
    pub fn version(&self) -> String {
        let version = self.client.version();
        let qemu = &version["qemu"];
        let number = |name: &str| qemu[name].as_u64().unwrap_or(0);
        let numbers = format!("QEMU {}.{}.{}", number("major"), number("minor"), number("micro"));
        match version["package"].as_str() {
            Some(package) if self.is_sterna() => format!("{package} (speaks as {numbers})"),
            Some(package) if !package.is_empty() => format!("{numbers} ({package})"),
            _ => numbers,
        }
    }

    /// Executes a command; a refusal or a broken connection ends ours with a sentence.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Stop> {
        self.try_execute(command, arguments).map_err(|error| self.stop(&error))
    }

    /// Executes a command whose refusal means something to the caller.
    pub fn try_execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.client.execute(command, arguments)
    }

    /// The sentence for an error of [`Monitor::try_execute`].
    pub fn stop(&self, error: &ClientError) -> Stop {
        Stop::failed(match error {
            ClientError::Refused { command, desc, .. } => {
                format!("{} refused `{command}`: {desc}", self.endpoint)
            }
            other => format!("{}: {}", self.endpoint, sentence(other)),
        })
    }

    /// The commands' limit; longer for those that check all of a guest's RAM.
    pub fn set_limit(&mut self, limit: Option<Duration>) {
        self.client.set_limit(limit.unwrap_or(ANSWER_LIMIT));
    }

    /// `query-status`'s word.
    pub fn run_state(&mut self) -> Result<String, Stop> {
        Ok(text(&self.execute("query-status", Value::Null)?["status"]))
    }

    /// `query-migrate`.
    pub fn progress(&mut self) -> Result<Progress, Stop> {
        Ok(Progress::from_query(&self.execute("query-migrate", Value::Null)?))
    }

    /// All that the engine knows about the migration away from there; none from QEMU, which has no such
    /// command, and before the first one.
    pub fn figures(&mut self) -> Result<Option<Figures>, Stop> {
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

    /// Switches capabilities on.
    pub fn switch_on(&mut self, capabilities: &[String]) -> Result<(), Stop> {
        if capabilities.is_empty() {
            return Ok(());
        }
        let states: Vec<Value> =
            capabilities.iter().map(|name| json!({"capability": name, "state": true})).collect();
        self.execute("migrate-set-capabilities", json!({ "capabilities": states })).map(drop)
    }

    /// Sets parameters from `NAME=VALUE` pairs. What a value is, the monitor's present one says: a number may
    /// carry a size's suffix.
    pub fn set_parameters(&mut self, pairs: &[(String, String)]) -> Result<(), Stop> {
        if pairs.is_empty() {
            return Ok(());
        }
        let present = self.execute("query-migrate-parameters", Value::Null)?;
        let mut changes = Map::new();
        for (name, value) in pairs {
            changes.insert(name.clone(), parameter(&present, name, value)?);
        }
        self.execute("migrate-set-parameters", Value::Object(changes)).map(drop)
    }
}

impl Progress {
    /// Reads what `query-migrate` returned.
    pub fn from_query(query: &Value) -> Self {
        let ram = &query["ram"];
        let number = |name: &str| ram[name].as_u64().unwrap_or(0);
        let flag = |name: &str| query[name].as_bool().unwrap_or(false);
        let page = ram["page-size"].as_u64().unwrap_or(units::PAGE_BYTES);
        Self {
            status: match text(&query["status"]) {
                _ if flag("x-sterna-undecided") => "undecided".into(),
                _ if flag("x-sterna-held") => "held".into(),
                status if status.is_empty() => "none".into(),
                status => status,
            },
            total_bytes: number("total"),
            remaining_bytes: number("remaining"),
            transferred_bytes: number("transferred"),
            bandwidth_bytes: ram["mbps"].as_f64().unwrap_or(0.0) * 1e6 / 8.0,
            dirty_bytes_per_second: number("dirty-pages-rate") as f64 * page as f64,
            downtime_ms: query["downtime"].as_u64().or(query["expected-downtime"].as_u64()),
            round: number("dirty-sync-count"),
            error: query["error-desc"].as_str().map(str::to_owned),
        }
    }

    /// Whether nothing more will happen by itself.
    pub fn is_over(&self) -> bool {
        matches!(self.status.as_str(), "none" | "completed" | "failed" | "cancelled")
    }
}

fn parameter(present: &Value, name: &str, value: &str) -> Result<Value, Stop> {
    let known = present.get(name).ok_or_else(|| {
        let names: Vec<&str> =
            present.as_object().into_iter().flat_map(Map::keys).map(String::as_str).collect();
        Stop::usage(format!("there is no parameter `{name}`; there are {}", names.join(", ")))
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

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// An error's words without a full stop, so that ours can go on.
fn sentence(error: &impl std::fmt::Display) -> String {
    error.to_string().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_of_a_running_migration_has_bytes_per_second() {
        let query = json!({"status": "active", "expected-downtime": 40, "ram": {
            "total": 100, "remaining": 30, "mbps": 8.0, "dirty-pages-rate": 10, "page-size": 4096,
            "dirty-sync-count": 2, "transferred": 80}});

        let progress = Progress::from_query(&query);

        assert_eq!(progress.bandwidth_bytes, 1e6);
        assert_eq!(progress.dirty_bytes_per_second, 40960.0);
        assert_eq!((progress.round, progress.downtime_ms), (2, Some(40)));
        assert!(!progress.is_over());
    }

    #[test]
    fn progress_before_any_migration_is_none() {
        let progress = Progress::from_query(&json!({}));

        assert_eq!(progress.status, "none");
        assert!(progress.is_over());
    }

    #[test]
    fn progress_says_undecided_where_qemu_has_no_word() {
        let query = json!({"status": "device", "x-sterna-undecided": true, "error-desc": "lost"});

        let progress = Progress::from_query(&query);

        assert_eq!(progress.status, "undecided");
        assert!(!progress.is_over());
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
    fn parameter_that_is_unknown_or_misfits_says_what_there_is() {
        let present = json!({"max-bandwidth": 1, "x": true});

        assert!(parameter(&present, "bandwidth", "1").unwrap_err().message.contains("max-bandwidth"));
        assert!(parameter(&present, "max-bandwidth", "fast").is_err());
        assert!(parameter(&present, "x", "2").is_err());
    }
}
