//! vfio-user: devices in other processes, connected by a Unix socket (specs/vfio-user.md).
//!
//! # The model
//! The *client* is the VMM, and the *server* is the device. The client sends one request at a time, and the
//! server answers in order. Guest RAM is handed over as descriptors ([`Client::map_ram`]), which the server
//! maps. The server is therefore trusted with the guest's memory, but with nothing else. Every byte that it
//! sends is checked ([`wire`]). Every wait has a time limit ([`ClientOptions::timeout`]).
//!
//! [`Client`] is a [`crate::vfio::MigrationPort`], so that [`crate::vfio::VfioDevice`] can migrate its
//! device. [`DmaLog`] is the dirty source for the server's writes to guest RAM. [`Server`] serves a
//! [`Backend`].

mod backend;
mod client;
mod connection;
mod server;
pub mod wire;

pub use backend::{Backend, BackendError, DmaRegion};
pub use client::{Client, ClientOptions};
pub use server::{Server, ServerEnd, ServerThread, Stopper, serve};

/// The DMA log that a device's process maintains.
pub type DmaLog = crate::vfio::DmaLog<Client>;
