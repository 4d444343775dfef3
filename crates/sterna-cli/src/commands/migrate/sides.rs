//! Settings that a migration changes at both sides. They are restored at its end, whether it succeeded or
//! failed.

use std::time::{Duration, Instant};

use serde_json::Value;
use sterna::TlsEndpoint;
use sterna_drive::rdma::Needs;
use sterna_drive::{DriveError, Progress, Temporary, readiness};

use super::arguments::{Arguments, RECONNECT_WINDOW};
use crate::exit::Stop;
use crate::monitor::Monitor;
use crate::terminal::Live;
use crate::tls;

/// How long a destination may need to notice that the migration is over.
const NOTICE_LIMIT: Duration = Duration::from_secs(2);
/// How long a destination may take to discard the received state after `migrate_cancel`.
const GIVE_UP_LIMIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(20);

/// The settings that this command has changed at both sides.
pub(super) struct Sides {
    source: Temporary,
    destination: Option<Temporary>,
    /// This command made the destination listen.
    was_told_to_listen: bool,
    keeps: bool,
}

impl Sides {
    /// Reads the source's settings and changes nothing.
    pub(super) fn begin(source: &mut Monitor, keeps: bool) -> Result<Self, Stop> {
        let source = Temporary::begin(source.vm())?;
        Ok(Self { source, destination: None, was_told_to_listen: false, keeps })
    }

    pub(super) fn source(&mut self) -> &mut Temporary {
        &mut self.source
    }

    /// Applies the command line's settings to the source.
    pub(super) fn set_source(&mut self, arguments: &Arguments, source: &mut Monitor) -> Result<(), Stop> {
        let settings = &mut self.source;
        source.switch_for(settings, &arguments.cap)?;
        if let Some(directory) = &arguments.tls_dir {
            tls::give(source, settings, directory, TlsEndpoint::Client)?;
        }
        source.set_parameters_for(settings, &arguments.set)?;
        if arguments.same_host {
            source.set_parameters_for(settings, &[("mode".to_owned(), "cpr-transfer".to_owned())])?;
        }
        Ok(())
    }

    /// Makes the destination listen with the same settings and with `needs`, unless it already listens.
    /// Returns the address with the port that the destination uses.
    pub(super) fn listen(
        &mut self,
        arguments: &Arguments,
        needs: Needs,
        destination: &mut Monitor,
        live: &Live,
    ) -> Result<String, Stop> {
        let state = destination.run_state()?;
        if state != "inmigrate" {
            return Err(Stop::failed(format!(
                "{} is `{state}` and cannot receive a guest: start a VM with `--incoming defer` there",
                destination.endpoint()
            )));
        }
        let address = &arguments.destination;
        let before = destination.execute("query-migrate", Value::Null)?;
        if readiness::listens(&before) {
            if let Some(port) = other_port(address, &before) {
                live.note(&format!(
                    "sterna: warning: {} listens already, at port {port}, and the source connects to {address}",
                    destination.endpoint()
                ));
            }
            return Ok(with_real_port(address, &before));
        }
        let settings = Temporary::begin(destination.vm())?;
        let settings = self.destination.insert(settings);
        let mut capabilities = without_throttling(&arguments.cap);
        capabilities.extend(needs.return_path_there.then(|| ("return-path".to_owned(), true)));
        destination.switch_for(settings, &capabilities)?;
        if let Some(directory) = &arguments.tls_dir {
            tls::give(destination, settings, directory, TlsEndpoint::Server)?;
        }
        let shared = both_sides(&arguments.set, |name| settings.before().parameter(name).is_some());
        destination.set_parameters_for(settings, &shared)?;
        match destination.vm().migrate_incoming(address) {
            Ok(()) => self.was_told_to_listen = true,
            // A QEMU 7.2 that listens does not report it if the address has no port.
            Err(error) if error.is_refusal_with("already been started") => {}
            Err(error) => return Err(error.into()),
        }
        let now = destination.execute("query-migrate", Value::Null)?;
        Ok(with_real_port(address, &now))
    }

