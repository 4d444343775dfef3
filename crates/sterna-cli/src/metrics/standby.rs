//! The figures of a standby.

use sterna_qmp::standby::StandbyReport;

use super::page::{Kind, Labels, Page};

/// The page for a standby.
pub fn page(report: &StandbyReport) -> String {
    let mut page = Page::new();
    let now = &report.statistics;
    let state = vec![("state", report.word().to_owned()), ("role", "standby".to_owned())];
    page.family("sterna_protection_state", Kind::Gauge, "The state of this side. Always 1.", [(state, 1.0)]);
    let mut one = |name, kind, help: &str, value: Option<f64>| {
        page.family(name, kind, help, value.map(|value| (Labels::new(), value)));
    };
    use Kind::{Counter, Gauge};
    let ram = (now.ram_bytes > 0).then_some(now.ram_bytes as f64);
    one("sterna_migration_data_total_bytes", Gauge, "Bytes of the guest's RAM.", ram);
    one(
        "sterna_migration_data_processed_bytes",
        Gauge,
        "Bytes that have arrived from the primary, the seeding included.",
        Some(now.received_bytes as f64),
    );
    one(
        "sterna_protection_checkpoints_total",
        Counter,
        "Checkpoints that are or were stored.",
        Some(now.checkpoints as f64),
    );
    let age = now.age.map(|age| age.as_secs_f64());
    one("sterna_protection_checkpoint_age_seconds", Gauge, "Time since the last checkpoint was stored.", age);
    one(
        "sterna_protection_checkpoint_seconds",
        Gauge,
        "Time in which the last checkpoint arrived.",
        Some(now.last_took.as_secs_f64()),
    );
    let connected = report.contact.as_ref().map(|contact| f64::from(u8::from(contact.is_connected)));
    one("sterna_protection_connected", Gauge, "1 while the primary is in contact.", connected);
    let trouble = f64::from(u8::from(report.trouble().is_some()));
    one("sterna_protection_trouble", Gauge, "1 while `sterna info` shows a problem.", Some(trouble));
    page.finish()
}
