//! Why a migration with Cloud Hypervisor fails.

use std::io;

use sterna_image::ImageError;
use sterna_store::StoreError;

use super::machine_error::MachineError;
use super::message::{Command, MessageError};
use super::order::OrderError;
use crate::source::SourceError;

/// A machine could not be saved, or could not be restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The socket could not be bound.
    #[error("cannot listen at {path}: {source}; remove the file if no other process serves it")]
    Listen {
        /// The path of the socket.
        path: String,
        /// The error of the system.
        source: io::Error,
    },
    /// No VMM listens at the socket.
    #[error(
        "cannot connect to {path} within {seconds} s: {source}; start the VMM and `ch-remote receive-migration \
         receiver_url=unix:{path}`"
    )]
    Connect {
        /// The path of the socket.
        path: String,
        /// How long it was tried, in seconds.
        seconds: u64,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refused a request.
    #[error("{call}: {source}")]
    System {
        /// The system call, and its object.
        call: String,
        /// The error of the call.
        source: io::Error,
    },
    /// The VMM closed its connection.
    #[error("the VMM closed its connection {during}; its log has the reason")]
    Closed {
        /// The step in which it closed, as the end of a sentence.
        during: String,
    },
    /// A message breaks a rule.
    #[error("the VMM broke the protocol: {0}")]
    Message(#[from] MessageError),
    /// A message came in the wrong place.
    #[error("the VMM broke the protocol: {0}")]
    Order(#[from] OrderError),
    /// A message on the connection for pages that does not belong there.
    #[error("the VMM broke the protocol: it sent {} on the connection for page requests (specs/ch-offload.md §5)", .0.name())]
    NoPageRequest(Command),
    /// The texts of the machine break a rule.
    #[error("the machine cannot be used: {0}")]
    Machine(#[from] MachineError),
    /// The VMM did not send the memory of a slot.
    #[error("the VMM sent no memory for the slot {slot} of its configuration")]
    NoMemory {
        /// Number of the slot.
        slot: u32,
    },
    /// A descriptor is not the memory of its slot.
    #[error("the descriptor of memory slot {slot} {why} (specs/ch-offload.md §3)")]
    NotMemory {
        /// Number of the slot.
        slot: u32,
        /// The broken rule, as the rest of a sentence.
        why: String,
    },
    /// The VMM answered a request with an error.
    #[error("the VMM refused {}; its log has the reason", .command.name())]
    Refused {
        /// The request that this side had sent.
        command: Command,
    },
    /// The VMM gave up.
    #[error("the VMM abandoned the migration; its log has the reason")]
    Abandoned,
    /// The operator ended the session.
    #[error("the operator ended it")]
    Stopped,
    /// The VMM requests memory that the machine does not have.
    #[error("the VMM requested {bytes} bytes at the guest address {address:#x}, which are in no memory slot")]
    Outside {
        /// First guest-physical address of the request.
        address: u64,
        /// Length of the request in bytes.
        bytes: u64,
    },
    /// The page of a request could not be read.
    #[error(
        "the page at the guest address {address:#x} (byte {offset:#x} of the memory) cannot be read: {source}"
    )]
    Page {
        /// Guest-physical address of the page.
        address: u64,
        /// Place in the image's memory, in bytes.
        offset: u64,
        /// The error of the image, with the frame.
        source: Box<SourceError>,
    },
    /// The memory could not be read.
    #[error("the memory cannot be read: {0}")]
    Source(Box<SourceError>),
    /// The image could not be written.
    #[error(transparent)]
    Image(Box<ImageError>),
    /// The image could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The image is of another VMM.
    #[error("{name} is an image of {kind}, and not of Cloud Hypervisor: restore it with that VMM")]
    OtherKind {
        /// Name of the image, as the operator gave it.
        name: String,
        /// The VMM whose snapshot the image contains.
        kind: String,
    },
    /// The image lacks a file.
    #[error("{name} lacks {file}, which each image of Cloud Hypervisor has")]
    LacksFile {
        /// Name of the image, as the operator gave it.
        name: String,
        /// Name of the file inside the image.
        file: &'static str,
    },
    /// A file of the image is longer than the protocol allows.
    #[error("{name}: {file} has {bytes} bytes, but at most {most} can be sent")]
    LongFile {
        /// Name of the image, as the operator gave it.
        name: String,
        /// Name of the file inside the image.
        file: &'static str,
        /// Its length in bytes.
        bytes: u64,
        /// The limit in bytes.
        most: u64,
    },
    /// The kernel places pages that were not written.
    #[error(
        "a lazy restore is not safe here, because the kernel makes huge pages of memfds ({file} is {setting:?}), which \
         would show pages as zeros before they are there: restore without --lazy, or write advise to that file"
    )]
    HugeShmem {
        /// The file of the setting.
        file: String,
        /// The content of that file.
        setting: String,
    },
    /// The VMM closed the connection for pages before all of them were there.
    #[error(
        "the VMM closed its connection for page requests while {missing_pages} pages were missing; its log has the reason"
    )]
    Incomplete {
        /// Pages that were not placed.
        missing_pages: u64,
    },
}

impl From<SourceError> for SessionError {
    fn from(error: SourceError) -> Self {
        Self::Source(Box::new(error))
    }
}

impl From<ImageError> for SessionError {
    fn from(error: ImageError) -> Self {
        Self::Image(Box::new(error))
    }
}

impl SessionError {
    pub(super) fn system(call: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let call = call.into();
        move |source| Self::System { call, source }
    }
}
