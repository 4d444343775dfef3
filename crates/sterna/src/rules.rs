//! Rules: which features of a migration exclude or need each other.
//!
//! [`RULES`] is the only list of these rules. The source, the destination, a standby and a recovery check it before
//! they claim the guest or open a connection. docs/combinations.md lists the rules; a test compares the page with
//! this table.

mod compiled;

use sterna_transport::Address;

use crate::params::{Capabilities, Compression, MigrationMode, NonConvergence, Parameters};
use crate::settings_error::SettingsError;

/// One feature of a migration: a transport, a capability or a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum Feature {
    /// A file as the peer (`file:`), or a pipe whose reader stores the stream.
    File,
    /// A file that contains a stream (`file:` without `mapped-ram`).
    StreamFile,
    /// RDMA as the transport (`rdma:`).
    Rdma,
    /// A Unix socket as the transport (`unix:`).
    UnixSocket,
    /// A connected descriptor that was passed to this process (`fd:`, or through the API). A listening one is not.
    Descriptor,
    /// A connected socket that was passed to this process: a descriptor that is no pipe.
    ConnectedSocket,
    /// Separate channels for pages (`multifd`).
    Multifd,
    /// Compressed pages on multifd channels (`multifd-compression`).
    Compression,
    /// Fixed places of pages in a file (`mapped-ram`).
    MappedRam,
    /// TLS, requested by credentials.
    Tls,
    /// Answers from the destination (`return-path`).
    ReturnPath,
    /// Acknowledgement of the switchover by the destination's devices (`switchover-ack`).
    SwitchoverAck,
    /// Throttling of all vCPUs (`auto-converge`).
    AutoConverge,
    /// A limit for each vCPU's dirty rate (`dirty-limit`).
    DirtyLimit,
    /// Pages sent as differences (`xbzrle`).
    Xbzrle,
    /// A move to another process of the same host (`mode` `cpr-transfer`).
    SameHost,
    /// Protection by a standby with checkpoints (`x-colo`).
    Protection,
    /// An image instead of a VM, in memory or in a file.
    Image,
    /// An image in a file instead of a VM.
    StoredImage,
    /// Postcopy (`postcopy-ram`).
    Postcopy,
    /// A separate channel for requested pages (`postcopy-preempt`).
    Preempt,
    /// `postcopy-preempt` over a descriptor.
    PreemptOverDescriptor,
    /// Measurement of waits for pages (`postcopy-blocktime`).
    Blocktime,
    /// Postcopy for a guest that does not converge (`x-sterna-non-convergence` `postcopy`).
    PostcopyAtStandstill,
    /// Postcopy after a given time (`x-sterna-postcopy-after`).
    PostcopyAfter,
    /// Postcopy after a given number of rounds (`x-sterna-postcopy-after-rounds`).
    PostcopyAfterRounds,
    /// A new connection for a paused postcopy.
    Recovery,
    /// A new connection for a lost one (`x-sterna-reconnect-window`).
    Reconnect,
    /// A save while the guest runs ([`LiveSave`](crate::LiveSave)).
    LiveSave,
}

impl Feature {
    /// The feature's name in docs/combinations.md.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::StreamFile => "file with a stream",
            Self::Rdma => "RDMA",
            Self::UnixSocket => "Unix socket",
            Self::Descriptor => "descriptor",
            Self::ConnectedSocket => "connected socket",
            Self::Multifd => "multifd",
            Self::Compression => "zstd, zlib",
            Self::MappedRam => "mapped-ram",
            Self::Tls => "TLS",
            Self::ReturnPath => "return path",
            Self::SwitchoverAck => "switchover-ack",
            Self::AutoConverge => "auto-converge",
            Self::DirtyLimit => "dirty-limit",
            Self::Xbzrle => "xbzrle",
            Self::SameHost => "same-host",
            Self::Protection => "protection",
            Self::Image => "image",
            Self::StoredImage => "image in a file",
            Self::Postcopy => "postcopy",
            Self::Preempt => "preempt",
            Self::PreemptOverDescriptor => "preempt over a descriptor",
            Self::Blocktime => "postcopy-blocktime",
            Self::PostcopyAtStandstill => "postcopy at a standstill",
            Self::PostcopyAfter => "postcopy after a time",
            Self::PostcopyAfterRounds => "postcopy after rounds",
            Self::Recovery => "recovery",
            Self::Reconnect => "reconnect",
            Self::LiveSave => "live save",
        }
    }
}

