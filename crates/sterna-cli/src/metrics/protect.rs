//! The figures of a protection at its primary.

use std::time::Duration;

use super::page::{Kind, Labels, Page};
use crate::protection_record::Look;

/// The page for the last look at a protection.
pub fn page(look: &Look) -> String {
    let mut page = Page::new();
    let state = vec![("state", look.state.clone()), ("role", "primary".to_owned())];
    page.family("sterna_protection_state", Kind::Gauge, "The state of this side. Always 1.", [(state, 1.0)]);
    let mut one = |name, kind, help: &str, value: Option<f64>| {
        page.family(name, kind, help, value.map(|value| (Labels::new(), value)));
    };
    use Kind::{Counter, Gauge};
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    one(
        "sterna_migration_data_processed_bytes",
        Gauge,
        "Bytes that were sent to the standby, the seeding included.",
        Some(look.transferred_bytes as f64),
    );
    one(
        "sterna_protection_checkpoints_total",
        Counter,
        "Checkpoints that the standby stored.",
        Some(look.held as f64),
    );
    one(
        "sterna_protection_checkpoint_age_seconds",
        Gauge,
        "Time since the standby stored a checkpoint.",
        seconds(look.age),
    );
    one("sterna_protection_pause_seconds", Gauge, "The last pause of the guest.", seconds(look.pause_last));
    let delay = Some(look.output_delay).filter(|_| look.released > 0);
    one("sterna_protection_output_delay_seconds", Gauge, "How long the last output waited.", seconds(delay));
    one(
        "sterna_protection_output_released_total",
        Counter,
        "Pieces of output that left.",
        Some(look.released as f64),
    );
    one(
        "sterna_protection_output_dropped_total",
        Counter,
        "Pieces of output that were dropped.",
        Some(look.dropped as f64),
    );
    one(
        "sterna_protection_output_waiting_bytes",
        Gauge,
        "Output that waits.",
        Some(look.waiting_bytes as f64),
    );
    let trouble = f64::from(u8::from(look.why.is_some()));
    one("sterna_protection_trouble", Gauge, "1 while there is a problem to look at.", Some(trouble));
    page.finish()
}
