//! What an operator may set: QEMU's migration parameters and capabilities, in typed units.
//!
//! `sterna-qmp` keeps QEMU's spelling, ranges and refusals; this module keeps the meaning.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::rdma::{Fabric, VerbsFabric};
use sterna_transport::{Direct, Tls};
use sterna_wire::rdma::ChunkSize;

use crate::settings_error::SettingsError;

/// How payloads of multifd packets are compressed (`multifd-compression`; specs/stream.md §3.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Compression {
    /// Raw pages.
    #[default]
    None,
    /// One zlib stream per channel.
    Zlib,
    /// One zstd frame per channel.
    Zstd,
}

/// Where zero pages are detected (`zero-page-detection`; specs/stream.md §2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ZeroPageDetection {
    /// Zero pages are sent as data.
    None,
    /// Zero pages are sent as records of the main channel.
    Legacy,
    /// The lane that sends a page scans it; with multifd, zero pages are sent in the packet's zero list.
    #[default]
    Multifd,
}

/// What happens to a migration that does not converge (`x-sterna-non-convergence`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum NonConvergence {
    /// It continues until the guest writes less or an operator ends it, as in QEMU. Sterna warns.
    #[default]
    KeepGoing,
    /// It fails when several syncs in a row brought no progress and no enabled throttling remains.
    Fail,
    /// The guest is stopped all the same, for longer than the downtime limit; Sterna warns of how long. What a protection does by
    /// default: its guest stands once, however much it writes.
    Switchover,
    /// The guest goes on at the destination before its pages are there, which then follow it
    /// ([`Capabilities::postcopy_ram`]).
    Postcopy,
}

/// How the guest's memory moves (`mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MigrationMode {
    /// It is copied, while the guest runs.
    #[default]
    Normal,
    /// It stays where it is: another process on the same host gets its descriptors and maps it (specs/extension.md §11). Between
    /// two Sternas, over a Unix socket.
    CprTransfer,
}

/// Who finds out which side has the guest after a lost acknowledgement (`x-sterna-status-question`;
/// specs/extension.md §6). Each side's setting governs what that side does: at the source whether it asks, at the
/// destination whether it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum StatusQuestions {
    /// The source asks the destination, which answers; both prove that they know the migration's secret.
    #[default]
    Auto,
    /// Nothing is asked, or nothing answered: the source stays undecided until [`crate::Migration::decide`].
    Operator,
}

