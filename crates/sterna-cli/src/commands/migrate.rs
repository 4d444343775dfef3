//! `sterna migrate`: drives a migration over QMP and watches it to its end.
//!
//! With both monitors in hand (`--dest-qmp`) it also prepares the destination, and holds the destination's
//! guest until a QEMU source has said `completed`: a QEMU source that missed the acknowledgement resumes by
//! itself, and two guests would run (ARCHITECTURE.md, *Handover*).

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use sterna::{Address, Statistics, Status as Stage, TlsEndpoint};
use sterna_qmp::Endpoint;
use sterna_qmp::drive::handover::{self, Arrived, Handover, OnArrival, StaysPaused};
use sterna_qmp::drive::rdma::{self, Needs, Wanted};
use sterna_qmp::drive::{DriveError, Settings};
use sterna_transport::TransportError;

use super::pair;
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::plan::{self, Plan, live::Stated};
use crate::record::{Record, Report};
use crate::terminal::{self, Live};
use crate::units::parse_bandwidth;
use crate::{summary, tls, watch};

const RECONNECT_WINDOW: &str = "x-sterna-reconnect-window";

/// From where, to where, how.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// QMP socket of the source: unix:PATH, a path, or tcp:HOST:PORT
    pub socket: Endpoint,
    /// Where the destination listens: tcp:HOST:PORT, rdma:HOST:PORT, unix:PATH or fd:NAME
    #[arg(value_parser = address)]
    pub destination: String,
    /// QMP socket of the destination: it gets the same settings and is told to listen, unless it listens already
    #[arg(long, value_name = "SOCKET")]
    pub dest_qmp: Option<Endpoint>,
    /// Leave the guest paused at the destination; `cont` there starts it. Without this option a guest that ran runs on
    /// there, unless the destination was started with -S, which can be detected only on the destination's own host
    #[arg(long, requires = "dest_qmp")]
    pub paused: bool,
    /// Move the guest to another Sterna process of this user on this host, and copy no memory: the destination, at unix:PATH, maps
    /// the memory that the source has. Guest RAM must be a memfd, huge pages or a shared file on both sides. The same as
    /// `--set mode=cpr-transfer`, which stays set only if the guest has moved
    #[arg(long)]
    pub same_host: bool,
    /// Migration parameter under QEMU's name, such as max-bandwidth=1G or multifd-channels=4. With `--dest-qmp` the
    /// destination gets those that both sides must share, too: multifd-*, and for rdma: alone x-rdma-chunk-size and
    /// x-sterna-rdma-pinned-limit
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Migration capability under QEMU's name, such as multifd
    #[arg(long, value_name = "NAME")]
    pub cap: Vec<String>,
    /// Let the guest go on at the destination before all of its memory is there; the rest follows, what it needs first. WHEN
    /// is `auto`: if it writes faster than the link carries; or a number of rounds of precopy, such as `2rounds` (both need a
    /// Sterna as the source); or a number of seconds after the start, 0 for as soon as possible. Switches postcopy-ram and
    /// postcopy-preempt on, on both sides with `--dest-qmp`. Once the guest runs at the destination, it needs both sides and
    /// the link until all of its memory is there
    #[arg(long, value_name = "WHEN", value_parser = postcopy_when, num_args = 0..=1, default_missing_value = "auto")]
    pub postcopy: Option<PostcopyWhen>,
    /// Make a connection that breaks before the guest is handed over anew, and go on with what had arrived, for so many seconds
    /// after each loss; meanwhile the guest runs on at the source. Sets x-sterna-reconnect-window, on both sides with `--dest-qmp`.
    /// Needs a Sterna on both sides, and a network: not rdma:, not a descriptor
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub reconnect_window: Option<u32>,
    /// Measure how the guest writes and print a forecast first; it is stored in the record before the first byte is
    /// sent
    #[arg(long)]
    pub forecast: bool,
    /// The link's bandwidth for the forecast, such as 10Gbit/s [default: max-bandwidth]
    #[arg(long, value_name = "RATE", value_parser = parse_bandwidth, requires = "forecast")]
    pub bandwidth: Option<u64>,
    /// Use TLS with the certificates in this directory (QEMU's file names) on the source's host; with `--dest-qmp` on
    /// both hosts
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Print the record as JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Write the record to a file, for `sterna report`
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
    /// Seconds to wait for the destination's answer when the acknowledgement was lost
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub undecided_wait: u64,
}

