//! A QEMU 11 that `sterna standby` protects, with an arbiter and a fence. It is killed or stopped, and its
//! guest continues elsewhere.

mod heart;
mod waiting;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sterna_arbiter::{Claim, Claimant, Generation, GuestName, Role, Ruling, Spec};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Builder, Failure, Guest, Qemu, Ram, Root, sterna, sterna_does, unbroken};
use sterna_standby::{Protection, Secret};

use heart::{Heart, LEASE};
use sterna_wire::replica::Message;

const PROTECTION: Protection = Protection { id: [0xab; 16], generation: 4 };

/// The process of a standby, and its output.
struct Command {
    process: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Command {
    fn start(arguments: &[String]) -> Result<Self, Failure> {
        let mut process = sterna()
            .arg("standby")
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|error| error.to_string())?;
        let lines = process.stdout.take().map(BufReader::new).ok_or("no output")?;
        Ok(Self { process, lines })
    }

    /// The next value in the output; `None` at its end.
    fn next(&mut self) -> Result<Option<Value>, Failure> {
        let mut line = String::new();
        let count = self.lines.read_line(&mut line).map_err(|error| error.to_string())?;
        if count == 0 {
            return Ok(None);
        }
        serde_json::from_str(&line).map(Some).map_err(|error| format!("{error}: {line:?}"))
    }

    /// The first value for which `holds` returns true.
    fn wait_for(&mut self, what: &str, holds: impl Fn(&Value) -> bool) -> Result<Value, Failure> {
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            let Some(said) = self.next()? else { return Err(format!("it ended before {what}")) };
            if holds(&said) {
                return Ok(said);
            }
        }
        Err(format!("{what} did not come"))
    }

    /// The last value in the output, and the exit status.
    fn end(&mut self) -> Result<(Value, ExitStatus), Failure> {
        let mut last = Value::Null;
        while let Some(said) = self.next()? {
            last = said;
        }
        Ok((last, self.process.wait().map_err(|error| error.to_string())?))
    }
}

