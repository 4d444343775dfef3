//! The members of the commands' answers.

use crate::migration::dirty_rate::MODES;
use crate::migration::query::STATUS_WORDS;
use crate::server::MemberKind::{
    self, Array, Boolean, Integer, List, Members, Number, Object, String as Text, Word,
};
use crate::server::{MemberSpec, optional, required};

pub(super) const TIME_UNITS: &[&str] = &["second", "millisecond"];
const ARCHITECTURE: MemberKind = Word(&[std::env::consts::ARCH]);

pub(crate) const STATUS: &[MemberSpec] = &[
    required(
        "status",
        Word(&["running", "paused", "prelaunch", "inmigrate", "finish-migrate", "postmigrate"]),
        "The run state.",
    ),
    required("running", Boolean, "Whether the guest runs."),
];
pub(super) const NAME: &[MemberSpec] = &[optional("name", Text, "The name.")];
pub(super) const UUID: &[MemberSpec] = &[required("UUID", Text, "The UUID; zeros if it has none.")];
pub(super) const KVM: &[MemberSpec] = &[
    required("enabled", Boolean, "Whether KVM runs the guest."),
    required("present", Boolean, "Whether the host has KVM."),
];
pub(super) const TARGET: &[MemberSpec] = &[required("arch", ARCHITECTURE, "This host's architecture.")];
pub(super) const MEMORY: &[MemberSpec] = &[required("base-memory", Integer, "Bytes.")];

pub(super) const MACHINE: &[MemberSpec] = &[
    required("name", Text, "The machine type."),
    required("is-default", Boolean, "`true`."),
    required("cpu-max", Integer, "Number of vCPUs."),
    required("hotpluggable-cpus", Boolean, "`false`."),
    required("numa-mem-supported", Boolean, "`false`."),
    required("deprecated", Boolean, "`false`."),
    required("acpi", Boolean, "`false`."),
];

pub(super) const CPU: &[MemberSpec] = &[
    required("cpu-index", Integer, "Index of the vCPU."),
    required("thread-id", Integer, "Its thread on the host."),
    required("qom-path", Text, "Its path for `qom-list`."),
    required("target", ARCHITECTURE, "The processor architecture."),
];

pub(super) const LIVE_SAVE: &[MemberSpec] = &[
    optional(
        "status",
        Word(STATUS_WORDS),
        "The status; `completed`: the target has everything, and the guest is here.",
    ),
    optional("number", Integer, "With `track`, after the end: the number for a later `since`."),
    optional("pause", Integer, "How long the guest was paused, in microseconds."),
    optional("held-writes", Integer, "After the end: writes of the guest that waited for a copy."),
    optional("pages", Integer, "After the end: pages in the image, zero pages included."),
    optional("error", Text, "Why there is no image."),
];

pub(super) const COMPLETING: &[MemberSpec] = &[required(
    "missing-bytes",
    Integer,
    "Bytes that are not loaded yet; 0: the guest has all of its memory.",
)];

pub(super) const BLOCK: &[MemberSpec] = &[
    required("device", Text, "The disk's name."),
    required("type", Text, "`unknown`."),
    required("removable", Boolean, "`false`."),
    required("locked", Boolean, "`false`."),
    required("inserted", Members(INSERTED), "The medium."),
];

const INSERTED: &[MemberSpec] = &[
    required("file", Text, "The file or device."),
    required("node-name", Text, "The disk's name."),
    required("drv", Text, "The format."),
    required("ro", Boolean, "Whether the guest cannot write it."),
    required("backing_file_depth", Integer, "1 with a backing file, otherwise 0."),
    optional("backing_file", Text, "The backing file."),
    required("image", Object, "`filename`, `format` and `virtual-size`."),
];

pub(super) const PROPERTY: &[MemberSpec] =
    &[required("name", Text, "The property's name."), required("type", Text, "`string`, or `child<TYPE>`.")];

pub(super) const DIRTY_LIMIT: &[MemberSpec] = &[
    required("cpu-index", Integer, "The vCPU."),
    required("limit-rate", Integer, "MB per second that it may dirty."),
    required("current-rate", Integer, "MB per second that it dirties."),
];

pub(super) const DIRTY_RATE: &[MemberSpec] = &[
    required("status", Word(&["unstarted", "measuring", "measured"]), "The state of the measurement."),
    required("start-time", Integer, "When it started, in seconds since 1970."),
    required("calc-time", Integer, "How long it measures."),
    required("calc-time-unit", Word(TIME_UNITS), "The unit of `calc-time`."),
    required("sample-pages", Integer, "0: every page is counted."),
    required("mode", Word(&MODES), "Kind of dirty log that the VM has."),
    optional("dirty-rate", Integer, "MB per second."),
    optional(
        "vcpu-dirty-rate",
        List(&[
            required("id", Integer, "The vCPU."),
            required("dirty-rate", Integer, "MB per second that it dirties."),
        ]),
        "The rate of each vCPU, with a dirty ring.",
    ),
    optional(
        "x-sterna-measured",
        Members(&[
            required("dirty-bytes", Integer, "Bytes of the pages that the guest dirtied."),
            required("interval-us", Integer, "Microseconds that the measurement lasted."),
            required("sync-us", Integer, "Microseconds that reading the log took."),
            required("touched-bytes", Integer, "Bytes of distinct pages that the guest dirtied."),
        ]),
        "The exact values.",
    ),
    optional("x-sterna-error", Text, "Why the measurement failed."),
];

