//! `sterna protect` for a Sterna VM. The VM protects its guest itself; this command configures both sides and
//! shows the state.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna_drive::Settings;

use super::json::{End, Line};
use super::{Arguments, LINE, LOOK};
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::protection_record::{GuestAt, Look, Recorder};
use crate::{terminal, tls, units};

/// Time limit for the connection to the standby and its handshake.
const BEGIN_LIMIT: Duration = Duration::from_secs(60);

/// Protects the guest of the Sterna VM `primary`, and restores the settings at the end.
pub(super) fn execute(
    arguments: &Arguments,
    mut primary: Monitor,
    interrupts: &Interrupts,
    recorder: &mut Recorder,
) -> Done {
    refuse(arguments)?;
    let mut standby = arguments.standby_qmp.as_ref().map(Monitor::connect).transpose()?;
    if let Some(standby) = standby.as_ref().filter(|standby| !standby.is_sterna()) {
        return Err(Stop::usage(format!(
            "{} is not a Sterna VM: the standby of a Sterna VM is another Sterna VM (`sterna run --incoming defer`), \
             or `sterna standby`",
            standby.endpoint()
        )));
    }
    let before = Settings::read(primary.vm())?;
    let before_there = standby.as_mut().map(|standby| Settings::read(standby.vm())).transpose()?;
    let done = begin(arguments, &mut primary, standby.as_mut(), interrupts)
        .and_then(|()| watch(arguments, &mut primary, interrupts, recorder));
    if matches!(&done, Err(stop) if stop.status == Status::Detached) {
        // The protection continues and needs its settings.
        return done;
    }
    put_back(arguments, &mut primary, &before);
    if let (Some(standby), Some(before)) = (&mut standby, &before_there) {
        put_back(arguments, standby, before);
    }
    done
}

/// Configures both sides and starts the protection.
fn begin(
    arguments: &Arguments,
    primary: &mut Monitor,
    mut standby: Option<&mut Monitor>,
    interrupts: &Interrupts,
) -> Result<(), Stop> {
    if let Some(standby) = &mut standby {
        set(arguments, standby)?;
        standby.execute("migrate-incoming", json!({"uri": arguments.standby}))?;
    }
    let begun = set(arguments, primary).and_then(|()| migrate(primary, &arguments.standby, interrupts));
    if let (Err(_), Some(standby)) = (&begun, standby) {
        // The standby waits for a stream that will not arrive. The call fails if the standby has already
        // stopped waiting.
        let _ = standby.try_execute("migrate_cancel", Value::Null);
    }
    begun?;
    if report(primary)?["watchdog"] == false {
        terminal::note(
            "sterna: warning: this VM has no watchdog (`sterna run --watchdog DEVICE`). If its process or its host is \
             suspended for longer than the lease and then resumes, its guest may run for a moment at the same time as \
             the standby's guest, unless the standby has a --fence",
        );
    }
    Ok(())
}

/// The capabilities that a protection sets.
const CAPABILITIES: [&str; 4] = ["x-colo", "return-path", "xbzrle", "multifd"];
/// How long a VM may refuse its former settings.
/// Its part of the protection ends a moment after the command's.
const PUT_BACK_LIMIT: Duration = Duration::from_secs(5);

/// Restores the settings that this command changed, for the next migration or protection. Nothing is done for
/// a VM that has exited.
fn put_back(arguments: &Arguments, monitor: &mut Monitor, before: &Settings) {
    let until = Instant::now() + PUT_BACK_LIMIT;
    let at = monitor.endpoint().to_string();
    loop {
        let parameters = parameters(arguments, monitor);
        let undone = parameters.and_then(|parameters| {
            let changed = before.changed_since(monitor.vm(), &CAPABILITIES, parameters.keys())?;
            Ok(changed.undo(monitor.vm())?)
        });
        let Err(stop) = undone else { return };
        if Instant::now() >= until || monitor.run_state().is_err() {
            let is_there = monitor.run_state().is_ok();
            if is_there {
                terminal::note(&format!(
                    "sterna: warning: the earlier settings of {at} could not be restored ({}): before a plain \
                     migration, switch x-colo off there",
                    stop.message
                ));
            }
            return;
        }
        std::thread::sleep(LOOK);
    }
}

