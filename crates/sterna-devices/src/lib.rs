//! Devices that live in other processes or in the kernel, behind the engine's traits.

pub mod vhost_user;
