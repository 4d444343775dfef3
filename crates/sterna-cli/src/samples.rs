//! Invented but consistent records for tests.

use std::time::Duration;

use crate::plan::Plan;
use crate::protection_record::{Change, GuestAt, Part, ProtectionRecord};
use crate::record::{Check, Cpu, Guest, Record};
use crate::relay_record::{self, RelayRecord};
use sterna::forecast::{DirtyModel, Fixed, Inputs, Point, PostcopyInputs};
use sterna::stats::{
    FaultSeries, IncomingPostcopy, Latencies, PostcopyChannel, PostcopyStatistics, PostcopyTimes,
    Reconnection,
};
use sterna_relay::frame::SessionId;
use sterna_relay::phase::Phase;
use sterna_relay::relay::Figures;
use sterna_relay::session::Role;

use sterna::{LaneTimes, RdmaStatistics, Round, Sample, Statistics, Status, SwitchoverStep, SyncParts};

/// A migration of 4 GiB in three rounds with a downtime of 48 ms.
pub fn engine_statistics() -> Statistics {
    let ms = Duration::from_millis;
    let round = |number, began, took, pages, dirtied_pages, sync, stopped| Round {
        number,
        began: ms(began),
        took: ms(took),
        pages,
        bytes: pages * 4100,
        lanes: LaneTimes { moving: ms(took - sync), idle: ms(sync), ..LaneTimes::default() },
        sync: ms(sync),
        sync_parts: SyncParts { kernel: ms(sync), ..SyncParts::default() },
        dirtied_pages,
        stopped,
        ..Round::default()
    };
    let samples = (0..=22u64).map(|tenth| Sample {
        at: ms(80 + tenth * 100),
        transferred_bytes: tenth * 210_000_000 + (tenth % 3) * 12_000_000,
        remaining_bytes: (4u64 << 30).saturating_sub(tenth * 195_000_000),
        dirty_pages_per_second: if tenth < 17 { 0 } else { 51_200 + tenth * 300 },
    });
    Statistics {
        status: Status::Completed,
        error: None,
        total_time: ms(2350),
        setup_time: ms(20),
        downtime: Some(ms(48)),
        expected_downtime: ms(51),
        switchover: vec![
            (SwitchoverStep::Stop, Duration::from_micros(800)),
            (SwitchoverStep::ReleaseHooks, Duration::from_micros(20)),
            (SwitchoverStep::LastSync, ms(1)),
            (SwitchoverStep::LastPages, ms(31)),
            (SwitchoverStep::Devices, ms(3)),
            (SwitchoverStep::Prepare, ms(9)),
            (SwitchoverStep::Start, ms(3)),
        ],
        ram_total_bytes: 4 << 30,
        ram_remaining_bytes: 0,
        missing_bytes: 0,
        transferred_bytes: 4_700_000_000,
        multifd_bytes: 4_699_000_000,
        precopy_bytes: 4_580_000_000,
        downtime_bytes: 120_000_000,
        postcopy_bytes: 0,
        postcopy_requests: 0,
        zero_pages: 10_000,
        normal_pages: 1_140_000,
        absent_pages: 4_000,
        free_pages: 0,
        bandwidth_bytes: 2_100_000_000,
        throughput_bytes: 2_100_000_000,
        drain_bytes: 2_000_000_000,
        dirty_pages_per_second: 57_000,
        pages_per_second: 512_000,
        rounds_begun: 3,
        rounds: vec![
            round(1, 20, 1700, 1_040_000, 96_000, 4, false),
            round(2, 1720, 560, 96_000, 29_000, 6, false),
            round(3, 2281, 31, 29_000, 0, 1, true),
        ],
        samples: samples.collect(),
        channels: 2,
        peer_is_sterna: Some(true),
        cpu_throttle_percent: 0,
        is_dirty_limited: false,
        dirty_limit_times: Some(sterna::DirtyLimitTimes { throttled_per_round: ms(3), ring_full: ms(40) }),
        streams: vec![sterna::StreamStatistics {
            bytes: 100 << 20,
            running_bytes: 60 << 20,
            working: ms(240),
            waiting: ms(3),
            took: ms(30),
            ..sterna::StreamStatistics::of("vfio-user/0", 0)
        }],
        rdma: None,
        reconnections: Vec::new(),
        earlier_reconnections: Default::default(),
        disconnected: None,
        postcopy: None,
    }
}

