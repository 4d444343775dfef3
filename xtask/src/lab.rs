//! The lab: VMs for tests that need hardware which the host lacks.
//!
//! One kind runs under QEMU's TCG with real (nested) KVM, where the reference machine also boots
//! Linux. Another has an RDMA device. A pair of joined VMs has an RDMA device in each.
//!
//! The tests and the VM's recipe are in `interop/` (crate sterna-interop). This file installs the
//! recipe's tools and starts it.

use std::process::Command;
use std::time::Duration;

use crate::parts::{Outcome, Parts};
use crate::process::{Failure, Result};
use crate::roots;
use crate::setup::{self, Tool};
use crate::suite::{Build, Job, Runner, built_program};

/// Programs that the recipe calls. The recipe itself downloads and unpacks Debian's kernel, which
/// is not installed.
pub const TOOLS: &[Tool] = &[
    Tool { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Tool { program: "cpio", package: "cpio" },
    Tool { program: "depmod", package: "kmod" },
    Tool { program: "xz", package: "xz-utils" },
];

/// The Debian package of the kernel that the lab boots.
const KERNEL: &str = "linux-image-6.12-amd64";

/// The kinds of labs; the recipe's program takes the name as an argument.
const KINDS: [&str; 4] = ["kvm", "linux", "rdma", "rdma-pair"];
/// The kinds that belong to the tests.
const TESTED_KINDS: [&str; 3] = ["kvm", "linux", "rdma"];

/// Time limit of the Linux lab. On a busy host the guest's migrations take longer than any other
/// program of the tests.
const LINUX_LIMIT: Duration = Duration::from_secs(1100);
/// Time limit of a run of chosen scenarios, some of which take long.
const CHOSEN_LIMIT: Duration = Duration::from_secs(1800);
/// Time limit of a run of disturbed migrations, which take much longer.
const RELIABILITY_LIMIT: Duration = Duration::from_secs(5500);
const RELIABILITY: &str = "--reliability";

/// Runs a VM of each tested kind, or of one kind: `cargo xtask lab [KIND [OPTION…]]`.
///
/// Options: `--all`, `--only=TEXT`, or `--reliability[=COUNT] [--seed=NUMBER] [--from=NUMBER]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let (kinds, chosen): (Vec<&str>, _) = match arguments {
        [] => (TESTED_KINDS.to_vec(), arguments),
        [name, chosen @ ..] => (KINDS.into_iter().filter(|kind| kind == name).collect(), chosen),
    };
    let starts = ["--only=", RELIABILITY, "--seed=", "--from="];
    let is_choice =
        |argument: &String| argument == "--all" || starts.iter().any(|start| argument.starts_with(start));
    if kinds.is_empty() || !chosen.iter().all(is_choice) {
        let kinds = KINDS.join(", ");
        return Err(Failure::Usage(format!(
            "lab takes one of {kinds}, or nothing; after the kind --all (also what takes long) or --only=TEXT \
             (what has such a name), for linux also --reliability=COUNT (so many moves in a row; with --seed=NUMBER others \
             between them are disturbed), for rdma --reliability[=COUNT] [--seed=NUMBER] [--from=NUMBER] (disturbed migrations)"
        )));
    }
    let mut parts = Parts::default();
    let mut runner = Runner::new()?;
    if kinds.iter().any(|kind| needs_root(kind)) {
        runner.add(roots::job_of(&roots::QEMU));
    }
    if kinds.contains(&"linux") {
        runner.add(roots::job_of(&roots::GUEST));
    }
    add(&mut runner, &mut parts, &kinds, chosen);
    let report = runner.run(Some(Build::new()?), |_| Ok(Vec::new()))?;
    report.close(&mut parts);
    parts.finish()
}

/// `cargo xtask linux [--count N] [--seed S]`: disturbed migrations of a Linux guest.
pub fn linux_command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let (mut chosen, mut words) = (vec!["linux".to_owned()], arguments.iter());
    while let Some(word) = words.next() {
        let option = match word.as_str() {
            "--count" => RELIABILITY,
            "--seed" => "--seed",
            _ => return Err(Failure::Usage(format!("linux takes --count N and --seed S, not `{word}`"))),
        };
        let number = words.next().filter(|number| number.parse::<u64>().is_ok());
        let number = number.ok_or_else(|| Failure::Usage(format!("write a number after {word}")))?;
        chosen.push(format!("{option}={number}"));
    }
    if chosen.len() == 1 {
        chosen.push("--all".to_owned());
    } else if !chosen.iter().any(|word| word.starts_with(RELIABILITY)) {
        return Err(Failure::Usage("a seed is for moves in a row: add --count N".to_owned()));
    }
    command(&chosen)
}

/// Adds a VM of each tested kind, or the reason why none can run here.
pub fn add_all(runner: &mut Runner, parts: &mut Parts) {
    add(runner, parts, &TESTED_KINDS, &[]);
}

fn add(runner: &mut Runner, parts: &mut Parts, kinds: &[&str], chosen: &[String]) {
    match jobs(kinds, chosen) {
        Ok(jobs) => jobs.into_iter().for_each(|job| runner.add(job)),
        Err(why) => parts.part("lab", || Ok(Outcome::Skipped(why))),
    }
}

/// Installs the programs that the lab's recipe needs.
pub fn ensure() -> Result<()> {
    setup::ensure(TOOLS)?;
    setup::package_lists(KERNEL)
}

/// Whether a lab of this kind uses a Debian root as its own file system.
fn needs_root(kind: &str) -> bool {
    kind.starts_with("rdma") || kind == "linux"
}

fn jobs(kinds: &[&str], chosen: &[String]) -> Result<Vec<Job>> {
    ensure()?;
    let job = |kind: &&str| {
        let mut command = Command::new(built_program("lab"));
        command.arg(kind).args(chosen).env("STERNA_ROOTS", roots::directory());
        let after: &[&str] = if needs_root(kind) { &["build", "roots"] } else { &["build"] };
        let job = Job::new("lab", format!("lab {kind}"), command).after(after);
        let is_reliability = chosen.iter().any(|argument| argument.starts_with(RELIABILITY));
        match chosen {
            [] if *kind == "linux" => Job { limit: LINUX_LIMIT, ..job },
            [] => job,
            _ if is_reliability => Job { limit: RELIABILITY_LIMIT, ..job },
            _ => Job { limit: CHOSEN_LIMIT, ..job },
        }
    };
    Ok(kinds.iter().map(job).collect())
}
