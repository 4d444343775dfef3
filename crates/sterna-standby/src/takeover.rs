//! Takeover without a contact: asks for the permission, then makes an image or starts the guest.

use std::path::PathBuf;

use sterna::error::{MigrationError, VmError};
use sterna::incoming::Incoming;
use sterna::internals::Follower;
use sterna_image::Shape;
use sterna_opaque::ImagePlan;

use super::held::{HeldCheckpoint, HeldGuest, held};
use super::store::{Stage, Store};
use super::survivor::{ImageSurvivor, Survivor};

/// Decides whether a standby may take over: no other host may run the guest, now or later.
///
/// Asked when no further checkpoint can become held, and before anything is changed. The decision may take any time
/// (an arbiter, a fence). Meanwhile the output of a live primary stays in its gate.
pub trait TakeoverPermission: Send + Sync {
    /// Asks whether this checkpoint may be taken over.
    ///
    /// # Errors
    /// Why not, and the next step for the operator.
    fn ask(&self, checkpoint: &HeldCheckpoint) -> Result<(), String>;
}

/// Permission by the operator, who has made sure that the primary's guest no longer runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct OperatorsWord;

impl TakeoverPermission for OperatorsWord {
    fn ask(&self, _: &HeldCheckpoint) -> Result<(), String> {
        Ok(())
    }
}

impl<F: Fn(&HeldCheckpoint) -> Result<(), String> + Send + Sync> TakeoverPermission for F {
    fn ask(&self, checkpoint: &HeldCheckpoint) -> Result<(), String> {
        self(checkpoint)
    }
}

/// Result of a takeover into an image.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TakenOver {
    /// The checkpoint in the image.
    pub checkpoint: HeldCheckpoint,
    /// Path of the image.
    pub path: PathBuf,
    /// The machine without its pages.
    pub shape: Shape,
}

/// Why a takeover failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TakeoverError {
    /// The seeding is not complete.
    #[error("this standby has no checkpoint yet: only the primary has the guest")]
    NothingHeld,
    /// The guest was taken over before.
    #[error("the checkpoint was taken over already: start the guest from that image")]
    Done,
    /// The permission was refused, because another side may have the guest.
    #[error("the takeover was refused: {0}; the standby continues")]
    Refused(String),
    /// The image could not be made; the checkpoint stays held.
    #[error(
        "the checkpoint is held, and its image could not be made: {0}; try again, with another file if necessary"
    )]
    Image(MigrationError),
    /// The survivor could not start the guest; the checkpoint stays held.
    #[error("the checkpoint is held, and the guest was not started: {0}; try again, or make an image")]
    Survivor(VmError),
    /// The primary is or was in contact, so the arbiter decides
    /// ([`StandbyContact::take_over`](super::StandbyContact::take_over)).
    #[error("this guest's standby is in contact with its primary, so a takeover needs a claim")]
    Protected,
}

/// Prevents checkpoints from becoming held, until it is dropped.
struct Frozen<'a>(&'a Store);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

/// Takes over into an image.
pub(super) fn into_image(
    store: &Store,
    incoming: &Incoming,
    plan: &ImagePlan,
    permission: &dyn TakeoverPermission,
) -> Result<TakenOver, TakeoverError> {
    let checkpoint = ended(store, incoming, permission)?;
    let image = ImageSurvivor::new(plan.clone());
    let made = HeldGuest::of(store).and_then(|guest| {
        image.make(&guest)?;
        image.publish()?;
        Ok(guest.shape().clone())
    });
    let shape = made.map_err(TakeoverError::Image)?;
    store.state().stage = Stage::TakenOver;
    Ok(TakenOver { checkpoint, path: plan.path.clone(), shape })
}

/// Takes over: `survivor` starts the guest.
pub(super) fn into_survivor(
    store: &Store,
    incoming: &Incoming,
    survivor: &dyn Survivor,
    permission: &dyn TakeoverPermission,
) -> Result<HeldCheckpoint, TakeoverError> {
    let checkpoint = ended(store, incoming, permission)?;
    let guest = HeldGuest::of(store).map_err(TakeoverError::Image)?;
    survivor.prepare(&guest).and_then(|()| survivor.start()).map_err(TakeoverError::Survivor)?;
    store.state().stage = Stage::TakenOver;
    Ok(checkpoint)
}

/// Asks for the permission; if it is given, ends the reception permanently.
fn ended(
    store: &Store,
    incoming: &Incoming,
    permission: &dyn TakeoverPermission,
) -> Result<HeldCheckpoint, TakeoverError> {
    store.freeze();
    let frozen = Frozen(store);
    if matches!(store.state().stage, Stage::TakenOver) {
        return Err(TakeoverError::Done);
    }
    let checkpoint = held(store).ok_or(TakeoverError::NothingHeld)?;
    permission.ask(&checkpoint).map_err(TakeoverError::Refused)?;
    // Order: first no further answer goes to the primary, then wait until no thread of the reception touches RAM.
    store.end();
    drop(frozen);
    incoming.wait();
    Ok(checkpoint)
}
