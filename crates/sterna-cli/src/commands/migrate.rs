//! `sterna migrate`: drives a migration over QMP and watches it to its end.
//!
//! With both monitors in hand (`--dest-qmp`) it also prepares the destination, and holds the destination's
//! guest until a QEMU source has said `completed`: a QEMU source that missed the acknowledgement resumes by
//! itself, and two guests would run (ARCHITECTURE.md, *Handover*).

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_qmp::Endpoint;

use super::pair;
use crate::exit::{Done, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::record::Record;
use crate::terminal::{self, Live};
use crate::{summary, watch};

/// From where, to where, how.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// QMP socket of the source: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
    /// Where the destination listens: tcp:HOST:PORT, unix:PATH or fd:NAME
    pub destination: String,
    /// QMP socket of the destination: it is given the same settings and told to listen, if it does not yet
    #[arg(long, value_name = "SOCKET")]
    pub dest_qmp: Option<Endpoint>,
    /// Migration parameter under QEMU's name, such as max-bandwidth=1G or multifd-channels=4
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Migration capability under QEMU's name, such as multifd
    #[arg(long, value_name = "NAME")]
    pub cap: Vec<String>,
    /// Print the record as JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Write the record to a file, for `sterna report`
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
    /// Seconds to wait for the truth when the acknowledgement was lost
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub undecided_wait: u64,
}

/// Migrates.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let mut source = Monitor::connect(&arguments.socket)?;
    let mut destination = arguments.dest_qmp.as_ref().map(Monitor::connect).transpose()?;
    let live = Live::new(arguments.json);
    let record = drive(arguments, &mut source, destination.as_mut(), &live, &interrupts)?;
    live.end();

    if let Some(file) = &arguments.report {
        record.write(file)?;
    }
    terminal::print(&if arguments.json { record.to_json() } else { summary::table(&record) });
    watch::end(&record.statistics, &source)
}

/// The migration itself: settings, start, end; and what came of it, however it ended.
pub fn drive(
    arguments: &Arguments,
    source: &mut Monitor,
    mut destination: Option<&mut Monitor>,
    live: &Live,
    interrupts: &Interrupts,
) -> Result<Record, Stop> {
    let ran = source.run_state()? == "running";
    source.switch_on(&arguments.cap)?;
    source.set_parameters(&arguments.set)?;
    let mut address = arguments.destination.clone();
    let mut held = false;
    if let Some(destination) = destination.as_deref_mut() {
        address = listen(arguments, destination)?;
        // Unless it was started stopped, it would start the guest before a QEMU source is sure.
        if destination.is_sterna() && !source.is_sterna() {
            destination.execute("stop", Value::Null)?;
            held = true;
        }
    }
    source.execute("migrate", json!({ "uri": address }))?;
    let patience = Duration::from_secs(arguments.undecided_wait);
    let figures = watch::until_over(source, live, interrupts, patience)?;
    if let Some(destination) = destination
        && held
        && ran
        && figures.status == "completed"
    {
        destination.execute("cont", Value::Null)?;
    }
    Ok(Record::new(&source.endpoint().to_string(), &address, figures))
}

/// Makes the destination listen with the same settings, unless it does already. Gives back the address with
/// its real port.
fn listen(arguments: &Arguments, destination: &mut Monitor) -> Result<String, Stop> {
    let state = destination.run_state()?;
    if state != "inmigrate" {
        return Err(Stop::failed(format!(
            "{} is `{state}` and takes no guest: start a VM with `--incoming defer` there",
            destination.endpoint()
        )));
    }
    let before = destination.execute("query-migrate", Value::Null)?;
    if before["status"] != "setup" {
        destination.switch_on(&arguments.cap)?;
        destination.set_parameters(&both_sides(&arguments.set))?;
        destination.execute("migrate-incoming", json!({ "uri": arguments.destination }))?;
    }
    let now = destination.execute("query-migrate", Value::Null)?;
    Ok(with_real_port(&arguments.destination, &now))
}

/// Settings that the destination must share; the others are the source's alone.
fn both_sides(set: &[(String, String)]) -> Vec<(String, String)> {
    set.iter().filter(|(name, _)| name.starts_with("multifd-")).cloned().collect()
}

/// `tcp:HOST:0` with the port that the destination says it got.
fn with_real_port(address: &str, query: &Value) -> String {
    let port = query["socket-address"][0]["port"].as_str();
    match (address.strip_suffix(":0"), port) {
        (Some(host), Some(port)) if address.starts_with("tcp:") => format!("{host}:{port}"),
        _ => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_real_port_replaces_only_a_port_that_was_left_open() {
        let query = json!({"socket-address": [{"type": "inet", "host": "127.0.0.1", "port": "4567"}]});

        assert_eq!(with_real_port("tcp:127.0.0.1:0", &query), "tcp:127.0.0.1:4567");
        assert_eq!(with_real_port("tcp:127.0.0.1:80", &query), "tcp:127.0.0.1:80");
        assert_eq!(with_real_port("unix:/tmp/a:0", &query), "unix:/tmp/a:0");
        assert_eq!(with_real_port("tcp:127.0.0.1:0", &json!({})), "tcp:127.0.0.1:0");
    }

    #[test]
    fn both_sides_keeps_what_the_wire_depends_on() {
        let set =
            [("multifd-channels".to_owned(), "4".to_owned()), ("max-bandwidth".to_owned(), "0".to_owned())];

        assert_eq!(both_sides(&set), set[..1]);
    }
}
