//! Devices that live in other processes or in the kernel, behind the engine's traits.
//!
//! # The model
//! A VMM often is not the one who knows a device's state: the kernel does (VFIO), or a process of its own
//! (vhost-user, vfio-user). Each way has its protocol; what the engine sees is one trait, [`sterna::DeviceStream`],
//! and for what the device writes into guest RAM one more, [`sterna_ram::DirtySource`].
//!
//! | module | holds |
//! | --- | --- |
//! | [`vfio`] | VFIO's migration states, shared by every way that speaks them: a [`vfio::MigrationPort`] is all that a way must have, [`vfio::VfioDevice`] makes a `DeviceStream` of it |
//! | [`vfio_user`] | the vfio-user protocol (specs/vfio-user.md): codec, client, server |
//! | [`vhost_user`] | the front end of vhost-user devices: state through a pipe, a shared dirty log |
//! | [`statebank`] | a device model whose state proves that nothing of it was lost, reordered or torn; in process, or as the program `sterna-statebank` |
#![warn(unreachable_pub)]

mod connect;
pub mod statebank;
pub mod vfio;
pub mod vfio_user;
pub mod vhost_user;
