//! Whether a relay may close its VMM's connections when the relays cannot reach each other (`specs/relay.md §9`).
//!
//! Two plain QEMUs decide by their connections: a source that has written the end of its stream resumes its guest if
//! the connection closes before SHUT, and a destination that has read the end starts the guest. So the relay at the
//! source must not close once the end may have arrived, and the relay at the destination must not pass the end on
//! once it has promised that it never will.
//!
//! What the machines cannot prevent: the relay process at the source is killed between sending the end and
//! delivering SHUT. Its sockets close, and the source resumes its guest although the destination may have started it.

#[cfg(test)]
mod sim;

use crate::frame::Verdict;

/// What a relay does with its VMM's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Closing {
    /// It closes them. The source's guest continues or resumes, or in postcopy both VMMs pause.
    Close,
    /// It keeps them open, without limit: the destination may have the guest.
    Wait,
    /// The migration is over, or the connections are closed already.
    Nothing,
}

/// What the relay at the source learns about the other relay's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Heard {
    /// With proof: the end was not passed on and never will be.
    Never,
    /// With proof: the end was passed on, and the session is over there.
    Passed,
    /// The other relay does not know the session. It may have been started again.
    Unknown,
}

/// How far the stream is, for a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamState {
    /// The end was not sent, or not passed on.
    Open,
    /// The end was sent or passed on: the destination may have the guest.
    Committed,
    /// Postcopy: the source never resumes its guest, whatever breaks.
    Postcopy,
    /// The source has the answer of the destination.
    Answered,
    /// This side has closed its VMM's connections.
    Closed,
}

/// The relay at the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SourceKeeper {
    state: StreamState,
    #[cfg(test)]
    planted: Option<sim::PlantedRule>,
}

impl Default for SourceKeeper {
    fn default() -> Self {
        Self::new()
    }
}

impl SourceKeeper {
    /// A keeper of a migration whose stream has not ended.
    pub fn new() -> Self {
        Self {
            state: StreamState::Open,
            #[cfg(test)]
            planted: None,
        }
    }

    /// How far the stream is.
    pub fn state(&self) -> StreamState {
        self.state
    }

    /// Whether the end may be given to a carrier. The caller calls [`end_sent`](Self::end_sent) before it does.
    pub fn may_send_end(&self) -> bool {
        #[cfg(test)]
        if self.planted == Some(sim::PlantedRule::SendsAfterClosing) {
            return true;
        }
        self.state != StreamState::Closed
    }

    /// The end is given to a carrier: it may arrive.
    pub fn end_sent(&mut self) {
        #[cfg(test)]
        if self.planted == Some(sim::PlantedRule::ForgetsThatItSent) {
            return;
        }
        if self.state == StreamState::Open {
            self.state = StreamState::Committed;
        }
    }

    /// The bytes after it have shown that the end was none.
    pub fn refuted(&mut self) {
        if self.state == StreamState::Committed {
            self.state = StreamState::Open;
        }
    }

    /// The source can never resume its guest by itself: it is in postcopy.
    pub fn in_postcopy(&mut self) {
        if matches!(self.state, StreamState::Open | StreamState::Committed) {
            self.state = StreamState::Postcopy;
        }
    }

    /// The source's VMM has got the destination's answer, or the end of the return path.
    pub fn answered(&mut self) {
        if self.state != StreamState::Closed {
            self.state = StreamState::Answered;
        }
    }

    /// The reconnect window ended, the session broke, or the operator ends it.
    pub fn give_up(&mut self) -> Closing {
        match self.state {
            StreamState::Open | StreamState::Postcopy => self.close(),
            StreamState::Committed => Closing::Wait,
            StreamState::Answered | StreamState::Closed => Closing::Nothing,
        }
    }

    /// The other relay has said how its session ended.
    pub fn heard(&mut self, heard: Heard) -> Closing {
        #[cfg(test)]
        if heard == Heard::Unknown && self.planted == Some(sim::PlantedRule::TrustsUnknown) {
            return self.close();
        }
        match (self.state, heard) {
            (StreamState::Committed, Heard::Never) => self.close(),
            _ => self.give_up(),
        }
    }

    fn close(&mut self) -> Closing {
        self.state = StreamState::Closed;
        Closing::Close
    }
}

/// The relay at the destination.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DestinationKeeper {
    state: StreamState,
    #[cfg(test)]
    planted: Option<sim::PlantedRule>,
}

impl Default for DestinationKeeper {
    fn default() -> Self {
        Self::new()
    }
}

impl DestinationKeeper {
    /// A keeper of a migration whose stream has not ended.
    pub fn new() -> Self {
        Self {
            state: StreamState::Open,
            #[cfg(test)]
            planted: None,
        }
    }

    /// How far the stream is.
    pub fn state(&self) -> StreamState {
        self.state
    }

    /// Whether the end may be passed on. The caller calls [`end_passed`](Self::end_passed) before it does.
    pub fn may_pass_end(&self) -> bool {
        #[cfg(test)]
        if self.planted == Some(sim::PlantedRule::PassesAfterClosing) {
            return true;
        }
        self.state != StreamState::Closed
    }

    /// The end is passed on to the VMM, or may be.
    pub fn end_passed(&mut self) {
        if self.state == StreamState::Open {
            self.state = StreamState::Committed;
        }
    }

    /// The bytes after it have shown that the end was none.
    pub fn refuted(&mut self) {
        if self.state == StreamState::Committed {
            self.state = StreamState::Open;
        }
    }

    /// The guest runs here and pages follow. A recovered main channel begins in this state.
    pub fn in_postcopy(&mut self) {
        if matches!(self.state, StreamState::Open | StreamState::Committed) {
            self.state = StreamState::Postcopy;
        }
    }

    /// The other relay has everything that the VMM answered.
    pub fn answered(&mut self) {
        if self.state != StreamState::Closed {
            self.state = StreamState::Answered;
        }
    }

    /// The reconnect window ended, the session broke, or the operator ends it.
    pub fn give_up(&mut self) -> Closing {
        match self.state {
            StreamState::Open => {
                self.state = StreamState::Closed;
                Closing::Close
            }
            // The VMM pauses; what was passed on was passed on.
            StreamState::Postcopy => Closing::Close,
            StreamState::Committed => Closing::Wait,
            StreamState::Answered | StreamState::Closed => Closing::Nothing,
        }
    }

    /// What the other relay is told when the session is over.
    pub fn verdict(&self) -> Verdict {
        #[cfg(test)]
        if self.planted == Some(sim::PlantedRule::DeniesThatItPassed) {
            return Verdict::Never;
        }
        match self.state {
            StreamState::Open | StreamState::Closed => Verdict::Never,
            StreamState::Committed | StreamState::Postcopy | StreamState::Answered => Verdict::Passed,
        }
    }
}
