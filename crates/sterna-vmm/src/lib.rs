//! The reference KVM machine: how a VMM lets the engine migrate its guest.
//!
//! # The model
//! A [`KvmMachine`] is one virtual machine: 1 to 8 vCPUs, each with a thread; RAM in one or two blocks
//! ([`layout`]); the interrupt controllers and the timer that KVM keeps in the kernel; a serial console.
//! It is at once a [`sterna::SourceVm`] and a [`sterna::TargetVm`].
//!
//! `machine/` is the running machine, `devices/` its saved state: one module per device, whose documentation says
//! what the body contains and by which rule it may change.
//!
//! It needs `/dev/kvm`, with or without hardware virtualisation. What a kernel does not offer is left out of the
//! saved state, never guessed.

mod devices;
mod error;
mod inherited;
mod kvm;
pub mod layout;
mod machine;
mod memory_failure;

pub use devices::codec::StateError;
pub use error::VmmError;
pub use inherited::claim_inherited;
pub use machine::bus::PortDevice;
pub use machine::config::{GuestImage, MachineConfig, PortRange};
pub use machine::gate::EndReason;
pub use machine::{KvmMachine, MACHINE_TYPE};
pub use memory_failure::forward_sigbus;
pub use sterna_devices::vhost_user::VhostUserOptions;
pub use sterna_ram::Backing;
