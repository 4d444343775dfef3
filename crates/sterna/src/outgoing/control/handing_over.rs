//! The guest's memory is offered to a destination on this host, as descriptors (specs/extension.md §10).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_proto::source::Source;
use sterna_wire::extension::{self, Features};
use sterna_wire::main::Command;

use super::Control;
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::same_host;
use crate::params::MigrationMode;

impl Control {
    /// Gives the destination the descriptors of all memory, if that is how it moves. The guest runs on in it: the destination
    /// only reads it before the commit.
    pub(super) fn hand_memory_over(&mut self) -> Result<(), Break> {
        let (shared, params) = (Arc::clone(&self.shared), self.shared.params());
        if params.mode != MigrationMode::CprTransfer {
            return Ok(());
        }
        let peer = shared.driver.inspect(Source::peer);
        if !peer.sterna || !Features(peer.features).contains(Features::MEMORY) {
            let what = "the destination cannot take memory as descriptors (it is a QEMU or an older Sterna): set mode to normal";
            return Err(MigrationError::PeerIncompatible { what: what.to_owned() }.into());
        }
        self.main()?.commands(&[Command::Ping(extension::MEMORY_PING)])?;
        let is_expected = || shared.memory_is_expected.load(Ordering::Acquire).then_some(());
        let after = params.limits.setup;
        if self.waits.at_most(after, is_expected)?.is_none() {
            let what = "the destination to wait for the guest's memory".to_owned();
            return Err(MigrationError::Limit { what, after }.into());
        }
        Ok(same_host::hand_over(&shared, &params)?)
    }
}
