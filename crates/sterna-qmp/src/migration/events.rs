//! The events.

use crate::server::MemberKind::{Boolean, Integer, String as Text, Word};
use crate::server::{EventSpec, optional, required};

/// Every event of a VM's monitor.
pub const EVENTS: &[EventSpec] = &[
    STOP,
    RESUME,
    MIGRATION,
    MIGRATION_PASS,
    COLO_EXIT,
    SHUTDOWN,
    X_STERNA_UNDECIDED,
    X_STERNA_WARNING,
    X_STERNA_CONNECTION_LOST,
    X_STERNA_RECONNECTED,
    X_STERNA_RESTORE,
];

/// The capability that a client switches on to be told about a migration.
const ASKED: &str = "events";

/// The guest was stopped.
pub const STOP: EventSpec =
    EventSpec::new("STOP", "The guest was stopped: by an operator, or by a migration's switchover.");

/// The guest was started.
pub const RESUME: EventSpec =
    EventSpec::new("RESUME", "The guest was started: by an operator, or because a migration ended here.");

/// A migration's status changed.
pub const MIGRATION: EventSpec = EventSpec::new("MIGRATION", "The status of the migration changed.")
    .with(&[required("status", Word(super::query::STATUS_WORDS), "As in `query-migrate`.")])
    .only_with(ASKED);

/// A round began.
pub const MIGRATION_PASS: EventSpec = EventSpec::new("MIGRATION_PASS", "A round of precopy began.")
    .with(&[required("pass", Integer, "Number of the round, from 1.")])
    .only_with(ASKED);

/// A protection ended.
pub const COLO_EXIT: EventSpec =
    EventSpec::new("COLO_EXIT", "The protection of a guest ended here.").with(&[
        required("mode", Word(&["primary", "secondary"]), "Side of this VM in the protection."),
        required("reason", Word(&["request", "error"]), "An operator's command, or a failure of a side."),
    ]);

/// Of [`SHUTDOWN`], in QEMU's words.
const REASONS: &[&str] = &["host-qmp-quit", "host-error", "guest-shutdown", "guest-reset", "guest-panic"];

/// The VMM ends.
pub const SHUTDOWN: EventSpec = EventSpec::new("SHUTDOWN", "The VM ends.").with(&[
    required("guest", Boolean, "Whether the guest ended it."),
    required("reason", Word(REASONS), "Why: `quit`, or how the guest ended."),
]);

/// The acknowledgement was lost.
pub const X_STERNA_UNDECIDED: EventSpec = EventSpec::new(
    "X_STERNA_UNDECIDED",
    "The destination's acknowledgement was lost; the guest stays stopped here until the destination or an operator \
     confirms which side has it.",
)
.with(&[required("reason", Text, "What happened, and what to do.")]);

/// Something that an operator should know.
pub const X_STERNA_WARNING: EventSpec = EventSpec::new(
    "X_STERNA_WARNING",
    "The migration continues, but not as set, or an arrived guest could not be started (this one is always sent).",
)
.with(&[required("warning", Text, "What happened, and what to do.")])
.only_with(ASKED);

/// A connection broke within the reconnect window.
pub const X_STERNA_CONNECTION_LOST: EventSpec = EventSpec::new(
    "X_STERNA_CONNECTION_LOST",
    "A connection of the migration was lost; the sides connect again (`x-sterna-reconnect-window`).",
)
.with(&[required("reason", Text, "Why it was lost.")])
.only_with(ASKED);

/// The sides are connected again.
pub const X_STERNA_RECONNECTED: EventSpec =
    EventSpec::new("X_STERNA_RECONNECTED", "The migration continues over new connections.")
        .with(&[
            required("time", Integer, "Milliseconds without a connection."),
            required("resent-bytes", Integer, "Bytes of pages that are sent again."),
        ])
        .only_with(ASKED);

/// The memory of a lazily restored guest is complete, or cannot be completed.
pub const X_STERNA_RESTORE: EventSpec = EventSpec::new(
    "X_STERNA_RESTORE",
    "A guest that runs before its memory is loaded (`sterna run --restore --lazy`) has all of it, or was stopped because a page \
     cannot be loaded.",
)
.with(&[
    required("status", Word(&["completed", "failed"]), "As in `x-sterna-query-restore`."),
    optional("error", Text, "Which page and which frame of the image, and what to do."),
]);