/// A set of features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(u32);

impl Features {
    /// The features that an address and settings request.
    pub fn of(address: &Address, params: &Parameters, capabilities: &Capabilities) -> Self {
        let of_address = Self::of_address(address);
        let (is_file, is_descriptor) = (of_address.has(Feature::File), of_address.has(Feature::Descriptor));
        let is_compressed = capabilities.multifd && params.multifd_compression != Compression::None;
        [
            (Feature::StreamFile, is_file && !capabilities.mapped_ram),
            (Feature::Multifd, capabilities.multifd),
            (Feature::Compression, is_compressed),
            (Feature::MappedRam, capabilities.mapped_ram),
            (Feature::Tls, params.tls.is_some()),
            (Feature::ReturnPath, capabilities.return_path),
            (Feature::SwitchoverAck, capabilities.switchover_ack),
            (Feature::AutoConverge, capabilities.auto_converge),
            (Feature::DirtyLimit, capabilities.dirty_limit),
            (Feature::Xbzrle, capabilities.xbzrle),
            (Feature::SameHost, params.mode == MigrationMode::CprTransfer),
            (Feature::Postcopy, capabilities.postcopy_ram),
            (Feature::Preempt, capabilities.postcopy_preempt),
            (Feature::PreemptOverDescriptor, capabilities.postcopy_preempt && is_descriptor),
            (Feature::Blocktime, capabilities.postcopy_blocktime),
            (Feature::Reconnect, !params.reconnect_window.is_zero()),
            (Feature::PostcopyAtStandstill, params.non_convergence == NonConvergence::Postcopy),
            (Feature::PostcopyAfter, !params.postcopy_after.is_zero()),
            (Feature::PostcopyAfterRounds, params.postcopy_after_rounds > 0),
        ]
        .into_iter()
        .fold(of_address, |features, (feature, is_on)| features.with(feature, is_on))
    }

    /// The features that an address alone requests.
    pub fn of_address(address: &Address) -> Self {
        Self::default()
            .with(Feature::File, matches!(address, Address::File { .. }) || address.is_pipe())
            .with(Feature::Rdma, matches!(address, Address::Rdma { .. }))
            .with(Feature::UnixSocket, matches!(address, Address::Unix(_)))
            .with(Feature::Descriptor, address.is_descriptor())
            .with(Feature::ConnectedSocket, address.is_descriptor() && !address.is_pipe())
    }

    /// Adds `feature` to the set if `is_on`.
    #[must_use]
    pub fn with(self, feature: Feature, is_on: bool) -> Self {
        Self(self.0 | u32::from(is_on) << feature as u32)
    }

    /// Whether `feature` is in the set.
    pub fn has(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u32 != 0
    }
}

/// The side that checks a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The side that the guest leaves.
    Source,
    /// The side that the guest reaches.
    Destination,
}

/// The relation that a rule states between two features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// The two features together are refused.
    Excludes,
    /// The first feature without the second is refused.
    Needs,
}

/// One rule: two features, their relation, and the refusal.
#[derive(Debug)]
pub struct Rule {
    /// The first feature.
    pub one: Feature,
    /// The relation between the two features.
    pub relation: Relation,
    /// The second feature.
    pub other: Feature,
    /// Whether the destination checks the rule, too; otherwise only the source does.
    pub binds_destination: bool,
    /// The error that a broken rule returns.
    pub why: SettingsError,
}

