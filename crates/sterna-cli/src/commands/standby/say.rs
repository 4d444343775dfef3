//! The output of `sterna standby`.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_drive::waiting::Survived;
use sterna_qmp::Endpoint;
use sterna_qmp::standby::StandbyReport;
use sterna_standby::machines::standby::State;
use sterna_standby::{HeldCheckpoint, StandbyState, StandbyStatistics};

use super::arguments::{Arguments, LINE};
use super::place::Ready;
use crate::units;

/// The line that is printed once per second.
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

/// How the operator can give commands: at the standby's monitor, or by Ctrl-C if it has none.
#[derive(Debug, Clone, Copy)]
pub struct Word<'a>(pub Option<&'a Endpoint>);

impl Word<'_> {
    /// How to retry the failed step.
    pub fn again(self) -> String {
        match self.0 {
            Some(socket) => format!("`sterna takeover {socket}` repeats the step"),
            None => "Ctrl-C repeats the step".to_owned(),
        }
    }

    /// How to continue when the fence has failed, or there is none.
    pub fn unfenced(self, has_fence: bool) -> String {
        match (self.0, has_fence) {
            (Some(socket), true) => format!(
                "repair the fence command, then run `sterna takeover {socket}`; or stop the primary's guest yourself, \
                 then run `sterna takeover {socket} --vouch`"
            ),
            (Some(socket), false) => format!(
                "make sure that the primary's guest does not run and never will, then run `sterna takeover {socket} \
                 --vouch`"
            ),
            (None, true) => "repair the fence command, then press Ctrl-C to run it again".to_owned(),
            (None, false) => {
                "make sure that the primary's guest does not run and never will, then press Ctrl-C and confirm it".to_owned()
            }
        }
    }

    /// How to confirm that a lost primary's guest does not run, if there is no fence.
    fn vouches(self) -> String {
        match self.0 {
            Some(socket) => format!("`sterna takeover {socket} --vouch`"),
            None => "the operator's confirmation by Ctrl-C".to_owned(),
        }
    }

    /// How to make an image of the held checkpoint without a contact.
    pub fn makes_image(self) -> String {
        match self.0 {
            Some(socket) => format!("Ctrl-C (or `sterna takeover {socket}`) writes"),
            None => "Ctrl-C writes".to_owned(),
        }
    }
}

/// The note for the operator when the state changes.
/// `is_given`: the primary has given its guest, for a planned takeover.
pub fn note(report: &StandbyReport, word: Word<'_>, has_fence: bool, is_given: bool) -> Option<String> {
    let contact = report.contact.as_ref()?;
    let (spec, identity) = report.arbiter.clone().unwrap_or_default();
    let why = contact.trouble.as_deref().unwrap_or("no reason was given");
    Some(match contact.state {
        State::Seeding => format!(
            "sterna: a primary is in contact: protection {}, generation {}, lease {}; the arbiter is {spec}{}{}",
            contact.id,
            contact.generation,
            units::time(contact.lease),
            identity.map_or_else(String::new, |identity| format!(" ({identity})")),
            match (has_fence, contact.needs_fence) {
                (true, _) => String::new(),
                (false, true) => format!(
                    ". There is no --fence: when the primary is lost, the guest starts here only after {}",
                    word.vouches()
                ),
                (false, false) => {
                    ". There is no --fence: if the primary's host is suspended for longer than the lease and then \
                     resumes, its guest may run for a moment at the same time as the guest here, unless that host has \
                     a watchdog (`sterna run --watchdog`)"
                        .to_owned()
                }
            }
        ),
        State::Preparing => preparing(is_given, contact.patience),
        State::Unready => format!("sterna: error: {why}. Nothing was claimed; {}", word.again()),
        State::Claiming => format!("sterna: the checkpoint is prepared; asking the arbiter {spec}"),
        State::Fencing => fencing(has_fence).to_owned(),
        State::Unfenced => format!(
            "sterna: error: {why}. The claim is won, and the guest runs on neither side: {}",
            word.unfenced(has_fence)
        ),
        State::Held => format!(
            "sterna: error: this side has the guest but could not start it: {why}. Remove the cause, then {}",
            word.again()
        ),
        _ => return None,
    })
}

fn preparing(is_given: bool, patience: Duration) -> String {
    if is_given {
        return "sterna: the primary has stopped its guest and handed it over: preparing its last checkpoint"
            .to_owned();
    }
    format!(
        "sterna: the primary has sent nothing within the waiting time ({}) after the contact ended: preparing the \
         last checkpoint",
        units::time(patience)
    )
}

/// The note before the fence runs.
fn fencing(has_fence: bool) -> &'static str {
    match has_fence {
        true => "sterna: the claim is won; --fence runs, and the guest starts after it has succeeded",
        false => {
            "sterna: the claim is won; without --fence the guest starts only after an operator confirms that the \
             primary's guest does not run"
        }
    }
}

/// The note after the fence has succeeded.
pub const FENCED: &str = "sterna: the fence has succeeded; starting the guest";

/// The last output: the guest is now an image, or runs in the VM here.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_the_monitor_and_is_ctrl_c_where_there_is_none() {
        let socket: Endpoint = "unix:/run/s.qmp".parse().unwrap();
        let texts = |word: Word<'_>| {
            [word.again(), word.unfenced(true), word.unfenced(false), word.vouches(), word.makes_image()]
        };

        for text in texts(Word(Some(&socket))) {
            assert!(text.contains("`sterna takeover unix:/run/s.qmp"), "{text}");
        }
        for text in texts(Word(None)) {
            assert!(text.contains("Ctrl-C") && !text.contains("sterna takeover"), "{text}");
        }
        assert!(!Word(Some(&socket)).unfenced(false).contains("repair"), "there is no fence to repair");
    }

    #[test]
    fn preparing_for_a_guest_that_was_given_speaks_of_no_ended_contact() {
        let patience = Duration::from_secs(2);

        assert!(!preparing(true, patience).contains("contact"), "{}", preparing(true, patience));
        assert!(preparing(false, patience).contains("waiting time (2.0"), "{}", preparing(false, patience));
    }

    #[test]
    fn fencing_does_not_call_the_primary_fenced_before_the_fence_has_run() {
        for has_fence in [true, false] {
            assert!(!fencing(has_fence).contains("fenced"), "{}", fencing(has_fence));
        }
    }
}
