//! RDMA inside this process, for tests: hosts, adapters and a network that never were.
//!
//! A [`Network`] has any number of [`Host`]s, each a [`Fabric`](super::Fabric). Queue pairs behave as `specs/rdma.md` says
//! that adapters do: keys, bounds and rights are checked, a send without a receive fails by the RNR retry count, a refused
//! write puts the writer's queue pair into the error state, everything outstanding is flushed. Where adapters differ, it
//! does as soft-RoCE does. Writes reach the peer's memory while
//! both sides run on: one thread of the network executes them, a piece at a time.
//!
//! With a seed ([`Settings::seeded`]) the network delays and reorders what the order of a queue pair leaves open: requests of
//! different queue pairs, and completions of different queues.
//!
//! Registering populates memory, and the network notices when registered pages are discarded: an adapter would go on
//! writing the old ones ([`Counts::stale_registrations`]).
//!
//! Faults are planned with [`Network::plan`], or happen at once: [`Network::kill`], [`Network::set_link`],
//! [`Network::remove_device`]. Time is accounted, too: see [`Costs`].

mod adapter;
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

pub use counts::Counts;
pub use faults::{Fault, Trigger};
pub use network::{Host, Network};
pub use settings::{Costs, Settings};
