//! Devices in other processes or in the kernel, as implementations of the engine's traits.
//!
//! # The model
//! The state of a device is often in the kernel (VFIO) or in another process (vhost-user, vfio-user). Each
//! has its own protocol. The engine uses one trait for all of them, [`sterna::DeviceStream`], and another for
//! the device's writes to guest RAM, [`sterna_ram::DirtySource`].
//!
//! | module | contains |
//! | --- | --- |
//! | [`vfio`] | VFIO's migration states, independent of the transport: a transport implements [`vfio::MigrationPort`], and [`vfio::VfioDevice`] turns it into a `DeviceStream` |
//! | [`vfio_user`] | the vfio-user protocol (specs/vfio-user.md): codec, client, server |
//! | [`vhost_user`] | the front end of vhost-user devices: state through a pipe, a shared dirty log |
//! | [`watchdog`] | the host's watchdog (`/dev/watchdog`), which the lease of a protected guest feeds |
//! | [`statebank`] | a device model that detects any lost, reordered or torn byte of its state; in process, or as the program `sterna-statebank` |
#![warn(unreachable_pub)]

mod connect;
pub mod statebank;
pub mod vfio;
pub mod vfio_user;
pub mod vhost_user;
pub mod watchdog;
