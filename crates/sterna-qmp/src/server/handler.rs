//! The interface between the server and the program that executes the commands.

use std::os::fd::OwnedFd;

use serde_json::{Map, Value};
use sterna::ram::Completing;

use super::spec::{CommandSpec, EventSpec};
use crate::error::QmpError;

/// Executes the commands of a monitor.
pub trait Handler: Send + Sync {
    /// All commands. The server checks the arguments before it calls [`Handler::execute`].
    fn commands(&self) -> Vec<CommandSpec>;
    /// All events that may be emitted.
    fn events(&self) -> Vec<EventSpec>;
    /// Executes one of [`Handler::commands`]. Called from the clients' threads, several at a time.
    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError>;
}

/// The parts of a connection that a command may use.
#[derive(Default)]
pub struct Context {
    pub(crate) named_fds: Vec<(String, OwnedFd)>,
    pub(crate) received_fds: Vec<OwnedFd>,
    pub(crate) after_reply: Vec<Box<dyn FnOnce() + Send>>,
    /// This client's request to load the rest of the guest's memory without pauses.
    pub(crate) completing: Option<Completing>,
}

impl Context {
    /// Takes the descriptor that this client named with `getfd`. Later commands do not find it any more.
    pub fn take_fd(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.named_fds.iter().position(|(known, _)| known == name)?;
        Some(self.named_fds.swap_remove(at).1)
    }

    /// Puts a descriptor back under `name` after the command that took it was refused.
    pub fn put_fd(&mut self, name: &str, fd: OwnedFd) {
        self.named_fds.retain(|(known, _)| known != name);
        self.named_fds.push((name.to_owned(), fd));
    }

    /// Runs `action` after the answer was written to the client, or after the connection was closed.
    pub fn after_reply(&mut self, action: impl FnOnce() + Send + 'static) {
        self.after_reply.push(Box::new(action));
    }
}
