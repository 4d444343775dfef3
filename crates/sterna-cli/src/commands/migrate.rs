//! `sterna migrate`: starts a migration over QMP and watches it to its end.
//!
//! With both monitors (`--dest-qmp`), it also prepares the destination. It keeps the destination's guest
//! stopped until a QEMU source has reported `completed`. A QEMU source that misses the acknowledgement
//! resumes by itself, and two guests would run (docs/design/handover.md).

mod arguments;
mod sides;
mod via;

use std::time::Duration;

use serde_json::{Value, json};
use sterna::{Statistics, Status as Stage};
use sterna_drive::handover::{self, Arrived, Handover, OnArrival, ReturnPath, StaysPaused};
use sterna_drive::rdma::{self, Needs};
use sterna_drive::{DriveError, MonitorAddress, Settings, Trace, Wanted, agree, readiness};

use self::sides::Sides;
pub(super) use self::sides::wait_until_over;
use self::via::OwnRelay;
pub use self::via::Via;

use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::plan::{self, Plan, live::Stated};
use crate::record::{Record, Report};
use crate::terminal::{self, Live};
use crate::{bitmaps, libvirt, summary, watch};
pub use arguments::{Arguments, PostcopyWhen};
use arguments::{RECONNECT_WINDOW, rdma_address};
pub(super) use arguments::{address, postcopy_when};

/// Migrates the guest, prints the result, and writes the report.
pub fn execute(arguments: &Arguments) -> Done {
    let addresses = [Some(&arguments.socket), arguments.dest_qmp.as_ref()];
    if let Some(domain) = addresses.into_iter().flatten().find_map(MonitorAddress::domain) {
        return Err(libvirt::migrate(domain, &arguments.destination, arguments.postcopy.is_some()));
    }
    let interrupts = Interrupts::catch()?;
    let mut source = Monitor::connect(&arguments.socket)?;
    let mut destination = arguments.dest_qmp.as_ref().map(Monitor::connect_oob).transpose()?;
    let live = Live::new(arguments.shown, arguments.json);
    let report = arguments.report.as_deref().map(Report::begin).transpose()?;
    let record = drive(arguments, &mut source, destination.as_mut(), &live, &interrupts)?;
    live.end();

    let end = watch::end(&record, &mut source);
    terminal::print(&if arguments.json { record.to_json() } else { summary::table(&record) });
    if let Some(report) = report
        && let Err(error) = report.write(&record)
    {
        // The exit status tells where the guest is. A record that cannot be written does not change it.
        terminal::note(&format!("sterna: warning: {error}"));
    }
    end
}

/// Adds the settings that options such as `--postcopy` imply.
fn with_settings(mut arguments: Arguments) -> Arguments {
    if let Some(seconds) = arguments.reconnect_window {
        let milliseconds = u64::from(seconds) * 1000;
        arguments.set.push((RECONNECT_WINDOW.to_owned(), milliseconds.to_string()));
    }
    let Some(when) = arguments.postcopy else { return arguments };
    for name in ["postcopy-ram", "postcopy-preempt"].map(str::to_owned) {
        if !arguments.cap.iter().any(|(given, _)| *given == name) {
            arguments.cap.push((name, true));
        }
    }
    let at_source = match when {
        PostcopyWhen::Auto => Some(("x-sterna-non-convergence", "postcopy".to_owned())),
        PostcopyWhen::AfterRounds(rounds) => Some(("x-sterna-postcopy-after-rounds", rounds.to_string())),
        // This command triggers the switch, because a QEMU has no such setting.
        PostcopyWhen::After(_) => None,
    };
    arguments.set.extend(at_source.map(|(name, value)| (name.to_owned(), value)));
    arguments
}

