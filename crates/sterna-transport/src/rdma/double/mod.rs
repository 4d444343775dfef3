//! A simulation of RDMA for tests on machines without adapters. Its hosts, adapters and network are inside this
//! process.
//!
//! A [`Network`] has any number of [`Host`]s, each a [`Fabric`](super::Fabric). Queue pairs behave as
//! `specs/rdma.md` describes for adapters:
//! * keys, bounds and rights are checked;
//! * a send without a receive fails according to the RNR retry count;
//! * a refused write puts the writer's queue pair into the error state;
//! * an error flushes everything outstanding.
//!
//! Where adapters differ, the double behaves as soft-RoCE. Writes reach the peer's memory while both sides
//! continue to run: a thread of the network executes them piece by piece.
//!
//! With a seed ([`Settings::seeded`]) the network delays and reorders everything whose order a queue pair does not
//! define: requests of different queue pairs, and completions of different queues.
//!
//! Registering populates memory. The network detects when registered pages are discarded, because a real adapter
//! would continue to write the old pages ([`Counts::stale_registrations`]).
//!
//! Faults are planned with [`Network::plan`], or happen immediately: [`Network::kill`], [`Network::set_link`],
//! [`Network::remove_device`]. The double also counts virtual time: see [`Costs`].

mod adapter;
mod asking;
mod clock;
mod connection;
mod counts;
mod execute;
mod faults;
mod manager;
mod network;
mod pair;
mod region;
mod settings;
mod state;
mod world;

pub use counts::Counts;
pub use faults::{Fault, Trigger};
pub use network::{Host, Network};
pub use settings::{Costs, Settings};