/// A record of a postcopy that was paused twice.
pub fn record_of_postcopy() -> Record {
    let (ms, us) = (Duration::from_millis, Duration::from_micros);
    let channel = |name: &str, background_pages, requested_pages| PostcopyChannel {
        name: name.into(),
        background_pages,
        requested_pages,
        sent_bytes: (background_pages + requested_pages) * 4108,
    };
    let pause = |at, took| Reconnection {
        at: ms(at),
        took: ms(took),
        resent_bytes: 512 << 10,
        why: "cut".into(),
        ..Reconnection::default()
    };
    let latencies = |p50, p99| Latencies {
        count: 1_200,
        average: us(p50 + 10),
        p50: us(p50),
        p99: us(p99),
        longest: us(p99 + 100),
        buckets: vec![(1_100, us(p50)), (100, us(p99 + 100))],
    };
    let postcopy = PostcopyStatistics {
        at: ms(3200),
        all_sent: Some(ms(5700)),
        missing_bytes: 512 << 20,
        faults: FaultSeries { began: ms(3190), part: ms(10), counts: vec![700, 400, 0, 100] },
        answers: latencies(120, 900),
        channels: vec![channel("preempt", 0, 1_200), channel("multifd 0", 129_872, 0)],
        recoveries: 2,
        paused_time: ms(3000),
        pauses: vec![pause(3400, 1000), pause(4500, 2000)],
        paused: None,
    };
    let times = PostcopyTimes {
        blocktime: ms(40),
        vcpu_blocktime: vec![ms(90), ms(70)],
        latency: us(410),
        vcpu_latency: vec![us(410), us(411)],
        non_vcpu_latency: us(300),
        latency_buckets: vec![0, 1_200],
        latencies: latencies(400, 2_000),
    };
    let arrival = IncomingPostcopy {
        missing_pages: 0,
        requests: 1_200,
        times: Some(times),
        faults: FaultSeries { began: Duration::ZERO, part: ms(10), counts: vec![700, 400, 0, 100] },
        started: Some(ms(4)),
        complete: Some(ms(2504)),
    };
    let statistics = Statistics {
        postcopy_requests: 1_200,
        total_time: ms(5702),
        postcopy: Some(postcopy),
        ..engine_statistics()
    };
    Record { arrival: Some(arrival), forecast: None, statistics, ..record() }
}

/// A protection of 60 s with a checkpoint every 50 ms from 2 s on. The standby is lost after 55 s.
pub fn protection_record() -> ProtectionRecord {
    let parts = (0..600u32).map(|tenth| {
        let at_seconds = f64::from(tenth) / 10.0;
        let (is_seeding, is_lost) = (tenth < 20, tenth >= 550);
        let has = |value: f64| (!is_seeding && !is_lost).then_some(value);
        Part {
            at_seconds,
            took_seconds: 0.1,
            checkpoints: if is_seeding || is_lost { 0 } else { 2 },
            pause_seconds: has(if tenth.is_multiple_of(50) { 0.0061 } else { 0.0018 }),
            age_seconds: (!is_seeding).then_some(if is_lost { f64::from(tenth - 550) / 10.0 } else { 0.05 }),
            output_delay_seconds: has(0.031),
            waiting_bytes: if is_lost { 2 << 20 } else { 12_000 },
            dropped: u64::from(is_lost),
            sent_bytes: if is_lost { 0 } else { 3 << 20 },
        }
    });
    let change = |at_seconds, state: &str, checkpoint, why: Option<&str>| Change {
        at_seconds,
        state: state.into(),
        checkpoint,
        why: why.map(str::to_owned),
    };
    ProtectionRecord {
        state: "alone".into(),
        guest_at: Some(GuestAt::Primary),
        end: Some(
            "the standby was lost (no echo for 2 s), and the claim is won: the guest continues to run here, \
                   unprotected"
                .into(),
        ),
        total_seconds: 60.0,
        seeding_seconds: Some(2.0),
        checkpoints: 1060,
        pause_p50_seconds: Some(0.0018),
        pause_p99_seconds: Some(0.0061),
        pause_longest_seconds: Some(0.0061),
        output_delay_p50_seconds: Some(0.028),
        output_delay_p99_seconds: Some(0.044),
        output_released: 40_000,
        output_dropped: 50,
        transferred_bytes: 550 * (3 << 20),
        parts: parts.collect(),
        changes: vec![
            change(0.0, "seeding", 0, None),
            change(2.0, "protected", 1, None),
            change(57.0, "asking the arbiter", 1060, Some("no echo for 2 s")),
            change(60.0, "alone", 1060, None),
        ],
        ..ProtectionRecord::new("unix:/run/a.qmp", "tcp:b:4444", 0.05)
    }
}

/// The cells of all tables of a page: one row per line, with `|` between cells.
pub fn cells(html: &str) -> String {
    let row = |row: &str| -> String {
        let cells = row.split("</td>").filter_map(|cell| Some(&cell[cell.find("<td")?..]));
        cells.map(|cell| format!("|{}", &cell[cell.find('>').map_or(0, |at| at + 1)..])).collect()
    };
    html.split("</tr>").map(|text| row(text) + "|\n").collect()
}

