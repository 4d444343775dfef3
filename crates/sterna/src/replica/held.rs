//! The guest as a takeover has it: the last held checkpoint.

use std::sync::Arc;
use std::time::Duration;

use sterna_image::Shape;
use sterna_ram::{GuestRam, PAGE_SIZE};
use sterna_wire::colo::DeviceList;
use sterna_wire::global_state::{self, GlobalState};

use super::store::{Devices, Stage, Store};
use crate::error::MigrationError;

/// Pages that are looked at at once.
pub(super) const PIECE_PAGES: u64 = 512;

/// A checkpoint that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldCheckpoint {
    /// Its number, counted from the seeding, which is 0.
    pub number: u64,
    /// Since it became held.
    pub age: Duration,
}

/// What is held.
pub(super) fn held(store: &Store) -> Option<HeldCheckpoint> {
    let state = store.state();
    let is_held = !matches!(state.stage, Stage::Seeding) && state.devices.is_some();
    let age = state.counts.held_at.filter(|_| is_held)?.elapsed();
    Some(HeldCheckpoint { number: state.number, age })
}

/// The guest at the last held checkpoint. No further one becomes held, and nobody writes its RAM. Clones share the RAM.
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
    /// Its instance.
    pub instance: u32,
    /// Version of the body.
    pub version: u32,
    /// The body as it stood in the stream.
    pub body: Vec<u8>,
}

impl HeldGuest {
    /// Nothing comes any more: puts the last checkpoint's pages into RAM, if they are not there yet.
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

    /// Which checkpoint it is.
    pub fn checkpoint(&self) -> HeldCheckpoint {
        self.checkpoint
    }

    /// All of the machine but its pages. It wants to run.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Its devices' sections, those that came before RAM first.
    pub fn devices(&self) -> &[HeldDevice] {
        &self.devices
    }

    pub(super) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Calls `visit` for every page of a block that is not zero, in order: its number and content. Blocks have the order of
    /// [`shape`](Self::shape).
    ///
    /// # Errors
    /// Memory of this host has failed, or what `visit` says.
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

/// The machine at a checkpoint (`specs/colo.md §6`).
fn shape_of(seeding: &Arc<Shape>, list: &DeviceList, devices: &Devices) -> Result<Shape, MigrationError> {
    let mut shape = seeding.as_ref().clone();
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
