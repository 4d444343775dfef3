//! Commands that operate a guest in this VM: `stop`, `cont`, and changes of its devices.
//!
//! Such a command may wait for a vCPU, and in postcopy a vCPU waits for a page. So each command runs in a thread of
//! its own, without a lock. The monitor can then execute the commands that let the page arrive, also for the client
//! that sent `stop`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use sterna::RunState;
use sterna::ram::{Custody, GuestRam};

use super::{MigrationControl, not_free};
use crate::error::QmpError;
use crate::migration::events::{RESUME, STOP};
use crate::migration::vm::MonitoredVm;

/// How long a client waits for a command that may wait for a page.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

/// Maximum number of commands that may wait for a page: one runs, and one waits for it.
const MOST_AT_ONCE: u32 = 2;

/// Counts one command as long as this value exists.
struct Counted(Arc<AtomicU32>);

impl Counted {
    /// Increments the counter, and also returns its new value.
    fn new(count: &Arc<AtomicU32>) -> (Self, u32) {
        (Self(Arc::clone(count)), count.fetch_add(1, Ordering::SeqCst) + 1)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl MigrationControl {
    /// Executes `stop` for a guest in this VM.
    pub(super) fn pause_guest(&self) -> Result<(), QmpError> {
        let relay = Arc::clone(&self.relay);
        self.operate("stop", move |vm| {
            let ran = vm.run_state() == RunState::Running;
            vm.pause().map_err(|error| QmpError::generic(error.to_string()))?;
            if ran {
                relay.bus.emit(&STOP, None);
            }
            Ok(())
        })
    }

    /// Executes `cont` for a guest in this VM.
    pub(super) fn run_guest(&self) -> Result<(), QmpError> {
        let (relay, state) = (Arc::clone(&self.relay), Arc::clone(&self.state));
        self.operate("cont", move |vm| {
            let outgoing = state.lock().outgoing.clone();
            let protection = outgoing.as_deref().and_then(|outgoing| outgoing.protection());
            if protection.is_some_and(|protection| !protection.may_guest_run()) {
                return Err(QmpError::generic(
                    "The lease of this protected guest has ended: the guest may already run at the standby. \
                     'x-sterna-query-protection' shows who decides",
                ));
            }
            let ran = vm.run_state() == RunState::Running;
            vm.cont().map_err(|error| QmpError::generic(error.to_string()))?;
            state.lock().prelaunch = false;
            if !ran {
                relay.bus.emit(&RESUME, None);
            }
            Ok(())
        })
    }

    /// Runs `act` either before or after a migration's switchover. Refuses it during the switchover and after a
    /// handover. If pages of the guest may be missing, the client waits only for a few seconds, and `act` continues.
    pub(in crate::migration) fn operate(
        &self,
        command: &str,
        act: impl FnOnce(&dyn MonitoredVm) -> Result<(), QmpError> + Send + 'static,
    ) -> Result<(), QmpError> {
        let ram = self.vm.ram();
        let (counted, count) = Counted::new(&self.operating);
        if count > MOST_AT_ONCE && may_lack_pages(&ram) {
            return Err(waits_for_a_page("An earlier command"));
        }
        let (tell, done) = channel();
        let (vm, theirs) = (self.vm.shared(), ram.clone());
        let work = move || {
            let acted = theirs.while_free(|| act(&*vm));
            // The counter is decremented before the client can send its next command.
            drop(counted);
            // A client that does not wait any more can use `query-status` and the events.
            let _ = tell.send(acted);
        };
        let thread = std::thread::Builder::new().name(format!("qmp-{command}")).spawn(work);
        thread.map_err(|error| QmpError::generic(format!("{command}: cannot start a thread: {error}")))?;
        let began = Instant::now();
        loop {
            match done.recv_timeout(LOOK) {
                Ok(Ok(acted)) => return acted,
                Ok(Err(custody)) => return Err(not_free(custody, self.outgoing().as_deref())),
                Err(RecvTimeoutError::Disconnected) => {
                    let what =
                        format!("{command}: the VM panicked; 'query-status' shows whether the guest runs");
                    return Err(QmpError::generic(what));
                }
                Err(RecvTimeoutError::Timeout) if began.elapsed() < PATIENCE || !may_lack_pages(&ram) => {}
                Err(RecvTimeoutError::Timeout) => return Err(waits_for_a_page(command)),
            }
        }
    }
}

fn may_lack_pages(ram: &GuestRam) -> bool {
    matches!(ram.custody(), Custody::Arriving { .. })
}

fn waits_for_a_page(command: &str) -> QmpError {
    QmpError::generic(format!(
        "{command} waits for the guest, which waits for a page of its memory that has not arrived. The command takes \
         effect when the page has arrived. If 'query-migrate' shows 'postcopy-paused', connect again: 'migrate' with \
         'resume' at the source, and 'migrate-recover' here if the source must use another address"
    ))
}
