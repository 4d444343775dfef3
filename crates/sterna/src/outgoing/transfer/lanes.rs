//! Starts the threads of lanes.

use std::sync::Arc;

use super::{Transfer, not_open};
use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::carrier::writers::Writers;
use crate::outgoing::lanes::{Lane, LaneEnds};
use crate::outgoing::postcopy::background_lanes::follow;
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::{DeviceStreams, Streams};
use crate::outgoing::workers::Workers;
use crate::threads::ThreadRole;

impl Transfer {
    /// Starts the save threads of device streams, the lanes and their helpers.
    ///
    /// Returns after every lane has written its opening barrier.
    pub(in crate::outgoing) fn start_lanes(&mut self) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&self.shared), self.main()?);
        if let Some(streams) = &self.streams {
            streams.start(&main, &mut self.workers)?;
        }
        let on_lanes = self.streams.as_ref().and_then(DeviceStreams::on_lanes);
        let carrier = self.carrier.as_mut().ok_or_else(not_open)?;
        start(&shared, carrier.lanes()?, on_lanes, &mut self.workers)?;
        carrier.start_helpers(&mut self.workers)?;
        self.waits.until(|| shared.session.lanes.are_through(0).then_some(()))
    }
}

/// Starts one thread per lane. Each writes its opening barrier and waits for rounds.
fn start(
    shared: &Arc<Shared>,
    writers: Writers,
    streams: Option<Arc<Streams>>,
    workers: &mut Workers,
) -> Result<(), MigrationError> {
    let Writers { lanes, detection, after_flush } = writers;
    for (index, LaneEnds { mut writer, reader }) in lanes.into_iter().enumerate() {
        let (shared, streams) = (Arc::clone(shared), streams.clone());
        workers.spawn(ThreadRole::Lane.of(index), move || {
            let lane = Lane {
                index,
                lanes: &shared.session.lanes,
                ram: &shared.guest.ram,
                dirty: shared.guest.vm.dirty_source(),
                reader: reader.as_ref(),
                detection,
                after_flush,
                counters: &shared.measures.counters,
                streams: streams.as_deref(),
                nudge: &|| shared.driver.nudge(),
            };
            let ended = lane.run(writer.as_mut());
            if let Err(error) = ended.and_then(|()| follow(&lane, &shared.postcopy, writer.as_mut())) {
                // The error is reported before the channel is closed, because closing causes further errors.
                shared.fail(error);
                writer.abort();
            }
        })?;
    }
    Ok(())
}
