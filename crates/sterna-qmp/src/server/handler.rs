//! What executes commands.

use std::os::fd::OwnedFd;

use serde_json::{Map, Value};

use super::arguments::CommandSpec;
use crate::error::QmpError;

/// Executes commands.
pub trait Handler: Send + Sync {
    /// Every command, with its arguments, which are checked before [`Handler::execute`] sees them.
    fn commands(&self) -> Vec<CommandSpec>;
    /// The names of the events that may be emitted.
    fn events(&self) -> Vec<&'static str>;
    /// Executes one of [`Handler::commands`]. Called from clients' threads, several at a time.
    fn execute(
        &self,
        command: &str,
        arguments: &Map<String, Value>,
        context: &mut Context,
    ) -> Result<Value, QmpError>;
}

/// What a command may use of the connection that it came over.
#[derive(Default)]
pub struct Context {
    pub(crate) named_fds: Vec<(String, OwnedFd)>,
    pub(crate) received_fds: Vec<OwnedFd>,
    pub(crate) after_reply: Vec<Box<dyn FnOnce() + Send>>,
}

impl Context {
    /// Takes the descriptor that this client named with `getfd`. Later commands do not find it any more.
    pub fn take_fd(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.named_fds.iter().position(|(known, _)| known == name)?;
        Some(self.named_fds.swap_remove(at).1)
    }

    /// Puts a descriptor back under `name`: the command that took it was refused.
    pub fn put_fd(&mut self, name: &str, fd: OwnedFd) {
        self.named_fds.retain(|(known, _)| known != name);
        self.named_fds.push((name.to_owned(), fd));
    }

    /// Runs `action` once the answer has been written to the client (or the client has gone).
    pub fn after_reply(&mut self, action: impl FnOnce() + Send + 'static) {
        self.after_reply.push(Box::new(action));
    }
}
