//! The reference KVM machine: how a VMM lets the engine migrate its guest.
//!
//! # The model
//! A [`KvmMachine`] is one virtual machine: 1 to 8 vCPUs, each with a thread; RAM in one or two blocks
//! ([`layout`]); the interrupt controllers and the timer that KVM keeps in the kernel; a serial console.
//! It is at once a [`sterna::SourceVm`] and a [`sterna::TargetVm`].
//!
//! The modules are layers, lowest first; none imports one above it:
//!
//! | module | contains |
//! | --- | --- |
//! | `hardware/` | what the guest runs on besides its vCPUs: the VM with its RAM, chips, ports, virtio devices, devices in other processes |
//! | `vcpus/` | the vCPUs, their threads, what finds their writes, and what slows them down |
//! | `devices/` | the saved state: one module per device, whose documentation says what the body contains and by which rule it may change |
//! | `machine/` | [`KvmMachine`]: owns all of these, and is what the engine and an operator use |
//!
//! It needs `/dev/kvm`, with or without hardware virtualisation. What a kernel does not offer is left out of the
//! saved state, never guessed.

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
