//! A guest of Sterna's own machine: it protects itself, and this command tells both sides and shows how it goes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Arguments, LINE, LOOK};
use crate::exit::{Done, Status, Stop};
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::{terminal, units};

/// How long the seeding may take until the standby is greeted and listens.
const BEGIN_LIMIT: Duration = Duration::from_secs(60);

/// Protects it.
pub(super) fn execute(arguments: &Arguments, mut primary: Monitor, interrupts: &Interrupts) -> Done {
    refuse(arguments)?;
    let mut standby = arguments.standby_qmp.as_ref().map(Monitor::connect).transpose()?;
    if let Some(standby) = &mut standby {
        if !standby.is_sterna() {
            return Err(Stop::usage(format!(
                "{} is no Sterna: the standby of a Sterna VM is another one (`sterna run --incoming defer`), or `sterna standby`",
                standby.endpoint()
            )));
        }
        set(arguments, standby)?;
        standby.execute("migrate-incoming", json!({"uri": arguments.standby}))?;
    }
    set(arguments, &mut primary)?;
    if let Err(error) = primary.execute("migrate", json!({"uri": arguments.standby})) {
        if let Some(standby) = &mut standby {
            // What it waits for does not come; an error says that it waits no more.
            let _ = standby.try_execute("migrate_cancel", Value::Null);
        }
        return Err(error);
    }
    watch(arguments, &mut primary, interrupts)
}

/// What is the VM's own affair, and not this command's.
fn refuse(arguments: &Arguments) -> Result<(), Stop> {
    let is_set = [
        ("--secret", arguments.secret.is_some()),
        ("--contact", arguments.contact.is_some()),
        ("--qmp", arguments.qmp.is_some()),
        ("--socket-dir", arguments.socket_dir.is_some()),
        ("--tls-dir", arguments.tls_dir.is_some()),
        ("--disk", !arguments.disk.is_empty()),
    ];
    match is_set.into_iter().find(|(_, is_set)| *is_set) {
        Some((option, _)) => Err(Stop::usage(format!(
            "{option} is for a QEMU: a Sterna VM has its arbiter, its secret, its lease and its certificates from `sterna run`"
        ))),
        None => Ok(()),
    }
}

fn set(arguments: &Arguments, monitor: &mut Monitor) -> Result<(), Stop> {
    let mut capabilities = vec!["x-colo".to_owned(), "return-path".to_owned()];
    if arguments.checkpoints.delta.is_some() {
        capabilities.push("xbzrle".to_owned());
    }
    monitor.switch_on(&capabilities)?;
    // Both sides alike, whatever an earlier migration or protection of either has left.
    let multifd = json!({"capability": "multifd", "state": arguments.channels.is_some()});
    monitor.execute("migrate-set-capabilities", json!({"capabilities": [multifd]}))?;
    let mut parameters = monitor.parameters(&arguments.set)?;
    parameters.insert("x-checkpoint-delay".to_owned(), arguments.checkpoint_delay.into());
    parameters.extend(arguments.checkpoints.parameters());
    if let Some(channels) = arguments.channels {
        parameters.insert("multifd-channels".to_owned(), channels.into());
    }
    monitor.execute("migrate-set-parameters", Value::Object(parameters)).map(drop)
}

/// Until there is an outcome.
fn watch(arguments: &Arguments, primary: &mut Monitor, interrupts: &Interrupts) -> Done {
    let first = interrupts.count();
    let (mut heard, mut due, mut before) = (first, Instant::now(), Value::Null);
    loop {
        let report = report(primary)?;
        if let Some(outcome) = report["outcome"].as_str() {
            return ended(arguments, outcome, &report);
        }
        if Instant::now() >= due {
            due = Instant::now() + LINE;
            terminal::print(&line(arguments.json, &report, &before));
            before = report;
        }
        interrupts.sleep(LOOK, heard);
        if interrupts.count() > heard {
            heard = interrupts.count();
            if heard >= first + 2 {
                return Err(Stop::with(
                    Status::Detached,
                    "left: the guest stays protected; see `sterna info`, and end it with `sterna unprotect`",
                ));
            }
            match primary.execute("x-sterna-unprotect", Value::Null) {
                Ok(_) => terminal::note(
                    "ending the protection: the standby is asked for its last word (Ctrl-C again leaves it as it is)",
                ),
                // Not seeded yet: then nothing is held, and the guest is here.
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
                terminal::note("the guest is not protected any more and runs on where it ran");
                return Ok(Status::Done);
            }
            Some(_) => {
                return Err(Stop::with(
                    Status::Lost,
                    "the standby has the guest; it was ended at its primary",
                ));
            }
            None if begun.elapsed() > BEGIN_LIMIT => {
                return Err(Stop::failed(format!(
                    "the protection has not ended within {} s; `sterna info` says where it stands",
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
            format!("{}; ask the standby who has the guest (`sterna info`)", stop.message),
        )
    })
}

fn ended(arguments: &Arguments, outcome: &str, report: &Value) -> Done {
    if arguments.json {
        terminal::print(&json_line(report));
    }
    let trouble = report["trouble"].as_str().unwrap_or("no reason is known");
    match outcome {
        "alone" if report["alone-by"] == "arbiter" => Err(Stop::failed(format!(
            "the standby was lost ({trouble}), and the claim is won: the guest runs on here, unprotected"
        ))),
        "alone" => {
            let why = report["trouble"].as_str().map_or_else(String::new, |trouble| format!(": {trouble}"));
            terminal::note(&format!("the guest is not protected any more and runs on here{why}"));
            Ok(Status::Done)
        }
        "handed over" => {
            let held = report["held"].as_u64().unwrap_or(0);
            terminal::note(&format!("handed over: the guest runs at the standby, from checkpoint {held} on"));
            Ok(Status::Done)
        }
        "lost" => {
            Err(Stop::with(Status::Lost, format!("the standby has the guest ({trouble}); it was ended here")))
        }
        _ => Err(Stop::failed(format!("the guest is not protected, and runs on here: {trouble}"))),
    }
}

fn line(is_json: bool, report: &Value, before: &Value) -> String {
    if is_json {
        return json_line(report);
    }
    let number = |name: &str| report[name].as_u64().unwrap_or(0);
    let time = |name: &str| units::time(Duration::from_secs_f64(report[name].as_f64().unwrap_or(0.0)));
    let state = report["state"].as_str().unwrap_or("seeding");
    if number("checkpoints") == 0 {
        return format!("{state:<11} {} sent\n", units::bytes(number("transferred-bytes")));
    }
    let rate = number("checkpoints").saturating_sub(before["checkpoints"].as_u64().unwrap_or(0));
    format!(
        "{state:<11} checkpoint {}, {rate}/s; pause {} (99 %: {}); output waits {}; the last one {}\n",
        number("held"),
        time("pause-p50"),
        time("pause-p99"),
        time("output-delay"),
        units::bytes(number("last-pages") * units::PAGE_BYTES),
    )
}

fn json_line(report: &Value) -> String {
    let mut value = report.clone();
    value["schema"] = "sterna-protection".into();
    value["version"] = 1.into();
    format!("{value}\n")
}