/// The parameters of one migration. Those marked *live* may change while it runs
/// ([`Migration::set_live`](crate::Migration::set_live)); to change another is refused.
///
/// Later versions add fields: write `Parameters { downtime_limit, ..Parameters::default() }`.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameters {
    /// `max-bandwidth`, bytes per second over all channels, 0 for no limit. Live.
    pub max_bandwidth_bytes: u64,
    /// `max-postcopy-bandwidth`, bytes per second of pages that nobody asks for after the switch to postcopy, 0 for no limit.
    /// Requested pages are not limited. Live.
    pub max_postcopy_bandwidth_bytes: u64,
    /// `downtime-limit`: the longest acceptable downtime. Live.
    pub downtime_limit: Duration,
    /// `avail-switchover-bandwidth`, bytes per second expected while the guest is stopped; 0: measure. Live.
    pub avail_switchover_bandwidth_bytes: u64,
    /// `multifd-channels`, 1 to 255. Both sides must agree. Counts only with [`Capabilities::multifd`].
    pub multifd_channels: u8,
    /// `multifd-compression`. Both sides must agree.
    pub multifd_compression: Compression,
    /// `multifd-zlib-level`, 0 to 9.
    pub multifd_zlib_level: u8,
    /// `multifd-zstd-level`, 0 to 20.
    pub multifd_zstd_level: u8,
    /// `zero-page-detection`, of the source.
    pub zero_page_detection: ZeroPageDetection,
    /// `tls-creds`, `tls-hostname`, `tls-authz`: every channel speaks TLS. Both sides must agree.
    pub tls: Option<Tls>,
    /// `direct-io`: files are written and read with direct I/O.
    pub direct_io: Direct,
    /// Whether an existing file is replaced when a guest is saved to its path; else that is refused. QEMU always replaces.
    pub replace_file: bool,
    /// `cpu-throttle-initial`: share of the time, percent, that vCPUs sleep when `auto-converge` sets in. Live.
    pub cpu_throttle_initial: u8,
    /// `cpu-throttle-increment`: percent more for each further step. Live.
    pub cpu_throttle_increment: u8,
    /// `cpu-throttle-tailslow`: no step is larger than what brings the dirty rate down to the threshold. Live.
    pub cpu_throttle_tailslow: bool,
    /// `max-cpu-throttle`: the most, percent. Live.
    pub max_cpu_throttle: u8,
    /// `throttle-trigger-threshold`: throttling sets in, or gets stronger, when in two rounds more bytes were
    /// dirtied than this share, percent, of those sent. Live.
    pub throttle_trigger_threshold: u8,
    /// `vcpu-dirty-limit`: what `dirty-limit` allows each vCPU to dirty, bytes per second. Live.
    pub vcpu_dirty_limit_bytes: u64,
    /// What to do with a guest that does not converge. Live.
    pub non_convergence: NonConvergence,
    /// `x-sterna-postcopy-after`: the source starts postcopy so long after the migration's start by itself, whether precopy converges or
    /// not; zero: it does not. Whichever comes first of this and the next one. Needs [`Capabilities::postcopy_ram`]. Live.
    pub postcopy_after: Duration,
    /// `x-sterna-postcopy-after-rounds`: the source starts postcopy by itself when so many rounds are over; 0: it does not. Live.
    pub postcopy_after_rounds: u32,
    /// `x-sterna-status-question`: whether a lost acknowledgement is asked for (source) and such questions are
    /// answered (destination).
    pub status_questions: StatusQuestions,
    /// `x-sterna-device-queue-size`: bytes of a device's stream that a destination holds for a device that
    /// loads slowly, for each device. Another Sterna is told and keeps to it over multifd channels; any other source may
    /// send larger chunks than that, up to 1 MiB, of which one is held.
    pub max_queued_stream_bytes: u64,
    /// `xbzrle-cache-size`: how much of what the standby holds a primary keeps, to send the difference
    /// ([`Capabilities::xbzrle`]). Memory is taken as pages are sent.
    pub xbzrle_cache_bytes: u64,
    /// `mode`: how memory moves. The source's word counts.
    pub mode: MigrationMode,
    /// `x-sterna-cpr-allow-root`: with [`MigrationMode::CprTransfer`] one of the two processes may be root's and the other of another
    /// user. Otherwise both must be of the same user. Each side asks its own setting.
    pub cpr_allow_root: bool,
    /// `x-sterna-reconnect-window`: a connection that is lost before the commit is made anew within this time, and the migration
    /// goes on (specs/extension.md §13); zero: it ends the migration. Both sides must have set it. A source dials for that long; a
    /// destination waits for its source for that long and `limits.stall`.
    pub reconnect_window: Duration,
    /// What concerns migrations to and from `rdma:` alone.
    pub rdma: RdmaParameters,
    /// How long Sterna waits for what. QEMU has no such limits.
    pub limits: WaitLimits,
}

/// What concerns RDMA alone (specs/rdma.md §6). Later versions add fields, as with [`Parameters`].
#[derive(Debug, Clone, Default)]
pub struct RdmaParameters {
    /// `x-rdma-chunk-size`: at the source the longest WRITE and the least piece of memory that is registered at once, at the
    /// destination the latter. The two sides may differ unless both are QEMUs.
    pub chunk: ChunkSize,
    /// `x-sterna-rdma-pinned-limit`: most bytes of guest memory that are registered at once, where that pins them: of a source on both sides (but
    /// two of the destination's chunks at least), of a destination on its own. Counts between two Sternas, since a QEMU gives
    /// no memory back; `None` for no limit.
    pub pinned_limit_bytes: Option<u64>,
    /// The adapters to use; `None` for those of this host.
    pub fabric: Option<Arc<dyn Fabric>>,
}

impl RdmaParameters {
    /// The adapters to use.
    pub(crate) fn fabric(&self) -> Arc<dyn Fabric> {
        self.fabric.clone().unwrap_or_else(|| Arc::new(VerbsFabric::new()))
    }
}

impl PartialEq for RdmaParameters {
    fn eq(&self, other: &Self) -> bool {
        let is_same_fabric = match (&self.fabric, &other.fabric) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        };
        is_same_fabric && self.chunk == other.chunk && self.pinned_limit_bytes == other.pinned_limit_bytes
    }
}

impl Parameters {
    /// Takes over those settings of `from` that are live.
    pub fn take_live(&mut self, from: &Self) {
        self.max_bandwidth_bytes = from.max_bandwidth_bytes;
        self.max_postcopy_bandwidth_bytes = from.max_postcopy_bandwidth_bytes;
        self.downtime_limit = from.downtime_limit;
        self.avail_switchover_bandwidth_bytes = from.avail_switchover_bandwidth_bytes;
        self.cpu_throttle_initial = from.cpu_throttle_initial;
        self.cpu_throttle_increment = from.cpu_throttle_increment;
        self.cpu_throttle_tailslow = from.cpu_throttle_tailslow;
        self.max_cpu_throttle = from.max_cpu_throttle;
        self.throttle_trigger_threshold = from.throttle_trigger_threshold;
        self.vcpu_dirty_limit_bytes = from.vcpu_dirty_limit_bytes;
        self.non_convergence = from.non_convergence;
        self.postcopy_after = from.postcopy_after;
        self.postcopy_after_rounds = from.postcopy_after_rounds;
    }

