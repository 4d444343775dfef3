//! The places at which a migration is disturbed. At each one, both sides are in a known state.

/// The side whose code passes a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The source's engine.
    Source,
    /// The destination's engine.
    Destination,
    /// The network between them.
    Network,
}

macro_rules! stops {
    ($($name:ident, $label:literal, $side:ident, $source:literal, $destination:literal, $weight:literal;)*) => {
        /// A place at which a migration waits until it has been disturbed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the table says what they are")]
        pub enum Stop { $($name),* }

        impl Stop {
            /// Every stop, in the order in which a migration passes them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Name of the stop in tables and on the child's command line.
            pub fn label(self) -> &'static str {
                match self { $(Self::$name => $label),* }
            }
            /// The side whose code passes the stop.
            pub fn side(self) -> Side {
                match self { $(Self::$name => Side::$side),* }
            }
            /// The states of both handover machines at this stop. `-`: that side has no migration yet.
            pub fn states(self) -> (&'static str, &'static str) {
                match self { $(Self::$name => ($source, $destination)),* }
            }
            /// Relative frequency of the stop. A state that has one stop gets 50 of 1,000.
            pub fn weight(self) -> u32 {
                match self { $(Self::$name => $weight),* }
            }
        }
    };
}

// Name, label, side that passes it, source's state, destination's state, weight.
stops! {
    Setup, "setup", Source, "Setup", "-", 18;
    Arrival, "arrival", Destination, "Setup", "Setup", 50;
    Identifying, "identifying", Network, "Identifying", "Active", 50;
    Comparing, "comparing", Destination, "Comparing", "Active", 50;
    FirstPass, "pass-1", Source, "Active", "Active", 18;
    Lane, "in-a-lane", Source, "Active", "Active", 18;
    LaterPass, "pass-3", Source, "Active", "Active", 18;
    Stopping, "stopping", Source, "Stopping", "Active", 17;
    Quiescing, "quiescing", Source, "Stopping", "Active", 16;
    StepStop, "step-stop", Source, "Stopping", "Active", 17;
    PreSwitchover, "pre-switchover", Source, "PreSwitchover", "Active", 50;
    Releasing, "releasing", Source, "Releasing", "Active", 46;
    StepRelease, "step-release", Source, "Releasing", "Active", 10;
    LastSync, "last-sync", Source, "Switchover", "Active", 9;
    ReadingStream, "reading-stream", Source, "Switchover", "Active", 9;
    LastPages, "last-pages", Source, "Switchover", "Active", 9;
    LoadingStream, "loading-stream", Destination, "Switchover", "Active", 9;
    StepStreams, "step-streams", Source, "Switchover", "Active", 9;
    Devices, "devices", Source, "Switchover", "Active", 9;
    StepDevices, "step-devices", Source, "Switchover", "Active", 9;
    LoadingDevices, "loading-devices", Destination, "Switchover", "Active", 9;
    Completing, "completing", Destination, "Preparing", "Completing", 50;
    Acquiring, "acquiring", Destination, "Preparing", "Preparing", 50;
    BeforeCommit, "before-commit", Destination, "Preparing", "Prepared", 50;
    AfterCommit, "after-commit", Source, "Committing", "Prepared", 30;
    StepPrepare, "step-prepare", Source, "Committing", "Prepared", 20;
    AwaitingAck, "awaiting-ack", Destination, "AwaitingAck", "Committed", 50;
    BeforeShut, "before-shut", Destination, "AwaitingAck", "Committed", 50;
    AfterShut, "after-shut", Source, "Completed", "Running", 30;
    StepStart, "step-start", Source, "Completed", "Running", 20;
    Undecided, "undecided", Source, "Undecided", "Running", 50;
    Cancelling, "cancelling", Source, "Cancelling", "Failing", 50;
    Failing, "failing", Source, "Failing", "Failing", 50;
    GivingBack, "giving-back", Destination, "Failing", "Failing", 50;
}

impl Stop {
    /// Finds the stop with this label.
    pub fn of_label(label: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|stop| stop.label() == label)
    }

    /// An earlier stop and its blow, without which the migration does not reach this stop.
    pub fn prelude(self) -> Option<(Self, Prelude)> {
        match self {
            Self::Undecided => Some((Self::AwaitingAck, Prelude::Outage)),
            Self::Cancelling => Some((Self::Devices, Prelude::Cancel)),
            Self::Failing => Some((Self::Devices, Prelude::Cut)),
            Self::GivingBack => Some((Self::BeforeCommit, Prelude::Cut)),
            _ => None,
        }
    }

    /// Whether only guests that have devices with large state pass it.
    pub fn needs_banks(self) -> bool {
        matches!(self, Self::Quiescing | Self::ReadingStream | Self::LoadingStream | Self::StepStreams)
    }

    /// Whether the source has committed when it is reached. From here on, cancel is refused.
    pub fn is_committed(self) -> bool {
        (Self::AfterCommit..=Self::Undecided).contains(&self)
    }

    /// Whether the destination has read EOF when it is reached. The guest is then the destination's.
    pub fn is_handed_over(self) -> bool {
        (Self::AwaitingAck..=Self::Undecided).contains(&self)
    }

    /// Whether the source has received the acknowledgement when it is reached.
    pub fn is_acknowledged(self) -> bool {
        matches!(self, Self::AfterShut | Self::StepStart)
    }

    /// Whether the migration is being undone.
    pub fn is_undoing(self) -> bool {
        self >= Self::Cancelling
    }
}

/// The blow that makes a migration reach the following stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prelude {
    /// The source is cancelled.
    Cancel,
    /// Every connection is cut; new ones are possible.
    Cut,
    /// Every connection is cut, and the network stays down.
    Outage,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_names_its_stop() {
        for &stop in Stop::ALL {
            assert_eq!(Stop::of_label(stop.label()), Some(stop));
        }
    }

    #[test]
    fn weights_of_the_table_make_a_thousand() {
        assert_eq!(Stop::ALL.iter().map(|stop| stop.weight()).sum::<u32>(), 1000);
    }

    #[test]
    fn every_state_is_reached_at_least_fifty_times_in_a_thousand() {
        let states = |pick: fn(Stop) -> &'static str| {
            let mut counts = std::collections::BTreeMap::<_, u32>::new();
            Stop::ALL.iter().for_each(|&stop| *counts.entry(pick(stop)).or_default() += stop.weight());
            counts.remove("-");
            counts
        };
        for counts in [states(|stop| stop.states().0), states(|stop| stop.states().1)] {
            assert!(counts.values().all(|&count| count >= 50), "{counts:?}");
        }
    }
}
