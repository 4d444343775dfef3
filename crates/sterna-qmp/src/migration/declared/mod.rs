//! The commands of a VM's monitor: names, arguments, answers, and one sentence each.

mod answers;

use super::capabilities;
use super::dirty_rate;
use super::parameters;
use super::query::STATUS_WORDS;
use crate::server::MemberKind::{self, Array, Boolean, Integer, List, Members, String as Text, Word};
use crate::server::{CommandSpec, MemberSpec, optional, required};
use answers::{
    BLOCK, COMPLETING, CPU, DIRTY_LIMIT, DIRTY_RATE, KVM, LIVE_SAVE, MACHINE, MEMORY, NAME, PROPERTY,
    STATISTICS, TARGET, TIME_UNITS, UUID,
};

pub(crate) use answers::{COLO_STATUS, MIGRATION, PROTECTION, STATUS};

/// Every command of a VM's monitor, besides [`BUILTIN_COMMANDS`](crate::server::BUILTIN_COMMANDS).
#[rustfmt::skip]
pub const COMMANDS: &[CommandSpec] = &[
    command("query-status", "Returns the run state of the VM.").returns(Members(STATUS)),
    command("query-name", "Returns the VM's name, if it has one.").returns(Members(NAME)),
    command("query-uuid", "Returns the VM's UUID.").returns(Members(UUID)),
    command("query-kvm", "Returns whether KVM runs the guest.").returns(Members(KVM)),
    command("query-target", "Returns the processor architecture.").returns(Members(TARGET)),
    command("query-machines", "Lists the VM's own machine type.").returns(List(MACHINE)),
    command("query-cpus-fast", "Lists the vCPUs and their threads.").returns(List(CPU)),
    command("query-memory-size-summary", "Returns the size of the guest's RAM.").returns(Members(MEMORY)),
    command("stop", "Stops the guest. A guest that is still arriving stays stopped after its arrival."),
    command("cont", "Starts the guest, also a held guest. A guest that is still arriving starts after its arrival."),
    command("quit", "Ends the VM after the answer."),
    command("query-migrate", "Returns the state and the statistics of the last outgoing migration, or of the incoming \
                              one if there was none.")
        .returns(Members(MIGRATION)),
    command("query-migrate-capabilities", "Lists the capabilities.").returns(List(CAPABILITY_STATE)),
    command("query-migrate-parameters", "Returns the parameters.").returns(Members(parameters::ANSWER)),
    command("migrate-start-postcopy", "Starts postcopy: the guest starts at the destination before all of its pages \
                                       have arrived."),
    command("migrate-pause", "Closes the connections of a postcopy; the migration waits for a recovery."),
    command("x-sterna-migration-statistics", "Returns all statistics of the engine, in the form in which its types \
                                              are serialised.")
        .returns(Members(STATISTICS)),
    command("x-sterna-migration-recording", "Returns the measurements of the precopy policy in the last outgoing \
                                             migration; null if there was none.")
        .returns(MemberKind::Any),
    command("migrate", "Moves the guest to a VM that waits for it, saves it to a file, or continues a paused postcopy.").takes(&[
        optional("uri", Text, "Address of the destination, such as `tcp:HOST:PORT`, `unix:PATH`, `fd:NAME`, \
                               `file:PATH` or `rdma:HOST:PORT`."),
        optional("channels", Array, "The same as a list with one channel, instead of `uri`."),
        optional("detach", Boolean, "No effect, as in QEMU: the command always returns when the migration has started."),
        optional("resume", Boolean, "Continues a paused postcopy over a new connection."),
    ]),
    command("x-sterna-live-save", "Saves the state of this moment while the guest continues to run: it is paused for \
                                   milliseconds. Capabilities have no effect. 'query-migrate' shows the progress, \
                                   'migrate_cancel' cancels.").takes(&[
        required("uri", Text, "Address of the target: a connected socket `fd:NAME`, `unix:PATH` or `tcp:HOST:PORT`, or a \
                               new file `file:PATH`. A VM that waits there gets a copy of the guest."),
        optional("track", Boolean, "Records the guest's writes from now on, so that a later save can hold only changes. \
                                    `migrate` ends that."),
        optional("since", Integer, "Only pages that changed since the save with this number; only with `track` and \
                                    `fd:NAME`. The rest of the memory is in the earlier image."),
        optional("max-bandwidth", Integer, "Bytes per second; 0 (default): no limit."),
        optional("buffer-size", Integer, "Most bytes of pages that are copied because the guest writes them before they \
                                          are sent; 256 MiB by default."),
    ]),
    command("x-sterna-query-live-save", "Returns the state of the last live save; an empty object if there was none, or a \
                                         migration since.")
        .returns(Members(LIVE_SAVE)),
    command("x-sterna-complete-memory", "Loads the rest of a lazily restored guest's memory without pauses, until this \
                                         connection closes. Repeat it for the progress.").takes(&[
        optional("stop", Boolean, "Restores the fill rate."),
    ]).returns(Members(COMPLETING)),
    command("migrate-incoming", "Waits for a guest; the address is bound when the command returns.").takes(&[
        optional("uri", Text, "Address to listen at, or the file to load."),
        optional("channels", Array, "The same as a list with one channel, instead of `uri`."),
        optional("exit-on-error", Boolean, "Only `false`: after a failure the VM waits for another `migrate-incoming`."),
    ]),
    command("migrate-recover", "Waits for the source of a paused postcopy at a new address.").takes(&[
        required("uri", Text, "Address to listen at."),
    ]),
    command("migrate_cancel", "Cancels the outgoing migration, or ends the wait for a guest.").takes(&[
        optional("x-sterna-force", Boolean, "Discards even a guest that is held here. It may be the only copy of the \
                                             guest."),
    ]),
    command("migrate-continue", "Continues a migration that `pause-before-switchover` has paused.").takes(&[
        required("state", Word(STATUS_WORDS), "Only `pre-switchover`."),
    ]),
    command("migrate-set-capabilities", "Switches capabilities on or off; all of them or none.").takes(&[
        required("capabilities", List(CAPABILITY_STATE), "Names and new states."),
    ]),
    command("migrate-set-parameters", "Sets parameters; all of them or none.").takes(parameters::ARGUMENTS),
    command("human-monitor-command", "Executes a command of the human monitor and returns its text.").takes(&[
        required("command-line", Text, "The command."),
        optional("cpu-index", Integer, "No effect."),
    ]).returns(Text),
    command("object-add", "Adds TLS credentials or an authorization, which parameters name.").takes(&[
        required("qom-type", Text, "`tls-creds-x509`, `authz-simple` or `authz-list`."),
        required("id", Text, "A new id: a letter, then letters, digits, `-`, `.` and `_`."),
        optional("dir", MemberKind::Any, "Of credentials: the directory of the PEM files."),
        optional("endpoint", MemberKind::Any, "Of credentials: `client` (default; a source) or `server` (a destination)."),
        optional("identity", MemberKind::Any, "Of `authz-simple`: the distinguished name that may connect."),
        optional("passwordid", MemberKind::Any, "Refused: Sterna cannot read encrypted keys."),
        optional("policy", MemberKind::Any, "Of `authz-list`: `allow` or `deny` (default) where no rule matches."),
        optional("priority", MemberKind::Any, "Refused: Sterna does not use GnuTLS priority strings."),
        optional("rules", MemberKind::Any, "Of `authz-list`: objects with `match`, `policy`, and `format` (`exact` or `glob`)."),
        optional("sanity-check", MemberKind::Any, "Of credentials: only `true` (default)."),
        optional("username", MemberKind::Any, "Refused."),
        optional("verify-peer", MemberKind::Any, "Of credentials: whether the peer needs a certificate (default `true`)."),
    ]),
    command("object-del", "Deletes an object. Migrations that use it keep what they have.").takes(&[
        required("id", Text, "Its id."),
    ]),
    command("x-sterna-decide", "Decides which side has the guest, when contact is lost. In postcopy, `destination` \
                                changes an undecided migration to `postcopy-paused`; there, it gives up the pages \
                                that the destination lacks.").takes(&[
        required("guest", MemberKind::Any, "`source`: it resumes here; `destination`: it stays stopped here permanently. Of a protection: primary and standby."),
        optional("expect", Text, "The status that you saw: `undecided`, `postcopy-paused` or `postcopy-recover`. In another status the decision is refused. The last two count as the same."),
    ]),
    command("query-block", "Lists the disks, `disk0` and so on.").returns(List(BLOCK)),
    command("block_resize", "Changes the size of a disk, while no migration has the guest.").takes(&[
        optional("device", Text, "The disk, such as `disk0`."),
        optional("node-name", Text, "The same, instead of `device`."),
        required("size", Integer, "The new size in bytes."),
    ]),
    command("announce-self", "Announces the guest to its networks, as after a migration.").takes(&[
        optional("interfaces", Array, "The cards, such as `net0`; all of them if absent."),
        optional("id", Text, "A name that replaces an earlier announcement with the same name."),
        required("initial", Integer, "As `announce-initial`, in milliseconds."),
        required("max", Integer, "As `announce-max`, in milliseconds."),
        required("rounds", Integer, "As `announce-rounds`."),
        required("step", Integer, "As `announce-step`, in milliseconds."),
    ]),
    command("calc-dirty-rate", "Begins to measure the guest's dirty rate.").takes(&[
        required("calc-time", Integer, "Duration, 50 ms to 60 s."),
        optional("calc-time-unit", Word(TIME_UNITS), "Unit of `calc-time`; seconds by default."),
        optional("sample-pages", Integer, "No effect: Sterna counts every page. 128 to 16384."),
        optional("mode", Word(&dirty_rate::MODES), "Kind of dirty log that the VM must have; any kind if absent or \
                                                    `page-sampling`."),
    ]),
    command("query-dirty-rate", "Returns the last measurement.").takes(&[
        optional("calc-time-unit", Word(TIME_UNITS), "Unit of `calc-time` in the answer; seconds by default."),
    ]).returns(Members(DIRTY_RATE)),
    command("set-vcpu-dirty-limit", "Limits the dirty rate of a vCPU, or of all. Needs a dirty ring.").takes(&[
        optional("cpu-index", Integer, "The vCPU; all of them if absent."),
        required("dirty-rate", Integer, "MB per second."),
    ]),
    command("cancel-vcpu-dirty-limit", "Removes the limit of a vCPU's dirty rate, or of all.").takes(&[
        optional("cpu-index", Integer, "The vCPU; all of them if absent."),
    ]),
    command("query-vcpu-dirty-limit", "Lists the vCPUs with a limit.").returns(List(DIRTY_LIMIT)),
    command("qom-list", "Lists the properties of a part of the VM.").takes(&[
        required("path", Text, "Path of the part, such as `/machine` or `/objects`."),
    ]).returns(List(PROPERTY)),
    command("qom-get", "Returns a property of a part of the VM.").takes(&[
        required("path", Text, "Path of the part, such as `/machine`."),
        required("property", Text, "Name of the property, such as `type`."),
    ]).returns(MemberKind::Any),
    command("query-colo-status", "Returns whether this VM is a side of a protection.").returns(Members(COLO_STATUS)),
    command("x-colo-lost-heartbeat", "At a primary: ends the protection, as `x-sterna-unprotect` does. At a standby: \
                                      starts an unplanned takeover. The standby or the arbiter decides."),
    command("x-sterna-query-protection", "Returns the state and the statistics of the last protection; an empty \
                                          object if there was none.")
        .returns(Members(PROTECTION)),
    command("x-sterna-unprotect", "Ends the protection; the guest continues at its primary."),
    command("x-sterna-takeover", "Moves a protected guest to its standby.").takes(&[
        optional("planned", Boolean, "At the primary: takes a last checkpoint first, so that nothing is lost."),
    ]),
];

/// A name and a state.
const CAPABILITY_STATE: &[MemberSpec] = &[
    required("capability", Word(capabilities::NAMES), "The name."),
    required("state", Boolean, "Whether it is on."),
];

/// The declaration of `name`.
pub(super) fn declared(name: &str) -> Option<&'static CommandSpec> {
    COMMANDS.iter().find(|command| command.name == name)
}

const fn command(name: &'static str, about: &'static str) -> CommandSpec {
    CommandSpec::new(name, about)
}
