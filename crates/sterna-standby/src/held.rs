//! The guest at the last held checkpoint, in the form in which a takeover uses it.

use std::sync::Arc;
use std::time::Duration;

use sterna::error::{MigrationError, ProtectionDifference};
use sterna_image::Shape;
use sterna_ram::{GuestRam, PAGE_SIZE};
use sterna_wire::colo::DeviceList;
use sterna_wire::global_state::{self, GlobalState};

use super::store::{Devices, Stage, Store};

/// Number of pages that are searched for zero pages in one call.
pub(super) const PIECE_PAGES: u64 = 512;

/// Number and age of a held checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldCheckpoint {
    /// Number of the checkpoint. The seeding is 0.
    pub number: u64,
    /// Time since the checkpoint became held.
    pub age: Duration,
}

/// The last held checkpoint; `None` while the guest is being seeded.
pub(super) fn held(store: &Store) -> Option<HeldCheckpoint> {
    let state = store.state();
    let is_held = !matches!(state.stage, Stage::Seeding) && state.devices.is_some();
    let age = state.counts.held_at.filter(|_| is_held)?.elapsed();
    Some(HeldCheckpoint { number: state.number, age })
}

/// The guest at the last held checkpoint. No further checkpoint becomes held, and no thread writes its RAM. Clones
/// share the RAM.
#[derive(Clone)]
pub struct HeldGuest {
    checkpoint: HeldCheckpoint,
    shape: Shape,
    ram: GuestRam,
    devices: Vec<HeldDevice>,
}

/// A device's section at the last held checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldDevice {
    /// Name of the section.
    pub name: String,
    /// Instance of the section, which distinguishes sections of one name.
    pub instance: u32,
    /// Version of the section's body.
    pub version: u32,
    /// The body, as in the stream.
    pub body: Vec<u8>,
}

impl HeldGuest {
    /// Completes RAM with the last checkpoint's pages, if they are not there yet. No further checkpoint may arrive.
    pub(super) fn of(store: &Store) -> Result<Self, MigrationError> {
        let missing = || MigrationError::Internal("no checkpoint is held".to_owned());
        let checkpoint = held(store).ok_or_else(missing)?;
        store.apply_held()?;
        store.disks.take_over()?;
        let (ram, shape, devices) = {
            let state = store.state();
            let (Some(seeded), Some(devices)) = (&state.seeded, &state.devices) else {
                return Err(missing());
            };
            let shape = shape_of(&seeded.shape, &seeded.list, devices)?;
            (seeded.pages.ram.clone(), shape, devices_of(&seeded.list, devices))
        };
        MigrationError::check_memory(&ram)?;
        Ok(Self { checkpoint, shape, ram, devices })
    }

    /// Number and age of the checkpoint.
    pub fn checkpoint(&self) -> HeldCheckpoint {
        self.checkpoint
    }

    /// The machine without its pages. Its run state is `running`.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The devices' sections. Sections that arrived before RAM come first.
    pub fn devices(&self) -> &[HeldDevice] {
        &self.devices
    }

    pub(super) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Calls `visit` with number and content of every non-zero page of a block, in order. Blocks have the order of
    /// [`shape`](Self::shape).
    ///
    /// # Errors
    /// Memory of this host has failed, or `visit` returned an error.
    pub fn visit_pages<E: From<MigrationError>>(
        &self,
        block: usize,
        mut visit: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let block = self.ram.block(block);
        let mut page = [0; PAGE_SIZE];
        for first in (0..block.pages()).step_by(PIECE_PAGES as usize) {
            let count = PIECE_PAGES.min(block.pages() - first);
            let mut zero = [0u64; (PIECE_PAGES / 64) as usize];
            block
                .slice(first * PAGE_SIZE as u64, count as usize * PAGE_SIZE)
                .map_err(MigrationError::from)?
                .zero_page_bits(&mut zero)
                .map_err(MigrationError::from)?;
            for index in (0..count).filter(|index| zero[(index / 64) as usize] >> (index % 64) & 1 == 0) {
                block.read((first + index) * PAGE_SIZE as u64, &mut page).map_err(MigrationError::from)?;
                visit(first + index, &page)?;
            }
        }
        Ok(())
    }
}

pub(super) fn devices_of(list: &DeviceList, devices: &Devices) -> Vec<HeldDevice> {
    let sections = list.devices().iter().zip(&devices.found.sections);
    let held = sections.map(|(device, (_, body))| HeldDevice {
        name: device.name.clone(),
        instance: device.instance,
        version: device.version,
        body: devices.bytes[body.clone()].to_vec(),
    });
    held.collect()
}

/// Describes the machine at a checkpoint (`specs/colo.md §6`).
fn shape_of(seeding: &Arc<Shape>, list: &DeviceList, devices: &Devices) -> Result<Shape, MigrationError> {
    let mut shape = seeding.as_ref().clone();
    let mut bytes = devices.bytes.clone();
    if let Some(index) = list.find(global_state::SECTION_NAME, global_state::SECTION_INSTANCE) {
        let body = &mut bytes[devices.found.sections[index].1.clone()];
        // The section repeats the run state of the seeding. At a checkpoint the guest ran, so `running` replaces it.
        let suspended = GlobalState::decode(body).map_or(Some(false), |state| state.suspended);
        let running = GlobalState { run_state: "running".to_owned(), suspended }.encode();
        let running = running.map_err(MigrationError::wire("globalstate"))?;
        if body.len() != running.len() {
            let (came, due) = (body.len(), running.len());
            return Err(ProtectionDifference::GlobalState { came, due }.into());
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