/// When a guest goes on at the destination before its pages are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostcopyWhen {
    /// When precopy does not converge.
    Auto,
    /// So long after the start.
    After(Duration),
    /// After so many rounds of precopy.
    AfterRounds(u32),
}

impl PostcopyWhen {
    /// So long after the start, if that is when.
    fn after(self) -> Option<Duration> {
        match self {
            Self::After(time) => Some(time),
            Self::Auto | Self::AfterRounds(_) => None,
        }
    }

    /// After so many rounds, if that is when.
    fn after_rounds(self) -> Option<u32> {
        match self {
            Self::AfterRounds(rounds) => Some(rounds),
            Self::Auto | Self::After(_) => None,
        }
    }
}

pub(super) fn postcopy_when(text: &str) -> Result<PostcopyWhen, String> {
    let number = |digits: &str| digits.parse::<u32>().ok();
    let rounds = text.strip_suffix("rounds").or_else(|| text.strip_suffix("round"));
    let when = match (text, rounds) {
        ("auto", _) => Some(PostcopyWhen::Auto),
        (_, Some(digits)) => number(digits).filter(|rounds| *rounds > 0).map(PostcopyWhen::AfterRounds),
        (digits, None) => {
            number(digits).map(|seconds| PostcopyWhen::After(Duration::from_secs(seconds.into())))
        }
    };
    when.ok_or_else(|| {
        format!(
            "`{text}` is neither `auto`, nor a number of seconds, nor a number of rounds such as `2rounds`"
        )
    })
}

/// An address that some QEMU knows; which of them, the VM says.
pub(super) fn address(text: &str) -> Result<String, String> {
    const KINDS: [&str; 7] = ["tcp", "rdma", "unix", "fd", "vsock", "exec", "file"];
    match text.split_once(':') {
        Some(("rdma", _)) => rdma_address(text).map(|_| text.to_owned()),
        Some((kind, rest)) if KINDS.contains(&kind) && !rest.is_empty() => Ok(text.to_owned()),
        _ => Err(format!("`{text}` is not an address such as tcp:HOST:PORT, rdma:HOST:PORT or unix:PATH")),
    }
}

/// Checked here, since a QEMU that is told to listen at one without a port aborts. It ignores options after a comma.
fn rdma_address(text: &str) -> Result<Address, String> {
    let place = text.split(',').next().unwrap_or_default();
    match place.parse().map_err(|error: TransportError| error.to_string())? {
        Address::Rdma { host, .. } if host.is_empty() => Err(format!(
            "{text:?} is not an address: a host must follow rdma:, since the source connects to it"
        )),
        address => Ok(address),
    }
}

/// Migrates.
pub fn execute(arguments: &Arguments) -> Done {
    let interrupts = Interrupts::catch()?;
    let mut source = Monitor::connect(&arguments.socket)?;
    let mut destination = arguments.dest_qmp.as_ref().map(Monitor::connect).transpose()?;
    let live = Live::new(arguments.json);
    let report = arguments.report.as_deref().map(Report::begin).transpose()?;
    let record = drive(arguments, &mut source, destination.as_mut(), &live, &interrupts)?;
    live.end();

    let end = watch::end(&record.statistics, &source);
    terminal::print(&if arguments.json { record.to_json() } else { summary::table(&record) });
    if let Some(report) = report
        && let Err(error) = report.write(&record)
    {
        // The exit status says what became of the guest, whatever becomes of the record.
        terminal::note(&format!("sterna: warning: {error}"));
    }
    end
}

/// The settings that options stand for.
fn with_settings(mut arguments: Arguments) -> Arguments {
    if let Some(seconds) = arguments.reconnect_window {
        let milliseconds = u64::from(seconds) * 1000;
        arguments.set.push((RECONNECT_WINDOW.to_owned(), milliseconds.to_string()));
    }
    let Some(when) = arguments.postcopy else { return arguments };
    for name in ["postcopy-ram", "postcopy-preempt"].map(str::to_owned) {
        if !arguments.cap.contains(&name) {
            arguments.cap.push(name);
        }
    }
    let at_source = match when {
        PostcopyWhen::Auto => Some(("x-sterna-non-convergence", "postcopy".to_owned())),
        PostcopyWhen::AfterRounds(rounds) => Some(("x-sterna-postcopy-after-rounds", rounds.to_string())),
        // Told from here, since a QEMU has no such setting.
        PostcopyWhen::After(_) => None,
    };
    arguments.set.extend(at_source.map(|(name, value)| (name.to_owned(), value)));
    arguments
}