impl Drop for Command {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) -> Result<(), Failure> {
    let begin = Instant::now();
    while !is_so() {
        if begin.elapsed() > PATIENCE {
            return Err(format!("{what} did not come"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// A QEMU, and the standby that holds its checkpoints.
struct Protected {
    builder: Builder,
    primary: Qemu,
    heart: Heart,
    command: Command,
    directory: PathBuf,
}

fn secret() -> Secret {
    Secret::from_bytes([0xcd; 32])
}

/// Number of failures that means that there is no fence.
const NO_FENCE: usize = usize::MAX;

/// A fence that fails this many times and logs each call.
fn fence(directory: &Path, fails: usize) -> Result<String, Failure> {
    let path = directory.join("fence.sh");
    let text = format!(
        "#!/bin/sh\necho \"$STERNA_CLAIM_GUEST $STERNA_CLAIM_GENERATION $STERNA_CLAIM_ROLE\" >> {0}\n\
         [ $(wc -l < {0}) -gt {fails} ]\n",
        directory.join("fenced").display()
    );
    std::fs::write(&path, text).map_err(|error| error.to_string())?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
        .map_err(|error| error.to_string())?;
    Ok(path.display().to_string())
}

impl Protected {
    /// Starts a protection, and waits until some checkpoints are held.
    fn begin(root: &Root, fails: usize, more: &[String]) -> Result<Self, Failure> {
        Self::begin_with(root, fails, None, more)
    }

    /// The same, with that arbiter instead of a directory.
    fn begin_with(
        root: &Root,
        fails: usize,
        arbiter: Option<&str>,
        more: &[String],
    ) -> Result<Self, Failure> {
        let builder = Qemu::builder(root).memory_mib(32).ram(Ram::File).guest(Guest::Boot);
        Self::begin_as(builder, fails, arbiter, more)
    }

    /// The same, with a machine of that kind.
    fn begin_as(
        builder: Builder,
        fails: usize,
        arbiter: Option<&str>,
        more: &[String],
    ) -> Result<Self, Failure> {
        let mut primary = builder.clone().spawn()?;
        primary.wait_for_ticks(2)?;
        let directory = primary.directory().to_owned();
        let at = |name: &str| directory.join(name).display().to_string();
        std::fs::create_dir(directory.join("claims")).map_err(|error| error.to_string())?;
        std::fs::write(directory.join("secret"), "cd".repeat(32)).map_err(|error| error.to_string())?;
        std::fs::set_permissions(directory.join("secret"), std::fs::Permissions::from_mode(0o600))
            .map_err(|error| error.to_string())?;
        let arbiter = arbiter.map_or_else(|| format!("file:{}", at("claims")), str::to_owned);
        let mut arguments = vec![
            format!("listen:unix:{}", at("standby")),
            format!("--image={}", at("image")),
            format!("--arbiter={arbiter}"),
            format!("--secret={}", at("secret")),
            format!("--qmp=unix:{}", at("monitor")),
            "--json".to_owned(),
        ];
        if fails != NO_FENCE {
            arguments.push(format!("--fence={}", fence(&directory, fails)?));
        }
        arguments.extend_from_slice(more);
        let mut command = Command::start(&arguments)?;
        command.wait_for("its address", |said| said["address"].is_string())?;
        let heart = Heart::begin(&directory.join("standby"), PROTECTION, &secret(), &arbiter)?;
        primary.capabilities(&["x-colo", "return-path"])?;
        primary
            .parameters(json!({"max-bandwidth": 0, "downtime-limit": 10_000, "x-checkpoint-delay": 50}))?;
        primary.start_migration(&format!("unix:{}", at("standby")))?;
        let said = command
            .wait_for("checkpoints", |said| said["checkpoints"].as_u64().is_some_and(|count| count > 5))?;
        let contact = &said["contact"];
        if contact["connected"] != true
            || contact["generation"] != 4
            || contact["lease"] != LEASE.as_secs_f64()
        {
            return Err(format!("{said}"));
        }
        primary.wait_for_ticks(2)?;
        Ok(Self { builder, primary, heart, command, directory })
    }

    fn claim(&self, role: Role) -> Result<Ruling, Failure> {
        let spec: Spec = format!("file:{}", self.directory.join("claims").display())
            .parse()
            .map_err(|error| format!("{error}"))?;
        let opened = spec.open(Duration::from_secs(10)).map_err(|error| error.to_string())?;
        let claim = Claim {
            guest: GuestName::of_id(PROTECTION.id),
            generation: Generation::new(PROTECTION.generation),
            claimant: Claimant::of_this_process(role),
        };
        opened.arbiter.claim(&claim).map_err(|error| error.to_string())
    }

    fn fenced(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.join("fenced")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn takeover(&self, more: &[&str]) -> Result<String, Failure> {
        let monitor = self.directory.join("monitor").display().to_string();
        sterna_does(&[&["takeover", monitor.as_str()][..], more].concat())
    }

    fn info(&self) -> Result<Value, Failure> {
        let monitor = self.directory.join("monitor").display().to_string();
        let text = sterna_does(&["info", &monitor, "--json"])?;
        serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))
    }

    /// Checks that the image is sound, and that its guest's count continues.
    fn goes_on_from_image(&self) -> Result<(), Failure> {
        let image = self.directory.join("image").display().to_string();
        sterna_does(&["verify", &image])?;
        let mut survivor = self.builder.clone().incoming_defer().spawn()?;
        survivor.capabilities(&["mapped-ram"])?;
        survivor.incoming(&format!("file:{image}"))?;
        survivor.wait_for_status("running")?;
        survivor.wait_for_ticks(3)?;
        unbroken(&[&survivor])?;
        let first = survivor.ticks()[0].number;
        let last = self.primary.ticks().last().map_or(0, |tick| tick.number);
        if first <= 2 || first > last + 1 {
            return Err(format!("the survivor goes on with tick {first}, the primary had come to {last}"));
        }
        Ok(())
    }
}

#[test]
fn killed_qemu_goes_on_after_claim_and_a_fence_that_failed_once() -> Result<(), Failure> {
    let test = "killed_qemu_goes_on_after_claim_and_a_fence_that_failed_once";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut protected = Protected::begin(&root, 1, &[])?;
    let info = protected.info()?;
    assert_eq!(info["protection"]["state"], "following", "{info}");
    assert!(info["protection"]["arbiter"]["identity"].is_string(), "{info}");

    protected.primary.kill();
    protected.heart.freeze();
    let said = protected.command.wait_for("the fence", |said| said["state"] == "unfenced")?;
    assert!(said["trouble"].as_str().is_some_and(|why| why.contains("exited with 1")), "{said}");
    assert!(!protected.directory.join("image").exists(), "started without a fence");
    assert!(matches!(protected.claim(Role::Primary)?, Ruling::Lost { .. }));
    protected.takeover(&[])?;

    let (last, status) = protected.command.end()?;
    assert!(status.success() && last["image"].is_string(), "{status}: {last}");
    let guest = GuestName::of_id(PROTECTION.id);
    assert_eq!(protected.fenced(), vec![format!("{guest} 4 standby"); 2]);
    protected.goes_on_from_image()
}

#[test]
fn stopped_qemu_is_fenced_and_taken_over_and_hears_nothing_more() -> Result<(), Failure> {
    let test = "stopped_qemu_is_fenced_and_taken_over_and_hears_nothing_more";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut protected = Protected::begin(&root, 0, &[])?;
    let pid = Pid::from_raw(protected.primary.pid() as i32).ok_or("no process")?;
    protected.heart.freeze();
    kill_process(pid, Signal::STOP).map_err(|error| error.to_string())?;

    let (last, status) = protected.command.end()?;

    assert!(status.success() && last["image"].is_string(), "{status}: {last}");
    assert_eq!(protected.fenced().len(), 1);
    protected.goes_on_from_image()?;
    kill_process(pid, Signal::CONT).map_err(|error| error.to_string())?;
    // Its checkpoint was not answered, so its side of COLO ends.
    wait("the end of COLO", || {
        let event = protected.primary.qmp().next_event(Duration::from_secs(1));
        event.is_ok_and(|event| event.is_some_and(|event| event.name == "COLO_EXIT"))
    })
}

#[test]
fn standby_that_loses_the_claim_discards_everything_and_says_so() -> Result<(), Failure> {
    let test = "standby_that_loses_the_claim_discards_everything_and_says_so";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut protected = Protected::begin(&root, 0, &[])?;
    assert_eq!(protected.claim(Role::Primary)?, Ruling::Won);

    protected.heart.freeze();

    let (_, status) = protected.command.end()?;
    assert_eq!(status.code(), Some(6), "{status}");
    assert!(!protected.directory.join("image").exists() && protected.fenced().is_empty());
    let left = std::fs::read_dir(&protected.directory).map_err(|error| error.to_string())?;
    let left = left.filter_map(Result::ok).map(|entry| entry.file_name().to_string_lossy().into_owned());
    assert_eq!(left.filter(|name| name.contains("partial")).count(), 0);
    Ok(())
}

#[test]
fn planned_takeover_by_the_operators_word_needs_no_fence() -> Result<(), Failure> {
    let test = "planned_takeover_by_the_operators_word_needs_no_fence";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut protected = Protected::begin_with(&root, usize::MAX >> 33, Some("ask"), &[])?;
    // This test plays the primary, which answers below.
    protected.takeover(&["--planned", "--no-wait"])?;
    wait("the standby's wish", || protected.heart.has_heard(Message::HandOver))?;
    let held = protected.info()?["protection"]["checkpoints"].as_u64();
    wait("a last checkpoint", || {
        protected.info().is_ok_and(|info| info["protection"]["checkpoints"].as_u64() > held)
    })?;

    protected.heart.give();

    wait("the standby's word", || protected.heart.has_heard(Message::Runs))?;
    protected.primary.kill();
    let (last, status) = protected.command.end()?;
    assert!(status.success() && last["image"].is_string(), "{status}: {last}");
    assert!(protected.fenced().is_empty());
    protected.goes_on_from_image()
}

#[test]
fn operators_word_is_the_claim_where_the_operator_is_the_arbiter() -> Result<(), Failure> {
    let test = "operators_word_is_the_claim_where_the_operator_is_the_arbiter";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut protected = Protected::begin_with(&root, 0, Some("ask"), &[])?;
    protected.primary.kill();
    protected.heart.freeze();
    let said = protected.command.wait_for("the question", |said| said["state"] == "claiming")?;
    let said = match said["trouble"].as_str() {
        Some(why) if why.contains("no operator has decided yet") => said,
        _ => protected.command.wait_for("the reason", |said| {
            said["trouble"].as_str().is_some_and(|why| why.contains("no operator has decided yet"))
        })?,
    };
    assert!(!protected.directory.join("image").exists(), "{said}");

    protected.takeover(&[])?;

    let (last, status) = protected.command.end()?;
    assert!(status.success() && last["image"].is_string(), "{status}: {last}");
    protected.goes_on_from_image()
}

#[test]
fn operators_word_alone_does_not_start_the_guest_of_a_qemu_that_nobody_fences() -> Result<(), Failure> {
    let test = "operators_word_alone_does_not_start_the_guest_of_a_qemu_that_nobody_fences";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut protected = Protected::begin_with(&root, NO_FENCE, Some("ask"), &[])?;
    let refused = protected.takeover(&[]).unwrap_err();
    assert!(refused.contains("--vouch") && refused.contains("Nothing was decided"), "{refused}");
    assert_eq!(protected.info()?["protection"]["state"], "following", "the contact was not given up");
    protected.primary.kill();
    protected.heart.freeze();
    protected.command.wait_for("the question", |said| said["state"] == "claiming")?;
    assert!(protected.takeover(&[]).is_err());
    assert!(!protected.directory.join("image").exists());

    protected.takeover(&["--vouch"])?;

    let (last, status) = protected.command.end()?;
    assert!(status.success() && last["image"].is_string(), "{status}: {last}");
    protected.goes_on_from_image()
}

#[test]
fn standby_that_is_ended_tells_its_primary() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("standby_that_is_ended_tells_its_primary") else { return Ok(()) };
    let mut protected = Protected::begin(&root, 0, &[])?;
    let pid = Pid::from_raw(protected.command.process.id() as i32).ok_or("no process")?;

    kill_process(pid, Signal::INT).map_err(|error| error.to_string())?;

    let (_, status) = protected.command.end()?;
    assert_eq!(status.code(), Some(130), "{status}");
    wait("the last word", || protected.heart.has_heard(Message::Never))?;
    assert!(protected.fenced().is_empty());
    Ok(())
}

#[test]
fn image_that_cannot_be_made_does_not_cost_the_checkpoint() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("image_that_cannot_be_made_does_not_cost_the_checkpoint") else {
        return Ok(());
    };
    let builder = Qemu::builder(&root).memory_mib(32).ram(Ram::File).guest(Guest::Boot);
    let mut primary = builder.clone().spawn()?;
    primary.wait_for_ticks(2)?;
    let directory = primary.directory().to_owned();
    let at = |name: &str| directory.join(name).display().to_string();
    let arguments = [
        format!("listen:unix:{}", at("standby")),
        format!("--image={}", at("image")),
        "--on-loss=image".to_owned(),
        "--json".to_owned(),
    ];
    let mut command = Command::start(&arguments)?;
    command.wait_for("its address", |said| said["address"].is_string())?;
    primary.capabilities(&["x-colo", "return-path"])?;
    primary.parameters(json!({"max-bandwidth": 0, "downtime-limit": 10_000, "x-checkpoint-delay": 50}))?;
    primary.start_migration(&format!("unix:{}", at("standby")))?;
    command.wait_for("checkpoints", |said| said["checkpoints"].as_u64() > Some(5))?;
    primary.wait_for_ticks(1)?;
    std::fs::write(directory.join("image"), b"taken").map_err(|error| error.to_string())?;
    primary.kill();
    command.wait_for("the loss", |said| said["state"] == "holding")?;

    std::fs::remove_file(directory.join("image")).map_err(|error| error.to_string())?;
    let pid = Pid::from_raw(command.process.id() as i32).ok_or("no process")?;
    kill_process(pid, Signal::INT).map_err(|error| error.to_string())?;

    let (last, status) = command.end()?;
    assert!(status.success() && last["image"].is_string(), "{status}: {last}");
    sterna_does(&["verify", &at("image")]).map(drop)
}
