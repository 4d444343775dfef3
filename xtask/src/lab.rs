//! The lab: a VM under QEMU's TCG that has real (nested) KVM, or an RDMA device, for tests that need them.
//!
//! The tests and the VM's recipe live in `interop/` (crate sterna-interop); here stands only what they need.

use std::process::Command;

use crate::parts::{Outcome, Parts};
use crate::process::{Failure, Result};
use crate::roots;
use crate::setup::{self, Tool};
use crate::suite::{Build, Job, Runner, built_program};

/// What the recipe calls. Debian's kernel itself is downloaded and unpacked by the recipe, not installed.
pub const TOOLS: &[Tool] = &[
    Tool { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Tool { program: "cpio", package: "cpio" },
    Tool { program: "depmod", package: "kmod" },
    Tool { program: "xz", package: "xz-utils" },
];

/// The kernel that the lab boots.
const KERNEL: &str = "linux-image-6.12-amd64";

/// What a lab may have; the program of the recipe takes the name.
const KINDS: [&str; 2] = ["kvm", "rdma"];

/// `cargo xtask lab [KIND]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let kinds: Vec<&str> = match arguments {
        [] => KINDS.to_vec(),
        [name] => KINDS.into_iter().filter(|kind| kind == name).collect(),
        _ => Vec::new(),
    };
    if kinds.is_empty() {
        return Err(Failure::Usage(format!("lab takes one of {}, or nothing", KINDS.join(", "))));
    }
    let mut parts = Parts::default();
    let mut runner = Runner::new()?;
    if kinds.contains(&"rdma") {
        runner.add(roots::job_of(&roots::QEMU));
    }
    add(&mut runner, &mut parts, &kinds);
    let report = runner.run(Some(Build::new()?), |_| Ok(Vec::new()))?;
    report.close(&mut parts);
    parts.finish()
}

/// A VM of each kind, or the reason for which none can run here.
pub fn add_all(runner: &mut Runner, parts: &mut Parts) {
    add(runner, parts, &KINDS);
}

fn add(runner: &mut Runner, parts: &mut Parts, kinds: &[&str]) {
    match jobs(kinds) {
        Ok(jobs) => jobs.into_iter().for_each(|job| runner.add(job)),
        Err(why) => parts.part("lab", || Ok(Outcome::Skipped(why))),
    }
}

fn jobs(kinds: &[&str]) -> Result<Vec<Job>> {
    setup::ensure(TOOLS)?;
    setup::package_lists(KERNEL)?;
    let job = |kind: &&str| {
        let mut command = Command::new(built_program("lab"));
        command.arg(kind).env("STERNA_ROOTS", roots::directory());
        let after: &[&str] = if *kind == "rdma" { &["build", "roots"] } else { &["build"] };
        Job::new("lab", format!("lab {kind}"), command).after(after)
    };
    Ok(kinds.iter().map(job).collect())
}
