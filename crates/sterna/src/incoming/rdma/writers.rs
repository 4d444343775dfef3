//! The connections over which the source may write guest memory.
//!
//! Each is registered before the source can use it, so that connections which are not accepted yet are
//! included. A connection's queue pair is ready when this side accepts, whether or not the source confirms.

use std::sync::{Arc, Weak};

use sterna_transport::rdma::Connection;

/// Connections that were opened with the right to write.
#[derive(Debug, Default)]
pub(super) struct Writers {
    /// Each connection with the number of its source.
    open: Vec<(u64, Weak<dyn Connection>)>,
    are_over: bool,
}

impl Writers {
    /// Whether no source may write any more.
    pub(super) fn are_over(&self) -> bool {
        self.are_over
    }

    /// Registers a connection that was opened and is not connected yet.
    pub(super) fn enter(&mut self, source: u64, connection: &Arc<dyn Connection>) {
        self.open.retain(|(_, open)| open.strong_count() > 0);
        self.open.push((source, Arc::downgrade(connection)));
    }

    /// The connections of one source.
    pub(super) fn of(&self, source: u64) -> Vec<Arc<dyn Connection>> {
        let of_source = self.open.iter().filter(|(of, _)| *of == source);
        of_source.filter_map(|(_, open)| open.upgrade()).collect()
    }

    /// Returns all connections, and refuses new ones from now on.
    pub(super) fn end(&mut self) -> Vec<Arc<dyn Connection>> {
        self.are_over = true;
        self.open.iter().filter_map(|(_, open)| open.upgrade()).collect()
    }
}
