//! The figures of a relay's sessions.

use sterna_relay::relay::{Figures, SessionStatus};

use super::page::{Kind, Labels, Page};

const PHASES: [&str; 8] = ["none", "setup", "ram", "switchover", "devices", "ended", "postcopy", "unread"];
const STATUSES: [SessionStatus; 3] = [SessionStatus::Running, SessionStatus::Waiting, SessionStatus::Over];

/// How sessions have ended, and the limit.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    /// Sessions that ended in order.
    pub ended: u64,
    /// Sessions that ended in another way.
    pub broken: u64,
    /// Connections and streams that were refused.
    pub refused: u64,
    /// The limit of all sessions in bytes per second; 0: none.
    pub limit: u64,
}

/// The page for these sessions: those that are open, and some that have ended.
pub fn page(sessions: &[Figures], sums: Sums) -> String {
    let mut page = Page::new();
    let open = sessions.iter().filter(|session| session.status != SessionStatus::Over).count();
    page.family(
        "sterna_relay_sessions",
        Kind::Gauge,
        "Sessions that are open.",
        [(Labels::new(), open as f64)],
    );
    let ended = [("in-order", sums.ended), ("broken", sums.broken)];
    page.family(
        "sterna_relay_sessions_ended_total",
        Kind::Counter,
        "Sessions that have ended.",
        ended.map(|(result, count)| (vec![("result", result.to_owned())], count as f64)),
    );
    page.family(
        "sterna_relay_refused_total",
        Kind::Counter,
        "Connections and streams that were refused.",
        [(Labels::new(), sums.refused as f64)],
    );
    page.family(
        "sterna_relay_limit_bytes",
        Kind::Gauge,
        "Limit of all sessions together, in bytes per second. 0: no limit.",
        [(Labels::new(), sums.limit as f64)],
    );
    states(&mut page, sessions);
    amounts(&mut page, sessions);
    page.finish()
}

fn labels(of: &Figures) -> Labels {
    vec![
        ("session", of.session.to_string()),
        ("route", of.route.to_string()),
        ("role", of.role_word().to_owned()),
    ]
}

fn states(page: &mut Page, sessions: &[Figures]) {
    let with = |of: &Figures, name: &'static str, value: &str| {
        let mut all = labels(of);
        all.push((name, value.to_owned()));
        all
    };
    page.family(
        "sterna_migration_info",
        Kind::Gauge,
        "A session and the other relay's address. Always 1.",
        sessions.iter().map(|of| (with(of, "peer", of.peer.as_deref().unwrap_or_default()), 1.0)),
    );
    let is = |is: bool| if is { 1.0 } else { 0.0 };
    page.family(
        "sterna_migration_status",
        Kind::Gauge,
        "1 for the session's status: running, waiting (an operator has to look at the destination), over.",
        sessions.iter().flat_map(|of| {
            STATUSES.map(move |status| (with(of, "status", status.word()), is(of.status == status)))
        }),
    );
    page.family(
        "sterna_migration_phase",
        Kind::Gauge,
        "1 for the phase of the migration, as the main channel shows it.",
        sessions
            .iter()
            .flat_map(|of| PHASES.map(move |phase| (with(of, "phase", phase), is(of.phase_word() == phase)))),
    );
}

fn amounts(page: &mut Page, sessions: &[Figures]) {
    type Value<'a> = &'a dyn Fn(&Figures) -> Option<f64>;
    let mut family = |name, kind, help: &str, of: Value<'_>| {
        page.family(name, kind, help, sessions.iter().filter_map(|it| Some((labels(it), of(it)?))));
    };
    let bytes = |value: Option<u64>| value.map(|value| value as f64);
    use Kind::{Counter, Gauge};
    family(
        "sterna_migration_data_total_bytes",
        Gauge,
        "Bytes of the guest's RAM, as the stream states them.",
        &|of| bytes(of.ram_bytes),
    );
    family(
        "sterna_migration_data_processed_bytes",
        Gauge,
        "Bytes of all connections from the source's VMM that have passed this relay.",
        &|of| Some(of.processed_bytes as f64),
    );
    family(
        "sterna_migration_data_remaining_bytes",
        Gauge,
        "Bytes of RAM that still have to pass: exact in the first round, an estimate later. Absent with multifd.",
        &|of| bytes(of.remaining_bytes),
    );
    family(
        "sterna_migration_dirty_rate_bytes",
        Gauge,
        "Bytes of RAM per second that the guest wrote in the round before the last complete one.",
        &|of| bytes(of.dirty_rate),
    );
    family(
        "sterna_migration_transfer_rate_bytes",
        Gauge,
        "Bytes per second from the source's VMM, over the last second.",
        &|of| Some(of.rate as f64),
    );
    family("sterna_migration_round", Gauge, "The RAM round, from 1. 0 before RAM.", &|of| {
        Some(f64::from(of.round))
    });
    family(
        "sterna_migration_downtime_seconds",
        Gauge,
        "Time from the guest's stop to the destination's answer, as the stream shows both. It grows while it lasts.",
        &|of| of.downtime.map(|time| time.as_secs_f64()),
    );
    family(
        "sterna_migration_compression_ratio",
        Gauge,
        "Bytes of connections for each byte that this relay sent for them. 1 without compression.",
        &|of| Some(of.compression_ratio()),
    );
    family(
        "sterna_migration_resent_bytes_total",
        Counter,
        "Bytes of connections that this relay sent again after a carrier was lost.",
        &|of| Some(of.resent_bytes as f64),
    );
    family("sterna_migration_reconnections_total", Counter, "Carriers that replaced lost ones.", &|of| {
        Some(of.reconnections as f64)
    });
    family("sterna_migration_lost_carriers_total", Counter, "Carriers that were lost.", &|of| {
        Some(of.lost_carriers as f64)
    });
    family("sterna_migration_carriers", Gauge, "Carriers that are connected.", &|of| {
        Some(f64::from(of.carriers))
    });
    family(
        "sterna_migration_lost_seconds",
        Gauge,
        "Time without any carrier. 0 while there is one.",
        &|of| Some(of.lost_for.map_or(0.0, |time| time.as_secs_f64())),
    );
    family("sterna_migration_flows", Gauge, "Connections of VMMs that are open.", &|of| {
        Some(f64::from(of.open_flows))
    });
    family("sterna_migration_held_bytes", Gauge, "Bytes that this relay holds in memory.", &|of| {
        Some(of.held_bytes as f64)
    });
    family("sterna_migration_age_seconds", Gauge, "Time since the session began.", &|of| {
        Some(of.age.as_secs_f64())
    });
}
