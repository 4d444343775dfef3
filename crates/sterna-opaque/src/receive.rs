//! Receives a machine from an address into an image.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna::StartError;
use sterna::error::MigrationError;
use sterna::events::{Observer, Status};
use sterna::incoming::{Arrival, Incoming, Refusal};
use sterna::params::{Capabilities, Parameters};
use sterna::stats::IncomingStatistics;
use sterna_image::Shape;
use sterna_transport::Address;

use super::image_plan::ImagePlan;
use super::image_target::ImageTarget;

/// Time limit for making an image durable: a day, because only the disk determines the duration.
const STORING: Duration = Duration::from_secs(24 * 3600);

/// A machine that is being received. Cloning gives another handle. When the last handle is dropped, the address is
/// closed, and an image that is not complete is removed.
///
/// Keep the handle after success: a Sterna source that lost the acknowledgement asks here for the result.
#[derive(Clone)]
pub struct Receiving {
    incoming: Incoming,
    target: Arc<ImageTarget>,
}

/// A received machine in its image.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Stored {
    /// Path of the image.
    pub path: PathBuf,
    /// The machine without its pages.
    pub shape: Shape,
    /// Statistics of the reception.
    pub statistics: IncomingStatistics,
}

/// Waits at `at` for a source and writes its machine to the image that `plan` names. The address is bound when this
/// returns.
///
/// The source may be a QEMU or a Sterna. It must use the multifd channels and the compression that `params` and
/// `capabilities` specify, because they are not negotiated (specs/stream.md §10). A source with `return-path` learns
/// whether the image is safe; a source without it does not.
///
/// # Errors
/// [`StartError`] if the address cannot be bound or the settings contradict each other. Whether the image can be
/// written is known only when the source's block list has arrived.
pub fn receive(
    at: &Address,
    plan: ImagePlan,
    params: Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Result<Receiving, StartError> {
    let mut params = params;
    params.limits.prepare = params.limits.prepare.max(STORING);
    // Managed mode would wait for a release of the guest. Here no guest runs: an image is complete, or it does not
    // exist.
    let capabilities = Capabilities { unmanaged: true, ..capabilities };
    let target = Arc::new(ImageTarget::new(plan));
    let incoming = Incoming::listen_for(target.clone(), at, params, capabilities, observer)?;
    Ok(Receiving { incoming, target })
}

impl Receiving {
    /// The bound address, with the port that the kernel chose.
    pub fn address(&self) -> Address {
        self.incoming.address()
    }

    /// The current status.
    pub fn status(&self) -> Status {
        self.incoming.status()
    }

    /// The current statistics.
    pub fn statistics(&self) -> IncomingStatistics {
        self.incoming.statistics()
    }

    /// The received part of the machine: its configuration and blocks when RAM begins.
    pub fn shape(&self) -> Shape {
        self.target.shape()
    }

    /// Bytes of the machine's RAM; 0 until its block list has arrived. Cheap, in contrast to [`Receiving::shape`].
    pub fn ram_bytes(&self) -> u64 {
        self.target.ram_bytes()
    }

    /// Cancels the reception. No image remains, and the source's guest continues to run.
    ///
    /// # Errors
    /// [`Refusal`] after the source has handed the guest over.
    pub fn cancel(&self) -> Result<(), Refusal> {
        self.incoming.cancel()
    }

    /// The result, after the reception has ended.
    pub fn result(&self) -> Option<Result<Stored, MigrationError>> {
        self.incoming.arrival().map(|arrival| self.stored(arrival))
    }

    /// Waits until the reception ends.
    ///
    /// # Errors
    /// Why there is no image in its place. The source's guest continues to run, with one exception: a source without
    /// a return path believes that it has completed. If the machine was complete by then, [`MigrationError::Kept`]
    /// contains the path of the image.
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
            other => Err(MigrationError::Internal(format!("a reception ended as {other:?}"))),
        }
    }
}