pub(crate) const COLO_STATUS: &[MemberSpec] = &[
    required("mode", Word(&["none", "primary", "secondary"]), "Side of this VM in the protection."),
    required("last-mode", Word(&["none", "primary", "secondary"]), "Side of this VM before that."),
    required("reason", Word(&["none", "request", "error"]), "Why this VM is not that side any more."),
];

pub(super) const STATISTICS: &[MemberSpec] = &[
    optional("outgoing", Object, "The last outgoing migration."),
    optional("incoming", Object, "The last incoming migration."),
];

pub(crate) const MIGRATION: &[MemberSpec] = &[
    optional("status", Word(STATUS_WORDS), "The status; absent if there was no migration."),
    optional("total-time", Integer, "Milliseconds since the start, or until the end."),
    optional("setup-time", Integer, "Milliseconds until the first page."),
    optional("downtime", Integer, "Milliseconds that the guest was stopped; after the end."),
    optional("expected-downtime", Integer, "Milliseconds that a switchover would take now; before the end."),
    optional("ram", Members(RAM), "Statistics of the guest's RAM."),
    optional("cpu-throttle-percentage", Integer, "Percent of the time that vCPUs sleep now."),
    optional(
        "dirty-limit-throttle-time-per-round",
        Integer,
        "Microseconds that `dirty-limit` delayed vCPUs in a round.",
    ),
    optional("dirty-limit-ring-full-time", Integer, "Microseconds that a vCPU needs to fill its ring."),
    optional("error-desc", Text, "Why it failed or waits, and what to do."),
    optional("socket-address", Array, "Address at which this VM waits for its guest."),
    optional("postcopy-blocktime", Integer, "Milliseconds during which all vCPUs waited for pages."),
    optional("postcopy-vcpu-blocktime", Array, "Milliseconds that each vCPU waited for pages."),
    optional("postcopy-latency", Integer, "Mean time in nanoseconds until a requested page arrived."),
    optional(
        "postcopy-latency-dist",
        Array,
        "Number of requests per latency: entry N has those of 2^N to 2^(N+1) µs.",
    ),
    optional("postcopy-vcpu-latency", Array, "The mean of each vCPU, in nanoseconds."),
    optional("postcopy-non-vcpu-latency", Integer, "The mean of all other threads, in nanoseconds."),
    optional(
        "x-sterna-address",
        Object,
        "Address at which this VM waits for its guest over `rdma:`, as a channel's `addr`.",
    ),
    optional("x-sterna-held", Boolean, "`true`: the guest has arrived and is held until `cont`."),
    optional(
        "x-sterna-undecided",
        Boolean,
        "`true`: the acknowledgement was lost; `x-sterna-decide` ends it.",
    ),
    optional(
        "x-sterna-missing-bytes",
        Integer,
        "In `setup`: bytes of the guest's memory that are still loaded from the image that it was restored from.",
    ),
    optional("x-sterna-reconnect", Members(RECONNECT), "Connections that were lost and replaced."),
    optional("x-sterna-rdma", Members(RDMA), "Statistics of the RDMA adapter (specs/stream.md §8.3)."),
];

const RAM: &[MemberSpec] = &[
    required("transferred", Integer, "Bytes sent."),
    required("remaining", Integer, "Bytes that are to be sent."),
    required("total", Integer, "Bytes of the guest's RAM."),
    required("duplicate", Integer, "Zero pages."),
    required("normal", Integer, "Pages with content."),
    required("normal-bytes", Integer, "Bytes of those."),
    required("dirty-pages-rate", Integer, "Pages per second that the guest dirties."),
    required("mbps", Number, "Megabits per second."),
    required("dirty-sync-count", Integer, "Rounds begun."),
    required("page-size", Integer, "Bytes of a page."),
    required("multifd-bytes", Integer, "Bytes sent over multifd channels."),
    required("pages-per-second", Integer, "Pages sent per second."),
    required("precopy-bytes", Integer, "Bytes sent before the guest was stopped."),
    required("downtime-bytes", Integer, "Bytes sent while the guest was stopped."),
    required("postcopy-bytes", Integer, "Bytes sent in postcopy."),
    required("dirty-sync-missed-zero-copy", Integer, "0."),
    required("postcopy-requests", Integer, "Pages that the destination requested."),
];

const RECONNECT: &[MemberSpec] = &[
    required("reconnections", Integer, "How many times the sides connected again."),
    required("resent-bytes", Integer, "Bytes of pages that were sent again."),
    required("time", Integer, "Milliseconds without a connection."),
    optional(
        "disconnected",
        Integer,
        "Milliseconds since the connection was lost that is being replaced now.",
    ),
    optional("remaining", Integer, "Milliseconds until the migration ends without a new connection."),
];

