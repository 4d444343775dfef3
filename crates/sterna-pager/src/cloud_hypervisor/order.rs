//! The order of the messages that a VMM sends when its machine is saved (specs/ch-offload.md §3). Pure.

use super::message::{Command, MessageError, Request};
use super::rules::SLOTS_MOST;

/// How far a machine has been received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Begin,
    /// The memory slots come, and then the configuration.
    Started,
    Configured,
    /// Only the end is missing.
    StateReceived,
    Ended,
}

/// The messages that have arrived, and what may come next.
#[derive(Debug, Clone)]
pub struct Order {
    stage: Stage,
    slots: Vec<u32>,
}

/// A message came where the protocol has no place for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The message itself breaks a rule.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Another message must come first.
    #[error("it sent {} where {expected} must come (specs/ch-offload.md §3)", .command.name())]
    Unexpected {
        /// The command that came.
        command: Command,
        /// What may come, in words.
        expected: &'static str,
    },
    /// The memory is in the stream.
    #[error(
        "it sends its memory in the stream instead of as descriptors: start the migration with local=on, and the VM with \
         shared=on in --memory"
    )]
    NotLocal,
    /// A message came with a wrong number of descriptors.
    #[error(
        "its {} came with {count} descriptors, but {needed} is needed: all of them were closed (specs/ch-offload.md §3)",
        .command.name()
    )]
    Descriptors {
        /// The command.
        command: Command,
        /// Number of descriptors that came, including those that the kernel dropped.
        count: usize,
        /// Number of descriptors that the command has.
        needed: usize,
    },
    /// A memory slot came twice.
    #[error("it sent the memory slot {slot} twice")]
    SlotTwice {
        /// Number of the slot.
        slot: u32,
    },
    /// There are more memory slots than a machine has.
    #[error("it sent more than {SLOTS_MOST} memory slots")]
    Slots,
}

impl Default for Order {
    fn default() -> Self {
        Self::new()
    }
}

impl Order {
    /// Nothing has arrived.
    pub fn new() -> Self {
        Self { stage: Stage::Begin, slots: Vec::new() }
    }

    /// Checks whether this request may come now. Its payload may be read then.
    ///
    /// # Errors
    /// [`OrderError::Unexpected`], [`OrderError::NotLocal`], [`OrderError::Slots`].
    pub fn check(&self, request: &Request) -> Result<(), OrderError> {
        use Command::{Abandon, Complete, CompletePaused, Config, MemoryFd, Start, State};
        let command = request.command;
        let (is_right, expected) = match self.stage {
            Stage::Begin => (command == Start, "Start"),
            Stage::Started => (matches!(command, MemoryFd | Config), "MemoryFd or Config"),
            Stage::Configured => (command == State, "State"),
            Stage::StateReceived => {
                (matches!(command, Complete | CompletePaused), "Complete or CompletePaused")
            }
            Stage::Ended => (false, "the end of the connection"),
        };
        let may_abandon = command == Abandon && !matches!(self.stage, Stage::Begin | Stage::Ended);
        match command {
            _ if may_abandon => Ok(()),
            Command::Memory if self.stage != Stage::Begin => Err(OrderError::NotLocal),
            MemoryFd if is_right && self.slots.len() == SLOTS_MOST => Err(OrderError::Slots),
            _ if is_right => Ok(()),
            _ => Err(OrderError::Unexpected { command, expected }),
        }
    }

    /// Notes that a checked request has arrived with its payload. `slot`: the number in the payload of a
    /// [`Command::MemoryFd`]. `descriptors`: the number of descriptors that came.
    ///
    /// # Errors
    /// [`OrderError::Descriptors`], [`OrderError::SlotTwice`].
    pub fn arrived(
        &mut self,
        command: Command,
        slot: Option<u32>,
        descriptors: usize,
    ) -> Result<(), OrderError> {
        let needed = usize::from(command == Command::MemoryFd);
        if descriptors != needed {
            return Err(OrderError::Descriptors { command, count: descriptors, needed });
        }
        if let Some(slot) = slot {
            if self.slots.contains(&slot) {
                return Err(OrderError::SlotTwice { slot });
            }
            self.slots.push(slot);
        }
        self.stage = match command {
            Command::Start | Command::MemoryFd => Stage::Started,
            Command::Config => Stage::Configured,
            Command::State => Stage::StateReceived,
            _ => Stage::Ended,
        };
        Ok(())
    }

    /// Whether no message has arrived.
    pub fn is_begin(&self) -> bool {
        self.stage == Stage::Begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Command::{Abandon, Complete, CompletePaused, Config, Memory, MemoryFd, PageFault, Start, State};

    fn run(commands: &[Command]) -> Result<Order, OrderError> {
        let mut order = Order::new();
        for (number, command) in commands.iter().enumerate() {
            order.check(&Request { command: *command, version: 0, payload_bytes: 0 })?;
            let is_memory = *command == MemoryFd;
            order.arrived(*command, is_memory.then_some(number as u32), usize::from(is_memory))?;
        }
        Ok(order)
    }

    #[test]
    fn both_ends_of_a_migration_are_accepted() {
        for end in [Complete, CompletePaused] {
            let order = run(&[Start, MemoryFd, MemoryFd, Config, State, end]).unwrap();
            assert_eq!(order.stage, Stage::Ended);
        }
        for before in [&[Start][..], &[Start, MemoryFd], &[Start, MemoryFd, Config, State]] {
            run(&[before, &[Abandon]].concat()).unwrap();
        }
    }

    #[test]
    fn message_in_the_wrong_place_is_refused() {
        let wrong: [&[Command]; 9] = [
            &[MemoryFd],
            &[Abandon],
            &[Start, Start],
            &[Start, State],
            &[Start, Config, MemoryFd],
            &[Start, Config, Complete],
            &[Start, Config, State, State],
            &[Start, Config, State, Complete, Complete],
            &[Start, PageFault],
        ];
        for commands in wrong {
            let error = run(commands).unwrap_err();
            let last = *commands.last().unwrap();
            assert!(
                matches!(error, OrderError::Unexpected { command, .. } if command == last),
                "{commands:?}: {error}"
            );
        }
        assert_eq!(run(&[Start, Config, Memory]).unwrap_err(), OrderError::NotLocal);
    }

    #[test]
    fn descriptors_belong_to_memory_alone() {
        let mut order = run(&[Start]).unwrap();
        for count in [0, 2] {
            let error = order.arrived(MemoryFd, Some(0), count).unwrap_err();
            assert_eq!(error, OrderError::Descriptors { command: MemoryFd, count, needed: 1 });
        }
        let error = order.arrived(Config, None, 1).unwrap_err();
        assert_eq!(error, OrderError::Descriptors { command: Config, count: 1, needed: 0 });
        order.arrived(MemoryFd, Some(7), 1).unwrap();
        assert_eq!(order.arrived(MemoryFd, Some(7), 1), Err(OrderError::SlotTwice { slot: 7 }));
    }

    #[test]
    fn slots_are_counted() {
        let mut order = run(&[Start]).unwrap();
        for slot in 0..SLOTS_MOST as u32 {
            order.arrived(MemoryFd, Some(slot), 1).unwrap();
        }

        assert_eq!(order.check(&Request::new(MemoryFd, 4)), Err(OrderError::Slots));
    }
}