impl Rule {
    /// Whether `features` break this rule on `side`.
    pub fn is_broken(&self, features: Features, side: Side) -> bool {
        let other = match self.relation {
            Relation::Excludes => features.has(self.other),
            Relation::Needs => !features.has(self.other),
        };
        (side == Side::Source || self.binds_destination) && features.has(self.one) && other
    }
}

/// Checks a set of features against all rules.
///
/// # Errors
/// [`SettingsError::NotCompiled`] for a feature that this build of the engine lacks. Otherwise the error of the
/// first broken rule, in the order of [`RULES`].
pub fn check(features: Features, side: Side) -> Result<(), SettingsError> {
    compiled::check(features, compiled::NEEDS)?;
    match RULES.iter().find(|rule| rule.is_broken(features, side)) {
        Some(rule) => Err(rule.why.clone()),
        None => Ok(()),
    }
}

/// A rule that both sides check.
const fn both(one: Feature, relation: Relation, other: Feature, why: SettingsError) -> Rule {
    Rule { one, relation, other, binds_destination: true, why }
}

/// A rule that only the source checks.
const fn source(one: Feature, relation: Relation, other: Feature, why: SettingsError) -> Rule {
    Rule { one, relation, other, binds_destination: false, why }
}

/// A rule of the source: excludes a feature from a move within one host (`cpr-transfer`).
const fn same_host(other: Feature, what: &'static str) -> Rule {
    source(Feature::SameHost, Excludes, other, SettingsError::CprExcludes { what })
}

/// A rule of both sides: excludes a feature from postcopy.
const fn postcopy(other: Feature, what: &'static str) -> Rule {
    both(Feature::Postcopy, Excludes, other, SettingsError::PostcopyExcludes { what })
}

/// A rule of both sides: a feature that needs postcopy.
const fn needs_postcopy(one: Feature, what: &'static str) -> Rule {
    both(one, Needs, Feature::Postcopy, SettingsError::NeedsPostcopy { what })
}

/// A rule of both sides: a transport whose connections cannot be replaced.
const fn no_reconnection(one: Feature, over: &'static str) -> Rule {
    both(one, Excludes, Feature::Reconnect, SettingsError::CannotReconnect { over })
}

/// A rule of the source: excludes a feature from a live save.
const fn live_save(other: Feature, what: &'static str) -> Rule {
    source(Feature::LiveSave, Excludes, other, SettingsError::LiveSaveExcludes { what })
}

use Relation::{Excludes, Needs};

