//! Elements of the stream that come at a wrong time.

use std::fmt;

use sterna_wire::main::Command;

/// An element that the source sent at a wrong time, or for a wrong object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Untimely {
    /// An element that is forbidden in this state of the handover.
    #[error("an element came at a forbidden time")]
    Element,
    /// Bytes after the end of a stream that no checkpoint follows.
    #[error("bytes came after the end of the stream")]
    AfterEnd,
    /// A command that is no keep-alive message, while the source decides.
    #[error("{0:?} came between *prepare* and EOF")]
    AfterPrepare(Box<Command>),
    /// The end of the stream without all of RAM.
    #[error("the stream ended before RAM's END section")]
    EndBeforeRam,
    /// Devices' streams begin a second time in one session.
    #[error("devices' streams begin again where none was lost (specs/extension.md §8)")]
    StreamsAgain,
    /// The source announces to reconnect, and this side has not offered to wait.
    #[error("it announced to come back after a lost connection, and this side has not offered to wait")]
    Comeback,
    /// A command of postcopy out of order.
    #[error("the source sent {} at a wrong time: it {} ({})", .0, .0.rule(), .0.paragraph())]
    Postcopy(UntimelyCommand),
    /// A command of postcopy about a block that does not exist.
    #[error("the source sent {command} for block {block:?}, and there is none")]
    UnknownBlock {
        /// The command.
        command: UntimelyCommand,
        /// Name of the block.
        block: String,
    },
    /// A discarded range outside the block, or with parts of pages.
    #[error(
        "the source drops {length:#x} bytes at {start:#x} of block {block:?}, which has {block_bytes:#x} bytes in pages of \
         {page_bytes:#x} (specs/postcopy.md §2)"
    )]
    Discard {
        /// Name of the block.
        block: String,
        /// First byte.
        start: u64,
        /// Number of bytes.
        length: u64,
        /// Length of the block in bytes.
        block_bytes: u64,
        /// Page size of the block in bytes.
        page_bytes: u64,
    },
    /// Something else than pages while the guest runs.
    #[error(
        "after LISTEN it sent something else than whole pages, and one MULTIFD_FLUSH after those of its multifd channels if \
         they bring any (specs/postcopy.md §3, specs/extension.md §12.5)"
    )]
    AfterListen,
    /// A question about the guest's start before the command to start it.
    #[error("the source asked whether the guest runs, before RUN")]
    StartQuestion,
}

/// A command of postcopy that is permitted at certain times only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum UntimelyCommand {
    /// ADVISE.
    Advise,
    /// DISCARD.
    Discard,
    /// PACKAGED.
    Packaged,
    /// LISTEN.
    Listen,
    /// RUN.
    Run,
    /// The end of the stream.
    Eof,
    /// RECV_BITMAP, in a recovery.
    ReceivedBitmap,
    /// RESUME, in a recovery.
    Resume,
}

impl UntimelyCommand {
    fn rule(self) -> &'static str {
        match self {
            Self::Advise => "comes once, and before RAM",
            Self::Discard => "comes between ADVISE and LISTEN",
            Self::Packaged => "comes once, after ADVISE",
            Self::Listen => "comes once, first in the package",
            Self::Run => "comes once, after LISTEN",
            Self::Eof => "comes after POSTCOPY_RUN, or without LISTEN",
            Self::ReceivedBitmap | Self::Resume => {
                "comes first on a connection in place of one that was lost"
            }
        }
    }

    fn paragraph(self) -> &'static str {
        match self {
            Self::ReceivedBitmap | Self::Resume => "specs/postcopy.md §5",
            _ => "specs/postcopy.md §2",
        }
    }
}

impl fmt::Display for UntimelyCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Advise => "POSTCOPY_ADVISE",
            Self::Discard => "POSTCOPY_RAM_DISCARD",
            Self::Packaged => "PACKAGED",
            Self::Listen => "POSTCOPY_LISTEN",
            Self::Run => "POSTCOPY_RUN",
            Self::Eof => "EOF",
            Self::ReceivedBitmap => "RECV_BITMAP",
            Self::Resume => "POSTCOPY_RESUME",
        })
    }
}

/// What is wrong with the package of postcopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadPackage {
    /// It is longer than the state of this machine's devices.
    #[error("has {bytes} bytes, and this machine's devices have at most {most}")]
    TooLong {
        /// Length of the package.
        bytes: usize,
        /// The limit.
        most: u64,
    },
    /// Its last element is incomplete.
    #[error("ends inside an element")]
    Torn,
    /// Its first element is not LISTEN.
    #[error("begins with something else than POSTCOPY_LISTEN")]
    NoListen,
    /// It contains an element that does not belong into a package.
    #[error("has something else in it than FULL sections, PINGs and RUN: element {element}")]
    Element {
        /// Position of the element, from 1. Its content may be long.
        element: usize,
    },
    /// An element follows RUN.
    #[error("continues after POSTCOPY_RUN")]
    AfterRun,
}