    /// These settings for a migration that runs with `running`.
    pub(crate) fn for_running(self, running: &Self) -> Result<Self, SettingsError> {
        let mut followed = running.clone();
        followed.take_live(&self);
        if followed == self {
            return Ok(self);
        }
        let fixed = [
            ("multifd_channels", self.multifd_channels != running.multifd_channels),
            ("multifd_compression", self.multifd_compression != running.multifd_compression),
            ("multifd_zlib_level", self.multifd_zlib_level != running.multifd_zlib_level),
            ("multifd_zstd_level", self.multifd_zstd_level != running.multifd_zstd_level),
            ("zero_page_detection", self.zero_page_detection != running.zero_page_detection),
            ("tls", self.tls != running.tls),
            ("direct_io", self.direct_io != running.direct_io),
            ("replace_file", self.replace_file != running.replace_file),
            ("status_questions", self.status_questions != running.status_questions),
            ("max_queued_stream_bytes", self.max_queued_stream_bytes != running.max_queued_stream_bytes),
            ("xbzrle_cache_bytes", self.xbzrle_cache_bytes != running.xbzrle_cache_bytes),
            ("mode", self.mode != running.mode),
            ("cpr_allow_root", self.cpr_allow_root != running.cpr_allow_root),
            ("reconnect_window", self.reconnect_window != running.reconnect_window),
            ("rdma", self.rdma != running.rdma),
            ("limits", self.limits != running.limits),
        ];
        let fields = fixed.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect();
        Err(SettingsError::NotLive { fields })
    }
}

impl Default for Parameters {
    /// QEMU 11's defaults.
    fn default() -> Self {
        Self {
            max_bandwidth_bytes: 128 << 20,
            max_postcopy_bandwidth_bytes: 0,
            downtime_limit: Duration::from_millis(300),
            avail_switchover_bandwidth_bytes: 0,
            multifd_channels: 2,
            multifd_compression: Compression::None,
            multifd_zlib_level: 1,
            multifd_zstd_level: 1,
            zero_page_detection: ZeroPageDetection::Multifd,
            tls: None,
            direct_io: Direct::Off,
            replace_file: false,
            cpu_throttle_initial: 20,
            cpu_throttle_increment: 10,
            cpu_throttle_tailslow: false,
            max_cpu_throttle: 99,
            throttle_trigger_threshold: 50,
            vcpu_dirty_limit_bytes: 1 << 20,
            non_convergence: NonConvergence::KeepGoing,
            postcopy_after: Duration::ZERO,
            postcopy_after_rounds: 0,
            status_questions: StatusQuestions::Auto,
            max_queued_stream_bytes: 64 << 20,
            xbzrle_cache_bytes: 64 << 20,
            mode: MigrationMode::Normal,
            cpr_allow_root: false,
            reconnect_window: Duration::ZERO,
            rdma: RdmaParameters::default(),
            limits: WaitLimits::default(),
        }
    }
}

/// The longest that each wait may last before the peer counts as dead. Later versions add fields, as with [`Parameters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitLimits {
    /// Connecting, the first headers and answers. At a destination also how long a channel waits for the others
    /// of its migration before it is refused.
    pub setup: Duration,
    /// No progress although one side waits. A destination checks all channels of the migration together, and treats
    /// silence as a failure only if the source must send something: the remaining bytes of an element or packet, or a promised
    /// keep-alive. Between elements a source may be silent without limit, like a QEMU that waits for its operator; the
    /// kernel detects within about this limit whether its host still runs (specs/stream.md §5.4). A source checks each
    /// channel separately.
    pub stall: Duration,
    /// Sending the last pages and devices, guest stopped; or four times the downtime limit, if that is more.
    pub switchover: Duration,
    /// The answer to *prepare*: the destination loads its devices meanwhile. At the destination also from
    /// that answer until the commit; after the limit the guest is discarded.
    pub prepare: Duration,
    /// The acknowledgement after the commit, and the answer to a question for it.
    pub acknowledge: Duration,
    /// Between two questions to a destination whose acknowledgement was lost.
    pub ask_interval: Duration,
}

impl Default for WaitLimits {
    fn default() -> Self {
        Self {
            setup: Duration::from_secs(30),
            stall: Duration::from_secs(30),
            switchover: Duration::from_secs(60),
            prepare: Duration::from_secs(60),
            acknowledge: Duration::from_secs(30),
            ask_interval: Duration::from_secs(2),
        }
    }
}

