//! `x-sterna-live-save`: saves the guest while it runs, as a whole or only its changes.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use sterna::{Address, ChangeLog, LiveSaveOptions, Parameters, Snapshot, SourceVm, TlsEndpoint};

use super::MigrationControl;
use crate::error::QmpError;
use crate::migration::query::status_word;
use crate::migration::refusal::refused;
use crate::server::Arguments;

/// The arguments besides the address.
struct Order {
    track: bool,
    since: Option<u64>,
    max_bandwidth: u64,
    buffer_size: Option<u64>,
}

impl Order {
    fn parse(arguments: &Map<String, Value>, to: &Address) -> Result<Self, QmpError> {
        let number = |name: &str| match arguments.get(name) {
            None => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| QmpError::expects(name, "a number, at least 0"))
            }
        };
        let order = Self {
            track: Arguments(arguments).flag("track")?,
            since: number("since")?,
            max_bandwidth: number("max-bandwidth")?.unwrap_or(0),
            buffer_size: number("buffer-size")?,
        };
        if order.since.is_some() && !(order.track && to.is_descriptor()) {
            return Err(QmpError::generic(
                "'since' needs 'track' and a descriptor ('fd:NAME'): a stream of changes is no whole guest, and only the \
                 program that has the earlier image can use it",
            ));
        }
        Ok(order)
    }
}

impl MigrationControl {
    /// Executes `x-sterna-live-save`.
    ///
    /// # Errors
    /// A migration or another save runs, the guest is not here, or its writes cannot be held.
    pub fn live_save(&self, to: &Address, arguments: &Map<String, Value>) -> Result<(), QmpError> {
        let order = Order::parse(arguments, to)?;
        let _one = self.beginning.lock();
        let (has_guest, custody) = (self.vm.has_guest(), self.custody());
        let state = self.state.lock();
        state.may_migrate(has_guest, custody, to)?;
        // A descriptor is a connection on this host, whose other end the client has.
        let tls = match to.is_descriptor() || matches!(to, Address::File { .. }) {
            true => None,
            false => state.engine_parameters(to, TlsEndpoint::Client)?.tls,
        };
        let Parameters { limits, on_thread_start, .. } = state.parameters.to_engine();
        let (measuring, changes) = (state.measuring.clone(), state.changes.clone());
        drop(state);
        let max_bandwidth_bytes = order.max_bandwidth;
        let parameters =
            Parameters { tls, limits, on_thread_start, max_bandwidth_bytes, ..Parameters::default() };
        if let Some(measuring) = &measuring {
            measuring.finish();
        }
        let mut options = LiveSaveOptions::default();
        options.buffer_bytes = order.buffer_size.unwrap_or(options.buffer_bytes);
        if order.track {
            let log = self.changes(changes, order.since)?;
            options.changes = Some(Snapshot { log, since: order.since });
        } else {
            self.end_changes();
        }
        let vm: Arc<dyn SourceVm> = self.vm.shared();
        let started = self.engine.start_live_save(vm, to, parameters, options, self.relay.clone());
        self.state.lock().outgoing = Some(started.map_err(refused)?);
        Ok(())
    }

    /// Answers `x-sterna-query-live-save`.
    pub(in crate::migration) fn query_live_save(&self) -> Value {
        let outgoing = self.outgoing();
        let Some(save) = outgoing.as_ref().and_then(|outgoing| outgoing.live_save()) else {
            return json!({});
        };
        let micros = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let mut answer = json!({ "status": status_word(save.status()) });
        if let Some(pause) = save.statistics().downtime {
            answer["pause"] = micros(pause).into();
        }
        match save.result() {
            None => {}
            Some(Ok(saved)) => {
                answer["held-writes"] = saved.held_writes.into();
                answer["pages"] = (saved.normal_pages + saved.zero_pages).into();
                if let Some(number) = saved.number {
                    answer["number"] = number.into();
                }
            }
            Some(Err(error)) => answer["error"] = error.to_string().into(),
        }
        answer
    }

    /// Ends the log of changes, so that a migration can have the dirty source.
    pub(super) fn end_changes(&self) {
        let changes = self.state.lock().changes.take();
        // The end calls the VM, which must not happen under the lock.
        if let Some(changes) = changes {
            changes.end();
        }
    }

    fn changes(&self, known: Option<Arc<ChangeLog>>, since: Option<u64>) -> Result<Arc<ChangeLog>, QmpError> {
        let known = known.filter(|log| !log.has_ended());
        if let Some(since) = since
            && !known.as_ref().is_some_and(|log| log.knows(since))
        {
            return Err(QmpError::generic(format!(
                "The changes since save {since} are not known any more; save the whole guest, without 'since'"
            )));
        }
        match known {
            Some(log) => Ok(log),
            None => {
                let log = ChangeLog::begin(self.vm.shared()).map_err(refused)?;
                self.state.lock().changes = Some(Arc::clone(&log));
                Ok(log)
            }
        }
    }
}
