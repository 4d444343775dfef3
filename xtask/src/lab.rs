//! The lab: a VM under QEMU's TCG that has real (nested) KVM, for tests that need hardware virtualisation.
//!
//! The tests and the VM's recipe live in `interop/` (crate sterna-interop); here stands only what they need.

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::setup::{self, Tool};
use crate::workspace::Metadata;

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
    parts.part("lab", run);
    parts.finish()
}

/// Runs the lab's tests if there are any and the machine has what they need.
pub fn run() -> Result<Outcome> {
    let metadata = Metadata::of_members(None)?;
    if !metadata.has_package("sterna-interop") {
        return Ok(Outcome::Skipped("there is no crate sterna-interop".into()));
    }
    let Some(target) = metadata.target("lab") else {
        return Ok(Outcome::Skipped("sterna-interop has no target called `lab`".into()));
    };
    if let Err(why) = setup::ensure(TOOLS) {
        return Ok(Outcome::Skipped(why));
    }
    setup::package_lists(KERNEL)?;
    let mut command = process::cargo();
    match target.kind.as_str() {
        "test" => command.args(["test", "--package", &target.package, "--test", "lab", "--", "--nocapture"]),
        "bin" => {
            command = process::program("lab")?;
            &mut command
        }
        other => return Err(format!("`lab` is a {other}, not a test or a program")),
    };
    // A program that cannot do it here says so, and why, and ends well.
    let (done, skipped) = process::run_and_watch(&mut command, "SKIPPED lab: ");
    done.map(|()| match skipped.first() {
        Some(line) => Outcome::Skipped(line.trim_start_matches("SKIPPED lab: ").to_owned()),
        None => Outcome::Passed,
    })
}
