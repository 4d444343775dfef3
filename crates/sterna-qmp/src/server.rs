//! A QMP server: any number of clients on a Unix or loopback TCP socket, one thread each.
//!
//! A client is greeted, negotiates with `qmp_capabilities`, and then has its commands executed one after the
//! other by the [`Handler`]; before the negotiation it gets no events. Events go to every client through
//! [`EventBus::emit`], which never waits: what a client has not read yet is held for it, and one that lets
//! more than [`MAX_UNREAD_BYTES`] pile up is disconnected rather than served with gaps. A client that does not
//! read its answers is not asked for further commands.
//!
//! [`Server::close`] (or dropping it) sends out what was answered, ends all threads and removes the socket
//! file. It must not be called from inside a handler; use [`Context::after_reply`] to act once the answer is
//! out.

mod arguments;
mod bus;
mod endpoint;
mod listener;
mod schema;
mod session;

use std::os::fd::OwnedFd;

use serde_json::{Map, Value};

pub use arguments::{ArgumentKind, ArgumentSpec, Arguments, CommandSpec};
pub use bus::{EventBus, MAX_UNREAD_BYTES};
pub use endpoint::Endpoint;
pub use listener::{Server, ServerError};

use crate::error::QmpError;

/// The most clients at a time; more are refused at once.
pub const MAX_CLIENTS: usize = 32;
/// The longest command in bytes.
pub const MAX_COMMAND_BYTES: usize = 1 << 20;
/// QEMU's version whose dialogue is spoken: major, minor, micro.
pub const QEMU_VERSION: (u32, u32, u32) = (11, 1, 3);

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

/// The `version` member of the greeting, and the answer to `query-version`.
pub fn version() -> Value {
    let (major, minor, micro) = QEMU_VERSION;
    serde_json::json!({
        "qemu": {"major": major, "minor": minor, "micro": micro},
        "package": concat!("Sterna ", env!("CARGO_PKG_VERSION")),
    })
}
