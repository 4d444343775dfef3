//! A standby whose fence fails, or that has none, and that has no monitor. The operator answers with Ctrl-C.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use sterna_interop::{Failure, Guest, Root, is_listening, sterna};

use super::command::Started;
use super::lab::{Lab, wait};

fn words(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}

/// The standby of a lost QEMU, in the state `unfenced`. Its output is in a file.
fn unfenced(lab: &mut Lab, directory: &Path, fence: Option<&Path>) -> Result<Started, Failure> {
    let at = |what: &str| directory.join(what).display().to_string();
    std::fs::create_dir(at("claims")).map_err(words)?;
    let arbiter = format!("--arbiter=file:{}", at("claims"));
    let said = std::fs::File::create(at("said")).map_err(words)?;
    let mut standby = sterna();
    standby.args(["standby", &format!("listen:unix:{}", at("both")), "--image", &at("image"), &arbiter]);
    standby.args(fence.map(|fence| format!("--fence={}", fence.display())));
    standby.stdout(said.try_clone().map_err(words)?).stderr(said);
    let standby = Started(standby.spawn().map_err(words)?);
    wait("the standby's socket", || is_listening(&directory.join("both")).then_some(()))?;
    let qemu = lab.primary.operator_socket().display().to_string();
    let mut protect = sterna();
    protect.args(["protect", &qemu, &format!("unix:{}", at("both")), &arbiter, "--lease=1s"]);
    let protect = Started(protect.stdout(Stdio::null()).spawn().map_err(words)?);
    said_by(directory, "following ")?;
    drop(protect);
    lab.primary.kill();
    said_by(directory, "The claim is won, and the guest runs on neither side")?;
    Ok(standby)
}

/// Waits until the standby has printed `what`, and returns its complete output.
fn said_by(directory: &Path, what: &str) -> Result<String, Failure> {
    let said = || std::fs::read_to_string(directory.join("said")).ok().filter(|said| said.contains(what));
    wait(what, said)
}

fn interrupt(standby: &Started) -> Result<(), Failure> {
    kill_process(Pid::from_child(&standby.0), Signal::INT).map_err(words)
}

#[test]
fn ctrl_c_runs_a_mended_fence_again_where_the_standby_has_no_monitor() -> Result<(), Failure> {
    let test = "ctrl_c_runs_a_mended_fence_again_where_the_standby_has_no_monitor";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::new(&root, Guest::Scribe, &[])?;
    let directory = tempfile::tempdir().map_err(words)?;
    let (fence, runs) = (directory.path().join("fence"), directory.path().join("runs"));
    let script = format!("#!/bin/sh\necho run >> {0}\ntest -e {0}.mended\n", runs.display());
    std::fs::write(&fence, script).map_err(words)?;
    std::fs::set_permissions(&fence, std::fs::Permissions::from_mode(0o755)).map_err(words)?;
    let mut standby = unfenced(&mut lab, directory.path(), Some(&fence))?;
    // A Ctrl-C while the fence runs counts as another answer, so the test waits for the failure.
    let has_failed = |count| {
        let said = || std::fs::read_to_string(directory.path().join("said")).unwrap_or_default();
        let told = || said().matches("press Ctrl-C to run it again").count();
        wait("the fence's failure", || (told() == count).then_some(()))
    };
    has_failed(1)?;

    // The checkpoint stays held, however often the fence fails.
    for count in [2, 3] {
        interrupt(&standby)?;
        has_failed(count)?;
    }
    std::fs::write(directory.path().join("runs.mended"), "").map_err(words)?;
    interrupt(&standby)?;

    let status = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
    let said = said_by(directory.path(), "taken over")?;
    assert!(status.success() && directory.path().join("image").exists(), "{status}: {said}");
    assert!(said.contains("press Ctrl-C to run it again") && !said.contains("sterna takeover"), "{said}");
    Ok(())
}

#[test]
fn second_ctrl_c_vouches_for_the_primary_of_a_standby_without_fence_and_monitor() -> Result<(), Failure> {
    let test = "second_ctrl_c_vouches_for_the_primary_of_a_standby_without_fence_and_monitor";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::new(&root, Guest::Scribe, &[])?;
    let directory = tempfile::tempdir().map_err(words)?;
    let mut standby = unfenced(&mut lab, directory.path(), None)?;

    interrupt(&standby)?;
    said_by(directory.path(), "Another Ctrl-C confirms this")?;
    assert!(!directory.path().join("image").exists(), "nobody has vouched yet");
    interrupt(&standby)?;

    let status = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
    let said = said_by(directory.path(), "taken over")?;
    assert!(status.success() && directory.path().join("image").exists(), "{status}: {said}");
    Ok(())
}

#[test]
fn requests_to_end_never_vouch_for_the_primary() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("requests_to_end_never_vouch_for_the_primary") else { return Ok(()) };
    let mut lab = Lab::new(&root, Guest::Scribe, &[])?;
    let directory = tempfile::tempdir().map_err(words)?;
    let mut standby = unfenced(&mut lab, directory.path(), None)?;
    let process = Pid::from_child(&standby.0);
    let terminate = || kill_process(process, Signal::TERM).map_err(words);

    // As a service manager sends them when the host shuts down.
    terminate()?;
    said_by(directory.path(), "Another Ctrl-C ends it")?;
    terminate()?;

    let status = wait("the standby's end", || standby.0.try_wait().ok().flatten())?;
    let said = said_by(directory.path(), "ended; ")?;
    assert!(!status.success() && !directory.path().join("image").exists(), "{status}: {said}");
    assert!(!said.contains("Another Ctrl-C confirms this"), "{said}");
    Ok(())
}
