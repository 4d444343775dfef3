//! The commands for postcopy: start, resume, pause and recover.

use sterna::{Address, Status};

use super::MigrationControl;
use crate::error::QmpError;

impl MigrationControl {
    /// Executes `migrate-start-postcopy`: the guest continues at the destination, and its pages follow.
    ///
    /// # Errors
    /// `postcopy-ram` is off, no migration runs, or the handover of the guest has begun.
    pub fn start_postcopy(&self) -> Result<(), QmpError> {
        if !self.capabilities().get("postcopy-ram") {
            return Err(QmpError::generic(
                "Enable postcopy with migrate_set_capability before the start of migration: 'postcopy-ram', on both sides",
            ));
        }
        let running = self.outgoing().filter(|outgoing| !outgoing.status().is_terminal());
        let running = running.ok_or_else(|| {
            QmpError::generic("Must be issued after the migration has been started; use 'migrate' first")
        })?;
        running.start_postcopy().map_err(QmpError::generic)
    }

    /// Executes `migrate` with `resume`: continues a postcopy whose connection broke over another connection.
    ///
    /// # Errors
    /// No postcopy is paused here.
    pub fn resume(&self, to: &Address) -> Result<(), QmpError> {
        let paused = self.outgoing().filter(|outgoing| outgoing.status() == Status::PostcopyPaused);
        let paused = paused.ok_or_else(|| {
            QmpError::generic(
                "Cannot resume if there is no paused migration: 'query-migrate' must show 'postcopy-paused' here, at the source; \
                 to start a new migration, leave 'resume' out",
            )
        })?;
        paused.resume(to).map_err(QmpError::generic)
    }

    /// Executes `migrate-pause`: breaks the connection of a postcopy on purpose, on either side.
    ///
    /// # Errors
    /// No postcopy runs here.
    pub fn pause_postcopy(&self) -> Result<(), QmpError> {
        let is_on = |status| matches!(status, Status::PostcopyActive | Status::PostcopyRecover);
        // A paused postcopy may be about to reconnect by itself, so it can be paused again.
        let may_be = |status| is_on(status) || status == Status::PostcopyPaused;
        if let Some(outgoing) = self.outgoing().filter(|outgoing| may_be(outgoing.status())) {
            return outgoing.pause().map_err(QmpError::generic);
        }
        match self.incoming().filter(|incoming| is_on(incoming.status())) {
            Some(incoming) => incoming.pause().map_err(QmpError::generic),
            None => Err(QmpError::generic(
                "migrate-pause is currently only supported during postcopy-active or postcopy-recover state: 'query-migrate' \
                 must show one of them here",
            )),
        }
    }

    /// Executes `migrate-recover`: listens for the source of a guest that lacks pages. The socket is bound when this
    /// returns.
    ///
    /// # Errors
    /// No postcopy is paused here.
    pub fn recover(&self, at: &Address) -> Result<(), QmpError> {
        let paused = self.incoming().filter(|incoming| incoming.status() == Status::PostcopyPaused);
        let paused = paused.ok_or_else(|| {
            QmpError::generic(
                "Migrate recover can only be run when postcopy is paused: 'query-migrate' must show 'postcopy-paused' \
                 here, at the destination. If it shows 'completed', every page has arrived: this side answers the \
                 source's question, or use 'x-sterna-decide' at the source",
            )
        })?;
        paused.recover_at(at).map_err(QmpError::generic)
    }
}
