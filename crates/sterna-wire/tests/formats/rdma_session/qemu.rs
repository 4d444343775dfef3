//! A model of QEMU's READYs and receives (`specs/rdma.md §1`, `§3.3`, `§3.4`).
//!
//! It is independent of Sterna's state machines. It posts only the receives that it needs.

use sterna_wire::rdma::MessageType;

/// A QEMU that sends commands.
#[derive(Debug, Default)]
pub struct QemuCommander {
    ready: u32,
    owed: Option<MessageType>,
    /// On the return path, the first `ahead` messages need no READY.
    sent: u32,
    ahead: u32,
    failed: bool,
}

impl QemuCommander {
    pub fn of_return_path() -> Self {
        Self { ahead: 1, ..Self::default() }
    }

    pub fn may_send(&self) -> bool {
        (self.ready > 0 || self.sent < self.ahead) && self.owed.is_none() && !self.failed
    }

    /// Returns the number of receives that it posts before it sends the command.
    pub fn send(&mut self, command: MessageType) -> usize {
        if self.sent >= self.ahead {
            self.ready = self.ready.saturating_sub(1);
        }
        self.sent += 1;
        self.owed = command.answer();
        1 + usize::from(self.owed.is_some())
    }

    pub fn received(&mut self, kind: MessageType) -> Result<(), String> {
        match (self.owed.take(), kind) {
            (Some(answer), kind) if kind == answer => {}
            (None, MessageType::Ready) => self.ready += 1,
            (owed, kind) => {
                self.failed = true;
                return Err(format!(
                    "a QEMU gets {kind}, and waits for {}",
                    owed.unwrap_or(MessageType::Ready)
                ));
            }
        }
        Ok(())
    }
}

/// A QEMU that receives commands. It has one receive and posts it again before each READY.
#[derive(Debug, Default)]
pub struct QemuListener {
    has_receive: bool,
    invited: bool,
    owes: Option<MessageType>,
}

impl QemuListener {
    pub fn starting(&mut self) -> usize {
        self.has_receive = true;
        1
    }

    pub fn may_invite(&self) -> bool {
        !self.invited && self.owes.is_none()
    }

    pub fn invite(&mut self) -> usize {
        self.invited = true;
        usize::from(!std::mem::replace(&mut self.has_receive, true))
    }

    pub fn received(&mut self, kind: MessageType) -> Result<(), String> {
        self.has_receive = false;
        self.invited = false;
        self.owes = kind.answer();
        if kind.is_command() { Ok(()) } else { Err(format!("a QEMU gets {kind}, and waits for a command")) }
    }

    pub fn answer(&mut self) {
        self.owes = None;
    }
}
