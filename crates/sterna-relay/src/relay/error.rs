//! Failures of a relay.

use std::path::PathBuf;

use sterna_transport::TransportError;

use crate::frame::{FrameError, RouteName, Status};
use crate::session::SessionError;

/// Why a relay, or one of its carriers, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// A socket.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The greeting of a carrier broke a rule.
    #[error("{peer}: {source}")]
    Greeting {
        /// The other end of the carrier.
        peer: String,
        /// The message and the rule.
        source: FrameError,
    },
    /// The other relay did not prove that it has the key.
    #[error(
        "{peer}: the other relay has not proved the session's secret: give both relays the same secret file (--secret) \
         and, if one of them uses certificates, both (--tls-dir)"
    )]
    Unproved {
        /// The other end of the carrier.
        peer: String,
    },
    /// The other relay closed the connection without an answer.
    #[error(
        "{peer}: the other relay closed the connection without an answer: it refuses this side's secret, certificate or \
         attempt; its log names the reason"
    )]
    Silent {
        /// The other end of the carrier.
        peer: String,
    },
    /// The other relay does not accept the session.
    #[error("{peer}: route {route}: {}", advice(*.status))]
    Refused {
        /// The other end of the carrier.
        peer: String,
        /// The route.
        route: RouteName,
        /// The answer.
        status: Status,
    },
    /// A peer with proof broke the protocol.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Neither certificates nor a secret, and an address that other hosts can reach.
    #[error(
        "{address} can be reached from other hosts, and the relay has neither certificates nor a secret: give --tls-dir \
         or --secret, use a loopback address or a Unix socket, or accept the risk with --insecure"
    )]
    Open {
        /// The address.
        address: String,
    },
    /// The directory for routes cannot be read.
    #[error("--route-dir {}: {source}: give a directory that exists", path.display())]
    RouteDirectory {
        /// The directory.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The operating system refused a thread or random bytes.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The error of the operating system.
        source: std::io::Error,
    },
}

fn advice(status: Status) -> &'static str {
    match status {
        Status::Welcome => "it accepts the session",
        Status::UnknownRoute => {
            "the other relay has no such route: add it there (--route NAME=ADDRESS), or correct the name in --to"
        }
        Status::UnknownSession => {
            "the other relay does not know the session: its process was started again, or it has forgotten the session"
        }
        Status::OverNever => {
            "the other relay has ended the session before it passed on the end of the stream"
        }
        Status::OverPassed => {
            "the other relay has ended the session after it passed on the end of the stream: the guest may run there"
        }
        Status::RouteBusy => {
            "another session uses the route: wait until its migration ends, or use another route for this guest"
        }
        Status::TooManySessions => "the other relay has as many sessions as it may have: wait until one ends",
        Status::OtherVersion => {
            "the other relay has another version: use the same version of Sterna on both hosts"
        }
    }
}
