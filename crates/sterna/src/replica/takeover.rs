//! Taking over: may it, and the image of what is held.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_image::{MappedWriter, Shape};
use sterna_ram::{GuestRam, PAGE_SIZE, PageBitmap, RamBlock};
use sterna_transport::{PageQueue, QueueOptions};
use sterna_wire::colo::DeviceList;
use sterna_wire::global_state::{self, GlobalState};

use super::store::{Devices, Stage, Store};
use crate::error::MigrationError;
use crate::incoming::Incoming;
use crate::incoming::follower::Follower;
use crate::opaque::ImagePlan;

/// Pages that are looked at, and written, at once.
const PIECE_PAGES: u64 = 512;

/// A checkpoint that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldCheckpoint {
    /// Its number, counted from the seeding, which is 0.
    pub number: u64,
    /// Since it became held.
    pub age: Duration,
}

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
}

/// What is held.
pub(super) fn held(store: &Store) -> Option<HeldCheckpoint> {
    let state = store.state();
    let is_held = !matches!(state.stage, Stage::Seeding) && state.devices.is_some();
    let age = state.counts.held_at.filter(|_| is_held)?.elapsed();
    Some(HeldCheckpoint { number: state.number, age })
}

/// While it lives, no checkpoint becomes held.
struct Frozen<'a>(&'a Store);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

pub(super) fn take_over(
    store: &Store,
    incoming: &Incoming,
    plan: &ImagePlan,
    permission: &dyn TakeoverPermission,
) -> Result<TakenOver, TakeoverError> {
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
    let shape = make_image(store, plan).map_err(TakeoverError::Image)?;
    store.state().stage = Stage::TakenOver;
    Ok(TakenOver { checkpoint, path: plan.path.clone(), shape })
}

fn make_image(store: &Store, plan: &ImagePlan) -> Result<Shape, MigrationError> {
    store.apply_held()?;
    let (pages, shape) = {
        let state = store.state();
        let (Some(seeded), Some(devices)) = (&state.seeded, &state.devices) else {
            return Err(MigrationError::Internal("a checkpoint is held without its machine".to_owned()));
        };
        (Arc::clone(&seeded.pages), shape_of(&seeded.shape, &seeded.list, devices)?)
    };
    MigrationError::check_memory(&pages.ram)?;
    let writer = plan.begin(&shape)?;
    write_pages(&writer, &pages.ram)?;
    plan.keep(&writer, &shape)?;
    plan.complete(&writer, &shape, false)?;
    Ok(shape)
}

/// The machine at a checkpoint (`specs/colo.md §6`).
fn shape_of(seeding: &Shape, list: &DeviceList, devices: &Devices) -> Result<Shape, MigrationError> {
    let mut shape = seeding.clone();
    let mut bytes = devices.bytes.clone();
    if let Some(index) = list.find(global_state::SECTION_NAME, global_state::SECTION_INSTANCE) {
        let body = &mut bytes[devices.found.sections[index].1.clone()];
        // The seeding's value for ever: the guest ran.
        let suspended = GlobalState::decode(body).map_or(Some(false), |state| state.suspended);
        let running = GlobalState { run_state: "running".to_owned(), suspended }.encode();
        let running = running.map_err(MigrationError::wire("globalstate"))?;
        if body.len() != running.len() {
            let what = format!("globalstate has {} bytes, not {}", body.len(), running.len());
            return Err(MigrationError::PeerIncompatible { what });
        }
        body.copy_from_slice(&running);
    }
    (shape.early, shape.setup, shape.devices) = (Vec::new(), Vec::new(), Vec::new());
    for (device, (section, _)) in list.devices().iter().zip(&devices.found.sections) {
        let place = if device.is_early { &mut shape.early } else { &mut shape.devices };
        place.extend_from_slice(&bytes[section.clone()]);
    }
    shape.has_eof = true;
    Ok(shape)
}

/// Writes every page that is not zero.
fn write_pages(writer: &MappedWriter, ram: &GuestRam) -> Result<(), MigrationError> {
    let mut queue = PageQueue::with_ram(writer.file(), ram, QueueOptions::default());
    for (index, block) in ram.blocks().iter().enumerate() {
        let absent = PageBitmap::new(block.pages());
        if let Err(error) = block.mark_absent(0, block.pages(), &absent) {
            tracing::warn!("cannot find out which pages are populated, so all are read: {error}");
        }
        let mut write = |first: u64, count: u64| {
            let (offset, length) = (first * PAGE_SIZE as u64, count as usize * PAGE_SIZE);
            let place = writer.pages_offset(index) + offset;
            queue.write_ram(place, index, offset, length).map_err(MigrationError::storage)?;
            writer.mark(index, first, count);
            Ok(())
        };
        for first in (0..block.pages()).step_by(PIECE_PAGES as usize) {
            let count = PIECE_PAGES.min(block.pages() - first);
            if absent.count_range(first, count) < count {
                write_piece(block, (first, count), &mut write)?;
            }
        }
    }
    queue.drain().map_err(MigrationError::storage)
}

/// Writes the pages of a piece that are not zero, as few runs.
fn write_piece(
    block: &RamBlock,
    (first, count): (u64, u64),
    write: &mut impl FnMut(u64, u64) -> Result<(), MigrationError>,
) -> Result<(), MigrationError> {
    let mut zero = [0u64; (PIECE_PAGES / 64) as usize];
    let piece = block.slice(first * PAGE_SIZE as u64, count as usize * PAGE_SIZE)?;
    piece.zero_page_bits(&mut zero)?;
    let is_zero = |page: u64| zero[(page / 64) as usize] >> (page % 64) & 1 == 1;
    let mut page = 0;
    while page < count {
        let from = page;
        while page < count && !is_zero(page) {
            page += 1;
        }
        if page > from {
            write(first + from, page - from)?;
        }
        while page < count && is_zero(page) {
            page += 1;
        }
    }
    Ok(())
}
