//! Runs the benches:
//!
//! * `micro`: scan, bitmap, packets.
//! * `sync`: syncing dirty bitmaps, compared with the machine's own speed.
//! * `e2e`: whole migrations on loopback, compared with a plain copy.
//! * `disk`: a local disk that is migrated, compared with a plain copy of its data.
//! * `converge`: forecasts, pauses and dirty rates of guests that write.
//! * `qemu`: Sterna's programs and QEMU's, in one run.
//! * `colo`: protected guests, QEMU's and Sterna's.
//! * `lazy`: the time to a guest's first instruction from an image.
//! * `live`: saves of a running guest: the pause, and increments.
//! * `postcopy`: a guest that runs before its memory has arrived, QEMU's and Sterna's.
//! * `same-host`: moves to another process of the same host, QEMU's and Sterna's.
//! * `cuts`: the data that is sent again after a network outage.
//! * `compress`: what compression between two relays saves on a slow link.
//! * `network`: the rate of postcopy on a path with jitter, and the time until pages resume after a
//!   silence.
//! * `relay`: migrations of QEMU through two relays, whose network breaks.
//! * `faults`: guests of other VMMs, and of Sterna's own, that are served by page faults.
//! * `level`: a compression level that follows the disk's speed, against fixed ones.
//! * `rdma`: Sterna and QEMU over soft-RoCE, in the lab VM.
//! * `linux`: a Linux guest in the reference machine and in QEMU's microvm, in the lab VM.

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::workspace::{Metadata, target_directory};
use crate::{lab, roots};

const BENCHES: [&str; 4] = ["micro", "sync", "e2e", "disk"];

/// Runs the default benches, or one bench by its name.
///
/// `cargo xtask bench [BENCH] [-- ARGS]`. Without BENCH, the benches up to `disk` run.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let (ours, theirs) = crate::demo::split_at_dashes(arguments);
    let wanted: Vec<&str> = match ours {
        [] => BENCHES.to_vec(),
        [one] if one == "qemu" => return with_qemu("qemu-bench", theirs),
        [one] if one == "colo" => return with_qemu("colo-bench", theirs),
        [one] if one == "lazy" => return with_qemu("lazy-bench", theirs),
        [one] if one == "postcopy" => return with_qemu("postcopy-bench", theirs),
        [one] if one == "same-host" => return with_qemu("same-host-bench", theirs),
        [one] if one == "relay" => return with_qemu("relay-bench", theirs),
        [one] if one == "live" => return with_sterna("live-bench", theirs),
        [one] if one == "cuts" => return with_sterna("cuts-bench", theirs),
        [one] if one == "compress" => return with_sterna("compress-bench", theirs),
        [one] if one == "network" => vec!["network-bench"],
        [one] if one == "faults" => {
            let mut parts = Parts::default();
            parts.part("faults", || run("faults", theirs));
            return parts.finish().and_then(|()| with_sterna("own-lazy-bench", theirs));
        }
        [one] if one == "level" => vec!["level"],
        [one] if one == "converge" => return with_qemu("converge", theirs),
        [one] if one == "rdma" || one == "linux" => return in_lab(one, theirs),
        [one] if BENCHES.contains(&one.as_str()) => vec![one],
        [other, ..] => {
            return Err(Failure::Usage(format!(
                "there is no bench `{other}`: micro, sync, e2e, disk, converge, qemu, colo, lazy, live, postcopy, same-host, cuts, compress, network, relay, faults, level, rdma or linux"
            )));
        }
    };
    let mut parts = Parts::default();
    for name in wanted {
        parts.part(name, || run(name, theirs));
    }
    parts.finish()
}

/// Builds the QEMU root, `sterna` and a bench that uses both, and runs the bench.
fn with_qemu(program: &str, arguments: &[String]) -> std::result::Result<(), Failure> {
    roots::command(&["qemu".to_owned()])?;
    with_sterna(program, arguments)
}

/// Builds the `sterna` command and a bench that uses it, and runs the bench.
fn with_sterna(program: &str, arguments: &[String]) -> std::result::Result<(), Failure> {
    let mut parts = Parts::default();
    parts.part(program, || {
        let mut build = process::cargo();
        build.args(["build", "--quiet", "--release", "--package", "sterna-cli", "--bin", "sterna"]);
        process::run(build.args(["--package", "sterna-benches", "--bin", program]))?;
        let programs = target_directory().join("release");
        let mut bench = std::process::Command::new(programs.join(program));
        bench.env("STERNA_ROOTS", target_directory().join("roots"));
        bench.arg("--sterna").arg(programs.join("sterna")).args(arguments);
        process::run(&mut bench).map(|()| Outcome::Passed)
    });
    parts.finish()
}

/// Builds the roots and the lab, and runs the lab's bench of that kind.
fn in_lab(kind: &str, arguments: &[String]) -> std::result::Result<(), Failure> {
    let roots: &[&str] = if kind == "linux" { &["qemu", "guest"] } else { &["qemu"] };
    roots.iter().try_for_each(|root| roots::command(&[(*root).to_owned()]))?;
    let mut parts = Parts::default();
    parts.part(kind, || {
        lab::ensure()?;
        let mut build = process::cargo();
        build.args(["build", "--quiet", "--release", "--package", "sterna-interop", "--bins"]);
        process::run(&mut build)?;
        let mut bench = std::process::Command::new(target_directory().join("release/lab"));
        bench.env("STERNA_ROOTS", roots::directory()).args([kind, "--bench"]).args(arguments);
        process::run(&mut bench).map(|()| Outcome::Passed)
    });
    parts.finish()
}

/// Runs one bench, always in the release profile.
fn run(name: &str, arguments: &[String]) -> Result<Outcome> {
    let Some(target) = Metadata::of_members(None)?.target(name) else {
        return Ok(Outcome::Skipped(format!("no target is called `{name}`")));
    };
    let mut command = process::cargo();
    match target.kind.as_str() {
        "bench" => command.args(["bench", "--quiet", "--package", &target.package, "--bench", name, "--"]),
        "bin" | "example" => {
            let kind = format!("--{}", target.kind);
            command.args(["run", "--quiet", "--release", "--package", &target.package, &kind, name, "--"])
        }
        other => return Err(format!("`{name}` of {} is a {other}, not a bench", target.package)),
    };
    process::run(command.args(arguments)).map(|()| Outcome::Passed)
}
