//! The end of a connection.

use std::fmt::{self, Debug};

/// A change of a connection or its adapter, other than a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The connection is established.
    Established,
    /// This side or the peer disconnected, or the peer's process ended.
    Disconnected,
    /// The port lost its link. The connection survives until its retries are used up.
    PortDown,
    /// The link of the port is restored.
    PortUp,
    /// The device was removed.
    DeviceRemoved,
    /// The queue pair or a completion queue failed; the text is the adapter's report.
    Fatal(String),
}

impl Event {
    /// Whether the event makes the connection unusable.
    pub fn is_end(&self) -> bool {
        matches!(self, Event::Disconnected | Event::DeviceRemoved | Event::Fatal(_))
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Established => f.write_str("the connection is established"),
            Event::Disconnected => f.write_str("the connection was closed"),
            Event::PortDown => f.write_str("the port lost its link"),
            Event::PortUp => f.write_str("the port has a link"),
            Event::DeviceRemoved => f.write_str("the device was removed"),
            Event::Fatal(what) => write!(f, "the adapter reported: {what}"),
        }
    }
}