/// The migration itself: settings, start, end; and what came of it, however it ended.
pub fn drive(
    arguments: &Arguments,
    source: &mut Monitor,
    mut destination: Option<&mut Monitor>,
    live: &Live,
    interrupts: &Interrupts,
) -> Result<Record, Stop> {
    let arguments = &with_settings(arguments.clone());
    if let Some(destination) = destination.as_deref_mut() {
        handover::compare(source.vm(), destination.vm())?;
    }
    let needs = match arguments.destination.starts_with("rdma:") {
        true => compare_for_rdma(arguments, source, destination.as_deref_mut())?,
        false => Needs::default(),
    };
    source.switch_on(&arguments.cap)?;
    if let Some(directory) = &arguments.tls_dir {
        tls::give(source, directory, TlsEndpoint::Client)?;
    }
    source.set_parameters(&arguments.set)?;
    let mode = if arguments.same_host { Some(Mode::begin(source, &arguments.destination)?) } else { None };
    let other = destination.as_deref_mut();
    let mut driven = drive_set_up(arguments, source, other, needs, live, interrupts);
    if let Ok(record) = &mut driven
        && record.statistics.postcopy.is_some()
    {
        record.arrival = destination.and_then(Monitor::arrival);
    }
    if let Some(mode) = mode {
        let has_moved = driven.as_ref().is_ok_and(|record| record.statistics.status == Stage::Completed);
        mode.end(source, has_moved);
    }
    driven
}

/// The migration, with the source's settings made.
fn drive_set_up(
    arguments: &Arguments,
    source: &mut Monitor,
    mut destination: Option<&mut Monitor>,
    needs: Needs,
    live: &Live,
    interrupts: &Interrupts,
) -> Result<Record, Stop> {
    let pressed = interrupts.count();
    let mut address = arguments.destination.clone();
    if let Some(destination) = destination.as_deref_mut() {
        address = listen(arguments, needs, destination)?;
    }
    let forecast = if arguments.forecast { Some(foretell(arguments, source, &address)?) } else { None };
    let on_arrival = if arguments.paused { OnArrival::Paused } else { OnArrival::AsStarted };
    let handover = {
        let destination = destination.as_deref_mut().map(Monitor::vm);
        Handover::begin(source.vm(), destination, on_arrival, needs.return_path)?
    };
    if let Some(remark) = handover.remark() {
        live.note(&format!("sterna: warning: {remark}"));
    }
    let begun = if interrupts.count() > pressed {
        Err(Stop::with(
            Status::Cancelled,
            "cancelled before anything was sent; the guest runs on at the source.",
        ))
    } else {
        source.execute("migrate", json!({ "uri": address }))
    };
    if let Err(refused) = begun {
        handover.refused(source.vm(), destination.as_deref_mut().map(Monitor::vm));
        return Err(refused);
    }
    let patience = Duration::from_secs(arguments.undecided_wait);
    let destination = destination.map(Monitor::vm);
    let window = Settings::read(source.vm())?;
    let window = window.parameter("x-sterna-reconnect-window").and_then(Value::as_u64).unwrap_or(0);
    let postcopy = watch::PostcopyWatch {
        after: arguments.postcopy.and_then(PostcopyWhen::after),
        address: &address,
        window: Duration::from_millis(window),
    };
    let watched = watch::until_over(source, live, interrupts, pressed, patience, postcopy);
    let (mut figures, trace) = match watched {
        Ok(seen) => seen,
        Err(error) if error.is_disconnect() => return Err(handover.lost(source.vm(), destination).into()),
        Err(error) => {
            let stop = match error {
                DriveError::Detached(what) => watch::detached(source, &what),
                error => error.into(),
            };
            let Some(destination) = destination.filter(|_| handover.is_held()) else { return Err(stop) };
            return Err(stop.with_more(&format!(
                " The destination holds the guest: if the source reports `completed`, run `cont` at {}.",
                destination.at()
            )));
        }
    };
    match figures.status {
        Stage::Completed => {
            let at = destination.as_ref().map(|destination| destination.at().to_owned()).unwrap_or_default();
            match (handover.completed(source.vm(), destination)?, trace.stopped) {
                // The guest waited for us: QEMU's own figure ends too early.
                (Arrived::Started, Some(stopped)) => {
                    figures.downtime = Some(trace.began.elapsed() - stopped);
                }
                (Arrived::Paused(why), _) => live.note(&left_paused(&at, why)),
                _ => {}
            }
        }
        Stage::Failed | Stage::Cancelled => {
            if let Some(reason) = handover.failed(source.vm(), destination) {
                let own = figures.error.take().unwrap_or_else(|| "the connection broke".into());
                figures.error = Some(format!("{own}; the destination reports: {reason}"));
            }
        }
        // Undecided: an operator has the word, and the settings may wait for him.
        _ => {}
    }
    match channels(source) {
        Ok(count) => figures.channels = figures.channels.max(count),
        Err(error) => live.note(&format!("the number of channels is unknown: {error}")),
    }
    let precopy = source.recording();
    Ok(Record { forecast, precopy, ..Record::new(&source.endpoint().to_string(), &address, figures) })
}

