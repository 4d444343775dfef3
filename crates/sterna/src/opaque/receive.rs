//! An image comes in from an address.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_image::Shape;
use sterna_transport::Address;

use super::image_plan::ImagePlan;
use super::image_target::ImageTarget;
use crate::error::MigrationError;
use crate::events::{Observer, Status};
use crate::incoming::{Arrival, Incoming, Refusal};
use crate::params::{Capabilities, Parameters};
use crate::start_error::StartError;
use crate::stats::IncomingStatistics;

/// Making an image durable waits for the disk, and for no peer.
const STORING: Duration = Duration::from_secs(24 * 3600);

/// A machine that is being received. Cloning gives another handle; when the last one is dropped the address is
/// given up, and an image that is not in its place yet is dropped.
///
/// Keep it after success: a Sterna source that lost the acknowledgement asks here what became of the guest.
#[derive(Clone)]
pub struct Receiving {
    incoming: Incoming,
    target: Arc<ImageTarget>,
}

/// A machine that lies in its image.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Stored {
    /// The image's place.
    pub path: PathBuf,
    /// All of the machine but its pages.
    pub shape: Shape,
    /// What was received.
    pub statistics: IncomingStatistics,
}

/// Waits at `at` for a source and writes its machine to the image that `plan` names. The address is bound when
/// this returns.
///
/// The source may be a QEMU or a Sterna, with the multifd channels and the compression that `params` and
/// `capabilities` say (nothing of that is negotiated: specs/stream.md §10). With `return-path` at the source it
/// learns whether the image is safe; without, it does not.
///
/// # Errors
/// [`StartError`] when the address cannot be bound or the settings make no sense. Whether the image can be written
/// shows when the source's block list has come.
pub fn receive(
    at: &Address,
    plan: ImagePlan,
    params: Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Result<Receiving, StartError> {
    let mut params = params;
    params.limits.prepare = params.limits.prepare.max(STORING);
    // No guest is held here: an image is in its place or it is not.
    let capabilities = Capabilities { unmanaged: true, ..capabilities };
    let target = Arc::new(ImageTarget::new(plan));
    let incoming = Incoming::listen_for(target.clone(), at, params, capabilities, observer)?;
    Ok(Receiving { incoming, target })
}

impl Receiving {
    /// Where it listens, with the port that the kernel chose.
    pub fn address(&self) -> Address {
        self.incoming.address()
    }

    /// Where it stands.
    pub fn status(&self) -> Status {
        self.incoming.status()
    }

    /// Its statistics now.
    pub fn statistics(&self) -> IncomingStatistics {
        self.incoming.statistics()
    }

    /// The machine as far as it has come: its configuration and blocks once RAM begins.
    pub fn shape(&self) -> Shape {
        self.target.shape()
    }

    /// Bytes of the machine's RAM; 0 until its block list has come. Cheap, unlike [`Receiving::shape`].
    pub fn ram_bytes(&self) -> u64 {
        self.target.ram_bytes()
    }

    /// Gives it up; there will be no image, and the source's guest runs on.
    ///
    /// # Errors
    /// [`Refusal`] once the source has handed the guest over.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.incoming.cancel()
    }

    /// How it ended, if it has.
    pub fn result(&self) -> Option<Result<Stored, MigrationError>> {
        self.incoming.arrival().map(|arrival| self.stored(arrival))
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// Why there is no image in its place. The source's guest runs on, unless the source had no return path and
    /// believes that it has completed; if all had come by then, [`MigrationError::Kept`] says where it is.
    pub fn wait(&self) -> Result<Stored, MigrationError> {
        let arrival = self.incoming.wait();
        self.stored(arrival)
    }

    fn stored(&self, arrival: Arrival) -> Result<Stored, MigrationError> {
        match arrival {
            Arrival::Completed(_) => Ok(Stored {
                path: self.target.plan().path.clone(),
                shape: self.target.shape(),
                statistics: self.statistics(),
            }),
            Arrival::Failed(error) => Err(error),
        }
    }
}
