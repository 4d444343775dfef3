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

use std::sync::Arc;

use parking_lot::Mutex;

pub use protect::page as of_protection;
pub use relay::{Sums as RelaySums, page as of_relay};
pub use serve::page as of_serving;
pub use server::MetricsServer;
pub use standby::page as of_standby;

/// The last figures of a loop that measures them itself.
#[derive(Debug)]
pub struct Board<T>(Arc<Mutex<T>>);

impl<T: Clone> Board<T> {
    /// A board with these figures.
    pub fn new(figures: T) -> Self {
        Self(Arc::new(Mutex::new(figures)))
    }

    /// Replaces the figures.
    pub fn set(&self, figures: T) {
        *self.0.lock() = figures;
    }

    /// The figures that were set last.
    pub fn get(&self) -> T {
        self.0.lock().clone()
    }
}

impl<T> Clone for Board<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}