/// RDMA statistics, which the sample migration does not have.
pub fn rdma() -> RdmaStatistics {
    RdmaStatistics {
        writes: 4_500,
        written_bytes: 4_660_000_000,
        in_flight_bytes: 3 << 20,
        registrations: 12,
        pinned_bytes: 2 << 30,
        windows: 11,
        destination_pinned_bytes: 1 << 30,
        exchanges: 16,
        receiver_not_ready: 0,
    }
}

/// A record with all optional fields.
pub fn record() -> Record {
    Record {
        unconfirmed: None,
        machine: Some("kvm".into()),
        forecast: Some(plan()),
        guest: Some(Guest { downtime_seconds: 0.0512, resolution_seconds: 0.001 }),
        check: Some(Check { passed: true, summary: "1 048 576 pages are one consistent cut".into() }),
        cpu: Some(Cpu { source_seconds: 3.41, destination_seconds: 2.02 }),
        ..Record::new("unix:/run/a.qmp", "tcp:127.0.0.1:4444", engine_statistics())
    }
}

/// The plan of the sample record.
fn plan() -> Plan {
    let point = |milliseconds, distinct_bytes| Point {
        interval: Duration::from_millis(milliseconds),
        distinct_bytes,
    };
    let inputs = Inputs {
        ram_bytes: 4 << 30,
        first_round_bytes: 4 << 30,
        switchover_bandwidth_bytes: None,
        avail_switchover_bandwidth_bytes: None,
        bandwidth_bytes: 2_100_000_000,
        dirty: DirtyModel::Curve(vec![point(100, 24 << 20), point(300, 70 << 20), point(1000, 210 << 20)]),
        sync: Duration::from_millis(4),
        downtime_limit: Duration::from_millis(60),
        fixed: Fixed { devices: Duration::from_millis(16), ..Fixed::default() },
        postcopy: PostcopyInputs::default(),
        uncertainty: 0.1,
    };
    // The plan is written and read again, because the file format rounds times.
    serde_json::from_str(&Plan::new(inputs, Vec::new(), None).to_json()).expect("a plan is read again")
}

/// A relayed migration of 4 GiB, compressed to the half, with an outage of two seconds.
pub fn relay_record() -> RelayRecord {
    let parts = (0..200u32).map(|tenth| {
        let is_lost = (80..100).contains(&tenth);
        relay_record::Part {
            at_seconds: f64::from(tenth) / 10.0,
            took_seconds: 0.1,
            processed_bytes: if is_lost { 0 } else { 24 << 20 },
            remaining_bytes: Some((4 << 30) - u64::from(tenth) * (20 << 20)),
            dirty_rate_bytes: (tenth > 150).then_some(30 << 20),
            is_lost,
        }
    });
    let change = |at_seconds, what: &str| relay_record::Change { at_seconds, what: what.to_owned() };
    RelayRecord {
        schema: relay_record::SCHEMA.into(),
        version: relay_record::VERSION,
        session: "0123456789abcdef".into(),
        route: "web1".into(),
        role: "source".into(),
        peer: Some("tcp:dst:4450".into()),
        end: "all flows are over".into(),
        in_order: true,
        phase: "ended".into(),
        rounds: 3,
        total_seconds: 20.0,
        downtime_seconds: Some(0.12),
        ram_bytes: Some(4 << 30),
        processed_bytes: 180 * (24 << 20),
        answered_bytes: 48,
        sent_bytes: 4 << 30,
        sent_payload_bytes: 2 << 30,
        resent_bytes: 1 << 20,
        lost_carriers: 2,
        reconnections: 2,
        parts: parts.collect(),
        changes: vec![
            change(0.1, "RAM, round 1"),
            change(8.0, "no connection to the other relay: it <broke>"),
            change(10.0, "connected again after 2.0 s"),
        ],
        ..RelayRecord::default()
    }
}

/// A session of a relay in its second round.
pub fn relay_figures() -> Figures {
    let route = "web1".parse().expect("a name of a route");
    let mut figures = Figures::begun(SessionId([0x2a; 16]), Role::Dialer, route);
    (figures.phase, figures.round) = (Some(Phase::Ram { round: 2 }), 2);
    (figures.ram_bytes, figures.remaining_bytes, figures.dirty_rate) =
        (Some(4 << 30), Some(1 << 30), Some(30 << 20));
    (figures.processed_bytes, figures.rate, figures.carriers) = (5 << 30, 110 << 20, 2);
    (figures.sent_bytes, figures.sent_payload_bytes, figures.reconnections) = (5 << 30, 2 << 30, 1);
    figures
}
