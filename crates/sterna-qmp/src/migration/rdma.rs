//! The member `x-sterna-rdma` of `query-migrate`: RDMA statistics (specs/stream.md §8.3), with a table for each side.

use serde_json::{Map, Value};
use sterna::{IncomingRdmaStatistics, RdmaStatistics};

type Fields<T> = &'static [(&'static str, fn(&mut T) -> &mut u64)];

/// Members of a source.
const OUTGOING: Fields<RdmaStatistics> = &[
    ("writes", |rdma| &mut rdma.writes),
    ("written-bytes", |rdma| &mut rdma.written_bytes),
    ("in-flight-bytes", |rdma| &mut rdma.in_flight_bytes),
    ("registrations", |rdma| &mut rdma.registrations),
    ("pinned-bytes", |rdma| &mut rdma.pinned_bytes),
    ("windows", |rdma| &mut rdma.windows),
    ("destination-pinned-bytes", |rdma| &mut rdma.destination_pinned_bytes),
    ("exchanges", |rdma| &mut rdma.exchanges),
    ("receiver-not-ready", |rdma| &mut rdma.receiver_not_ready),
];

/// Members of a destination.
const INCOMING: Fields<IncomingRdmaStatistics> = &[
    ("registrations", |rdma| &mut rdma.registrations),
    ("pinned-bytes", |rdma| &mut rdma.pinned_bytes),
    ("commands", |rdma| &mut rdma.commands),
    ("zero-ranges", |rdma| &mut rdma.zero_ranges),
];

pub(super) fn outgoing(rdma: &RdmaStatistics) -> Value {
    to_json(OUTGOING, *rdma)
}

pub(super) fn incoming(rdma: &IncomingRdmaStatistics) -> Value {
    to_json(INCOMING, *rdma)
}

/// Reads a source's answer to `query-migrate`. None if it has no RDMA statistics. Missing numbers are 0.
pub fn from_query(query: &Value) -> Option<RdmaStatistics> {
    let object = query["x-sterna-rdma"].as_object()?;
    let mut rdma = RdmaStatistics::default();
    for (name, field) in OUTGOING {
        *field(&mut rdma) = object.get(*name).and_then(Value::as_u64).unwrap_or(0);
    }
    Some(rdma)
}

fn to_json<T>(fields: Fields<T>, mut rdma: T) -> Value {
    let member = |(name, field): &(&'static str, fn(&mut T) -> &mut u64)| {
        ((*name).to_owned(), Value::from(*field(&mut rdma)))
    };
    Value::Object(fields.iter().map(member).collect::<Map<_, _>>())
}
