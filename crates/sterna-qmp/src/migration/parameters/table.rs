//! The parameters: one row for each.
//!
//! A row says the name, the values that the parameter takes, their unit, when it may change, where its value is in the typed settings (whose
//! default is the parameter's), and what it does. Everything else about a parameter follows from its row.

use serde_json::Value;
use sterna_standby::MOST_IN_FLIGHT;

use super::spec::{Change, ParameterSpec, Range, Unit};
use super::typed::{Field, field};
use crate::server::{MemberKind, MemberSpec};
use Change::{Frozen, Harmless, Live};
use Unit::{Bytes, BytesPerSecond, BytesPerSecondBare, Megabytes, Milliseconds, Percent};

/// No field, and this default.
macro_rules! nothing {
    ($default:literal) => {
        Field { part: "", read: |_| Value::from($default), write: |_, _| {} }
    };
}

/// Every parameter, in the order in which they are shown. QEMU does not know those named `x-sterna-`.
#[rustfmt::skip]
pub const PARAMETERS: &[ParameterSpec] = &[
    row("announce-initial", number(0, 100_000), Milliseconds, Harmless, field!(announcing.initial),
        "Time between the first two network announcements of an arrived guest."),
    row("announce-max", number(0, 100_000), Milliseconds, Harmless, field!(announcing.max),
        "Longest time between two network announcements of an arrived guest."),
    row("announce-rounds", number(0, 1000), Unit::None, Harmless, field!(announcing.rounds),
        "Number of network announcements of an arrived guest."),
    row("announce-step", number(1, 10_000), Milliseconds, Harmless, field!(announcing.step),
        "Increase of the time from each announcement to the next."),
    row("throttle-trigger-threshold", number(1, 100), Percent, Live, field!(engine.throttle_trigger_threshold),
        "Throttling begins or increases if, in two rounds, the guest dirtied more than this share of the bytes that \
         were sent."),
    row("cpu-throttle-initial", PERCENT, Percent, Live, field!(engine.cpu_throttle_initial),
        "Share of the time that vCPUs sleep when `auto-converge` begins to throttle them."),
    row("cpu-throttle-increment", PERCENT, Percent, Live, field!(engine.cpu_throttle_increment),
        "Increase of that share by each further step of `auto-converge`."),
    row("cpu-throttle-tailslow", Range::Boolean, Unit::None, Live, field!(engine.cpu_throttle_tailslow),
        "Makes steps smaller near the end: no step is larger than the dirty rate requires."),
    row("max-cpu-throttle", PERCENT, Percent, Live, field!(engine.max_cpu_throttle),
        "Largest share of the time that vCPUs sleep; at least `cpu-throttle-initial`."),
    row("tls-creds", Range::Text, Unit::None, Frozen, field!(tls.creds),
        "Id of the `tls-creds-x509` object whose TLS every channel uses; empty: no TLS. Both sides must agree."),
    row("tls-hostname", Range::Text, Unit::None, Frozen, field!(tls.hostname),
        "Name that the destination's certificate must have; empty: the host of the address."),
    row("tls-authz", Range::Text, Unit::None, Frozen, field!(tls.authz),
        "Id of the object that lists the clients which a destination accepts; empty: every verified client."),
    row("max-bandwidth", number(0, u64::MAX), BytesPerSecond, Live, field!(engine.max_bandwidth_bytes),
        "Bandwidth limit of all channels together in precopy; 0: no limit."),
    row("avail-switchover-bandwidth", number(0, u64::MAX), BytesPerSecond, Live, field!(engine.avail_switchover_bandwidth_bytes),
        "Bandwidth to expect while the guest is stopped for the switchover; 0: Sterna measures it."),
    row("downtime-limit", number(0, 2_000_000), Milliseconds, Live, field!(engine.downtime_limit),
        "Longest acceptable downtime; the guest is stopped when the remaining data can be sent within this time."),
    row("x-checkpoint-delay", number(1, u32::MAX as u64), Milliseconds, Live, field!(checkpoints.delay),
        "Interval between the checkpoints of a protected guest; setting it requests a checkpoint immediately."),
    row("multifd-channels", number(1, 255), Unit::None, Frozen, field!(engine.multifd_channels),
        "Number of page channels with the capability `multifd`. Both sides must agree."),
    row("multifd-compression", Range::Word(&["none", "zlib", "zstd"]), Unit::None, Frozen, field!(engine.multifd_compression),
        "Compression of the pages on multifd channels. Both sides must agree."),
    row("multifd-zlib-level", number(0, 9), Unit::None, Frozen, field!(engine.multifd_zlib_level),
        "Level of zlib on multifd channels."),
    row("multifd-qatzip-level", number(1, 9), Unit::None, Harmless, nothing!(1),
        "No effect: Sterna has no QATzip. Kept and shown."),
    row("multifd-zstd-level", number(0, 20), Unit::None, Frozen, field!(engine.multifd_zstd_level),
        "Level of zstd on multifd channels."),
    row("xbzrle-cache-size", Range::PowerOfTwo { least: 4096, greatest: 1 << 63 }, Bytes, Frozen, field!(engine.xbzrle_cache_bytes),
        "Memory for copies of the standby's pages, from which `xbzrle` computes differences."),
    row("max-postcopy-bandwidth", number(0, u64::MAX), BytesPerSecondBare, Live, field!(engine.max_postcopy_bandwidth_bytes),
        "Bandwidth limit of pages that the destination has not requested, in postcopy; 0: no limit."),
    row("x-vcpu-dirty-limit-period", number(1, 1000), Milliseconds, Harmless, nothing!(1000),
        "No effect: Sterna measures dirty rates at its own times. Kept and shown."),
    row("vcpu-dirty-limit", number(1, u64::MAX), Megabytes, Live, MEGABYTES,
        "Dirty rate that the capability `dirty-limit` allows each vCPU."),
    row("mode", Range::Word(&["normal", "cpr-transfer"]), Unit::None, Frozen, field!(engine.mode),
        "`normal` copies memory. `cpr-transfer` hands it to another process on this host. The source's setting counts."),
    row("zero-page-detection", Range::Word(&["none", "legacy", "multifd"]), Unit::None, Frozen, field!(engine.zero_page_detection),
        "Which thread of the source detects zero pages: none, the main channel's, or each multifd channel's."),
    row("direct-io", Range::Boolean, Unit::None, Frozen, field!(engine.direct_io),
        "Reads and writes files with direct I/O, where the file system supports it."),
    row("x-rdma-chunk-size", Range::PowerOfTwo { least: 1 << 20, greatest: 1 << 30 }, Bytes, Frozen, field!(engine.rdma.chunk),
        "Longest RDMA write of a source, and the smallest piece of memory that a side registers.").rdma(),
    row("x-sterna-non-convergence", Range::Word(&["keep-going", "fail", "switchover", "postcopy"]), Unit::None, Live, field!(engine.non_convergence),
        "What happens to a migration that does not converge: continue as QEMU does, fail, exceed the downtime limit, or switch to postcopy."),
    row("x-sterna-postcopy-after", number(0, 24 * HOUR_MS), Milliseconds, Live, field!(engine.postcopy_after),
        "The source starts postcopy itself after this time; 0: never. Needs `postcopy-ram`."),
    row("x-sterna-postcopy-after-rounds", number(0, u32::MAX as u64), Unit::None, Live, field!(engine.postcopy_after_rounds),
        "The source starts postcopy itself after this number of rounds; 0: never. Needs `postcopy-ram`."),
    row("x-sterna-replace-file", Range::Boolean, Unit::None, Frozen, field!(engine.replace_file),
        "Replaces an existing file when a guest is saved to its path; otherwise that is refused. QEMU always replaces it."),
    row("x-sterna-cpr-allow-root", Range::Boolean, Unit::None, Frozen, field!(engine.cpr_allow_root),
        "With `cpr-transfer`, allows root's process and another user's process as the two sides. Both sides must set \
         it."),
    row("x-sterna-status-question", Range::Word(&["auto", "operator"]), Unit::None, Frozen, field!(engine.status_questions),
        "After a lost acknowledgement, `auto` lets the source ask and the destination answer who has the guest; with `operator` only `x-sterna-decide` resolves it."),
    row("x-sterna-device-queue-size", number(1 << 16, 1 << 40), Bytes, Frozen, field!(engine.max_queued_stream_bytes),
        "Bytes of a device's stream that a destination holds, for each device that loads slowly."),
    row("x-sterna-checkpoint-buffer-size", number(4096, 1 << 40), Bytes, Frozen, field!(checkpoints.buffer_bytes),
        "Memory at the primary for pages of checkpoints that are copied while the guest is paused; shared by all checkpoints in flight."),
    row("x-sterna-checkpoint-mode", Range::Word(&["interval", "output", "load"]), Unit::None, Live, field!(checkpoints.mode),
        "When the next checkpoint is taken: after `x-checkpoint-delay`, when output has waited long enough, or as often as the overhead allows."),
    row("x-sterna-output-delay", number(1, HOUR_MS), Milliseconds, Live, field!(checkpoints.output_delay),
        "In the mode `output`: how long output waits before a checkpoint is taken for it."),
    row("x-sterna-checkpoint-overhead", number(1, 90), Percent, Live, field!(checkpoints.overhead_percent),
        "In the mode `load`: largest share of the time that checkpoints pause the guest."),
    row("x-sterna-checkpoints-in-flight", number(1, MOST_IN_FLIGHT as u64), Unit::None, Live, field!(checkpoints.in_flight),
        "Number of checkpoints that may be on their way to the standby."),
    row("x-sterna-checkpoint-copy", Range::Word(&["auto", "copy", "copy-on-write"]), Unit::None, Live, field!(checkpoints.copy),
        "Copies dirty pages while the guest is paused (`copy`), or protects them and copies afterwards (`copy-on-write`); `auto` takes the shorter pause."),
    row("x-sterna-checkpoint-journal-size", number(4096, 1 << 40), Bytes, Frozen, field!(checkpoints.journal_bytes),
        "Largest size of the pages of one checkpoint at a standby."),
    row("x-sterna-rdma-pinned-limit", Range::Limit { least: 1 << 20 }, Bytes, Frozen, field!(engine.rdma.pinned_limit_bytes),
        "Largest amount of guest memory that a side registers at a time, if registering pins it; 0: no limit. Only \
         between two Sternas.").rdma(),
    row("x-sterna-reconnect-window", number(0, HOUR_MS), Milliseconds, Frozen, field!(engine.reconnect_window),
        "Time limit for replacing a lost connection; 0: the loss ends a precopy and pauses a postcopy. Both sides \
         must set it."),
    row("x-sterna-setup-limit", number(100, HOUR_MS), Milliseconds, Frozen, field!(engine.limits.setup),
        "Time limit for connecting, for the first answers, and for all channels of a migration to arrive."),
    row("x-sterna-stall-limit", number(100, HOUR_MS), Milliseconds, Frozen, field!(engine.limits.stall),
        "Time limit without progress while a side waits for the other."),
    row("x-sterna-prepare-limit", number(100, HOUR_MS), Milliseconds, Frozen, field!(engine.limits.prepare),
        "Time limit for the destination to load its devices and answer, and from its answer to the commit."),
    row("x-sterna-acknowledge-limit", number(100, HOUR_MS), Milliseconds, Frozen, field!(engine.limits.acknowledge),
        "Time limit for the destination's acknowledgement after the commit, and for the answer to a question for it."),
];