/// All rules, in the order in which [`check`] tests them.
pub static RULES: &[Rule] = &[
    live_save(Feature::Rdma, "rdma:"),
    live_save(Feature::Multifd, "multifd"),
    live_save(Feature::MappedRam, "mapped_ram"),
    live_save(Feature::Postcopy, "postcopy_ram"),
    live_save(Feature::SameHost, "mode cpr-transfer"),
    live_save(Feature::Reconnect, "reconnect_window"),
    both(Feature::StreamFile, Excludes, Feature::Multifd, SettingsError::FileIsOneChannel),
    both(Feature::File, Excludes, Feature::Tls, SettingsError::FileHasNoTls),
    source(Feature::File, Excludes, Feature::SwitchoverAck, SettingsError::FileDoesNotAnswer),
    both(Feature::Rdma, Excludes, Feature::Tls, SettingsError::RdmaHasNoTls),
    both(Feature::Rdma, Excludes, Feature::Compression, SettingsError::RdmaIsUncompressed),
    both(Feature::MappedRam, Needs, Feature::File, SettingsError::MappedNeedsFile),
    both(Feature::MappedRam, Excludes, Feature::Descriptor, SettingsError::MappedNeedsFile),
    both(Feature::MappedRam, Excludes, Feature::Compression, SettingsError::MappedIsUncompressed),
    both(Feature::Descriptor, Excludes, Feature::Multifd, SettingsError::DescriptorIsOneChannel),
    no_reconnection(Feature::ConnectedSocket, "a connected socket"),
    no_reconnection(Feature::Rdma, "rdma:"),
    source(Feature::SameHost, Needs, Feature::UnixSocket, SettingsError::CprNeedsUnix),
    // TLS protects nothing here: the destination is on this host, and a process that can read the socket can read its
    // memory.
    same_host(Feature::Tls, "tls"),
    source(
        Feature::SameHost,
        Needs,
        Feature::ReturnPath,
        SettingsError::CprExcludes { what: "return_path off" },
    ),
    same_host(Feature::Xbzrle, "xbzrle"),
    same_host(Feature::AutoConverge, "auto_converge"),
    same_host(Feature::DirtyLimit, "dirty_limit"),
    same_host(Feature::Compression, "multifd_compression"),
    same_host(Feature::Protection, "a standby (x-colo)"),
    source(Feature::AutoConverge, Excludes, Feature::DirtyLimit, SettingsError::TwoThrottles),
    both(Feature::Protection, Excludes, Feature::Rdma, SettingsError::NoStandbyThere),
    both(Feature::Protection, Excludes, Feature::File, SettingsError::NoStandbyThere),
    source(Feature::Protection, Needs, Feature::ReturnPath, SettingsError::StandbyNeedsReturnPath),
    source(Feature::SwitchoverAck, Needs, Feature::ReturnPath, SettingsError::AckNeedsReturnPath),
    source(Feature::Xbzrle, Needs, Feature::Protection, SettingsError::DeltaNeedsStandby),
    both(Feature::Image, Excludes, Feature::File, SettingsError::ImageIntoFile),
    both(Feature::StoredImage, Excludes, Feature::Rdma, SettingsError::ImageOverRdma),
    source(Feature::Image, Excludes, Feature::SameHost, SettingsError::CprOfImage),
    needs_postcopy(Feature::Preempt, "postcopy_preempt"),
    needs_postcopy(Feature::Blocktime, "postcopy_blocktime"),
    source(
        Feature::PostcopyAtStandstill,
        Needs,
        Feature::Postcopy,
        SettingsError::NeedsPostcopy { what: "non_convergence postcopy" },
    ),
    source(
        Feature::PostcopyAfter,
        Needs,
        Feature::Postcopy,
        SettingsError::NeedsPostcopy { what: "postcopy_after" },
    ),
    source(
        Feature::PostcopyAfterRounds,
        Needs,
        Feature::Postcopy,
        SettingsError::NeedsPostcopy { what: "postcopy_after_rounds" },
    ),
    both(Feature::Recovery, Excludes, Feature::File, SettingsError::NoWayToRecover),
    both(Feature::Recovery, Excludes, Feature::Rdma, SettingsError::NoWayToRecover),
    both(Feature::Recovery, Excludes, Feature::PreemptOverDescriptor, SettingsError::NoWayToRecover),
    postcopy(Feature::File, "a file"),
    postcopy(Feature::Rdma, "rdma:"),
    both(
        Feature::Postcopy,
        Excludes,
        Feature::PreemptOverDescriptor,
        SettingsError::PostcopyExcludes { what: "postcopy_preempt over a descriptor" },
    ),
    source(
        Feature::Postcopy,
        Excludes,
        Feature::SameHost,
        SettingsError::PostcopyExcludes { what: "mode cpr-transfer" },
    ),
    source(
        Feature::Postcopy,
        Needs,
        Feature::ReturnPath,
        SettingsError::PostcopyExcludes { what: "return_path off" },
    ),
    source(
        Feature::Postcopy,
        Excludes,
        Feature::Image,
        SettingsError::PostcopyExcludes { what: "an image or a standby" },
    ),
    source(
        Feature::Postcopy,
        Excludes,
        Feature::Protection,
        SettingsError::PostcopyExcludes { what: "an image or a standby" },
    ),
];