/// Executes `migrate`, which returns after the handshake with the standby. Ctrl-C cancels it.
fn migrate(primary: &mut Monitor, standby: &str, interrupts: &Interrupts) -> Result<(), Stop> {
    let endpoint = primary.endpoint().clone();
    let is_answered = AtomicBool::new(false);
    let cancel = || {
        while !is_answered.load(Ordering::Acquire) {
            interrupts.sleep(LOOK, 0);
            if interrupts.count() > 0 {
                // A second connection is needed, because the first one waits for the answer of `migrate`.
                let other = Monitor::connect(&endpoint);
                return other.and_then(|mut other| other.execute("migrate_cancel", Value::Null)).map(drop);
            }
        }
        Ok(())
    };
    primary.set_limit(Some(BEGIN_LIMIT));
    let begun = std::thread::scope(|scope| {
        // If the thread cannot be created, Ctrl-C takes effect only after the answer.
        let watching = std::thread::Builder::new().spawn_scoped(scope, cancel);
        let begun = primary.execute("migrate", json!({"uri": standby}));
        is_answered.store(true, Ordering::Release);
        (begun, watching.map(|watching| watching.join()))
    });
    primary.set_limit(None);
    match begun {
        (Err(stop), _) if interrupts.count() > 0 => Err(Stop::with(
            Status::Cancelled,
            format!(
                "{}; the guest is not protected and continues to run",
                stop.message.trim_end_matches('.')
            ),
        )),
        (Err(stop), _) => {
            let advice = tls::name_advice(&stop.message, tls::NAME_PARAMETER);
            Err(stop.with_more(advice))
        }
        (Ok(_), Ok(Ok(Err(stop)))) => {
            terminal::note(&format!("sterna: warning: {stop}"));
            Ok(())
        }
        (Ok(_), _) => Ok(()),
    }
}

/// Refuses options that a Sterna VM gets from its own `sterna run`.
fn refuse(arguments: &Arguments) -> Result<(), Stop> {
    let is_set = [
        ("--secret", arguments.secret.is_some()),
        ("--contact", arguments.contact.is_some()),
        ("--qmp", arguments.qmp.is_some()),
        ("--socket-dir", arguments.socket_dir.is_some()),
        ("--tls-dir", arguments.tls_dir.is_some()),
        ("--disk", !arguments.disk.is_empty()),
        ("--watchdog", arguments.watchdog.is_some()),
    ];
    match is_set.into_iter().find(|(_, is_set)| *is_set) {
        Some((option, _)) => Err(Stop::usage(format!(
            "{option} is only for a QEMU: a Sterna VM gets its arbiter, secret, lease, watchdog and certificates from \
             `sterna run`"
        ))),
        None => Ok(()),
    }
}

fn set(arguments: &Arguments, monitor: &mut Monitor) -> Result<(), Stop> {
    // Both sides get the same settings, because an earlier migration or protection may have left others.
    let multifd = ("multifd", arguments.channels.is_some());
    let delta = arguments.checkpoints.delta.is_some().then_some(("xbzrle", true));
    let capabilities = [("x-colo", true), ("return-path", true), multifd].into_iter().chain(delta);
    let capabilities: Vec<_> = capabilities.map(|(name, is_on)| (name.to_owned(), is_on)).collect();
    monitor.switch(&capabilities)?;
    let parameters = parameters(arguments, monitor)?;
    monitor.execute("migrate-set-parameters", Value::Object(parameters)).map(drop)
}

/// The parameters that a protection sets.
fn parameters(arguments: &Arguments, monitor: &mut Monitor) -> Result<Map<String, Value>, Stop> {
    let mut parameters = monitor.parameters(&arguments.set)?;
    parameters.insert("x-checkpoint-delay".to_owned(), arguments.checkpoint_delay.into());
    parameters.extend(arguments.checkpoints.parameters());
    if let Some(bytes) = arguments.checkpoint_buffer {
        parameters.insert("x-sterna-checkpoint-buffer-size".to_owned(), bytes.into());
    }
    if let Some(channels) = arguments.channels {
        parameters.insert("multifd-channels".to_owned(), channels.into());
    }
    Ok(parameters)
}

/// Prints a line per second until the protection ends.
fn watch(
    arguments: &Arguments,
    primary: &mut Monitor,
    interrupts: &Interrupts,
    recorder: &mut Recorder,
) -> Done {
    let (began, mut heard, mut due) = (Instant::now(), 0, Instant::now());
    let mut shown = Shown { checkpoints: report(primary)?["checkpoints"].as_u64().unwrap_or(0), at: began };
    loop {
        let report = report(primary)?;
        recorder.look(Look::at_sterna(&report));
        if let Some(outcome) = report["outcome"].as_str() {
            let done = ended(arguments, primary, outcome, &report, began.elapsed());
            let how = match (&done, outcome) {
                (Err(stop), _) => stop.message.as_str(),
                (Ok(_), "handed over") => "handed over as planned: the guest runs at the standby",
                (Ok(_), _) => "an operator ended the protection: the guest continues to run at the primary",
            };
            let is_there = matches!(outcome, "handed over" | "lost");
            let guest_at = if is_there { GuestAt::Standby } else { GuestAt::Primary };
            recorder.end(Some(outcome), Some(guest_at), how);
            return done;
        }
        if Instant::now() >= due {
            due = Instant::now() + LINE;
            let per_second = shown.per_second(&report);
            terminal::print(&match arguments.json {
                true => format!("{}\n", Line::of_sterna(&report, per_second, began.elapsed()).value()),
                false => line(&report, per_second),
            });
        }
        interrupts.sleep(LOOK, heard);
        if interrupts.count() > heard {
            heard = interrupts.count();
            if heard >= 2 {
                return Err(Stop::with(
                    Status::Detached,
                    "interrupted: the guest stays protected. `sterna info` shows the protection, and `sterna \
                     unprotect` ends it",
                ));
            }
            match primary.execute("x-sterna-unprotect", Value::Null) {
                Ok(_) => terminal::note(
                    "ending the protection: waiting for the standby's confirmation (Ctrl-C again exits and leaves the \
                     protection as it is)",
                ),
                // The seeding is not finished: the standby holds no checkpoint, and the guest is here.
                Err(_) => drop(primary.execute("migrate_cancel", Value::Null)?),
            }
        }
    }
}