    /// Restores the settings of both sides, if the migration is over.
    /// Cancels the migration at a destination that still waits after a failure.
    pub(super) fn end(&self, source: &mut Monitor, destination: Option<&mut Monitor>, live: &Live) {
        let progress = source.vm().progress();
        let is_over = progress.as_ref().is_ok_and(Progress::is_over);
        let has_left = progress.as_ref().is_ok_and(|progress| progress.status == "completed");
        if is_over {
            put_back(&self.source, source, self.keeps, live);
        } else if !self.keeps && !progress.as_ref().is_err_and(DriveError::is_disconnect) {
            // A process that has exited has no settings to restore.
            self.note_left(source, progress.err().map(|error| error.to_string()), live);
        }
        let Some(destination) = destination.filter(|_| is_over) else { return };
        if has_left {
            // The destination reports the end a moment later than the source.
            wait_until_over(destination, NOTICE_LIMIT);
        } else {
            self.leave_waiting(destination, live);
        }
        if let Some(settings) = &self.destination {
            put_back(settings, destination, self.keeps, live);
        }
    }

    /// Warns of settings that stay, because the migration continues without this command, or because of
    /// `why`.
    fn note_left(&self, source: &Monitor, why: Option<String>, live: &Live) {
        let names = self.source.names();
        // `events` alone has no effect on a migration.
        if names.is_empty() || names == "events" {
            return;
        }
        let why = why.unwrap_or_else(|| "the migration has not ended".to_owned());
        live.note(&format!(
            "sterna: warning: {why}: {names} stay set at {}; restore the earlier values when it has ended",
            source.endpoint()
        ));
    }

    /// After a migration without a guest, makes the destination wait as it did before this command.
    fn leave_waiting(&self, destination: &mut Monitor, live: &Live) {
        let Some(progress) = wait_until_over(destination, NOTICE_LIMIT).filter(|it| !it.is_over()) else {
            return;
        };
        if !destination.is_sterna() {
            if self.was_told_to_listen {
                live.note(&format!(
                    "{} listens now, and a QEMU cannot stop listening: use the same address next time",
                    destination.endpoint()
                ));
            }
            return;
        }
        // It waits for a source whose connection was lost, or for the one that this command has announced.
        if progress.status != "setup" || self.was_told_to_listen {
            match destination.try_execute("migrate_cancel", Value::Null) {
                Ok(_) => drop(wait_until_over(destination, GIVE_UP_LIMIT)),
                Err(error) => live.note(&format!("sterna: warning: {}", destination.stop(error))),
            }
        }
    }
}

/// Waits until the VM's migration is over, at most for `limit`. Returns the last progress; none if the VM is
/// gone.
pub(in crate::commands) fn wait_until_over(monitor: &mut Monitor, limit: Duration) -> Option<Progress> {
    let deadline = Instant::now() + limit;
    loop {
        let query = monitor.try_execute("query-migrate", Value::Null).ok()?;
        let progress = Progress::from_query(&query);
        // A QEMU 7.2 that listens has no status.
        let is_over = progress.is_over() && !readiness::listens(&query);
        if is_over || Instant::now() >= deadline {
            let status =
                if is_over || !progress.is_over() { progress.status.clone() } else { "setup".into() };
            return Some(Progress { status, ..progress });
        }
        std::thread::sleep(LOOK);
    }
}

fn put_back(settings: &Temporary, monitor: &mut Monitor, keeps: bool, live: &Live) {
    if keeps {
        return;
    }
    match settings.put_back(monitor.vm()) {
        Ok(()) => {}
        // A QEMU exits if its incoming migration fails. Its settings end with it.
        Err(error) if error.is_disconnect() => {}
        Err(error) => live.note(&format!(
            "sterna: warning: the earlier values of {} could not be restored: {error}; restore them before the next \
             migration",
            settings.names()
        )),
    }
}

/// Settings that the destination must share; the others apply only to the source.
/// The destination gets RDMA settings if it `knows` them: they may differ unless both sides are QEMUs. The
/// same applies to the reconnect window; without it, the source warns that the window has no effect.
fn both_sides(set: &[(String, String)], knows: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    const IF_KNOWN: [&str; 3] = ["x-rdma-chunk-size", "x-sterna-rdma-pinned-limit", RECONNECT_WINDOW];
    let is_shared = |name: &str| name.starts_with("multifd-") || IF_KNOWN.contains(&name) && knows(name);
    set.iter().filter(|(name, _)| is_shared(name)).cloned().collect()
}