const PERCENT: Range = number(1, 99);
const HOUR_MS: u64 = 3_600_000;

/// Bytes per second in the engine. What is more than 2^64 bytes limits nothing.
const MEGABYTES: Field = Field {
    part: "engine",
    read: |typed| (typed.engine.vcpu_dirty_limit_bytes >> 20).into(),
    write: |typed, value| {
        typed.engine.vcpu_dirty_limit_bytes = value.as_u64().unwrap_or(1).saturating_mul(1 << 20);
    },
};

const fn number(least: u64, greatest: u64) -> Range {
    Range::Integer { least, greatest }
}

const fn row(
    name: &'static str,
    range: Range,
    unit: Unit,
    change: Change,
    field: Field,
    about: &'static str,
) -> ParameterSpec {
    ParameterSpec { name, range, unit, change, about, since: "0.1", only_for: None, field }
}

impl ParameterSpec {
    /// One that applies to RDMA alone.
    const fn rdma(self) -> Self {
        Self { only_for: Some("rdma:"), ..self }
    }
}

/// The row of parameter `name`.
pub fn parameter(name: &str) -> Option<&'static ParameterSpec> {
    index_of(name).map(|at| &PARAMETERS[at])
}

/// The arguments of `migrate-set-parameters`.
pub(in crate::migration) const ARGUMENTS: &[MemberSpec] = &members(true);
/// The members of `query-migrate-parameters`.
pub(in crate::migration) const ANSWER: &[MemberSpec] = &members(false);

const fn members(are_optional: bool) -> [MemberSpec; PARAMETERS.len()] {
    let mut members = [MemberSpec::optional("", MemberKind::Any, ""); PARAMETERS.len()];
    let mut at = 0;
    while at < PARAMETERS.len() {
        let spec = &PARAMETERS[at];
        let kind = match spec.range {
            Range::Integer { .. } | Range::PowerOfTwo { .. } | Range::Limit { .. } => MemberKind::Integer,
            Range::Boolean => MemberKind::Boolean,
            Range::Word(words) => MemberKind::Word(words),
            Range::Text => MemberKind::StringOrNull,
        };
        members[at] = MemberSpec { name: spec.name, kind, optional: are_optional, about: spec.about };
        at += 1;
    }
    members
}

pub(super) fn index_of(name: &str) -> Option<usize> {
    PARAMETERS.iter().position(|spec| spec.name == name)
}
