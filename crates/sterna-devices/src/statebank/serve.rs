//! A statebank behind a vfio-user server on a thread: a process of its own in all but the process.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::bank::StateBank;
use crate::vfio_user::{Server, ServerThread};

/// A statebank that is served; dropping it ends the server, hanging or not.
#[derive(Debug)]
pub struct BankServer {
    bank: Arc<StateBank>,
    /// Dropped after hangs were ended.
    _server: ServerThread,
}

impl StateBank {
    /// Serves this device to vfio-user clients at `path`, one after the other.
    ///
    /// # Errors
    /// Somebody listens there, or the system refuses.
    pub fn serve(self: &Arc<Self>, path: &Path) -> io::Result<BankServer> {
        let server = Server::bind(path, Arc::<Self>::clone(self))?.spawn()?;
        Ok(BankServer { bank: Arc::clone(self), _server: server })
    }
}

impl BankServer {
    /// The device.
    pub fn bank(&self) -> &Arc<StateBank> {
        &self.bank
    }
}

impl Drop for BankServer {
    fn drop(&mut self) {
        self.bank.release();
    }
}
