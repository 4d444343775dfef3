//! An object storage on loopback whose answers come later, as over a network. It is the one of `sterna-s3`'s tests.

use std::process::Command;
use std::time::Duration;

use server::{BUCKET, KEY, SECRET, Server};

#[path = "../../crates/sterna-s3/tests/s3/server.rs"]
#[allow(dead_code, missing_docs, clippy::unwrap_used, clippy::missing_panics_doc, unreachable_pub)]
mod server;

/// A storage with one bucket.
pub struct Storage {
    server: Server,
}

impl Storage {
    /// Starts it. Answers come at once.
    pub fn start() -> Self {
        Self { server: Server::start() }
    }

    /// The address of an image in an object of its own.
    pub fn address(name: &str) -> String {
        format!("s3://{BUCKET}/{name}.sterna")
    }

    /// Each answer comes so much later from now on.
    pub fn delay(&self, delay: Duration) {
        self.server.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner).delay = delay;
    }

    /// Tells a program where the storage is.
    pub fn tell<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("AWS_ENDPOINT_URL", self.server.endpoint())
            .env("AWS_ACCESS_KEY_ID", KEY)
            .env("AWS_SECRET_ACCESS_KEY", SECRET)
    }
}
