//! The lab: a VM under QEMU's TCG that has real (nested) KVM, for tests that need hardware virtualisation.
//!
//! The tests and the VM's recipe live in `interop/` (crate sterna-interop); here stands only what they need.

use std::process::Command;

use crate::parts::Parts;
use crate::process::{Failure, Result};
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

/// `cargo xtask lab`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(extra) = arguments.first() {
        return Err(Failure::Usage(format!("lab takes no `{extra}`")));
    }
    let mut parts = Parts::default();
    let mut runner = Runner::new()?;
    runner.add(job()?.after(&["build"]));
    let report = runner.run(Some(Build::new()?), |_| Ok(Vec::new()))?;
    report.close(&mut parts);
    parts.finish()
}

/// The built program, or the reason for which it cannot run here.
pub fn job() -> Result<Job> {
    setup::ensure(TOOLS)?;
    setup::package_lists(KERNEL)?;
    Ok(Job::new("lab", "lab", Command::new(built_program("lab"))))
}