const RDMA: &[MemberSpec] = &[
    optional("writes", Integer, "Remote writes."),
    optional("written-bytes", Integer, "Bytes of those."),
    optional("in-flight-bytes", Integer, "Bytes of writes that have not ended."),
    required("registrations", Integer, "Registrations of memory."),
    required("pinned-bytes", Integer, "Bytes of guest memory that are registered now."),
    optional("windows", Integer, "Pieces of the destination's memory that are registered now."),
    optional("destination-pinned-bytes", Integer, "Bytes of those."),
    optional("exchanges", Integer, "Requests with an answer."),
    optional("receiver-not-ready", Integer, "Messages that the other side had no buffer for."),
    optional("commands", Integer, "Requests of the source."),
    optional("zero-ranges", Integer, "Ranges that the source declared to be zero."),
];

pub(crate) const PROTECTION: &[MemberSpec] = &[
    optional("side", Word(&["primary", "secondary"]), "The side that this VM is or was."),
    optional(
        "state",
        Text,
        "State, such as `seeding`, `protected`, `following`, `holding`, `handed over` or `taken over`.",
    ),
    optional("generation", Integer, "Primary: generation of the protection."),
    optional("checkpoints", Integer, "Checkpoints taken, or stored at a standby."),
    optional("held", Integer, "Primary: checkpoints that the standby has stored."),
    optional("pages", Integer, "Pages in checkpoints."),
    optional("last-pages", Integer, "Primary: pages in the last checkpoint."),
    optional("device-bytes", Integer, "Primary: bytes of devices in the last checkpoint."),
    optional("unbuffered", Integer, "Primary: checkpoints that did not fit into the buffer."),
    optional("copied-ahead", Integer, "Primary: pages copied before the pause and not written again."),
    optional("copied-on-write", Integer, "Primary: checkpoints whose pages were copied after the pause."),
    optional("held-writes", Integer, "Primary: writes of the guest that waited for such a copy."),
    optional(
        "why-copied",
        Text,
        "Primary: why pages are copied during the pause although `x-sterna-checkpoint-copy` allows otherwise.",
    ),
    optional("checkpoints-in-flight", Integer, "Primary: checkpoints that the standby has not stored yet."),
    optional("checkpoint-interval", Number, "Primary: seconds between checkpoints now."),
    optional("xbzrle-pages", Integer, "Primary: pages sent as differences."),
    optional("xbzrle-bytes", Integer, "Primary: their bytes."),
    optional("pause-p50", Number, "Primary: median pause of the guest, in seconds."),
    optional("pause-p99", Number, "Primary: 99th percentile of the pauses, in seconds."),
    optional("pause-most", Number, "Primary: longest pause, in seconds."),
    optional("pause-last", Number, "Primary: last pause, in seconds."),
    optional("last-transfer", Number, "Primary: seconds until the standby had the last checkpoint."),
    optional("output-waiting-bytes", Integer, "Primary: bytes of output that wait for a checkpoint."),
    optional("output-delay", Number, "Primary: seconds that the last output waited."),
    optional("output-released", Integer, "Primary: pieces of output that were released."),
    optional("output-delay-p50", Number, "Primary: median of that time, in seconds."),
    optional("output-delay-p99", Number, "Primary: 99th percentile of that time, in seconds."),
    optional("transferred-bytes", Integer, "Primary: bytes sent."),
    optional("outcome", Text, "Primary: how the protection ended."),
    optional(
        "alone-by",
        Text,
        "Primary: arbiter or operator that decided that the guest continues without a standby.",
    ),
    optional("checkpoint-age", Number, "Primary: seconds since the checkpoint that the standby stored last."),
    optional("watchdog", MemberKind::Any, "Primary: the watchdog that ends its guest."),
    optional("trouble", Text, "What is wrong, and what to do."),
    optional("age", Number, "Standby: seconds since the last checkpoint."),
    optional("ram-bytes", Integer, "Standby: bytes of the guest's RAM."),
    optional("received-bytes", Integer, "Standby: bytes received."),
    optional("last-time", Number, "Standby: seconds that the last checkpoint took to arrive."),
    optional("contact", Members(CONTACT), "Standby: the contact with the primary."),
    optional("arbiter", Object, "Standby: `spec` and `identity` of the arbiter."),
    optional("waiting-vm", Text, "Standby: the VM that waits for the guest."),
];

const CONTACT: &[MemberSpec] = &[
    required("connected", Boolean, "Whether the primary is in contact."),
    required("protection", Text, "The protection's id."),
    required("generation", Integer, "Its generation."),
    required("needs-fence", Boolean, "Whether the guest is started only after a fence."),
    required("lease", Number, "Seconds for which the primary runs its guest without an answer (the lease)."),
    required("patience", Number, "Seconds that the standby waits after the last heartbeat."),
    optional("outcome", Text, "How the protection ended here."),
];