/// `mode` is `cpr-transfer` for one migration.
struct Mode {
    before: Value,
}

impl Mode {
    fn begin(source: &mut Monitor, destination: &str) -> Result<Self, Stop> {
        if !destination.starts_with("unix:") {
            return Err(Stop::usage(format!(
                "`--same-host` hands the guest's memory over a Unix socket, and {destination} is none: give unix:PATH"
            )));
        }
        let before =
            Settings::read(source.vm())?.parameter("mode").cloned().unwrap_or_else(|| "normal".into());
        source.execute("migrate-set-parameters", json!({ "mode": "cpr-transfer" }))?;
        Ok(Self { before })
    }

    /// A guest that is still here may move to another host next.
    fn end(self, source: &mut Monitor, has_moved: bool) {
        if !has_moved
            && let Err(error) = source.execute("migrate-set-parameters", json!({ "mode": self.before }))
        {
            terminal::note(&format!("sterna: warning: the parameter `mode` is still cpr-transfer: {error}"));
        }
    }
}

/// What is said of a guest that has arrived and stays paused.
fn left_paused(at: &str, why: StaysPaused) -> String {
    let why = match why {
        StaysPaused::StartedStopped => "which was started with -S",
        StaysPaused::Asked => "as --paused says",
    };
    format!("the guest has arrived and is paused at {at}, {why}: `cont` there starts it")
}

/// Plans, shows the plan, and stores it: whoever reads the record later sees what was known before.
fn foretell(arguments: &Arguments, source: &mut Monitor, address: &str) -> Result<Plan, Stop> {
    let to = Some(address.to_owned());
    let postcopy_after = arguments.postcopy.and_then(PostcopyWhen::after);
    let postcopy_after_rounds = arguments.postcopy.and_then(PostcopyWhen::after_rounds);
    let bandwidth_bytes = arguments.bandwidth;
    let stated = Stated { bandwidth_bytes, to, postcopy_after, postcopy_after_rounds, ..Stated::default() };
    let plan = stated.plan_for(source)?;
    terminal::note(&plan::table(&plan));
    if let Some(file) = &arguments.report {
        let record = Record::new(&source.endpoint().to_string(), address, Statistics::default());
        Report::begin(file)?.write(&Record { forecast: Some(plan.clone()), ..record })?;
    }
    Ok(plan)
}

/// Channels that carry pages, as they are set.
fn channels(monitor: &mut Monitor) -> Result<u32, Stop> {
    let settings = Settings::read(monitor.vm())?;
    Ok(match settings.capability("multifd") {
        Some(true) => {
            settings.parameter("multifd-channels").and_then(Value::as_u64).map_or(1, |count| count as u32)
        }
        _ => 1,
    })
}

/// Finds what does not match over `rdma:`; gives back what the destination needs besides the settings of the command line.
fn compare_for_rdma(
    arguments: &Arguments,
    source: &mut Monitor,
    destination: Option<&mut Monitor>,
) -> Result<Needs, Stop> {
    let address = rdma_address(&arguments.destination).map_err(Stop::usage)?;
    let parameters = source.parameters(&arguments.set)?;
    let wanted = Wanted {
        capabilities: &arguments.cap,
        parameters: &parameters,
        has_tls: arguments.tls_dir.is_some(),
    };
    Ok(rdma::compare(source.vm(), destination.map(Monitor::vm), &address, wanted)?)
}

