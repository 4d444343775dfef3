//! Makes the VM, and the state of its migration, on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use sterna_ram::missing_pages::MissingPages;

use super::Configuring;
use crate::error::{ConfigurationDifference, MigrationError, VmError};
use crate::incoming::control;
use crate::incoming::postcopy;
use crate::incoming::shared::Shared;
use crate::incoming::transport::interface::Beginning;
use crate::incoming::vm_target::VmTarget;
use crate::params::{Capabilities, Parameters};
use crate::rules::{self, Features, Side};
use crate::shared_settings::Settings;
use crate::start_error::StartError;
use crate::threads::{self, ThreadRole, call, tried};
use crate::vm::TargetVm;

/// The callback's name in errors.
const CALLBACK: &str = "the callback of Incoming::listen_with";

/// The VMM's callback.
pub(super) type Make = Box<dyn FnOnce(&[u8]) -> Result<Arc<dyn TargetVm>, VmError> + Send>;

/// The settings of a migration after both sides have agreed.
pub(super) type Agreed = (Parameters, Capabilities);

/// A configuration from which the VM is to be made.
pub(super) struct Job {
    shared: Arc<Shared>,
    agreed: Agreed,
    configuration: Vec<u8>,
    answer: Sender<Result<Arc<Shared>, MigrationError>>,
}

/// Starts the thread `configure`. It waits for one configuration, and ends if none can come any more.
pub(super) fn spawn(jobs: Receiver<Job>, make: Make) -> Result<JoinHandle<()>, MigrationError> {
    let work = move || {
        if let Ok(Job { shared, agreed, configuration, answer }) = jobs.recv() {
            let made = tried("making the VM", || perform(&shared, agreed, &configuration, make));
            // The greeter waits for the answer as long as its process lives.
            let _ = answer.send(made);
        }
    };
    threads::spawn(ThreadRole::Configure, work, |_| ())
}

/// The settings for a source with the shared settings `theirs`. An error leaves the VM to another source.
pub(super) fn settings(configuring: &Configuring, theirs: &Settings) -> Result<Agreed, MigrationError> {
    let (params, capabilities) = configuring.own.clone();
    let (params, capabilities) = configuring.settings.agree(theirs, params, capabilities)?;
    rules::check(Features::of(&configuring.at, &params, &capabilities), Side::Destination)
        .map_err(|error| excluded(error.into()))?;
    if capabilities.postcopy_ram {
        MissingPages::probe().map_err(|error| excluded(StartError::Postcopy(Arc::new(error))))?;
    }
    Ok((params, capabilities))
}

/// Lets the thread `configure` make the VM, and waits for it.
pub(super) fn make(
    shared: &Arc<Shared>,
    jobs: &Sender<Job>,
    agreed: Agreed,
    configuration: Vec<u8>,
) -> Result<Arc<Shared>, MigrationError> {
    let (answer, answered) = mpsc::channel();
    let job = Job { shared: Arc::clone(shared), agreed, configuration, answer };
    let ended = || MigrationError::Internal("the thread that makes the VM has ended".to_owned());
    jobs.send(job).map_err(|_| ended())?;
    answered.recv().map_err(|_| ended())?
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
    postcopy::check(&target, &capabilities).map_err(excluded)?;
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

fn excluded(error: StartError) -> MigrationError {
    ConfigurationDifference::Excluded(Box::new(error)).into()
}
