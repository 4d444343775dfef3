//! Devices in other processes or in the kernel, as implementations of the engine's traits.
//!
//! # The model
//! Often not the VMM but the kernel (VFIO) or another process (vhost-user, vfio-user) has a device's state. Each has
//! its own protocol. The engine sees one trait, [`sterna::DeviceStream`], and for the device's writes to guest RAM
//! another, [`sterna_ram::DirtySource`].
//!
//! | module | contains |
//! | --- | --- |
//! | [`vfio`] | VFIO's migration states, shared by every way that speaks them: a [`vfio::MigrationPort`] is all that a way must have, [`vfio::VfioDevice`] makes a `DeviceStream` of it |
//! | [`vfio_user`] | the vfio-user protocol (specs/vfio-user.md): codec, client, server |
//! | [`vhost_user`] | the front end of vhost-user devices: state through a pipe, a shared dirty log |
//! | [`statebank`] | a device model that detects any lost, reordered or torn byte of its state; in process, or as the program `sterna-statebank` |
#![warn(unreachable_pub)]

mod connect;
pub mod statebank;
pub mod vfio;
pub mod vfio_user;
pub mod vhost_user;
