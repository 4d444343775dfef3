//! Taking over by one's own word: may it, and the image of what is held.

use std::path::PathBuf;

use sterna_image::Shape;

use super::held::{HeldCheckpoint, HeldGuest, held};
use super::store::{Stage, Store};
use super::survivor::{ImageSurvivor, Survivor};
use crate::error::{MigrationError, VmError};
use crate::incoming::Incoming;
use crate::incoming::follower::Follower;
use crate::opaque::ImagePlan;

/// Decides whether a standby may take over: whether nobody else runs the guest, now or later.
///
/// It is asked when no further checkpoint can become held, and before anything is changed. It may take as long as it needs
/// (an arbiter, a fence); meanwhile a primary that lives waits with its output held back.
pub trait TakeoverPermission: Send + Sync {
    /// May this checkpoint be taken over?
    ///
    /// # Errors
    /// Why not, and what to do about it.
    fn ask(&self, checkpoint: &HeldCheckpoint) -> Result<(), String>;
}

/// The operator says so, and has seen to it that the primary's guest does not run any more.
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

/// A checkpoint that was taken over.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TakenOver {
    /// Which.
    pub checkpoint: HeldCheckpoint,
    /// The image's place.
    pub path: PathBuf,
    /// All of the machine but its pages.
    pub shape: Shape,
}

/// Why nothing was taken over.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TakeoverError {
    /// The seeding has not come whole.
    #[error("nothing is held yet: the guest is at the primary alone")]
    NothingHeld,
    /// It was done before.
    #[error("the checkpoint was taken over already: start the guest from that image")]
    Done,
    /// Another side may have the guest.
    #[error("the takeover was refused: {0}; the standby goes on as before")]
    Refused(String),
    /// The image could not be made; the checkpoint is still held.
    #[error("the checkpoint is held, and its image could not be made: {0}; try again, elsewhere if need be")]
    Image(MigrationError),
    /// The guest could not be started elsewhere; the checkpoint is still held.
    #[error("the checkpoint is held, and the guest was not started: {0}; try again, or make an image")]
    Survivor(VmError),
    /// The primary is or was in contact: the arbiter decides ([`StandbyContact::take_over`](super::StandbyContact::take_over)).
    #[error("this guest is protected in contact with its primary, so nobody takes it over without a claim")]
    Protected,
}

/// While it lives, no checkpoint becomes held.
struct Frozen<'a>(&'a Store);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

/// Makes an image.
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

/// Starts the guest where `survivor` has it.
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

/// Asks for the permission; with it the following ends for ever.
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
    // The primary hears nothing any more, and no thread touches RAM when the migration has ended.
    store.end();
    drop(frozen);
    incoming.wait();
    Ok(checkpoint)
}
