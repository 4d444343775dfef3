//! The log of tests and explorations.

use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Writes the log of the crates under test to standard error, with the levels of `RUST_LOG` (`debug`, `sterna=trace`); without it,
/// errors only. The first call of a process counts.
pub fn log_from_env() {
    let levels = std::env::var("RUST_LOG").ok().and_then(|levels| levels.parse::<Targets>().ok());
    let levels = levels.unwrap_or_else(|| Targets::new().with_default(LevelFilter::ERROR));
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let _ = tracing_subscriber::registry().with(layer.with_filter(levels)).try_init();
}
