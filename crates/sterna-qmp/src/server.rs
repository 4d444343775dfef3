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
mod handler;
mod limits;
mod listener;
mod schema;
mod session;
mod version;

pub use arguments::{ArgumentKind, ArgumentSpec, Arguments, CommandSpec};
pub use bus::{EventBus, MAX_UNREAD_BYTES};
pub use endpoint::Endpoint;
pub use handler::{Context, Handler};
pub use limits::{MAX_CLIENTS, MAX_COMMAND_BYTES};
pub use listener::{Server, ServerError};
pub use version::{QEMU_VERSION, version};