/// Capabilities that the destination must also have. Those for throttling are left out, because only a source
/// throttles.
fn without_throttling(capabilities: &[(String, bool)]) -> Vec<(String, bool)> {
    let is_for_both = |(name, _): &&(String, bool)| !matches!(name.as_str(), "auto-converge" | "dirty-limit");
    capabilities.iter().filter(is_for_both).cloned().collect()
}

/// `tcp:HOST:0` or `rdma:HOST:0` with the port that the destination reports.
fn with_real_port(address: &str, query: &Value) -> String {
    let port = match address.split_once(':') {
        Some(("tcp", _)) => &query["socket-address"][0]["port"],
        Some(("rdma", _)) => &query["x-sterna-address"]["port"],
        _ => &Value::Null,
    };
    match (address.strip_suffix(":0"), port.as_str()) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        _ => address.to_owned(),
    }
}

/// The port at which a destination already listens, if it differs from the port of `address`.
fn other_port(address: &str, query: &Value) -> Option<String> {
    let (kind, place) = address.split_once(':')?;
    let port = query["socket-address"][0]["port"].as_str().filter(|_| kind == "tcp")?;
    let wanted = place.split(',').next()?.rsplit_once(':')?.1;
    (wanted != "0" && wanted != port).then(|| port.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn with_real_port_replaces_only_a_port_that_was_left_open() {
        let query = json!({"socket-address": [{"type": "inet", "host": "127.0.0.1", "port": "4567"}]});

        assert_eq!(with_real_port("tcp:127.0.0.1:0", &query), "tcp:127.0.0.1:4567");
        assert_eq!(with_real_port("tcp:127.0.0.1:80", &query), "tcp:127.0.0.1:80");
        assert_eq!(with_real_port("unix:/tmp/a:0", &query), "unix:/tmp/a:0");
        assert_eq!(with_real_port("tcp:127.0.0.1:0", &json!({})), "tcp:127.0.0.1:0");
        let query = json!({"x-sterna-address": {"transport": "rdma", "host": "10.9.0.1", "port": "4567"}});
        assert_eq!(with_real_port("rdma:10.9.0.1:0", &query), "rdma:10.9.0.1:4567");
        assert_eq!(with_real_port("rdma:10.9.0.1:80", &query), "rdma:10.9.0.1:80");
    }

    #[test]
    fn both_sides_keeps_what_the_wire_depends_on() {
        let all = [
            "multifd-channels",
            "x-rdma-chunk-size",
            "x-sterna-rdma-pinned-limit",
            RECONNECT_WINDOW,
            "max-bandwidth",
        ];
        let set = all.map(|name| (name.to_owned(), "4M".to_owned()));

        assert_eq!(both_sides(&set, |_| true), set[..4]);
        assert_eq!(both_sides(&set, |name| name == "x-rdma-chunk-size"), set[..2]);
        assert_eq!(both_sides(&set, |_| false), set[..1]);
    }

    #[test]
    fn capabilities_of_the_source_alone_are_not_asked_of_the_destination() {
        let all =
            [("multifd", true), ("auto-converge", true), ("dirty-limit", false), ("return-path", false)];
        let all = all.map(|(name, is_on)| (name.to_owned(), is_on));

        assert_eq!(without_throttling(&all), [all[0].clone(), all[3].clone()]);
    }

    #[test]
    fn other_port_is_found_where_the_destination_listens_elsewhere() {
        let query = json!({"socket-address": [{"type": "inet", "host": "0.0.0.0", "port": "4567"}]});

        assert_eq!(other_port("tcp:host:4568", &query), Some("4567".to_owned()));
        for same in ["tcp:host:4567", "tcp:host:4567,ipv4=on", "tcp:host:0", "unix:/a:1"] {
            assert_eq!(other_port(same, &query), None, "{same}");
        }
        assert_eq!(other_port("tcp:host:4568", &json!({})), None);
    }
}
