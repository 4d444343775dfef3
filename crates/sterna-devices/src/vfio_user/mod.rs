//! vfio-user: a device in a process of its own, over a Unix socket (specs/vfio-user.md).
//!
//! # The model
//! The *client* is the VMM; the *server* is the device. The client asks, one request at a time; the server
//! answers in order. Guest RAM is handed over as descriptors ([`Client::map_ram`]), which the server maps, so a
//! server is trusted with the guest's memory; it is not trusted with anything else: every byte that it sends is
//! checked ([`wire`]), and every wait for it ends ([`ClientOptions::timeout`]).
//!
//! [`Client`] is a [`crate::vfio::MigrationPort`], so [`crate::vfio::VfioDevice`] makes a device with large state of
//! it. [`DmaLog`] is the dirty source of what the server writes into guest RAM. [`Server`] serves a [`Backend`].

mod backend;
mod client;
mod connection;
mod server;
pub mod wire;

pub use backend::{Backend, BackendError, DmaRegion};
pub use client::{Client, ClientOptions};
pub use server::{Server, ServerEnd, ServerThread, Stopper, serve};

/// The DMA log that a device's process keeps.
pub type DmaLog = crate::vfio::DmaLog<Client>;