/// Makes the destination listen with the same settings and what it `needs`, unless it does already.
/// Gives back the address with its real port.
fn listen(arguments: &Arguments, needs: Needs, destination: &mut Monitor) -> Result<String, Stop> {
    let state = destination.run_state()?;
    if state != "inmigrate" {
        return Err(Stop::failed(format!(
            "{} is `{state}` and cannot receive a guest: start a VM with `--incoming defer` there",
            destination.endpoint()
        )));
    }
    let before = destination.execute("query-migrate", Value::Null)?;
    if before["status"] != "setup" {
        let mut capabilities = without_throttling(&arguments.cap);
        capabilities.extend(needs.return_path_there.then(|| "return-path".to_owned()));
        destination.switch_on(&capabilities)?;
        if let Some(directory) = &arguments.tls_dir {
            tls::give(destination, directory, TlsEndpoint::Server)?;
        }
        let known = Settings::read(destination.vm())?;
        destination.set_parameters(&both_sides(&arguments.set, |name| known.parameter(name).is_some()))?;
        destination.vm().migrate_incoming(&arguments.destination)?;
    }
    let now = destination.execute("query-migrate", Value::Null)?;
    Ok(with_real_port(&arguments.destination, &now))
}

/// Settings that the destination must share; the others are the source's alone. Those of RDMA it gets if it `knows` them:
/// they may differ unless both sides are QEMUs. So does the window of a lost connection: without it the source says that it has
/// no effect.
fn both_sides(set: &[(String, String)], knows: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    const IF_KNOWN: [&str; 3] = ["x-rdma-chunk-size", "x-sterna-rdma-pinned-limit", RECONNECT_WINDOW];
    let is_shared = |name: &str| name.starts_with("multifd-") || IF_KNOWN.contains(&name) && knows(name);
    set.iter().filter(|(name, _)| is_shared(name)).cloned().collect()
}

/// Capabilities that the destination must have as well. It throttles nobody, and may lack what that needs.
fn without_throttling(capabilities: &[String]) -> Vec<String> {
    let is_for_both = |name: &&String| !matches!(name.as_str(), "auto-converge" | "dirty-limit");
    capabilities.iter().filter(is_for_both).cloned().collect()
}

/// `tcp:HOST:0` or `rdma:HOST:0` with the port that the destination says it got.
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
        let query = json!({"x-sterna-address": {"transport": "rdma", "host": "10.9.0.1", "port": "4567"}});
        assert_eq!(with_real_port("rdma:10.9.0.1:0", &query), "rdma:10.9.0.1:4567");
        assert_eq!(with_real_port("rdma:10.9.0.1:80", &query), "rdma:10.9.0.1:80");
    }

    #[test]
    fn address_of_rdma_needs_host_and_port_and_keeps_the_options_that_qemu_ignores() {
        for good in ["rdma:h:4444", "rdma:[fd09::1]:4444", "rdma:h:4444,ipv4=on", "rdma:h:0", "tcp:h"] {
            assert_eq!(address(good), Ok(good.to_owned()));
        }
        for (bad, word) in [
            ("rdma:", "port"),
            ("rdma:host", "port"),
            ("rdma:host,ipv4=on", "port"),
            ("rdma:host:http", "number"),
            ("rdma::4444", "a host"),
            ("rdma", "rdma:HOST:PORT"),
        ] {
            let refused = address(bad).unwrap_err();
            assert!(refused.contains(word), "{bad}: {refused}");
        }
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
    fn postcopy_stands_for_settings_of_both_sides() {
        assert_eq!(postcopy_when("auto"), Ok(PostcopyWhen::Auto));
        assert_eq!(postcopy_when("0"), Ok(PostcopyWhen::After(Duration::ZERO)));
        assert_eq!(postcopy_when("2rounds"), Ok(PostcopyWhen::AfterRounds(2)));
        assert_eq!(postcopy_when("1round"), Ok(PostcopyWhen::AfterRounds(1)));
        assert!(postcopy_when("0rounds").is_err() && postcopy_when("rounds").is_err());
        assert!(postcopy_when("soon").is_err() && postcopy_when("-1").is_err());
    }

    #[test]
    fn capabilities_of_the_source_alone_are_not_asked_of_the_destination() {
        let all = ["multifd", "auto-converge", "dirty-limit", "return-path"].map(str::to_owned);

        assert_eq!(without_throttling(&all), ["multifd", "return-path"]);
    }
}
