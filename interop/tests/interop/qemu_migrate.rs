//! `sterna migrate`, `info` and `cancel` with two real QEMUs.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_interop::qemu::PATIENCE;
use sterna_interop::{Failure, Guest, Qemu, Root, sterna, sterna_does, unbroken};

fn guest(root: &Root) -> sterna_interop::qemu::Builder {
    Qemu::builder(root).guest(Guest::Boot)
}

/// Runs `sterna migrate` between two QEMUs, with more arguments. The downtime limit is long, because a busy
/// host cannot send this guest's writes within the default limit.
fn migrate(source: &Qemu, target: &Qemu, more: &[&str]) -> Command {
    let mut command = sterna();
    command.arg("migrate").arg(source.operator_socket()).arg("tcp:127.0.0.1:0");
    command
        .arg("--dest-qmp")
        .arg(target.operator_socket())
        .args(["--json", "--set", "downtime-limit=10000"])
        .args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn start(mut command: Command) -> Result<Child, Failure> {
    command.spawn().map_err(|error| error.to_string())
}

/// Waits until the source sends pages.
fn wait_until_active(source: &mut Qemu) -> Result<(), Failure> {
    let begin = Instant::now();
    loop {
        let query = source.execute("query-migrate", Value::Null)?;
        if query["status"] == "active" && query["ram"]["transferred"].as_u64().unwrap_or(0) > 0 {
            return Ok(());
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("the migration did not begin: {query}"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Exit status and error output of the command.
fn end(child: Child) -> Result<(Option<i32>, String), Failure> {
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn migrate_between_two_qemus_reports_and_lets_the_guest_go_on() -> Result<(), Failure> {
    let test = "migrate_between_two_qemus_reports_and_lets_the_guest_go_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut machines = vec![guest(&root).spawn()?];
    for more in [&["--set", "max-bandwidth=0"][..], &["--cap", "multifd", "--set", "multifd-channels=3"]] {
        let source = machines.last_mut().expect("there is one from the start");
        source.wait_for_ticks(2)?;
        let mut target = guest(&root).incoming_defer().spawn()?;
        let before = source.capabilities_on()?;

        let output = migrate(source, &target, more).output().map_err(|error| error.to_string())?;

        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let record: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
        let figures = &record["statistics"];
        assert_eq!(figures["status"], "completed");
        assert!(figures["rounds"].as_array().is_some_and(|rounds| !rounds.is_empty()), "{figures}");
        assert!(figures["samples"].as_array().is_some_and(|samples| !samples.is_empty()), "{figures}");
        assert!(
            figures["normal_pages"].as_u64() > Some(0) && figures["downtime"].as_f64() > Some(0.0),
            "{figures}"
        );
        assert_eq!(figures["channels"], json!(if more[0] == "--cap" { 3 } else { 1 }));
        // The destination is also restored, because its next migration may be a plain one.
        assert_eq!((source.capabilities_on()?, target.capabilities_on()?), (before.clone(), before));
        target.wait_for_status("running")?;
        machines.push(target);
    }
    machines.last_mut().expect("there are many").wait_for_ticks(2)?;
    unbroken(&machines.iter().collect::<Vec<_>>()).map(drop)
}

#[test]
fn migrate_to_a_destination_that_was_started_with_s_leaves_the_guest_paused() -> Result<(), Failure> {
    let test = "migrate_to_a_destination_that_was_started_with_s_leaves_the_guest_paused";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let mut target = guest(&root).incoming_defer().arg("-S").spawn()?;

    let (status, said) = end(start(migrate(&source, &target, &["--set", "max-bandwidth=0"]))?)?;

    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("started with -S") && said.contains("`cont` there"), "{said}");
    assert_eq!(target.status()?, "paused");
    target.resume()?;
    target.wait_for_ticks(1)?;
    unbroken(&[&source, &target]).map(drop)
}

#[test]
fn migrate_that_is_cancelled_leaves_the_guest_at_the_source() -> Result<(), Failure> {
    let test = "migrate_that_is_cancelled_leaves_the_guest_at_the_source";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    for by_signal in [true, false] {
        let target = guest(&root).incoming_defer().spawn()?;
        let child = start(migrate(&source, &target, &["--set", "max-bandwidth=1M"]))?;
        wait_until_active(&mut source)?;

        if by_signal {
            let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
            kill.map_err(|error| error.to_string())?;
        } else {
            source.execute("migrate_cancel", Value::Null)?;
        }

        let (status, said) = end(child)?;
        assert_eq!(status, Some(130), "{said}");
        assert_eq!(source.status()?, "running");
        source.wait_for_ticks(1)?;
    }
    unbroken(&[&source]).map(drop)
}

#[test]
fn migrate_whose_destination_dies_leaves_the_guest_at_the_source() -> Result<(), Failure> {
    let test = "migrate_whose_destination_dies_leaves_the_guest_at_the_source";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let mut target = guest(&root).incoming_defer().spawn()?;
    let child = start(migrate(&source, &target, &["--set", "max-bandwidth=1M"]))?;
    wait_until_active(&mut source)?;

    target.kill();

    let (status, said) = end(child)?;
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("continues to run at the source"), "{said}");
    source.wait_for_ticks(2)?;
    unbroken(&[&source]).map(drop)
}

/// Runs without the destination's monitor, which may be on an unreachable host.
#[test]
fn migrate_to_a_qemu_that_lacks_a_device_fails_and_the_guest_stays_at_the_source() -> Result<(), Failure> {
    let test = "migrate_to_a_qemu_that_lacks_a_device_fails_and_the_guest_stays_at_the_source";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).args(&["-device", "virtio-rng-pci"]).spawn()?;
    source.wait_for_ticks(1)?;
    let mut target = guest(&root).incoming_defer().spawn()?;
    target.execute("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}))?;
    let query = target.execute("query-migrate", Value::Null)?;
    let port = query["socket-address"][0]["port"].as_str().ok_or("no port")?.to_owned();
    let before = source.capabilities_on()?;

    let mut command = sterna();
    command.arg("migrate").arg(source.operator_socket()).arg(format!("tcp:127.0.0.1:{port}"));
    command.args(["--set", "downtime-limit=10000", "--set", "max-bandwidth=0"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (status, said) = end(start(command)?)?;

    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("continues to run at the source"), "{said}");
    assert_eq!(source.capabilities_on()?, before);
    source.wait_for_ticks(2)?;
    unbroken(&[&source]).map(drop)
}

#[test]
fn migrate_to_a_command_has_the_status_of_an_arrival_that_nothing_confirms() -> Result<(), Failure> {
    let test = "migrate_to_a_command_has_the_status_of_an_arrival_that_nothing_confirms";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;

    let mut command = sterna();
    command.arg("migrate").arg(source.operator_socket()).arg("exec:cat >/dev/null");
    command.args(["--set", "downtime-limit=10000", "--set", "max-bandwidth=0"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (status, said) = end(start(command)?)?;

    assert_eq!(status, Some(7), "{said}");
    assert!(said.contains("unconfirmed") && said.contains("has no return path"), "{said}");
    // QEMU reports the end of the migration before it leaves `finish-migrate`.
    source.wait_for_status("postmigrate")?;
    Ok(())
}

/// The guest is stopped and everything is sent. The port belongs to a program that reads and never answers.
#[test]
fn migrate_to_a_program_that_never_answers_is_undecided_and_cancel_resumes_the_guest() -> Result<(), Failure>
{
    let test = "migrate_to_a_program_that_never_answers_is_undecided_and_cancel_resumes_the_guest";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let port = listener.local_addr().map_err(|error| error.to_string())?.port();
    std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });

    let mut command = sterna();
    command.arg("migrate").arg(source.operator_socket()).arg(format!("tcp:127.0.0.1:{port}"));
    command.args(["--set", "downtime-limit=10000", "--set", "max-bandwidth=0", "--undecided-wait", "2"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (status, said) = end(start(command)?)?;

    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("paused at the source") && said.contains("sterna cancel"), "{said}");
    let socket = source.operator_socket().display().to_string();
    sterna_does(&["cancel", &socket])?;
    source.wait_for_status("running")?;
    source.wait_for_ticks(1)?;
    unbroken(&[&source]).map(drop)
}

#[test]
fn migrate_whose_source_dies_says_where_the_guest_is() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("migrate_whose_source_dies_says_where_the_guest_is") else {
        return Ok(());
    };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let mut target = guest(&root).incoming_defer().spawn()?;
    let child = start(migrate(&source, &target, &["--set", "max-bandwidth=1M"]))?;
    wait_until_active(&mut source)?;

    source.kill();

    let (status, said) = end(child)?;
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("monitor") && said.contains("before the whole guest was sent"), "{said}");
    // A partially received guest is useless, so the destination must end.
    let begin = Instant::now();
    while target.ended().is_none() {
        assert!(begin.elapsed() < PATIENCE, "the destination waits for nothing any more");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[test]
fn migrate_that_is_left_alone_says_where_the_held_guest_must_go_on() -> Result<(), Failure> {
    let test = "migrate_that_is_left_alone_says_where_the_held_guest_must_go_on";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    let mut target = guest(&root).incoming_defer().spawn()?;
    let child = start(migrate(&source, &target, &["--set", "max-bandwidth=1M"]))?;
    wait_until_active(&mut source)?;

    // Two signals, because a single one would cancel. On a busy machine, the first may still be handled
    // alone.
    for signal in ["-STOP", "-INT", "-TERM", "-CONT"] {
        let kill = Command::new("kill").args([signal, &child.id().to_string()]).status();
        kill.map_err(|error| error.to_string())?;
    }

    let (status, said) = end(child)?;
    assert_eq!(status, Some(5), "{said}");
    let place = target.operator_socket().display().to_string();
    assert!(
        said.contains("holds the guest") && said.contains("`cont` at") && said.contains(&place),
        "{said}"
    );
    source.parameters(json!({"max-bandwidth": 0}))?;
    let begin = Instant::now();
    loop {
        let query = source.execute("query-migrate", Value::Null)?;
        if query["status"] == "completed" {
            break;
        }
        if query["status"] == "cancelled" {
            assert!(said.contains("asked to cancel"), "{said}");
            assert_eq!(source.status()?, "running");
            return Ok(());
        }
        assert!(begin.elapsed() < PATIENCE, "the migration goes on: {query}");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_ne!(target.status()?, "running", "it is held");
    target.execute("cont", Value::Null)?;
    target.wait_for_ticks(2)?;
    unbroken(&[&source, &target]).map(drop)
}

#[test]
fn migrate_to_another_machine_is_refused_before_anything_moves() -> Result<(), Failure> {
    let test = "migrate_to_another_machine_is_refused_before_anything_moves";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut source = guest(&root).spawn()?;
    source.wait_for_ticks(1)?;
    for (builder, word) in
        [(guest(&root).machine("q35"), "machine types differ"), (guest(&root).memory_mib(128), "pc.ram")]
    {
        let mut target = builder.incoming_defer().spawn()?;

        let (status, said) = end(start(migrate(&source, &target, &[]))?)?;

        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains(word), "{said}");
        assert_eq!((source.status()?, target.status()?), ("running".into(), "inmigrate".into()));
    }
    Ok(())
}

#[test]
fn info_and_cancel_work_on_a_qemu() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("info_and_cancel_work_on_a_qemu") else { return Ok(()) };
    let qemu = guest(&root).spawn()?;
    let socket = qemu.operator_socket().display().to_string();

    let info = sterna_does(&["info", &socket, "--json"])?;
    let refused = sterna_does(&["cancel", &socket]).expect_err("nothing is under way");

    let info: Value = serde_json::from_str(&info).map_err(|error| error.to_string())?;
    assert_eq!(info["status"], "running");
    assert!(info["machine"].as_str().is_some_and(|machine| machine.starts_with("pc-i440fx-")), "{info}");
    assert!(refused.contains("no running migration"), "{refused}");
    Ok(())
}
