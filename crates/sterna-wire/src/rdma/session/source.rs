//! The order of messages at the source's main connection (`specs/rdma.md §5.3`, `§6.4`, `§7`).

use super::commander::{Commander, Heard};
use super::receives::Sending;
use super::receives::{END, PHASES, local, misbehaved};
use crate::error::WireError;
use crate::rdma::message::Message;
use crate::rdma::message_type::MessageType;

const WRITE: &str = "WRITE";
const WINDOWS: &str = "specs/rdma.md §6.4";

/// The kind of destination, which decides the rules for the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peer {
    /// A QEMU: one record per message, and memory remains registered.
    Qemu,
    /// A Sterna, by its introduction ([`ConnectReply::introduction`](crate::rdma::ConnectReply::introduction)).
    Sterna,
}

/// A command that a source sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Bytes of the stream.
    File {
        /// Number of bytes in the message.
        bytes: usize,
        /// End of a hook of RAM in these bytes; `None` without a hook.
        ///
        /// The hook must be the last content of the message.
        hook_ends_at: Option<usize>,
    },
    /// Asks for the positions of the blocks.
    RamBlocks,
    /// Reports so many ranges that contain only zeros.
    Compress(usize),
    /// Asks to register so many pieces of memory.
    Register(usize),
    /// Asks to deregister so many chunks.
    Unregister(usize),
    /// Ends the phase at the destination.
    Finished,
}

impl Command {
    /// The type of the command's message.
    pub fn kind(self) -> MessageType {
        match self {
            Self::File { .. } => MessageType::File,
            Self::RamBlocks => MessageType::RamBlocksRequest,
            Self::Compress(_) => MessageType::Compress,
            Self::Register(_) => MessageType::RegisterRequest,
            Self::Unregister(_) => MessageType::UnregisterRequest,
            Self::Finished => MessageType::RegisterFinished,
        }
    }
}

/// READYs, phases and WRITEs of a source.
#[derive(Debug, Clone)]
pub struct SourceSession {
    commander: Commander,
    peer: Peer,
    in_phase: bool,
    /// Whether the destination has stated its blocks' positions, in the first phase.
    has_blocks: bool,
    /// Number of results that the answer to a register request must have.
    results: usize,
    /// Number of WRITEs that are posted and not complete.
    writes: usize,
    /// Whether the whole stream has been sent.
    has_sent_all: bool,
}

impl SourceSession {
    /// The session of a connection that is not open yet.
    pub fn new(peer: Peer) -> Self {
        Self {
            commander: Commander::new(),
            peer,
            in_phase: false,
            has_blocks: false,
            results: 0,
            writes: 0,
            has_sent_all: false,
        }
    }

    /// Number of receives to post before connecting.
    pub fn starting(&mut self) -> usize {
        self.commander.starting()
    }

    /// Sets the kind of the destination, after its reply has been read.
    pub fn met(&mut self, peer: Peer) {
        self.peer = peer;
    }

    /// Whether some command may be sent now. [`send`](Self::send) decides which ones.
    pub fn may_send(&self) -> bool {
        self.commander.may_send()
    }

    /// Whether a phase is open.
    pub fn is_in_phase(&self) -> bool {
        self.in_phase
    }

    /// Number of WRITEs that are posted and not complete.
    pub fn writes_in_flight(&self) -> usize {
        self.writes
    }

    /// Asks to send a command. On success the command counts as sent.
    ///
    /// # Errors
    /// - the errors of [`Commander::send`]
    /// - a command of a phase outside a phase, or another command inside one
    /// - a hook that does not end its message
    /// - the end of a phase before its WRITEs are complete
    /// - a command that QEMU handles wrongly
    pub fn send(&mut self, command: Command) -> Result<Sending, WireError> {
        self.check(command)?;
        let sending = self.commander.send(command.kind())?;
        match command {
            Command::File { hook_ends_at, .. } => self.in_phase = hook_ends_at.is_some(),
            Command::Register(count) => self.results = count,
            Command::Finished => self.in_phase = false,
            Command::RamBlocks | Command::Compress(_) | Command::Unregister(_) => {}
        }
        Ok(sending)
    }

