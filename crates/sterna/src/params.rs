//! Settings of a migration: QEMU's migration parameters and capabilities, in typed units.
//!
//! `sterna-qmp` contains QEMU's spelling, ranges and refusals; this module contains the meaning.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::{Direct, Tls};

use crate::rdma::RdmaParameters;
use crate::settings_error::SettingsError;
use crate::threads::OnThreadStart;

/// Compression of multifd packets' payloads (`multifd-compression`; specs/stream.md §3.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Compression {
    /// Pages are sent uncompressed.
    #[default]
    None,
    /// One zlib stream per channel.
    Zlib,
    /// One zstd frame per channel.
    Zstd,
}

/// Detection and form of zero pages (`zero-page-detection`; specs/stream.md §2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ZeroPageDetection {
    /// Zero pages are sent as data.
    None,
    /// Zero pages are sent as records of the main channel.
    Legacy,
    /// The lane that sends a page scans it. With multifd, zero pages are sent in the packet's zero list.
    #[default]
    Multifd,
}

/// Reaction to a migration that does not converge (`x-sterna-non-convergence`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum NonConvergence {
    /// The migration continues until the guest writes less or an operator ends it, as in QEMU. Sterna warns.
    #[default]
    KeepGoing,
    /// The migration fails when several syncs in a row brought no progress and no enabled throttling remains.
    Fail,
    /// The guest is stopped although the downtime will exceed the limit; Sterna warns of the expected downtime. A
    /// protection does this by default, so its guest is paused once, however much it writes.
    Switchover,
    /// The guest resumes at the destination before its pages are there, and the pages follow
    /// ([`Capabilities::postcopy_ram`]).
    Postcopy,
}

/// How the guest's memory reaches the destination (`mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MigrationMode {
    /// Memory is copied while the guest runs.
    #[default]
    Normal,
    /// Memory stays in place: another process on the same host receives its descriptors and maps it
    /// (specs/extension.md §11). Both processes must be Sternas, connected by a Unix socket.
    CprTransfer,
}

/// How the sides find out which side has the guest after a lost acknowledgement (`x-sterna-status-question`;
/// specs/extension.md §6).
///
/// Each side's setting governs that side: at the source whether it asks, at the destination whether it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum StatusQuestions {
    /// The source asks the destination, which answers; both prove that they know the migration's secret.
    #[default]
    Auto,
    /// The source does not ask, or the destination does not answer: the source stays undecided until
    /// [`crate::Migration::decide`].
    Operator,
}

