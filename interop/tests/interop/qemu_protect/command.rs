//! `sterna protect` and the commands around it, as an operator uses them.

use std::io::{BufRead, BufReader};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Failure, Root, sterna, sterna_does};

use super::lab::{Lab, Side, number_in, wait};
use super::settings;

/// The process of `sterna protect`, and its output.
pub(super) struct Protect {
    pub(super) process: Child,
    pub(super) lines: BufReader<std::process::ChildStdout>,
    pub(super) socket: String,
}

impl Protect {
    pub(super) fn start(lab: &Lab, side: &Side, arguments: &[&str]) -> Result<Self, Failure> {
        let arbiter = arguments.iter().find_map(|argument| argument.strip_prefix("--arbiter="));
        *side.arbiter.lock().map_err(|error| error.to_string())? = arbiter.unwrap_or("ask").to_owned();
        let socket = format!("unix:{}", lab.directory.path().join("control").display());
        let mut process = sterna()
            .args(["protect", &format!("unix:{}", lab.primary.operator_socket().display()), &side.stream()])
            .args(["--contact", &side.contact_address(), "--json", "--qmp", &socket])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|error| error.to_string())?;
        let lines = process.stdout.take().map(BufReader::new).ok_or("no output")?;
        Ok(Self { process, lines, socket })
    }

    /// The next line of the output for which `is` returns true.
    pub(super) fn line(&mut self, is: impl Fn(&Value) -> bool) -> Result<Value, Failure> {
        let begin = std::time::Instant::now();
        let mut last = String::new();
        while begin.elapsed() < PATIENCE {
            let mut line = String::new();
            let length = self.lines.read_line(&mut line).map_err(|error| error.to_string())?;
            if length == 0 {
                break;
            }
            let value = serde_json::from_str(&line).map_err(|error| format!("{error}: {line:?}"))?;
            if is(&value) {
                return Ok(value);
            }
            last = line;
        }
        Err(format!("no such line; the last was {last}"))
    }

    pub(super) fn until_protected(&mut self) -> Result<Value, Failure> {
        self.line(|line| line["state"] == "protected" && line["checkpoint"].as_u64() >= Some(10))
    }

    pub(super) fn end(&mut self) -> Result<ExitStatus, Failure> {
        wait("the command's end", || self.process.try_wait().ok().flatten())
    }

    fn signal(&self) -> Result<(), Failure> {
        let id = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(id, rustix::process::Signal::INT).map_err(|error| error.to_string())
    }
}

impl Drop for Protect {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn command_protects_and_is_ended_by_its_socket_and_by_ctrl_c() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("command_protects_and_is_ended_by_its_socket_and_by_ctrl_c") else {
        return Ok(());
    };
    let mut lab = Lab::talking(&root)?;
    let before = settings(&mut lab.primary)?;
    for by_socket in [true, false] {
        let side = lab.standby(2)?;
        let mut protect = Protect::start(&lab, &side, &["--channels=2", "--lease=600s"])?;
        let line = protect.until_protected()?;
        assert!(line["pause_p50"].as_f64() > Some(0.0) && line["stream_bytes"].as_u64() > Some(0), "{line}");
        let info: Value = serde_json::from_str(&sterna_does(&["info", &protect.socket, "--json"])?)
            .map_err(|error| error.to_string())?;
        assert_eq!(info["state"], "protected");
        let table = sterna_does(&["info", &protect.socket])?;
        assert!(table.contains("checkpoint"), "{table}");
        lab.network.hear_more(10)?;

        if by_socket {
            sterna_does(&["unprotect", &protect.socket])?;
        } else {
            protect.signal()?;
        }

        let end = protect.line(|line| line["state"] == "alone")?;
        assert_eq!((&end["runs_here"], &end["left"]), (&json!(true), &json!([])));
        assert_eq!(protect.end()?.code(), Some(0));
        lab.network.hear_more(20)?;
        assert_eq!(settings(&mut lab.primary)?, before);
    }
    Ok(())
}

#[test]
fn operator_decides_and_the_exit_status_says_who_has_the_guest() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("operator_decides_and_the_exit_status_says_who_has_the_guest") else {
        return Ok(());
    };
    let mut lab = Lab::talking(&root)?;
    for (word, status) in [("source", 1), ("destination", 6)] {
        let side = lab.standby(0)?;
        let mut protect = Protect::start(&lab, &side, &["--lease=2s"])?;
        protect.until_protected()?;
        lab.network.hear_more(10)?;

        side.wire.cut();
        protect.line(|line| line["state"] == "asking")?;
        sterna_does(&["decide", &protect.socket, word])?;

        assert_eq!(protect.end()?.code(), Some(status));
        if word == "source" {
            lab.network.hear_more(20)?;
        } else {
            wait("QEMU's end", || lab.primary.ended())?;
        }
    }
    Ok(())
}