/// Runs the migration and returns its record, however it ended. The settings of both sides are restored.
pub fn drive(
    arguments: &Arguments,
    source: &mut Monitor,
    mut destination: Option<&mut Monitor>,
    live: &Live,
    interrupts: &Interrupts,
) -> Result<Record, Stop> {
    let arguments = &with_settings(arguments.clone());
    let needs = compare(arguments, source, destination.as_deref_mut())?;
    let settings = Settings::read(source.vm())?;
    if let Some(text) =
        bitmaps::warning(source, &settings, &arguments.cap, "migrate with `--cap dirty-bitmaps`")
    {
        live.note(&format!("sterna: warning: {text}"));
    }
    let mut sides = Sides::begin(source, arguments.keep_settings)?;
    let other = destination.as_deref_mut();
    let mut driven = drive_set_up(arguments, &mut sides, source, other, needs, live, interrupts);
    if let Ok(record) = &mut driven
        && record.statistics.postcopy.is_some()
    {
        record.arrival = destination.as_deref_mut().and_then(Monitor::arrival);
    }
    sides.end(source, destination, live);
    driven
}

/// Refuses combinations that cannot work, before any setting is changed.
/// Returns what both sides need in addition to the settings of the command line.
fn compare(
    arguments: &Arguments,
    source: &mut Monitor,
    mut destination: Option<&mut Monitor>,
) -> Result<Needs, Stop> {
    let address = &arguments.destination;
    if arguments.same_host && !address.starts_with("unix:") {
        return Err(Stop::usage(format!(
            "`--same-host` needs a Unix socket as the destination, and {address} is another kind of address: give \
             unix:PATH"
        )));
    }
    readiness::may_leave(source.vm(), "migrate")?;
    if let Some(destination) = destination.as_deref_mut() {
        handover::compare(source.vm(), destination.vm())?;
    }
    let parameters = source.parameters(&arguments.set)?;
    let settings = Settings::read(source.vm())?;
    source.check_known(&settings, &arguments.cap)?;
    let wanted = Wanted {
        capabilities: &arguments.cap,
        parameters: &parameters,
        has_tls: arguments.tls_dir.is_some(),
    };
    if address.starts_with("rdma:") {
        let address = rdma_address(address).map_err(Stop::usage)?;
        return Ok(rdma::compare(source.vm(), destination.map(Monitor::vm), &address, wanted)?);
    }
    let return_path = match (ReturnPath::over(address), &destination) {
        _ if arguments.cap.contains(&("return-path".to_owned(), false)) => ReturnPath::AsSet,
        (ReturnPath::AsSet, Some(_)) => ReturnPath::On,
        (return_path, _) => return_path,
    };
    // A same-host migration hands memory over, so the settings of the page stream do not matter.
    if let Some(destination) = destination.filter(|_| !arguments.same_host) {
        agree::compare(source.vm(), destination.vm(), wanted)?;
    }
    Ok(Needs { return_path, ..Needs::default() })
}