/// Ends the protection of a Sterna VM's guest.
pub(in crate::commands) fn unprotect(monitor: &mut Monitor) -> Done {
    let begun = Instant::now();
    loop {
        let report = report(monitor)?;
        match report["outcome"].as_str() {
            Some("alone") => {
                // `sterna protect` restores its settings unless it was detached or killed. `x-colo` is the
                // one that makes an ordinary migration fail, so it is switched off here.
                let off = json!({"capabilities": [{"capability": "x-colo", "state": false}]});
                if let Err(error) = monitor.try_execute("migrate-set-capabilities", off) {
                    terminal::note(&format!("sterna: warning: x-colo stays on: {error}"));
                }
                let here = monitor.where_guest_is("at its VM");
                terminal::note(&format!("the guest is not protected any more: {here}"));
                return Ok(Status::Done);
            }
            Some(_) => {
                return Err(Stop::with(
                    Status::Lost,
                    "the standby has the guest; the primary has ended its copy",
                ));
            }
            None if begun.elapsed() > BEGIN_LIMIT => {
                return Err(Stop::failed(format!(
                    "the protection has not ended within {} s; `sterna info` shows its state",
                    BEGIN_LIMIT.as_secs()
                )));
            }
            None => std::thread::sleep(LOOK),
        }
    }
}

fn report(monitor: &mut Monitor) -> Result<Value, Stop> {
    monitor.execute("x-sterna-query-protection", Value::Null).map_err(|stop| {
        Stop::with(
            Status::Undecided,
            format!("{}; find out whether the standby has the guest (`sterna info` there)", stop.message),
        )
    })
}

fn ended(arguments: &Arguments, primary: &mut Monitor, outcome: &str, report: &Value, age: Duration) -> Done {
    let is_here = !matches!(outcome, "handed over" | "lost");
    let runs_here = is_here && primary.run_state().is_ok_and(|state| state == "running");
    if arguments.json {
        terminal::print(&format!("{}\n", End::of_sterna(report, outcome, runs_here, age).value()));
    }
    let here = primary.where_guest_is("here");
    let trouble = report["trouble"].as_str().unwrap_or("no reason is known");
    match outcome {
        "alone" if report["alone-by"] == "arbiter" => Err(Stop::failed(format!(
            "the standby was lost ({trouble}), and the claim is won: {here}, unprotected"
        ))),
        "alone" => {
            let why = report["trouble"].as_str().map_or_else(String::new, |trouble| format!(" ({trouble})"));
            terminal::note(&format!("the guest is not protected any more: {here}{why}"));
            Ok(Status::Done)
        }
        "handed over" => {
            let held = report["held"].as_u64().unwrap_or(0);
            terminal::note(&format!(
                "handed over: the guest runs at the standby, starting from checkpoint {held}"
            ));
            Ok(Status::Done)
        }
        "lost" => Err(Stop::with(
            Status::Lost,
            format!("the standby has the guest ({trouble}); the guest was ended here"),
        )),
        _ => Err(Stop::failed(format!("the guest is not protected ({trouble}); {here}"))),
    }
}

/// The values of the previous line, from which rates are computed.
struct Shown {
    checkpoints: u64,
    at: Instant,
}

impl Shown {
    /// Checkpoints per second since the previous line; none if that was less than half a line's interval ago.
    fn per_second(&mut self, report: &Value) -> Option<f64> {
        let (now, taken) = (Instant::now(), report["checkpoints"].as_u64().unwrap_or(0));
        let before = std::mem::replace(self, Self { checkpoints: taken, at: now });
        let time = now.duration_since(before.at);
        (time >= LINE / 2).then(|| taken.saturating_sub(before.checkpoints) as f64 / time.as_secs_f64())
    }
}

fn line(report: &Value, per_second: Option<f64>) -> String {
    let number = |name: &str| report[name].as_u64().unwrap_or(0);
    let time = |name: &str| units::time(Duration::from_secs_f64(report[name].as_f64().unwrap_or(0.0)));
    let state = report["state"].as_str().unwrap_or("seeding");
    if number("checkpoints") == 0 {
        return format!("{state:<11} {} sent\n", units::bytes(number("transferred-bytes")));
    }
    let rate = per_second.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"));
    format!(
        "{state:<11} checkpoint {}, {rate}/s; pause {} (99 %: {}); output waits {}; the last {}\n",
        number("held"),
        time("pause-p50"),
        time("pause-p99"),
        time("output-delay"),
        units::bytes(number("last-pages") * units::PAGE_BYTES),
    )
}
