//! The monitor as clients see it: real sockets, a scripted engine behind.

mod capabilities;
mod client;
mod combinations;
mod devices;
mod dialogue;
mod dirty_rate;
mod engine;
mod fuzz;
mod hmp;
mod parameters;
mod python;
mod rdma;
mod rdma_engine;
mod reconnect;
mod recovery;
mod refusals;
mod session;
mod support;
mod tls;