#[test]
fn command_ends_when_qemu_is_killed_and_the_standby_takes_over() -> Result<(), Failure> {
    let test = "command_ends_when_qemu_is_killed_and_the_standby_takes_over";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let side = lab.standby(2)?;
    let arbiter = format!("--arbiter=file:{}", lab.directory.path().display());
    let mut protect = Protect::start(&lab, &side, &["--channels=2", &arbiter])?;
    protect.until_protected()?;

    lab.primary.kill();

    assert_eq!(protect.end()?.code(), Some(1));
    wait("the standby's start", || side.asked.started.load(Ordering::SeqCst).then_some(()))?;
    lab.network.hear_out()?;
    let held = side.take_over(&lab.directory.path().join("image"))?;
    assert!(held >= lab.network.last, "{held} is held, {} was heard", lab.network.last);
    Ok(())
}

/// Starts both commands at one address, and waits until checkpoints are held.
fn both(lab: &mut Lab, name: &str) -> Result<(Started, Protect), Failure> {
    let (standby, mut protect) = started(lab, name, &[])?;
    protect.until_protected()?;
    lab.network.hear_more(20)?;
    Ok((standby, protect))
}

fn started(lab: &Lab, name: &str, more: &[&str]) -> Result<(Started, Protect), Failure> {
    let at = |what: &str| lab.directory.path().join(format!("{what}{name}")).display().to_string();
    let claims = lab.directory.path().join("claims");
    std::fs::create_dir_all(&claims).map_err(|error| error.to_string())?;
    let (arbiter, socket) = (format!("--arbiter=file:{}", claims.display()), at("both"));
    let mut standby = sterna();
    standby.args(["standby", &format!("listen:unix:{socket}"), "--image", &at("image"), &arbiter]);
    standby.args(["--fence=/bin/true", "--channels=2", "--json", &format!("--qmp=unix:{}", at("standby"))]);
    standby.args(["--report", &at("report")]);
    let standby = Started(standby.stdout(Stdio::null()).spawn().map_err(|error| error.to_string())?);
    wait("the standby's socket", || {
        sterna_interop::is_listening(std::path::Path::new(&socket)).then_some(())
    })?;
    let (qemu, socket) = (lab.primary.operator_socket().display().to_string(), format!("unix:{socket}"));
    let mut protect = sterna();
    protect.args(["protect", &qemu, &socket, &arbiter, "--channels=2", "--lease=3s", "--json"]);
    protect.arg(format!("--qmp=unix:{}", at("control"))).args(more);
    let mut process = protect.stdout(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let lines = process.stdout.take().map(BufReader::new).ok_or("no output")?;
    Ok((standby, Protect { process, lines, socket: at("control") }))
}

#[test]
fn both_commands_protect_a_qemu_and_the_image_knows_all_that_was_heard() -> Result<(), Failure> {
    let test = "both_commands_protect_a_qemu_and_the_image_knows_all_that_was_heard";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for is_planned in [false, true] {
        let mut lab = Lab::talking(&root)?;
        let (mut standby, mut protect) = both(&mut lab, "first")?;
        sterna_does(&["unprotect", &protect.socket])?;
        assert_eq!(protect.end()?.code(), Some(0));
        lab.network.hear_until("the first standby's end", || standby.0.try_wait().ok().flatten())?;
        lab.network.hear_more(20)?;

        let (mut standby, mut protect) = both(&mut lab, "second")?;
        let at = |what: &str| lab.directory.path().join(format!("{what}second"));
        if is_planned {
            let mut takeover = sterna();
            takeover.arg("takeover").arg(at("standby")).arg("--planned");
            let mut takeover = Started(takeover.spawn().map_err(|error| error.to_string())?);
            let ended = || takeover.0.try_wait().ok().flatten();
            let status = lab.network.hear_until("the takeover's end", ended)?;
            assert!(status.success(), "{status}");
        } else {
            lab.primary.kill();
        }

        assert_eq!(protect.end()?.code(), Some(if is_planned { 0 } else { 1 }));
        let status = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
        assert!(status.success(), "{status}");
        wait("QEMU's end", || lab.primary.ended())?;
        lab.network.hear_out()?;
        let held = number_in(&at("image"))?;
        let heard = lab.network.last;
        assert!(held >= heard, "{held} is held, {heard} was heard");
        let [before, after] = ["first", "second"].map(|name| record(&lab, name));
        assert_eq!((&before["state"], &before["guest_at"]), (&json!("discarded"), &json!("primary")));
        assert_eq!((&after["state"], &after["guest_at"]), (&json!("taken over"), &json!("standby")));
        assert!(after["checkpoints"].as_u64() >= Some(1), "{after}");
        if is_planned {
            Lab::talks_on(&root, &at("image"), heard)?;
        }
    }
    Ok(())
}

/// The record that a standby has written.
fn record(lab: &Lab, name: &str) -> Value {
    let text = std::fs::read(lab.directory.path().join(format!("report{name}"))).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// The operator's action just before QEMU is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Under {
    /// No action. QEMU is killed after this many milliseconds, within a checkpoint or between two.
    Checkpoints(u64),
    Unprotect,
    Planned,
}

#[test]
fn qemu_that_is_killed_in_any_state_is_taken_over_from_all_that_was_heard_or_not_at_all()
-> Result<(), Failure> {
    let test = "qemu_that_is_killed_in_any_state_is_taken_over_from_all_that_was_heard_or_not_at_all";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let moments = [0, 3, 8, 23, 41].map(Under::Checkpoints);
    for under in moments.into_iter().chain([Under::Unprotect, Under::Planned]) {
        let mut lab = Lab::talking(&root)?;
        let (mut standby, mut protect) = both(&mut lab, "struck")?;
        let at = |what: &str| lab.directory.path().join(format!("{what}struck"));
        let order = match under {
            Under::Checkpoints(moment) => {
                std::thread::sleep(std::time::Duration::from_millis(moment));
                None
            }
            Under::Unprotect => Some(vec!["unprotect".to_owned(), protect.socket.clone()]),
            Under::Planned => {
                Some(vec!["takeover".to_owned(), at("standby").display().to_string(), "--planned".to_owned()])
            }
        };
        let order = order.map(|arguments| {
            sterna().args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(Started)
        });
        let _order = order.transpose().map_err(|error| error.to_string())?;

        lab.primary.kill();

        let status = protect.end()?;
        let ended = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
        lab.network.hear_out()?;
        let heard = lab.network.last;
        match ended.success() {
            true => {
                let held = number_in(&at("image"))?;
                assert!(held >= heard, "{under:?}: {held} is held, {heard} was heard");
            }
            // The protection had ended by a message before QEMU was killed.
            false => assert!(under == Under::Unprotect && ended.code() == Some(6), "{under:?}: {ended}"),
        }
        assert_eq!(at("image").exists(), ended.success(), "{under:?}: {status}");
    }
    Ok(())
}

#[test]
fn qemu_that_is_killed_in_the_seeding_leaves_nothing_behind() -> Result<(), Failure> {
    let test = "qemu_that_is_killed_in_the_seeding_leaves_nothing_behind";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    // The bandwidth is so low that the seeding lasts until QEMU is killed.
    let (mut standby, mut protect) = started(&lab, "seeding", &["--set=max-bandwidth=4096"])?;
    protect.line(|line| line["state"] == "seeding" && line["stream_bytes"].as_u64() > Some(0))?;

    lab.primary.kill();

    assert_eq!(protect.end()?.code(), Some(1));
    let ended = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
    assert_eq!(ended.code(), Some(1));
    assert!(!lab.directory.path().join("imageseeding").exists());
    Ok(())
}

#[test]
fn stopped_qemu_says_nothing_when_it_wakes_after_its_guest_was_taken_over() -> Result<(), Failure> {
    let test = "stopped_qemu_says_nothing_when_it_wakes_after_its_guest_was_taken_over";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for moment in [0, 7, 30] {
        let mut lab = Lab::talking(&root)?;
        let (mut standby, mut protect) = both(&mut lab, "stopped")?;
        let at = |what: &str| lab.directory.path().join(format!("{what}stopped"));
        std::thread::sleep(std::time::Duration::from_millis(moment));
        signal(&lab, rustix::process::Signal::STOP)?;

        // `sterna protect` is alive and the lease continues, so an operator decides.
        sterna_does(&["takeover", &at("standby").display().to_string()])?;

        let ended = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
        assert!(ended.success(), "{ended}");
        lab.network.hear_out()?;
        let heard = lab.network.last;
        let held = number_in(&at("image"))?;
        assert!(held >= heard, "{held} is held, {heard} was heard");
        signal(&lab, rustix::process::Signal::CONT)?;
        assert_eq!(protect.end()?.code(), Some(6));
        lab.network.hear_out()?;
        // Output that the gate had released before the stop leaves now. It belongs to a held checkpoint.
        let last = lab.network.last;
        assert!(held >= last, "it spoke when it woke: {held} is held, {last} was heard");
        wait("QEMU's end", || lab.primary.ended())?;
    }
    Ok(())
}

#[test]
fn qemu_that_stands_still_in_the_seeding_goes_on_and_can_be_protected() -> Result<(), Failure> {
    let test = "qemu_that_stands_still_in_the_seeding_goes_on_and_can_be_protected";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let before = settings(&mut lab.primary)?;
    // The bandwidth is so low that the seeding still runs when QEMU is stopped.
    let (mut standby, mut protect) = started(&lab, "still", &["--set=max-bandwidth=4096"])?;
    let at = |what: &str| lab.directory.path().join(format!("{what}still"));
    protect.line(|line| line["state"] == "seeding" && line["stream_bytes"].as_u64() > Some(0))?;
    signal(&lab, rustix::process::Signal::STOP)?;

    // The pause is longer than the lease. No checkpoint is held that could be taken over.
    std::thread::sleep(std::time::Duration::from_secs(5));
    let refused = sterna_does(&["takeover", &at("standby").display().to_string()]).unwrap_err();
    assert!(refused.contains("nothing to take over"), "{refused}");
    signal(&lab, rustix::process::Signal::CONT)?;

    // Seeding and guest continue.
    lab.network.hear_more(20)?;
    protect.line(|line| line["state"] == "seeding")?;
    sterna_does(&["unprotect", &protect.socket])?;
    assert_eq!(protect.end()?.code(), Some(130), "cancelled");
    let ended = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
    lab.network.hear_more(20)?;
    assert!(!at("image").exists() && !ended.success(), "{ended}");
    assert_eq!(settings(&mut lab.primary)?, before);
    let (_standby, mut protect) = both(&mut lab, "again")?;
    sterna_does(&["unprotect", &protect.socket])?;
    assert_eq!(protect.end()?.code(), Some(0));
    lab.network.hear_more(20)
}

#[test]
fn qemu_that_stands_still_while_it_is_handed_over_leaves_one_guest() -> Result<(), Failure> {
    let test = "qemu_that_stands_still_while_it_is_handed_over_leaves_one_guest";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    // Milliseconds from the order to the stop, and length of the stop: within the lease and longer.
    for (moment, still) in [(0, 500), (0, 5000), (4, 5000), (15, 5000), (40, 500), (60, 5000)] {
        let mut lab = Lab::talking(&root)?;
        let (mut standby, mut protect) = both(&mut lab, "handed")?;
        let at = |what: &str| lab.directory.path().join(format!("{what}handed"));
        let mut order = sterna();
        order.args(["takeover", &at("standby").display().to_string(), "--planned"]);
        let mut order = Started(
            order.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(|error| error.to_string())?,
        );
        std::thread::sleep(std::time::Duration::from_millis(moment));
        // QEMU may already have handed the guest over and ended.
        let was_there = signal(&lab, rustix::process::Signal::STOP).is_ok();
        std::thread::sleep(std::time::Duration::from_millis(still));
        if was_there {
            let _ = signal(&lab, rustix::process::Signal::CONT);
        }

        let ordered = wait("the order's end", || order.0.try_wait().ok().flatten())?;
        let status = protect.end()?;
        let ended = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
        let told = format!("{moment} ms, {still} ms: {ordered}, {status}, {ended}");
        if ended.success() {
            // The guest is at the standby, and its QEMU has ended.
            assert!(matches!(status.code(), Some(0 | 6)), "{told}");
            wait("QEMU's end", || lab.primary.ended())?;
            lab.network.hear_out()?;
            let (held, heard) = (number_in(&at("image"))?, lab.network.last);
            assert!(held >= heard, "{told}: {held} is held, {heard} was heard");
        } else {
            assert_eq!((status.code(), at("image").exists()), (Some(1), false), "{told}");
            lab.network.hear_more(20)?;
        }
    }
    Ok(())
}

fn signal(lab: &Lab, signal: rustix::process::Signal) -> Result<(), Failure> {
    let id = rustix::process::Pid::from_raw(lab.primary.pid().cast_signed()).ok_or("no process")?;
    rustix::process::kill_process(id, signal).map_err(|error| error.to_string())
}

#[test]
fn planned_takeover_of_a_qemu_without_an_arbiter_fails_and_the_guest_goes_on_protected() -> Result<(), Failure>
{
    let test = "planned_takeover_of_a_qemu_without_an_arbiter_fails_and_the_guest_goes_on_protected";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let (mut standby, mut protect) = both(&mut lab, "planned")?;
    let at = |what: &str| lab.directory.path().join(what);
    let rename = |from: &str, to: &str| std::fs::rename(at(from), at(to)).map_err(|error| error.to_string());
    let monitor = at("standbyplanned").display().to_string();
    rename("claims", "away")?;

    let refused = sterna_does(&["takeover", &monitor, "--planned"]).unwrap_err();
    assert!(refused.contains("the arbiter cannot be reached"), "{refused}");
    let mut control = sterna_drive::Vm::connect(&sterna_qmp::Endpoint::Unix(at("controlplanned")))
        .map_err(|error| error.to_string())?;
    let refused = control.execute("x-sterna-takeover", Value::Null).unwrap_err().to_string();
    assert!(refused.contains("the arbiter cannot be reached"), "{refused}");
    protect.line(|line| line["state"] == "protected")?;
    lab.network.hear_more(20)?;

    rename("away", "claims")?;
    sterna_does(&["takeover", &monitor, "--planned"])?;
    assert_eq!(protect.end()?.code(), Some(0));
    let status = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
    assert!(status.success(), "{status}");
    wait("QEMU's end", || lab.primary.ended()).map(drop)
}

#[test]
fn qemu_whose_standby_asks_another_arbiter_is_left_as_it_was() -> Result<(), Failure> {
    let test = "qemu_whose_standby_asks_another_arbiter_is_left_as_it_was";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let before = settings(&mut lab.primary)?;
    let at = |what: &str| lab.directory.path().join(what).display().to_string();
    for name in ["here", "there"] {
        std::fs::create_dir(at(name)).map_err(|error| error.to_string())?;
    }
    let [here, there] = ["here", "there"].map(|name| format!("file:{}", at(name)));
    let mut standby = sterna();
    standby.args(["standby", &format!("listen:unix:{}", at("standby")), "--image", &at("image")]);
    standby.args(["--arbiter", &there, "--fence=/bin/true"]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut standby = Started(standby.spawn().map_err(|error| error.to_string())?);
    let socket = at("standby");
    wait("the standby's socket", || {
        sterna_interop::is_listening(std::path::Path::new(&socket)).then_some(())
    })?;

    let qemu = lab.primary.operator_socket().display().to_string();
    let refused =
        sterna_does(&["protect", &qemu, &format!("unix:{socket}"), "--arbiter", &here]).unwrap_err();

    let named = format!("the primary's arbiter is {here}, and the standby's {there}");
    assert!(refused.contains(&named) && refused.contains("do not share it"), "{refused}");
    assert_eq!(settings(&mut lab.primary)?, before);
    lab.network.hear_more(10)?;
    // The standby waits for the next primary, which must ask the same arbiter.
    assert!(standby.0.try_wait().map_err(|error| error.to_string())?.is_none());
    let mut protect = sterna();
    protect.args([
        "protect",
        &qemu,
        &format!("unix:{socket}"),
        "--arbiter",
        &there,
        "--lease=600s",
        "--json",
    ]);
    let mut process = protect.stdout(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let lines = process.stdout.take().map(BufReader::new).ok_or("no output")?;
    let mut protect = Protect { process, lines, socket: String::new() };
    protect.until_protected()?;
    protect.signal()?;
    assert_eq!(protect.end()?.code(), Some(0));
    Ok(())
}

/// A process that is killed at the end of the test.
pub(super) struct Started(pub(super) Child);

impl Drop for Started {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn command_that_was_killed_can_be_given_again() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("command_that_was_killed_can_be_given_again") else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let side = lab.standby(0)?;
    let mut protect = Protect::start(&lab, &side, &["--lease=600s"])?;
    protect.until_protected()?;
    drop(protect);
    side.wire.cut();

    // No output is released, because it is unknown which side has the guest.
    lab.network.hear_out()?;
    let at = format!("unix:{}", lab.primary.operator_socket().display());
    let side = lab.standby(0)?;
    let refused = sterna_does(&["protect", &at, &side.stream(), "--arbiter=file:/tmp"]).unwrap_err();
    assert!(refused.contains("--vouch"), "{refused}");
    lab.primary.execute("x-colo-lost-heartbeat", Value::Null)?;
    lab.primary.wait_for_status("running")?;
    let mut protect = Protect::start(&lab, &side, &["--lease=600s"])?;
    protect.until_protected()?;
    lab.network.forget();
    lab.network.hear_more(20)?;
    sterna_does(&["unprotect", &protect.socket])?;
    assert_eq!(protect.end()?.code(), Some(0));
    lab.network.hear_more(20)
}
