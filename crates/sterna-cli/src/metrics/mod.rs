//! `--metrics ADDRESS`: a command's figures for Prometheus, over HTTP.
//!
//! - [`page`]: the text format.
//! - [`server`]: the endpoint. Requests are bounded in number, size and time.
//! - `relay`, `standby`, `protect`, `serve`: the families of each command.
//!
//! Names and units follow KubeVirt's and libvirt's exporters (`data_total`, `data_processed`, `data_remaining`, rates in
//! bytes per second).

pub mod page;
mod protect;
mod relay;
mod serve;
mod server;
mod standby;

pub use protect::page as of_protection;
pub use relay::{Sums as RelaySums, page as of_relay};
pub use serve::page as of_serving;
pub use server::MetricsServer;
pub use standby::page as of_standby;
