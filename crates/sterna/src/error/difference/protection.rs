//! A primary and its standby.

use std::net::IpAddr;

use crate::error::lower::Cause;

/// Why a primary and this side cannot protect a guest together.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ProtectionDifference {
    /// A primary's contact at a destination that is no standby.
    #[error(
        "{peer}: a primary wants to be in contact with its standby, and none is here: use `sterna standby`"
    )]
    NoStandby {
        /// Address of the primary.
        peer: String,
    },
    /// A primary's disk at a destination that is no standby.
    #[error(
        "{peer}: a primary wants to write to its guest's disk at a standby, and none is here: use `sterna standby`"
    )]
    NoStandbyForDisk {
        /// Address of the primary.
        peer: String,
    },
    /// A primary's disk at a standby without disks.
    #[error("{peer}: the primary wants to write to a disk, and this standby has none: name it with `--disk`")]
    NoDisks {
        /// Address of the primary.
        peer: String,
    },
    /// A primary's disk that this standby lacks.
    #[error("{peer}: {disk}")]
    UnknownDisk {
        /// Address of the primary.
        peer: String,
        /// The disk, and those that this standby has.
        disk: UnknownDisk,
    },
    /// A disk of this standby that the primary does not write to.
    #[error(
        "this standby has the disk {disk}, and the primary does not write to it: name it there with `--disk`, or leave it out \
         here"
    )]
    UnusedDisk {
        /// Name of the disk.
        disk: String,
    },
    /// A Sterna that migrates its guest to a standby.
    #[error(
        "a Sterna source hands its guest over and sends no checkpoints: migrate it to a destination instead of a standby"
    )]
    HandsOver,
    /// A primary without the return path that carries the standby's promises.
    #[error(
        "without a return path a standby cannot promise anything: switch return-path and x-colo on at the primary"
    )]
    NoReturnPath,
    /// A primary's contact at a standby that takes checkpoints alone.
    #[error("{peer}: a primary opens a contact, but this standby takes only checkpoints")]
    NoContactHere {
        /// Address of the primary.
        peer: String,
    },
    /// A primary's contact after its guest.
    #[error(
        "{peer}: a primary opened its contact after the guest began to arrive: the contact must be opened first, so protect \
         the guest again"
    )]
    LateContact {
        /// Address of the primary.
        peer: String,
    },
    /// A guest without its primary's contact.
    #[error(
        "a guest arrived without its primary's contact, which must be opened first: protect it with `sterna protect`, or let this standby \
         do without an arbiter, a fence and a secret"
    )]
    NoContact,
    /// A guest from another host than its primary's contact, without TLS.
    #[error(
        "{peer}: a guest comes from {guest}, and its primary's contact from {contact}: without TLS both come from one host"
    )]
    OtherHost {
        /// Address of the connection that brings the guest.
        peer: String,
        /// Its host.
        guest: IpAddr,
        /// Host of the contact.
        contact: IpAddr,
    },
    /// The sides ask different arbiters.
    #[error("{peer}: {why}")]
    Arbiters {
        /// Address of the primary.
        peer: String,
        /// The arbiters' names, and why they differ.
        #[source]
        why: Cause,
    },
    /// The run state that the primary sent has another length.
    #[error("globalstate has {came} bytes, not {due}")]
    GlobalState {
        /// Length that came.
        came: usize,
        /// Length of this version's section.
        due: usize,
    },
    /// A device sends its state in parts, which checkpoints do not contain.
    #[error(
        "{device:?} is sent in parts, of which a checkpoint brings none: take the device (or its migration capability) off the \
         primary"
    )]
    SentInParts {
        /// Name of the device.
        device: String,
    },
    /// Checkpoints' summaries of another version.
    #[error(
        "section {section:?} has version {version}, only {known} is known: run the same Sterna on both sides"
    )]
    SummaryVersion {
        /// Name of the section.
        section: &'static str,
        /// The primary's version.
        version: u32,
        /// This side's version.
        known: u32,
    },
}

/// A disk that a standby lacks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the standby has no disk {name:?}, but {}: name it there with `--disk`", known.join(", "))]
#[non_exhaustive]
pub struct UnknownDisk {
    /// Name that the primary wants.
    pub name: String,
    /// Names of the standby's disks.
    pub known: Vec<String>,
}

impl UnknownDisk {
    /// The disk `name`, which is not among `known`.
    pub fn new(name: impl Into<String>, known: Vec<String>) -> Self {
        Self { name: name.into(), known }
    }
}
