//! Deliberate faults of a statebank.

use std::fmt;
use std::str::FromStr;

use crate::vfio::MigState;

/// The kind of a deliberate fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The process ends, or the server closes the connection.
    Die,
    /// The request gets no answer.
    Hang,
    /// The device refuses one request, and executes later ones.
    Fail,
}

/// A fault that occurs once, on the way into a state or at a byte. The byte is read or written in that state.
/// The text form is `KIND@STATE` or `KIND@STATE:BYTE`, such as `hang@stop-copy:1048576`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// State in which the fault occurs.
    pub state: MigState,
    /// Byte at which the fault occurs, counted from the entry into the state. `None`: it occurs on the way
    /// into the state.
    pub byte: Option<u64>,
}

impl Fault {
    /// A fault on the way into `state`.
    pub fn entering(kind: FaultKind, state: MigState) -> Self {
        Self { kind, state, byte: None }
    }

    /// A fault at byte `byte` of `state`.
    pub fn at_byte(kind: FaultKind, state: MigState, byte: u64) -> Self {
        Self { kind, state, byte: Some(byte) }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            FaultKind::Die => "die",
            FaultKind::Hang => "hang",
            FaultKind::Fail => "fail",
        };
        write!(f, "{kind}@{}", text(self.state))?;
        self.byte.map_or(Ok(()), |byte| write!(f, ":{byte}"))
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(from: &str) -> Result<Self, String> {
        let wrong = || format!("{from:?} is not a fault; write KIND@STATE or KIND@STATE:BYTE");
        let (kind, rest) = from.split_once('@').ok_or_else(wrong)?;
        let kind = match kind {
            "die" => FaultKind::Die,
            "hang" => FaultKind::Hang,
            "fail" => FaultKind::Fail,
            _ => return Err(format!("{kind:?} is not a kind of fault; use die, hang or fail")),
        };
        let (state, byte) = match rest.split_once(':') {
            None => (rest, None),
            Some((state, byte)) => (state, Some(byte.parse().map_err(|_| wrong())?)),
        };
        let found = MigState::ALL.into_iter().find(|known| text(*known) == state);
        let state = found.filter(|state| *state != MigState::Error).ok_or_else(|| {
            let known: Vec<_> = MigState::ALL.into_iter().skip(1).map(text).collect();
            format!("{state:?} is not a state; states are {}", known.join(", "))
        })?;
        Ok(Self { kind, state, byte })
    }
}

fn text(state: MigState) -> String {
    state.name().to_lowercase().replace('_', "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_reads_what_it_writes() {
        for kind in [FaultKind::Die, FaultKind::Hang, FaultKind::Fail] {
            for state in MigState::ALL.into_iter().skip(1) {
                for fault in [Fault::entering(kind, state), Fault::at_byte(kind, state, 77)] {
                    assert_eq!(fault.to_string().parse(), Ok(fault));
                }
            }
        }
        assert_eq!("hang@stop-copy:1".parse(), Ok(Fault::at_byte(FaultKind::Hang, MigState::StopCopy, 1)));
    }

    #[test]
    fn fault_that_is_none_is_refused() {
        for text in ["", "die", "die@", "burn@stop", "die@error", "die@stop:", "die@stop:x", "@stop"] {
            assert!(text.parse::<Fault>().is_err(), "{text:?}");
        }
    }
}
