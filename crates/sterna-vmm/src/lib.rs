//! The reference KVM machine. It shows how a VMM lets the engine migrate its guest.
//!
//! # The model
//! A [`KvmMachine`] is one virtual machine with these parts:
//!
//! - 1 to 8 vCPUs, each with a thread
//! - RAM in one or two blocks ([`layout`])
//! - the interrupt controllers and the timer that KVM implements in the kernel
//! - a serial console
//!
//! It implements both [`sterna::SourceVm`] and [`sterna::TargetVm`].
//!
//! The modules are layers, lowest first. No module imports a higher one:
//!
//! | module | contains |
//! | --- | --- |
//! | `hardware/` | the hardware except the vCPUs: the VM with its RAM, chips, ports, virtio devices, devices in other processes |
//! | `vcpus/` | the vCPUs, their threads, the tracking of their writes, and the throttle |
//! | `devices/` | the saved state, one module per device; each module's documentation describes the body and the rule for changes |
//! | `machine/` | [`KvmMachine`], which owns all of these; the engine and an operator use it |
//!
//! The crate needs `/dev/kvm`, with or without hardware virtualisation. State that a kernel does not offer is
//! left out of the saved state and never guessed.

mod config;
mod devices;
mod end_reason;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod hardware;
mod inherited;
mod kvm;
pub mod layout;
mod machine;
mod memory_failure;
mod ports;
mod vcpus;

pub use config::{
    AnnounceOptions, DiskMigration, DiskOptions, GuestImage, LinuxImage, MacAddress, MachineConfig,
    NetOptions,
};
pub use devices::codec::StateError;
pub use end_reason::EndReason;
pub use error::VmmError;
pub use inherited::claim_inherited;
pub use machine::{KvmMachine, MACHINE_TYPE};
pub use memory_failure::forward_sigbus;
pub use ports::{PortDevice, PortRange};
pub use sterna_devices::vhost_user::{DeviceKind, VhostUserOptions};
pub use sterna_disk::Format as DiskFormat;
pub use sterna_ram::Backing;