/// Runs the migration after both sides were found to be compatible.
fn drive_set_up(
    arguments: &Arguments,
    sides: &mut Sides,
    source: &mut Monitor,
    mut destination: Option<&mut Monitor>,
    needs: Needs,
    live: &Live,
    interrupts: &Interrupts,
) -> Result<Record, Stop> {
    sides.set_source(arguments, source)?;
    // Reasons why the source refuses must be found before the destination listens, because a QEMU accepts
    // only one address.
    readiness::refuse_blocked(source.vm())?;
    let forecast = if arguments.forecast { Some(foretell(arguments, source)?) } else { None };
    let mut address = arguments.destination.clone();
    if let Some(destination) = destination.as_deref_mut() {
        address = sides.listen(arguments, needs, destination, live)?;
    }
    let own_relay = OwnRelay::start(arguments.via.as_ref(), source, live)?;
    if let Some(own) = &own_relay {
        address = own.address();
    }
    let on_arrival = if arguments.paused { OnArrival::Paused } else { OnArrival::AsStarted };
    let handover = {
        let destination = destination.as_deref_mut().map(Monitor::vm);
        Handover::begin(source.vm(), sides.source(), destination, on_arrival, needs.return_path)?
    };
    if let Some(remark) = handover.remark() {
        live.note(&format!("sterna: warning: {remark}"));
    }
    let begun = if interrupts.count() > 0 {
        Err(Stop::with(
            Status::Cancelled,
            "cancelled before anything was sent; the guest runs at the source.",
        ))
    } else {
        source.execute("migrate", json!({ "uri": address }))
    };
    if let Err(refused) = begun {
        handover.refused(destination.as_deref_mut().map(Monitor::vm));
        return Err(refused);
    }
    let ran = handover.ran();
    // While relays are without a connection, no answer can come.
    let lost = arguments.via.as_ref().map_or(0, |via| via.via_reconnect_window);
    let patience = Duration::from_secs(arguments.undecided_wait + lost);
    let mut destination = destination.map(Monitor::vm);
    let window = Settings::read(source.vm())?;
    let window = window.parameter(RECONNECT_WINDOW).and_then(Value::as_u64).unwrap_or(0);
    let postcopy = watch::PostcopyWatch {
        after: arguments.postcopy.and_then(PostcopyWhen::after),
        address: &address,
        window: Duration::from_millis(window),
        starts_at_switch: handover.starts_at_switch(),
    };
    let other = destination.as_deref_mut();
    let watched = watch::until_over(source, other, live, interrupts, patience, postcopy);
    let (mut figures, trace) = match watched {
        Ok(seen) => seen,
        Err(error) if error.is_disconnect() => return Err(handover.lost(source.vm(), destination).into()),
        Err(error) => {
            let stop = match error {
                DriveError::Detached(what) => {
                    let stop = watch::detached(source, &what);
                    if own_relay.is_some() { stop.with_more(OwnRelay::GOES_WITH_IT) } else { stop }
                }
                error => error.into(),
            };
            // With postcopy, the destination's guest was started at the switch.
            let is_postcopy = source.progress().is_ok_and(|now| now.status.starts_with("postcopy-"));
            let waits = handover.is_held() && !(is_postcopy && handover.starts_at_switch());
            let Some(destination) = destination.filter(|_| waits) else { return Err(stop) };
            return Err(stop.with_more(&format!(
                " The destination holds the guest: if the source reports `completed`, run `cont` at {}.",
                destination.at()
            )));
        }
    };
    let mut unconfirmed = None;
    match figures.status {
        Stage::Completed => {
            let at = destination.as_ref().map(|destination| destination.at().to_owned()).unwrap_or_default();
            let why = handover.unconfirmed().map(str::to_owned);
            match (handover.completed(source.vm(), destination)?, trace.stopped) {
                // The guest started only after this command sent `cont`. QEMU's downtime ends before that, so
                // it is measured here.
                (Arrived::Started, Some(stopped)) if figures.postcopy.is_none() && !trace.has_switched() => {
                    figures.downtime = Some(trace.began.elapsed() - stopped);
                }
                (Arrived::Paused(why), _) => live.note(&left_paused(&at, why)),
                (Arrived::ByItself, _) if !ran => {
                    live.note("the guest was paused at the source, so it is paused at the destination: `cont` there \
                               resumes it");
                }
                // With `file:`, the source has written the file itself and no destination confirms.
                (Arrived::Unconfirmed, _) if !address.starts_with("file:") => unconfirmed = why,
                _ => {}
            }
        }
        Stage::Failed | Stage::Cancelled => {
            let is_alone = destination.is_none();
            // The error of a Sterna source names the first cause, unless the cause is at the destination.
            let is_there = !source.is_sterna()
                || figures.error.as_ref().is_none_or(|own| own.starts_with("the destination"));
            let reason = if is_there { handover.failed(destination) } else { None };
            if let Some(reason) = reason {
                figures.error = Some(match figures.error.take() {
                    Some(own) => format!("{}; {reason}", own.trim_end_matches("; see its log")),
                    None => format!("the connection broke; {reason}"),
                });
            }
            if figures.status == Stage::Failed && figures.error.is_none() && !source.is_sterna() {
                let reason =
                    "the connection to the destination broke; the destination's log contains the reason";
                figures.error = Some(reason.to_owned());
            }
            if is_alone && let Some(text) = perhaps_twice(source, &figures, &trace) {
                live.note(&text);
            }
        }
        // A QEMU source that gets no answer keeps reporting that the migration runs.
        status if !source.is_sterna() && !status.is_terminal() && status != Stage::PostcopyPaused => {
            figures.status = Stage::Undecided;
            figures.error =
                Some(format!("the destination has not confirmed within {patience:?} that it has the guest"));
        }
        // Undecided: the operator decides, and the settings stay until then.
        _ => {}
    }
    if let Some(own) = own_relay {
        own.end(figures.status == Stage::Undecided, live, interrupts);
    }
    match channels(source) {
        Ok(count) => figures.channels = figures.channels.max(count),
        Err(error) => live.note(&format!("the number of channels is unknown: {error}")),
    }
    let precopy = source.recording();
    let to = match arguments.via.as_ref().and_then(|via| via.via.as_ref()) {
        Some(relay) => format!("{} via {relay}", arguments.destination),
        None => address,
    };
    let record = Record::new(&source.endpoint().to_string(), &to, figures);
    Ok(Record { forecast, precopy, unconfirmed, ..record })
}

