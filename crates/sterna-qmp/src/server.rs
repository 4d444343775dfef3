//! A QMP server: up to [`MAX_CLIENTS`] clients on a Unix or loopback TCP socket, one thread each.
//!
//! A client gets the greeting and negotiates with `qmp_capabilities`. Then the [`Handler`] executes its commands, one
//! after the other. A client gets no events before the negotiation. [`EventBus::emit`] sends events to every client
//! and never waits: unread bytes are kept for each client. A client with more than [`MAX_UNREAD_BYTES`] is
//! disconnected, so that no client misses events. While a client does not read its answers, no further commands of it
//! are executed.
//!
//! [`Server::close`] (or dropping it) sends the finished answers, ends all threads and removes the socket file. It
//! must not be called from inside a handler. Use [`Context::after_reply`] to act after the answer was sent.

mod arguments;
mod bus;
mod endpoint;
mod handler;
mod limits;
mod listener;
mod schema;
mod session;
mod spec;
mod version;

pub use arguments::Arguments;
pub use bus::{EventBus, MAX_UNREAD_BYTES};
pub use endpoint::Endpoint;
pub use handler::{Context, Handler};
pub use limits::{MAX_CLIENTS, MAX_COMMAND_BYTES};
pub use listener::{Server, ServerError};
pub use schema::schema;
pub use session::BUILTIN_COMMANDS;
pub use spec::{CommandSpec, EventSpec, MemberKind, MemberSpec};
pub(crate) use spec::{optional, required};
pub use version::{QEMU_VERSION, version};