    fn check(&self, command: Command) -> Result<(), WireError> {
        let kind = command.kind();
        let no = |rule: &str| Err(local(kind, PHASES, rule));
        match command {
            Command::File { .. } if self.in_phase => {
                return no("a phase is open, in which stream data is not permitted");
            }
            Command::File { bytes, hook_ends_at: Some(at) } if at != bytes => {
                let rule = format!(
                    "{bytes} bytes with a hook that ends at {at}: it must be the last of its message"
                );
                return Err(local(kind, "specs/rdma.md §5.2", rule));
            }
            Command::File { .. } => return Ok(()),
            _ if !self.in_phase => return no("no phase is open"),
            Command::RamBlocks if self.has_blocks => {
                return no("the blocks have already been exchanged");
            }
            Command::RamBlocks => return Ok(()),
            _ if !self.has_blocks => return no("the first phase is for the exchange of blocks"),
            Command::Finished if self.writes > 0 => {
                return Err(local(kind, PHASES, format!("{} WRITEs are not complete", self.writes)));
            }
            _ => {}
        }
        match (command, self.peer) {
            (Command::Compress(0) | Command::Register(0) | Command::Unregister(0), _) => {
                no("it holds no record")
            }
            (Command::Unregister(_), Peer::Qemu) => {
                Err(local(kind, WINDOWS, "a QEMU crashes if it finds the memory unregistered"))
            }
            (Command::Compress(count) | Command::Register(count), Peer::Qemu) if count > 1 => {
                Err(local(kind, WINDOWS, format!("{count} records, but a QEMU reads only the first")))
            }
            _ => Ok(()),
        }
    }

    /// Asks to post a WRITE. On success it counts as posted. An answer may be due at the same time.
    ///
    /// # Errors
    /// No phase is open, or only the first one.
    pub fn write(&mut self) -> Result<(), WireError> {
        if !self.in_phase || !self.has_blocks || self.commander.is_over() {
            let rule = "no phase is open in which the destination expects it";
            return Err(WireError::local(WRITE, 0, PHASES, rule));
        }
        self.writes += 1;
        Ok(())
    }

    /// Reports that so many WRITEs are complete.
    ///
    /// # Errors
    /// More WRITEs than were posted.
    pub fn completed(&mut self, writes: usize) -> Result<(), WireError> {
        match self.writes.checked_sub(writes) {
            Some(left) => {
                self.writes = left;
                Ok(())
            }
            None => {
                let rule = format!("{writes} are complete, but {} were in flight", self.writes);
                Err(WireError::local(WRITE, 0, PHASES, rule))
            }
        }
    }

    /// Records a received message.
    ///
    /// # Errors
    /// As [`Commander::received`]; a number of results that differs from the request.
    pub fn received(&mut self, message: &Message<'_>) -> Result<Heard, WireError> {
        let heard = self.commander.received(message.kind())?;
        match message {
            Message::RamBlocksResult(_) => self.has_blocks = true,
            Message::RegisterResult(list) if list.len() != self.results => {
                self.commander.finish();
                let rule = format!("{} results, but {} were requested", list.len(), self.results);
                return Err(misbehaved(message.kind(), "specs/rdma.md §4.3", rule));
            }
            _ => {}
        }
        Ok(heard)
    }

    /// Ends the session after the last byte of the stream has been sent.
    ///
    /// # Errors
    /// A phase is open.
    pub fn finish(&mut self) -> Result<(), WireError> {
        if self.in_phase {
            return Err(local(
                MessageType::RegisterFinished,
                PHASES,
                "it has not been sent, but the stream ends",
            ));
        }
        self.commander.finish();
        self.has_sent_all = true;
        Ok(())
    }

    /// Records that the connection has ended.
    ///
    /// # Errors
    /// The stream has not been sent completely.
    pub fn disconnected(&mut self) -> Result<(), WireError> {
        self.commander.finish();
        match self.has_sent_all {
            true => Ok(()),
            false => {
                let rule = "the destination disconnected before the end of the stream";
                Err(WireError::misbehaved("RDMA connection", 0, END, rule))
            }
        }
    }

    /// Asks to send ERROR. The session is then over.
    ///
    /// # Errors
    /// The session is over.
    pub fn say_error(&mut self) -> Result<(), WireError> {
        self.commander.say_error()
    }
}
