//! Makes the VM, and the state of its migration, on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;

use crate::error::{ConfigurationDifference, MigrationError, VmError};
use crate::incoming::awaited_vm::{Agreed, Job, no_postcopy};
use crate::incoming::control;
use crate::incoming::postcopy;
use crate::incoming::shared::Shared;
use crate::incoming::transport::interface::Beginning;
use crate::incoming::vm_target::VmTarget;
use crate::start_error::StartError;
use crate::threads::{self, ThreadRole, call, tried};
use crate::vm::TargetVm;

/// The callback's name in errors.
const CALLBACK: &str = "the callback of Incoming::listen_with";

/// The VMM's callback.
pub(super) type Make = Box<dyn FnOnce(&[u8]) -> Result<Arc<dyn TargetVm>, VmError> + Send>;

/// Starts the thread `configure`. It waits for one configuration, and ends if none can come any more.
pub(super) fn spawn(jobs: Receiver<Job<Shared>>, make: Make) -> Result<JoinHandle<()>, MigrationError> {
    let work = move || {
        if let Ok(Job { shared, agreed, configuration, answer }) = jobs.recv() {
            let made = tried("making the VM", || perform(&shared, agreed, &configuration, make));
            // The greeter waits for the answer as long as its process lives.
            let _ = answer.send(made);
        }
    };
    threads::spawn(ThreadRole::Configure, work, |_| ())
}

fn perform(
    shared: &Arc<Shared>,
    (params, capabilities): Agreed,
    configuration: &[u8],
    make: Make,
) -> Result<Arc<Shared>, MigrationError> {
    if shared.closing.is_cancelled() {
        return Err(MigrationError::Cancelled);
    }
    let vm = call(CALLBACK, || make(configuration))?;
    let target = VmTarget::new(vm)?;
    postcopy::check_target(&target, &capabilities).map_err(excluded)?;
    let (at, observer) = (&shared.address, Arc::clone(&shared.observer));
    let beginning = Beginning { target: Arc::new(target), at, params, capabilities, observer };
    let unfit = |error: StartError| VmError::new("receive a guest in the VM that was made", error);
    let custody = beginning.claim().map_err(unfit)?;
    let mut made = beginning.shared(custody, shared.address.clone()).map_err(unfit)?;
    made.follow(shared);
    let made = Arc::new(made);
    control::spawn(&made)?;
    if shared.hand_over_to(&made) {
        return Ok(made);
    }
    // An operator has cancelled meanwhile.
    made.end_before_it_began(MigrationError::Cancelled);
    Err(MigrationError::Cancelled)
}

/// The error for settings with which the VM that was made cannot receive a guest.
fn excluded(error: StartError) -> MigrationError {
    match error {
        StartError::Settings(error) => ConfigurationDifference::Excluded(error).into(),
        error => no_postcopy(&error).into(),
    }
}
