//! What the command prints.

use std::time::Duration;

use serde_json::{Value, json};
use sterna::replica::machines::standby::State;
use sterna::replica::{HeldCheckpoint, StandbyState, StandbyStatistics};
use sterna_qmp::drive::waiting::Survived;
use sterna_qmp::standby::StandbyReport;

use super::place::Ready;
use super::{Arguments, LINE};
use crate::units;

/// The line of a second.
pub fn line(is_json: bool, report: &StandbyReport, before: &StandbyStatistics) -> String {
    let now = &report.statistics;
    let per_second = (now.checkpoints - before.checkpoints) as f64 / LINE.as_secs_f64();
    if is_json {
        let contact = report.contact.as_ref();
        let value: Value = json!({
            "schema": "sterna-standby",
            "version": 1,
            "state": report.word(),
            "address": report.address.to_string(),
            "checkpoints": now.checkpoints,
            "checkpoints_per_second": per_second,
            "last_normal_pages": now.last_normal_pages,
            "last_zero_pages": now.last_zero_pages,
            "last_device_bytes": now.last_device_bytes,
            "last_time": now.last_took.as_secs_f64(),
            "age": now.age.map(|age| age.as_secs_f64()),
            "most_journal_bytes": now.most_journal_bytes,
            "most_disk_bytes": now.most_disk_bytes,
            "received_bytes": now.received_bytes,
            "ram_total_bytes": now.ram_bytes,
            "contact": contact.map(|contact| contact.to_json()),
            "arbiter": contact.and(report.arbiter.as_ref()).map(|(spec, identity)| json!({
                "spec": spec, "identity": identity,
            })),
            "waiting_vm": report.waiting_vm,
            "trouble": report.trouble(),
        });
        return format!("{value}\n");
    }
    match report.state {
        StandbyState::Waiting if report.contact.is_some() => "in contact, waiting for the guest\n".to_owned(),
        StandbyState::Waiting => "waiting for a primary\n".to_owned(),
        StandbyState::Seeding => format!(
            "seeding     {} of {}\n",
            units::bytes((now.normal_pages + now.zero_pages) * units::PAGE_BYTES),
            units::bytes(now.ram_bytes)
        ),
        _ => format!(
            "{:<11} checkpoint {}, {per_second:.0}/s; the last one {} in {}, {} ago; journal at most {}{}\n",
            report.word(),
            now.checkpoints,
            units::bytes(now.last_normal_pages * units::PAGE_BYTES + now.last_device_bytes),
            units::time(now.last_took),
            units::time(now.age.unwrap_or_default()),
            units::bytes(now.most_journal_bytes),
            contact(report),
        ),
    }
}

fn contact(report: &StandbyReport) -> String {
    let Some(contact) = &report.contact else { return String::new() };
    let word = if contact.is_connected { "in contact" } else { "no contact" };
    format!("; {word}, generation {}, lease {}", contact.generation, units::time(contact.lease))
}

/// What an operator should know when the machine comes into a state.
pub fn note(report: &StandbyReport) -> Option<String> {
    let contact = report.contact.as_ref()?;
    let (spec, identity) = report.arbiter.clone().unwrap_or_default();
    let why = contact.trouble.as_deref().unwrap_or("no reason was given");
    Some(match contact.state {
        State::Seeding => format!(
            "sterna: a primary is in contact: protection {}, generation {}, lease {}; the arbiter is {spec}{}",
            contact.id,
            contact.generation,
            units::time(contact.lease),
            identity.map_or_else(String::new, |identity| format!(" ({identity})"))
        ),
        State::Preparing => format!(
            "sterna: contact with the primary was lost, or it has given its guest, and patience ({}) is over: the last \
             checkpoint is made ready",
            units::time(contact.patience)
        ),
        State::Unready => format!("sterna: error: {why}. Nothing was claimed; `sterna takeover` tries again"),
        State::Claiming => format!("sterna: ready; the arbiter {spec} is asked"),
        State::Fencing => "sterna: the claim is won; the primary is fenced".to_owned(),
        State::Unfenced => format!(
            "sterna: error: {why}. The claim is won and nobody runs the guest: mend the fence, then `sterna takeover`; or stop the \
             primary's guest by hand, then `sterna takeover --vouch`"
        ),
        State::Held => format!(
            "sterna: error: the guest is ours and could not be started: {why}. Mend that, then `sterna takeover`"
        ),
        _ => return None,
    })
}

/// The last word: the guest goes on from what is here.
pub fn end(
    arguments: &Arguments,
    report: &StandbyReport,
    ready: &Ready,
    vm: Option<&Survived>,
    took: Duration,
) -> String {
    let image = arguments.image.display().to_string();
    if arguments.json {
        let value = json!({
            "schema": "sterna-standby",
            "version": 1,
            "state": "taken over",
            "image": vm.is_none().then_some(image),
            "process": vm.map(|vm| vm.process),
            "monitor": vm.map(|vm| vm.monitor.display().to_string()),
            "messages": vm.map(|vm| vm.log.display().to_string()),
            "machine": ready.machine,
            "checkpoint": ready.checkpoint.number,
            "checkpoints": ready.checkpoint.number,
            "age": ready.checkpoint.age.as_secs_f64(),
            "ram_total_bytes": ready.ram_bytes,
            "total_time": took.as_secs_f64(),
            "contact": report.contact.as_ref().map(|contact| contact.to_json()),
        });
        return format!("{value}\n");
    }
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    let HeldCheckpoint { number, age, .. } = ready.checkpoint;
    row("taken over", format!("checkpoint {number}, {} old", units::time(age)));
    match vm {
        None => row("image", image),
        Some(vm) => {
            row("process", vm.process.to_string());
            row("monitor", vm.monitor.display().to_string());
            row("messages", vm.log.display().to_string());
        }
    }
    row("guest RAM", units::bytes(ready.ram_bytes));
    row("total time", units::seconds(took.as_secs_f64()));
    text
}
