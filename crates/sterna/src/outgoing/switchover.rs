//! The switchover: the guest is stopped and leaves, with all its pages or before them.

use std::sync::Arc;

use sterna_proto::source::Event as Fed;
use sterna_wire::extension;
use sterna_wire::main::Command;

use super::reconnection::watch;
use super::transfer::{Transfer, not_open};
use crate::error::MigrationError;
use crate::events::SwitchoverStep;
use crate::interruption::Break;
use crate::threads::call;

/// How the guest leaves. The control thread calls the steps in this order.
pub(super) trait Switchover {
    /// The guest is about to be stopped: does what would lengthen its pause.
    fn prepare_stop(&mut self, transfer: &mut Transfer) -> Result<(), Break>;

    /// Performs `SendFinalState`, with the guest stopped.
    fn send_final_state(&mut self, transfer: &mut Transfer) -> Result<(), Break>;

    /// Performs `SendPrepare`: asks whether the destination can start the guest.
    fn send_prepare(&mut self, transfer: &mut Transfer) -> Result<(), MigrationError>;

    /// Performs `SendEof` or `SendRun`. The machine has committed, so the guest stays stopped even if this fails.
    fn commit(&mut self, transfer: &mut Transfer);
}

/// The guest leaves after its last page.
pub(super) struct Complete;

impl Switchover for Complete {
    fn prepare_stop(&mut self, _transfer: &mut Transfer) -> Result<(), Break> {
        Ok(())
    }

    /// The last sync, the last round, END of RAM, and every device.
    fn send_final_state(&mut self, transfer: &mut Transfer) -> Result<(), Break> {
        let (shared, main) = (Arc::clone(&transfer.shared), transfer.main()?);
        // `max-bandwidth` protects other traffic from long precopy. The downtime should be short, so the limit is
        // lifted.
        shared.session.limiter.open();
        watch::closely(transfer, true);
        transfer.rounds()?.open_last();
        if let Some(streams) = &transfer.streams {
            streams.finish();
        }
        transfer.last_sync()?;
        transfer.step(SwitchoverStep::LastSync);
        let has_end = main.with(|stream| shared.guest.source.send_switchover_start(stream))?;
        send_last_round(transfer)?;
        // Pages that were sent before their memory failed are outdated by now, or the guest was informed and does
        // not use them. Which of the two holds is unknown, so the guest stays here.
        MigrationError::check_memory(&shared.guest.ram)?;
        transfer.step(SwitchoverStep::LastPages);
        let is_on_lanes = transfer.streams.as_ref().is_some_and(|streams| streams.on_lanes().is_some());
        if is_on_lanes {
            send_rest_of_streams(transfer)?;
        }
        if transfer.course.pages_sent(&main)? {
            transfer.step(SwitchoverStep::Streams);
        }
        // The lanes have written their last SYNC, and `run_dry` its flush. END therefore contains no flush.
        if has_end {
            transfer.carrier()?.end_ram()?;
        }
        if let Some(streams) = transfer.streams.as_ref().filter(|_| !is_on_lanes) {
            streams.send_in_turn(&mut transfer.waits, &main)?;
            transfer.step(SwitchoverStep::Streams);
        }
        let run_state = transfer.run_state_before();
        main.with(|stream| {
            stream.mark_devices();
            transfer.course.write_devices(stream, run_state)
        })?;
        transfer.step(SwitchoverStep::Devices);
        if let Some(stored) = transfer.carrier()?.store() {
            stored?;
            transfer.step(SwitchoverStep::Prepare);
        }
        MigrationError::check_same_ram(&call("Vm::ram", || shared.guest.vm.ram()), &shared.guest.ram)?;
        transfer.check_last_sync()?;
        // Without a return path this is the commit.
        MigrationError::check_memory(&shared.guest.ram)?;
        shared.report(Fed::FinalStateSent);
        Ok(())
    }

    fn send_prepare(&mut self, transfer: &mut Transfer) -> Result<(), MigrationError> {
        transfer.main()?.commands(&[Command::Ping(extension::PREPARE_PING)])?;
        // The main channel was not silent, so no keepalive is due for a while.
        transfer.waits.was_not_silent();
        Ok(())
    }

    /// Writes the end of the stream. A seeding commits nothing.
    fn commit(&mut self, transfer: &mut Transfer) {
        let shared = Arc::clone(&transfer.shared);
        watch::closely(transfer, false);
        if shared.capabilities.return_path {
            transfer.step(SwitchoverStep::Prepare);
        }
        let (sent, failed) = match &transfer.carrier {
            Some(carrier) => (carrier.end(), carrier.end_failed()),
            None => (Err(not_open()), Fed::EofFailed),
        };
        if let Some(carrier) = &transfer.carrier {
            transfer.course.stream_ended(carrier.as_ref());
        }
        match sent {
            Ok(()) => shared.report(Fed::EofSent),
            Err(error) => {
                shared.note_error(error);
                shared.report(failed);
            }
        }
    }
}

/// Sends the pages that the last sync found.
fn send_last_round(transfer: &mut Transfer) -> Result<(), Break> {
    transfer.publish(false)?;
    let round = Arc::clone(transfer.rounds()?.round());
    transfer.run_dry(&round)
}

/// Sends the rest of the device streams, after RAM's last page.
fn send_rest_of_streams(transfer: &mut Transfer) -> Result<(), Break> {
    if let Some(streams) = &transfer.streams {
        streams.await_lanes(&mut transfer.waits)?;
    }
    transfer.step(SwitchoverStep::Streams);
    // Every lane writes one more barrier: after the destination has seen its flush, it has every chunk.
    send_last_round(transfer)
}
