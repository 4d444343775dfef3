//! The figures of an image that is served.

use sterna_opaque::serve::{ServeStatistics, Stage};

use super::page::{Kind, Labels, Page};
use crate::units::PAGE_BYTES;

const STAGES: [(Stage, &str); 6] = [
    (Stage::Connecting, "connecting"),
    (Stage::Loading, "loading"),
    (Stage::Active, "active"),
    (Stage::Paused, "paused"),
    (Stage::Completed, "completed"),
    (Stage::Failed, "failed"),
];

/// The page for the guests, numbered from 1 in the order of their connections.
pub fn page(guests: &[ServeStatistics]) -> String {
    let mut page = Page::new();
    let numbered = || guests.iter().enumerate().map(|(index, guest)| ((index + 1).to_string(), guest));
    page.family(
        "sterna_serve_guests",
        Kind::Gauge,
        "Guests of this image.",
        [(Labels::new(), guests.len() as f64)],
    );
    page.family(
        "sterna_serve_stage",
        Kind::Gauge,
        "1 for the stage that the guest has reached.",
        numbered().flat_map(|(number, guest)| {
            STAGES.map(|(stage, word)| {
                let labels = vec![("guest", number.clone()), ("stage", word.to_owned())];
                (labels, f64::from(u8::from(guest.stage == stage)))
            })
        }),
    );
    let mut each = |name, kind, help: &str, value: &dyn Fn(&ServeStatistics) -> Option<f64>| {
        let samples = numbered().filter_map(|(number, guest)| Some((vec![("guest", number)], value(guest)?)));
        page.family(name, kind, help, samples);
    };
    use Kind::{Counter, Gauge};
    each("sterna_migration_data_total_bytes", Gauge, "Bytes of the guest's RAM.", &|of| {
        Some((of.total_pages * PAGE_BYTES) as f64)
    });
    each("sterna_migration_data_processed_bytes", Gauge, "Bytes that were sent to the guest's VMM.", &|of| {
        Some(of.written_bytes as f64)
    });
    each("sterna_migration_data_remaining_bytes", Gauge, "Bytes of RAM that the guest lacks.", &|of| {
        Some((of.missing_pages * PAGE_BYTES) as f64)
    });
    each(
        "sterna_serve_requested_pages_total",
        Counter,
        "Pages that were sent because the guest asked.",
        &|of| Some(of.requested_pages as f64),
    );
    each(
        "sterna_migration_reconnections_total",
        Counter,
        "Lost connections after which serving continued.",
        &|of| Some(of.recoveries as f64),
    );
    each("sterna_serve_until_guest_seconds", Gauge, "Time until the guest could start.", &|of| {
        of.until_guest.map(|time| time.as_secs_f64())
    });
    page.finish()
}
