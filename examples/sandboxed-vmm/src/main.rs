//! A VMM that locks itself in before it touches a guest, and migrates with Sterna.
//!
//! | module | contains | names `sterna` |
//! | --- | --- | --- |
//! | `machine`, `vcpu`, `ticker` | the machine of `examples/vm-memory-vmm` | no |
//! | `jail` | chroot, user, Landlock | no |
//! | `filters` | a seccomp filter for each thread, from the engine's table | yes |
//! | `migratable` | the machine's implementation of the engine's traits | yes |
//! | `control` | the event loop, and an operator's commands | yes |
//!
//! One thread runs the event loop: it owns the machine, makes it from the source's configuration, and serves the commands of standard input.
//! The process opens `/dev/kvm` and gets its listening socket before it locks itself in; afterwards it opens nothing.
//!
//! ```text
//! sandboxed-vmm --jail DIRECTORY --boot MIB              the source
//! sandboxed-vmm --jail DIRECTORY --listen fd:NUMBER      the destination, with an inherited listening socket
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

mod control;
mod filters;
mod jail;
#[path = "../../vm-memory-vmm/src/machine.rs"]
#[allow(dead_code, reason = "this VMM plugs no memory")]
mod machine;
mod migratable;
#[path = "../../vm-memory-vmm/src/ticker.rs"]
mod ticker;
#[path = "../../vm-memory-vmm/src/vcpu.rs"]
#[allow(dead_code, reason = "this VMM reports less")]
mod vcpu;

use std::error::Error;
use std::path::PathBuf;

use kvm_ioctls::Kvm;

const USAGE: &str = "usage: sandboxed-vmm --jail DIRECTORY (--boot MIB | --listen fd:NUMBER)";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [jail, directory, what, value] = &arguments[..] else { return Err(USAGE.into()) };
    if jail != "--jail" {
        return Err(USAGE.into());
    }
    let kvm = Kvm::new()?;
    sterna::ram::keep_pagemap()?;
    let locks = jail::lock(&PathBuf::from(directory))?;
    filters::lock_event_loop()?;
    println!("locked by {locks}");
    let mut vmm = control::Vmm::new(kvm)?;
    match what.as_str() {
        "--boot" => vmm.boot(value.parse()?)?,
        "--listen" => vmm.listen(value)?,
        _ => return Err(USAGE.into()),
    }
    vmm.run()
}