/// A warning that two guests may run.
/// A QEMU resumes its guest if it misses the destination's answer. A destination without a monitor here may
/// already have started the guest.
fn perhaps_twice(source: &Monitor, figures: &Statistics, trace: &Trace) -> Option<String> {
    // "Sibling indicated error 1": the destination has reported that it does not have the guest.
    let is_told = figures.error.as_ref().is_some_and(|error| error.starts_with("Sibling indicated"));
    let is_late = trace.stopped.is_some() && !trace.was_cancelled && !is_told;
    (figures.status == Stage::Failed && is_late && !source.is_sterna()).then(|| {
        "sterna: warning: the migration failed after the guest was stopped: make sure that the guest does not run at \
         the destination, too"
            .to_owned()
    })
}

/// The message about a guest that has arrived and stays paused.
fn left_paused(at: &str, why: StaysPaused) -> String {
    let why = match why {
        StaysPaused::StartedStopped => "which was started with -S",
        StaysPaused::Asked => "because of --paused",
    };
    format!("the guest has arrived and is paused at {at}, {why}: `cont` there starts it")
}

/// Makes the plan, shows it, and stores it in the record for later comparison with the measured migration.
fn foretell(arguments: &Arguments, source: &mut Monitor) -> Result<Plan, Stop> {
    let address = &arguments.destination;
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

/// Channels that carry pages, from the source's settings.
fn channels(monitor: &mut Monitor) -> Result<u32, Stop> {
    let settings = Settings::read(monitor.vm())?;
    Ok(match settings.capability("multifd") {
        Some(true) => {
            settings.parameter("multifd-channels").and_then(Value::as_u64).map_or(1, |count| count as u32)
        }
        _ => 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_tcp_or_unix_is_checked_before_a_vm_gets_it() {
        for good in
            ["tcp:h:4444", "tcp:[::1]:0", "tcp::4444", "tcp:h:4444,ipv4=on", "unix:/a,b", "fd:7", "exec:cat"]
        {
            assert_eq!(address(good), Ok(good.to_owned()));
        }
        let long = format!("unix:/{}", "x".repeat(107));
        for (bad, word) in [
            ("tcp:", "port"),
            ("tcp:h", "port"),
            ("tcp:h:99999", "65535"),
            ("tcp:h:abc", "number"),
            ("tcp:::1:4724", "brackets"),
            ("tcp:[::1]4724", "[NUMBER]:PORT"),
            ("tcp://h:4444", "slash"),
            ("h:4444", "tcp:HOST:PORT"),
            ("unix:", "path"),
            (&long, "107"),
            ("fd:", "tcp:HOST:PORT"),
        ] {
            let refused = address(bad).unwrap_err();
            assert!(refused.contains(word), "{bad}: {refused}");
        }
    }

    #[test]
    fn address_of_rdma_needs_host_and_port_and_keeps_the_options_that_qemu_ignores() {
        for good in ["rdma:h:4444", "rdma:[fd09::1]:4444", "rdma:h:4444,ipv4=on", "rdma:h:0"] {
            assert_eq!(address(good), Ok(good.to_owned()));
        }
        for (bad, word) in [
            ("rdma:", "port"),
            ("rdma:host", "port"),
            ("rdma:host,ipv4=on", "port"),
            ("rdma:host:http", "number"),
            ("rdma::4444", "the host"),
            ("rdma", "rdma:HOST:PORT"),
        ] {
            let refused = address(bad).unwrap_err();
            assert!(refused.contains(word), "{bad}: {refused}");
        }
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
}
