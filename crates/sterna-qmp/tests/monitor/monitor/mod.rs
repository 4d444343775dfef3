//! Tests the monitor as a client: real sockets, with a scripted engine.

mod capabilities;
mod client;
mod combinations;
mod declared;
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
mod waiting;
