//! Tests Sterna against independent programs: real QEMU, real libvirt, and real KVM in a VM if the host has
//! none.
//!
//! A test of interoperation gets a root ([`Root::qemu_for`]) and starts QEMU from it, with a guest that keeps
//! checking its own memory ([`Qemu::builder`], [`Guest`]). Then Sterna acts on that QEMU. At the end, the
//! test checks that the guest's count continues ([`unbroken`]):
//!
//! ```no_run
//! # use sterna_interop::{Guest, Qemu, Root, unbroken};
//! # fn main() -> Result<(), sterna_interop::Failure> {
//! let Some(root) = Root::qemu_for("guest_saved_and_restored_counts_on") else { return Ok(()) };
//! let builder = Qemu::builder(&root).machine("pc").memory_mib(64).guest(Guest::Boot);
//! let mut source = builder.clone().spawn()?;
//! source.wait_for_ticks(3)?;
//! source.migrate("file:/tmp/image")?;
//! let mut target = builder.incoming_defer().spawn()?;
//! target.incoming("file:/tmp/image")?;
//! target.resume()?;
//! target.wait_for_ticks(3)?;
//! unbroken(&[&source, &target])?;
//! # Ok(())
//! # }
//! ```
//!
//! A test that cannot run here prints `SKIPPED test: reason` to standard error and returns ([`skip`]). xtask
//! repeats these lines at the end. `cargo xtask roots` builds the roots. The tests look for them in
//! `$STERNA_ROOTS`, then in `roots` of the target directory.
//!
//! The other half of the crate is the lab VM with real KVM: [`lab`], [`scenarios`], [`guests`].

pub mod certificates;
mod content;
mod etcd;
pub mod guests;
mod kernel;
pub mod lab;
mod libvirt;
mod linux;
pub mod machines;
pub mod qemu;
mod root;
pub mod scenarios;
mod sterna_program;
pub mod ticks;
mod workload;

pub use content::fill;
pub use etcd::Etcd;
pub use libvirt::{Libvirt, save_formats};
pub use machines::{Machine, machines_for};
pub use qemu::{Accelerator, Builder, Qemu, Ram};
pub use root::{Root, kvm_for, skip};
pub use scenarios::Failure;
pub use sterna_program::{sterna, sterna_does};
pub use sterna_testing::is_listening;
pub use ticks::{Tick, unbroken};
pub use workload::{
    DONE_ADDRESS, GAPS, GAPS_ADDRESS, Guest, LAST_STEP_ADDRESS, LONGEST_GAP_ADDRESS, MOST_LATE_ADDRESS,
    NUMBER_ADDRESS, NUMBER_IN_FRAME, PACE_ADDRESS, SAYS_ADDRESS, SCRIBE_BYTES, boot_disk, gap_ticks,
    scribe_devices, scribe_disks, scribed,
};
