//! Sterna before foreign judges: real QEMU, real libvirt, and real KVM where the host has none.
//!
//! A test of interoperation asks for a root ([`Root::qemu_for`]), starts QEMU in it with a guest that keeps
//! checking its own memory ([`Qemu::builder`], [`Guest`]), lets Sterna do something with it, and asks whether
//! the guest's count goes on ([`unbroken`]):
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
//! What cannot run here says `SKIPPED test: reason` on standard error and returns ([`skip`]); xtask repeats
//! those lines at the end. The roots are built by `cargo xtask roots`; the tests look for them in
//! `$STERNA_ROOTS`, then in `roots` of the target directory.
//!
//! The other half of the crate is the lab VM with real KVM: [`lab`], [`scenarios`], [`guests`].

mod content;
mod etcd;
pub mod guests;
mod kernel;
pub mod lab;
mod libvirt;
mod linux;
mod listening;
pub mod machines;
pub mod qemu;
mod root;
pub mod scenarios;
mod sterna_program;
pub mod ticks;
mod workload;

pub use content::fill;
pub use etcd::Etcd;
pub use libvirt::{Libvirt, SAVE_FORMATS};
pub use listening::is_listening;
pub use machines::{Machine, machines_for};
pub use qemu::{Accelerator, Builder, Qemu, Ram};
pub use root::{Root, kvm_for, skip};
pub use scenarios::Failure;
pub use sterna_program::{sterna, sterna_does};
pub use ticks::{Tick, unbroken};
pub use workload::{
    DONE_ADDRESS, GAPS, GAPS_ADDRESS, Guest, LAST_STEP_ADDRESS, LONGEST_GAP_ADDRESS, MOST_LATE_ADDRESS,
    NUMBER_ADDRESS, NUMBER_IN_FRAME, PACE_ADDRESS, SAYS_ADDRESS, SCRIBE_BYTES, boot_disk, gap_ticks,
    scribe_devices, scribe_disks, scribed,
};