/// What is enabled (QEMU's capabilities of the same names). All are off by default, as in QEMU, except the
/// return path, without which there is no handover. Later versions add fields, as with [`Parameters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// `multifd`: pages are sent over [`Parameters::multifd_channels`] channels of their own.
    pub multifd: bool,
    /// `mapped-ram`: in a file every page has a fixed place (specs/mapped-ram.md); without it a file contains a stream.
    /// Multifd channels are then threads that write or read it.
    pub mapped_ram: bool,
    /// `return-path`. Switch it off only for a peer that cannot answer: the source then never learns whether the migration
    /// succeeded. A file never answers; there the file system's result decides.
    pub return_path: bool,
    /// `switchover-ack`: the guest stops only after the destination's devices reported that they are ready.
    pub switchover_ack: bool,
    /// `auto-converge`: throttle vCPUs when the guest writes faster than it can be sent.
    pub auto_converge: bool,
    /// `dirty-limit`: limit each vCPU's dirty rate instead. Needs a VM that counts it; not together with
    /// [`Capabilities::auto_converge`].
    pub dirty_limit: bool,
    /// `pause-before-switchover`: wait, with the guest stopped, for [`crate::Migration::continue_switchover`].
    pub pause_before_switchover: bool,
    /// `rdma-pin-all`: the destination registers all memory before the first page is sent, and the source, too. Only with
    /// `rdma:`; the source's word counts (specs/rdma.md §2.2).
    pub rdma_pin_all: bool,
    /// `postcopy-ram`: [`crate::Migration::start_postcopy`] lets the guest go on at the destination before its pages are there.
    /// On both sides; a destination needs userfaultfd with page faults of the kernel for it (specs/postcopy.md).
    pub postcopy_ram: bool,
    /// `postcopy-preempt`: pages that the destination asks for come over a channel of their own. On both sides; only with
    /// [`Capabilities::postcopy_ram`].
    pub postcopy_preempt: bool,
    /// `postcopy-blocktime`: the destination measures how long pages were waited for.
    pub postcopy_blocktime: bool,
    /// `xbzrle`: checkpoints bring the difference to what the standby holds, where it is shorter. Only while a standby protects
    /// the guest, and over the main channel alone; a receiver takes differences whatever this says.
    pub xbzrle: bool,
    /// Unmanaged destination of a QEMU source: start the guest at EOF, as QEMU does. When false the guest
    /// stays held until [`crate::Incoming::release`] (see ARCHITECTURE.md, *Handover*).
    pub unmanaged: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            multifd: false,
            mapped_ram: false,
            return_path: true,
            switchover_ack: false,
            auto_converge: false,
            dirty_limit: false,
            pause_before_switchover: false,
            rdma_pin_all: false,
            postcopy_ram: false,
            postcopy_preempt: false,
            postcopy_blocktime: false,
            xbzrle: false,
            unmanaged: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_migration_follows_live_settings_and_refuses_all_others_by_name() {
        let running = Parameters::default();
        let live =
            Parameters { downtime_limit: Duration::from_secs(9), max_cpu_throttle: 50, ..running.clone() };
        assert_eq!(live.clone().for_running(&running), Ok(live));

        let limits = WaitLimits { stall: Duration::from_secs(1), ..running.limits };
        let fixed = Parameters { multifd_channels: 9, limits, ..running.clone() };
        let refused = fixed.for_running(&running);
        assert_eq!(refused, Err(SettingsError::NotLive { fields: vec!["multifd_channels", "limits"] }));
    }

    /// A field that is neither live nor listed would be refused without a name.
    #[test]
    fn every_fixed_setting_is_refused_by_its_name() {
        let running = Parameters::default();
        let changes: [fn(&mut Parameters); 14] = [
            |to| to.multifd_channels += 1,
            |to| to.multifd_compression = Compression::Zstd,
            |to| to.multifd_zlib_level += 1,
            |to| to.multifd_zstd_level += 1,
            |to| to.zero_page_detection = ZeroPageDetection::None,
            |to| to.direct_io = Direct::Wanted,
            |to| to.replace_file = true,
            |to| to.status_questions = StatusQuestions::Operator,
            |to| to.max_queued_stream_bytes += 1,
            |to| to.xbzrle_cache_bytes += 1,
            |to| to.mode = MigrationMode::CprTransfer,
            |to| to.cpr_allow_root = true,
            |to| to.rdma.pinned_limit_bytes = Some(1),
            |to| to.limits.setup = Duration::ZERO,
        ];
        for change in changes {
            let mut wanted = running.clone();
            change(&mut wanted);
            let refused = wanted.for_running(&running);
            assert!(
                matches!(&refused, Err(SettingsError::NotLive { fields }) if fields.len() == 1),
                "{refused:?}"
            );
        }
    }
}
