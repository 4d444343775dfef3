//! Serves a statebank over vfio-user on a thread instead of in another process.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::bank::StateBank;
use crate::vfio_user::{Server, ServerThread};

/// A served statebank. Dropping it ends the server, even one that hangs.
#[derive(Debug)]
pub struct BankServer {
    bank: Arc<StateBank>,
    /// Dropped after `drop` has ended the hangs, because it joins the server's thread.
    _server: ServerThread,
}

impl StateBank {
    /// Serves this device to vfio-user clients at `path`, one after the other.
    ///
    /// # Errors
    /// Another server listens there, or the system refuses.
    pub fn serve(self: &Arc<Self>, path: &Path) -> io::Result<BankServer> {
        let server = Server::bind(path, Arc::<Self>::clone(self))?.spawn()?;
        Ok(BankServer { bank: Arc::clone(self), _server: server })
    }
}

impl BankServer {
    /// The device that this server serves.
    pub fn bank(&self) -> &Arc<StateBank> {
        &self.bank
    }
}

impl Drop for BankServer {
    fn drop(&mut self) {
        self.bank.release();
    }
}