/// Declares [`Parameters`]: for each field its type, its default (QEMU 11's, except the bandwidth), and whether it is live.
macro_rules! parameters {
    ($($(#[$about:meta])+ $change:ident $field:ident: $type:ty = $default:expr,)+) => {
        /// The parameters of one migration. Those marked *live* may change while it runs
        /// ([`Migration::set_live`](crate::Migration::set_live)); to change another is refused.
        ///
        /// Later versions add fields: write `Parameters { downtime_limit, ..Parameters::default() }`.
        #[derive(Clone)]
        pub struct Parameters {
            $($(#[$about])+ #[doc = parameters!(@note $change)] pub $field: $type,)+
        }

        impl Default for Parameters {
            /// QEMU 11's defaults, except that nothing limits the bandwidth.
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl PartialEq for Parameters {
            fn eq(&self, other: &Self) -> bool {
                $(parameters!(@same $change self, other, $field))&&+
            }
        }

        impl std::fmt::Debug for Parameters {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut fields = f.debug_struct("Parameters");
                $(parameters!(@show $change self, $field, fields);)+
                fields.finish()
            }
        }

        impl Parameters {
            /// Copies the live settings of `from`.
            pub fn take_live(&mut self, from: &Self) {
                $(parameters!(@take $change self, from, $field);)+
            }

            /// Names of the fixed fields that differ from `running`.
            fn fixed_differences(&self, running: &Self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $(parameters!(@differs $change self, running, $field, names);)+
                names
            }
        }
    };
    (@note live) => { "\n\n*Live.*" };
    (@note fixed) => { "" };
    (@note function) => { "" };
    (@same function $one:ident, $other:ident, $field:ident) => {
        match (&$one.$field, &$other.$field) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        }
    };
    (@same $change:ident $one:ident, $other:ident, $field:ident) => { $one.$field == $other.$field };
    (@show function $one:ident, $field:ident, $fields:ident) => {
        $fields.field(stringify!($field), &$one.$field.as_ref().map(Arc::as_ptr));
    };
    (@show $change:ident $one:ident, $field:ident, $fields:ident) => {
        $fields.field(stringify!($field), &$one.$field);
    };
    (@take live $to:ident, $from:ident, $field:ident) => { Clone::clone_from(&mut $to.$field, &$from.$field) };
    (@take $change:ident $to:ident, $from:ident, $field:ident) => {};
    (@differs live $one:ident, $other:ident, $field:ident, $names:ident) => {};
    (@differs $change:ident $one:ident, $other:ident, $field:ident, $names:ident) => {
        if !(parameters!(@same $change $one, $other, $field)) {
            $names.push(stringify!($field));
        }
    };
}

parameters! {
    /// `max-bandwidth`, bytes per second over all channels, 0 for no limit. QEMU's default, 128 MiB/s, is the monitor's
    /// (`sterna-qmp`).
    live max_bandwidth_bytes: u64 = 0,
    /// `max-postcopy-bandwidth`, bytes per second of background pages after the switch to postcopy, 0 for no limit.
    /// Requested pages are not limited.
    live max_postcopy_bandwidth_bytes: u64 = 0,
    /// `downtime-limit`: the longest acceptable downtime.
    live downtime_limit: Duration = Duration::from_millis(300),
    /// `avail-switchover-bandwidth`, bytes per second expected while the guest is stopped; 0: use the measured
    /// bandwidth.
    live avail_switchover_bandwidth_bytes: u64 = 0,
    /// `multifd-channels`, 1 to 255. Both sides must agree. Has an effect only with [`Capabilities::multifd`].
    fixed multifd_channels: u8 = 2,
    /// `multifd-compression`. Both sides must agree.
    fixed multifd_compression: Compression = Compression::None,
    /// `multifd-zlib-level`, 0 to 9.
    fixed multifd_zlib_level: u8 = 1,
    /// `multifd-zstd-level`, 0 to 20.
    fixed multifd_zstd_level: u8 = 1,
    /// `zero-page-detection`: the source's setting decides.
    fixed zero_page_detection: ZeroPageDetection = ZeroPageDetection::Multifd,
    /// `tls-creds`, `tls-hostname`, `tls-authz`: every channel speaks TLS. Both sides must agree.
    fixed tls: Option<Tls> = None,
    /// `direct-io`: files are written and read with direct I/O.
    fixed direct_io: Direct = Direct::Off,
    /// Whether a guest may be saved to the path of an existing file, which is then replaced. If false, that is
    /// refused. QEMU always replaces the file.
    fixed replace_file: bool = false,
    /// `cpu-throttle-initial`: share of the time, percent, that vCPUs sleep when `auto-converge` starts to throttle.
    live cpu_throttle_initial: u8 = 20,
    /// `cpu-throttle-increment`: percent that each further step adds.
    live cpu_throttle_increment: u8 = 10,
    /// `cpu-throttle-tailslow`: limits each step to the amount that reduces the dirty rate to the threshold.
    live cpu_throttle_tailslow: bool = false,
    /// `max-cpu-throttle`: the strongest throttling, percent.
    live max_cpu_throttle: u8 = 99,
    /// `throttle-trigger-threshold`: ratio of dirtied to sent bytes, percent. Throttling starts, or gets stronger,
    /// when the guest exceeds this ratio in two rounds.
    live throttle_trigger_threshold: u8 = 50,
    /// `vcpu-dirty-limit`: the dirty rate that `dirty-limit` allows each vCPU, bytes per second.
    live vcpu_dirty_limit_bytes: u64 = 1 << 20,
    /// `x-sterna-non-convergence`: reaction to a guest that does not converge.
    live non_convergence: NonConvergence = NonConvergence::KeepGoing,
    /// `x-sterna-postcopy-after`: the source starts postcopy by itself this long after the migration's start, whether
    /// or not precopy converges. Zero: it does not. If `x-sterna-postcopy-after-rounds` is also set, the earlier of
    /// the two counts. Needs [`Capabilities::postcopy_ram`].
    live postcopy_after: Duration = Duration::ZERO,
    /// `x-sterna-postcopy-after-rounds`: the source starts postcopy by itself after this number of rounds; 0: it does
    /// not.
    live postcopy_after_rounds: u32 = 0,
    /// `x-sterna-status-question`: whether the source asks after a lost acknowledgement, and whether the destination
    /// answers such questions.
    fixed status_questions: StatusQuestions = StatusQuestions::Auto,
    /// `x-sterna-device-queue-size`: bytes of a device's stream that a destination buffers for a device that loads
    /// slowly, per device.
    ///
    /// A Sterna source learns this limit and keeps to it over multifd channels. Any other source may send larger
    /// chunks than the limit, up to 1 MiB; then one chunk is buffered.
    fixed max_queued_stream_bytes: u64 = 64 << 20,
    /// `xbzrle-cache-size`: bytes of the standby's pages that a primary caches, so that it can send differences
    /// ([`Capabilities::xbzrle`]). Memory is allocated as pages are sent.
    fixed xbzrle_cache_bytes: u64 = 64 << 20,
    /// `mode`: how memory reaches the destination. The source's setting decides.
    fixed mode: MigrationMode = MigrationMode::Normal,
    /// `x-sterna-cpr-allow-root`: with [`MigrationMode::CprTransfer`] one of the two processes may be root's and the
    /// other of another user. Otherwise both must be of the same user. Each side checks its own setting.
    fixed cpr_allow_root: bool = false,
    /// `x-sterna-reconnect-window`: time in which a lost connection is replaced, so that the migration continues.
    /// This applies before the commit (specs/extension.md §13). Zero: a lost connection ends the migration. Both
    /// sides must set it. The source dials for this time; the destination waits for its source for this time plus
    /// `limits.stall`. Refused over `rdma:` and over a connected socket, because that connection cannot be replaced.
    fixed reconnect_window: Duration = Duration::ZERO,
    /// Whether a source compares the paused guest's memory at the last sync with its memory after the devices were
    /// saved. For tests of a VMM: it reads all memory twice while the guest is paused.
    ///
    /// A write in between does not reach the destination. If one is found, the migration fails with
    /// [`MigrationError::ChangedAfterLastSync`](crate::MigrationError::ChangedAfterLastSync), and the guest continues
    /// at the source. Checkpoints of a protection are compared, too.
    fixed check_last_sync: bool = false,
    /// Called first on every thread that this side of the migration starts, on that thread, with its role.
    ///
    /// Use it for seccomp filters, affinity, cgroups, scheduling and signal masks. Threads of a protection and of
    /// its standby call it, too. Threads that belong to the kernel (`iou-wrk-…` of io_uring) do not.
    ///
    /// A panic of the hook has the effect of a panic of the thread before its first step:
    /// [`MigrationError::Panicked`](crate::MigrationError::Panicked) names the thread, and the guest stays at its
    /// side. The thread `greeter` refuses its connection with a warning instead, and on the thread `incoming` the
    /// destination does not begin to listen ([`StartError::System`](crate::StartError::System)).
    function on_thread_start: Option<OnThreadStart> = None,
    /// Settings that apply only to migrations to and from `rdma:`.
    fixed rdma: RdmaParameters = RdmaParameters::default(),
    /// Time limits for each wait. QEMU has no such limits.
    fixed limits: WaitLimits = WaitLimits::default(),
}

impl Parameters {
    /// Checks that these settings change only live parameters of a migration that runs with `running`.
    pub(crate) fn for_running(self, running: &Self) -> Result<Self, SettingsError> {
        let fields = self.fixed_differences(running);
        if fields.is_empty() { Ok(self) } else { Err(SettingsError::NotLive { fields }) }
    }
}

/// Time limits for each wait, after which the peer counts as dead. Later versions add fields, as with [`Parameters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitLimits {
    /// Connecting, and the first headers and answers. At a destination also the time that a channel waits for the
    /// other channels of its migration before it is refused.
    pub setup: Duration,
    /// No progress although one side waits.
    ///
    /// A destination checks all channels of the migration together. It treats silence as a failure only if the source
    /// must send something: the remaining bytes of an element or packet, or a promised keep-alive. Between elements a
    /// source may be silent without limit, for example a QEMU that waits for its operator. The kernel detects within
    /// about this limit whether the source's host still runs (specs/stream.md §5.4).
    ///
    /// A source checks each channel separately.
    pub stall: Duration,
    /// Sending the last pages and devices while the guest is stopped. If four times the downtime limit is longer,
    /// that applies.
    pub switchover: Duration,
    /// The answer to *prepare*; the destination loads its devices meanwhile. At the destination also the time from
    /// that answer until the commit. After this limit the destination discards the guest.
    pub prepare: Duration,
    /// The acknowledgement after the commit, and the answer to a question after a lost acknowledgement.
    pub acknowledge: Duration,
    /// Interval between two questions to a destination whose acknowledgement was lost.
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

/// Enabled features (QEMU's capabilities of the same names). All are off by default, as in QEMU, except the return
/// path, which the handover needs. Later versions add fields, as with [`Parameters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// `multifd`: pages are sent over [`Parameters::multifd_channels`] separate channels.
    pub multifd: bool,
    /// `mapped-ram`: every page has a fixed place in the file (specs/mapped-ram.md). Otherwise the file contains a
    /// stream. With mapped-ram, multifd channels are threads that write or read the file.
    pub mapped_ram: bool,
    /// `return-path`. Switch it off only for a peer that cannot answer: the source then never learns whether the
    /// migration succeeded. A file never answers; for a file, the file system's result decides.
    pub return_path: bool,
    /// `switchover-ack`: the guest stops only after the destination's devices reported that they are ready.
    pub switchover_ack: bool,
    /// `auto-converge`: throttle vCPUs when the guest dirties memory faster than the source can send it.
    pub auto_converge: bool,
    /// `dirty-limit`: limit each vCPU's dirty rate instead. Needs a VM that counts the rates. Excludes
    /// [`Capabilities::auto_converge`].
    pub dirty_limit: bool,
    /// `pause-before-switchover`: wait with the guest stopped until [`crate::Migration::continue_switchover`] is
    /// called.
    pub pause_before_switchover: bool,
    /// `rdma-pin-all`: the destination and the source register all memory before the first page is sent. Only with
    /// `rdma:`; the source's setting decides (specs/rdma.md §2.2).
    pub rdma_pin_all: bool,
    /// `postcopy-ram`: [`crate::Migration::start_postcopy`] lets the guest resume at the destination before its pages
    /// are there. Both sides must enable it. A destination needs userfaultfd that also handles page faults in kernel
    /// mode (specs/postcopy.md).
    pub postcopy_ram: bool,
    /// `postcopy-preempt`: requested pages are sent over a separate channel. Both sides must enable it; only with
    /// [`Capabilities::postcopy_ram`].
    pub postcopy_preempt: bool,
    /// `postcopy-blocktime`: the destination measures how long vCPUs and other threads wait for pages.
    pub postcopy_blocktime: bool,
    /// `xbzrle`: checkpoints carry a page's difference from the standby's copy, if that is shorter than the page.
    ///
    /// Only while a standby protects the guest, over the main channel or multifd channels. A receiver accepts
    /// differences independently of this setting.
    pub xbzrle: bool,
    /// Destination: start the guest of a QEMU at EOF, as QEMU does, and a guest of a file as soon as it is loaded.
    ///
    /// If false, the guest of a QEMU waits, stopped, until [`crate::Incoming::release`] (see docs/design/handover.md), and a
    /// guest of a file arrives paused.
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
    fn library_limits_no_bandwidth_unless_the_vmm_asks_for_it() {
        assert_eq!(Parameters::default().max_bandwidth_bytes, 0);
        assert_eq!(sterna_forecast::precopy::Settings::default().max_bandwidth_bytes, 0);
    }

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
}
