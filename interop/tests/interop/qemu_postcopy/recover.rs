//! A postcopy between two QEMUs whose connection breaks. Meanwhile, `sterna migrate` is connected to their
//! only monitors. Also the messages of `serve` for a QEMU that waits for another channel.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_interop::{Accelerator, Builder, Failure, Qemu, Ram, Root, fill, sterna, sterna_does};

use super::cut::Cut;
use super::{still, waiting};

/// Time limit within which a mismatch is reported.
const NAMED: Duration = Duration::from_secs(2);

#[test]
fn recover_as_migrate_prints_it_works_while_migrate_waits() -> Result<(), Failure> {
    recovers_as_printed(
        "recover_as_migrate_prints_it_works_while_migrate_waits",
        false,
        |way| way.allow(u64::MAX),
        "connected again",
    )
}

/// The dead connection stays open, so neither side notices. `migrate` sees that nothing is sent, and
/// disconnects from the monitors.
#[test]
fn recover_as_migrate_prints_it_works_on_a_connection_that_is_dead_and_open() -> Result<(), Failure> {
    recovers_as_printed(
        "recover_as_migrate_prints_it_works_on_a_connection_that_is_dead_and_open",
        true,
        Cut::abandon,
        "sends again",
    )
}

/// The connection breaks after 30 MiB, or stalls with `stalls`; `mend` lets a new one pass. Then the command
/// that `migrate` has printed is run while `migrate` still runs. `migrate` must print `after` and succeed.
fn recovers_as_printed(test: &str, stalls: bool, mend: fn(&Cut), after: &str) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = Qemu::builder(&root).memory_mib(128).accelerator(Accelerator::Nothing).ram(Ram::File);
    let mut source = builder.clone().spawn()?;
    fill(&source.directory().join("ram"), 5)?;
    source.parameters(json!({"max-bandwidth": 20_000_000, "max-postcopy-bandwidth": 20_000_000}))?;
    let (mut target, address) = waiting(&builder.ram(Ram::Object), &["postcopy-preempt"])?;
    let way = Cut::new(&target.directory().join("way"), &address, 30 << 20, stalls)
        .map_err(|error| error.to_string())?;
    let mut command = sterna();
    command.arg("migrate").arg(source.operator_socket()).arg(way.address());
    command.arg("--dest-qmp").arg(target.operator_socket()).args(["--postcopy", "0"]);
    let mut migrating =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let mut said =
        BufReader::new(migrating.stderr.take().ok_or("no standard error")?).lines().map_while(Result::ok);

    let line = said.find_map(|line| Some(line.split_once("`sterna ")?.1.split_once('`')?.0.to_owned()));
    mend(&way);
    let rest = std::thread::spawn(move || said.collect::<Vec<_>>().join("\n"));
    let line = line.ok_or("no line to recover was printed")?;
    sterna_does(&line.split(' ').collect::<Vec<_>>())?;

    let status = migrating.wait().map_err(|error| error.to_string())?;
    let rest = rest.join().unwrap_or_default();
    assert!(status.success(), "{line}: {rest}");
    assert!(rest.contains(after), "{rest}");
    assert_eq!(target.status()?, "running");
    Ok(())
}

#[test]
fn serve_names_a_channel_that_the_qemu_waits_for() -> Result<(), Failure> {
    let test = "serve_names_a_channel_that_the_qemu_waits_for";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 32)?;
    serve_names(&builder, &image, &["multifd"], &[], "multifd")?;
    serve_names(&builder, &image, &["postcopy-preempt"], &[], "serve with --preempt")
}

/// A QEMU that does not read the preempt channel. It hangs when its devices or its guest need a page from
/// that channel.
#[test]
fn serve_names_a_channel_that_the_qemu_does_not_read() -> Result<(), Failure> {
    let test = "serve_names_a_channel_that_the_qemu_does_not_read";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let builder = super::builder(&root);
    let (_source, image) = super::saved(&builder)?;
    serve_names(&builder, &image, &[], &["--preempt"], "without --preempt")
}

/// Runs `serve` with the arguments `more` for a QEMU with `capabilities`. It must soon print `word`. One
/// Ctrl-C must end it, because no guest lacks pages.
fn serve_names(
    builder: &Builder,
    image: &Path,
    capabilities: &[&str],
    more: &[&str],
    word: &str,
) -> Result<(), Failure> {
    let (_target, address) = waiting(builder, capabilities)?;
    let mut command = sterna();
    command.arg("serve").arg(image).arg(&address).args(more);
    let begin = Instant::now();
    let mut serving =
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let mut said =
        BufReader::new(serving.stderr.take().ok_or("no standard error")?).lines().map_while(Result::ok);

    let named = said.by_ref().take_while(|_| begin.elapsed() < NAMED * 5).find(|line| line.contains(word));

    let took = begin.elapsed();
    let interrupted = Command::new("kill").args(["-INT", &serving.id().to_string()]).status();
    interrupted.map_err(|error| error.to_string())?;
    let rest: Vec<String> = said.collect();
    serving.wait().map_err(|error| error.to_string())?;
    assert!(named.is_some(), "{capabilities:?} {more:?}: not named in {took:?}: {rest:?}");
    // The time to open the image is added to the limit.
    assert!(took < NAMED + Duration::from_secs(1), "{capabilities:?} {more:?}: {took:?}");
    assert!(!rest.iter().any(|line| line.contains("Ctrl-C again")), "{rest:?}");
    Ok(())
}

/// A port scanner's connection does not count as a guest. A guest that connects later is served.
#[test]
fn serve_does_not_count_connections_that_say_nothing() -> Result<(), Failure> {
    let test = "serve_does_not_count_connections_that_say_nothing";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let (builder, _source, image) = still(&root, 32)?;
    let place = image.with_file_name("served");
    let mut command = sterna();
    command
        .arg("serve")
        .arg(&image)
        .arg(format!("listen:unix:{}", place.display()))
        .args(["--guests", "1", "--json"]);
    let serving =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let connect = || loop {
        if let Ok(connection) = std::os::unix::net::UnixStream::connect(&place) {
            return connection;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    drop(connect());
    let silent = connect();
    let mut target = builder.incoming_defer().spawn()?;
    target.capabilities(&["postcopy-ram"])?;
    target.qmp().send_fd("pages", std::os::fd::AsFd::as_fd(&connect())).map_err(|error| error.to_string())?;

    target.start_incoming("fd:pages")?;

    let report = super::report(serving)?;
    assert_eq!(report["guests"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(report["guests"][0]["completed"], true, "{report}");
    drop(silent);
    Ok(())
}
