//! The statebank device: its migration states, its actions in each state, and its faults.

mod backend;
mod port;

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;

use super::config::StateBankConfig;
use super::content::{BLOCK_BYTES, mix};
use super::dma::{Dma, DmaPlan};
use super::fault::{Fault, FaultKind};
use super::load::LoadError;
use super::load::{Loaded, Loader};
use super::pace::{Pace, sleep_until};
use super::save::{Blocks, Saver};
use super::status::{Status, Verdict};
use super::stream::End;
use crate::vfio::{MigState, arcs, path};

/// The device model. [The module's text](super) describes it.
#[derive(Debug)]
pub struct StateBank {
    config: StateBankConfig,
    inner: Mutex<Inner>,
    dma: Dma,
    /// Whether hangs have been ended.
    released: Mutex<bool>,
    release: Condvar,
}

#[derive(Debug)]
struct Inner {
    state: MigState,
    blocks: Blocks,
    dirty_rate: u64,
    /// Start of the present run, and the blocks changed since then. `None` while the device does not run.
    changes: Option<(Instant, u64)>,
    changed_blocks: u64,
    saver: Option<Saver>,
    loader: Option<Loader>,
    /// Bytes read or written since the device entered the present state.
    state_bytes: u64,
    read_pace: Pace,
    load_pace: Pace,
    fault: Option<Fault>,
    /// Whether the device has died from a fault.
    dead: bool,
    loaded: Verdict,
    /// Whether guest RAM must be checked before a loaded device runs.
    looks_at_ram: bool,
    ram: Verdict,
    load_error: Option<LoadError>,
    read_bytes: u64,
    loaded_bytes: u64,
}

/// Why the device does not execute a request.
#[derive(Debug)]
enum Failure {
    /// The request is not possible, or its arguments are invalid.
    Refused(Errno),
    /// The configured fault has occurred.
    Fault(FaultKind),
    /// The device died earlier.
    Dead,
    /// The loaded bytes are no valid state.
    Load(LoadError),
    /// Guest RAM lacks a write of the source's device.
    Ram(super::dma::LostWrite),
}

impl StateBank {
    /// Creates a device in RUNNING with every block in generation 0.
    ///
    /// # Errors
    /// A text that names the invalid setting and the reason.
    pub fn new(config: StateBankConfig) -> Result<Arc<Self>, String> {
        config.check()?;
        let dma = Dma::new(first_plan(&config));
        let bank = Self {
            inner: Mutex::new(Inner::new(&config)),
            config,
            dma,
            released: Mutex::default(),
            release: Condvar::new(),
        };
        bank.dma.run();
        Ok(Arc::new(bank))
    }

    /// The configuration of this device.
    pub fn config(&self) -> &StateBankConfig {
        &self.config
    }

    /// A summary of the device's state and counters.
    pub fn status(&self) -> Status {
        let mut inner = self.inner.lock();
        inner.change_blocks(Instant::now());
        Status {
            state: inner.state,
            loaded: inner.loaded,
            ram: inner.ram,
            digest: inner.blocks.digest(),
            read_bytes: inner.read_bytes,
            loaded_bytes: inner.loaded_bytes,
            dma_writes: self.dma.plan().1,
            changed_blocks: inner.changed_blocks,
        }
    }

    /// Error of the last load, if it failed.
    pub fn load_error(&self) -> Option<LoadError> {
        self.inner.lock().load_error.clone()
    }

    /// The device's DMA writer and its log.
    pub fn dma(&self) -> &Dma {
        &self.dma
    }

    /// Ends present and future hangs. The waiting callers get an error as if no answer had arrived.
    pub fn release(&self) {
        *self.released.lock() = true;
        self.release.notify_all();
    }

    fn state(&self) -> MigState {
        self.inner.lock().state
    }

    fn set_state(&self, to: MigState) -> Result<(), Failure> {
        let mut inner = self.alive()?;
        let way = path(self.config.features(), inner.state, to).ok_or(Failure::Refused(Errno::INVAL))?;
        for next in way {
            inner.trip(next, None)?;
            self.step(&mut inner, next)?;
        }
        Ok(())
    }

    /// Performs one arc between two states.
    fn step(&self, inner: &mut Inner, next: MigState) -> Result<(), Failure> {
        debug_assert!(arcs::is_arc(self.config.features(), inner.state, next));
        let now = Instant::now();
        inner.change_blocks(now);
        let from = inner.state;
        if from.runs() && !next.runs() {
            self.dma.stop();
            inner.changes = None;
        }
        match (from, next) {
            (MigState::Resuming, _) => self.take_over(inner)?,
            (_, MigState::Resuming) => inner.loader = Some(Loader::new(self.config.state_bytes)),
            _ => {}
        }
        if !from.runs() && next.runs() {
            self.look_at_ram(inner)?;
            inner.changes = Some((now, 0));
            self.dma.run();
        }
        if !from.saves() && next.saves() {
            inner.saver = Some(Saver::new(&inner.blocks, self.config.precopy_percent));
        } else if !next.saves() {
            inner.saver = None;
        }
        (inner.state, inner.state_bytes) = (next, 0);
        inner.read_pace.begin();
        inner.load_pace.begin();
        Ok(())
    }

    /// Leaves RESUMING. The received state becomes the device's state, or the device enters ERROR.
    fn take_over(&self, inner: &mut Inner) -> Result<(), Failure> {
        let loader = inner.loader.take().ok_or(Failure::Refused(Errno::INVAL))?;
        match loader.finish() {
            Ok(Loaded { blocks, end }) => {
                let plan = DmaPlan { seed: blocks.seed, rate: end.dma_rate, window: end.dma_window };
                self.dma.become_other(plan, end.dma_writes);
                (inner.blocks, inner.dirty_rate) = (blocks, end.dirty_rate);
                (inner.loaded, inner.load_error) = (Verdict::Good, None);
                (inner.looks_at_ram, inner.ram) = (true, Verdict::None);
                Ok(())
            }
            Err(error) => {
                (inner.loaded, inner.load_error) = (Verdict::Bad, Some(error.clone()));
                inner.state = MigState::Error;
                Err(Failure::Load(error))
            }
        }
    }

    fn look_at_ram(&self, inner: &mut Inner) -> Result<(), Failure> {
        if !std::mem::take(&mut inner.looks_at_ram) {
            return Ok(());
        }
        match self.dma.verify() {
            None => Ok(()),
            Some(Ok(())) => {
                inner.ram = Verdict::Good;
                Ok(())
            }
            Some(Err(lost)) => {
                inner.ram = Verdict::Bad;
                inner.state = MigState::Error;
                Err(Failure::Ram(lost))
            }
        }
    }

    fn reset(&self) -> Result<(), Failure> {
        let mut inner = self.alive()?;
        self.dma.stop();
        let fault = inner.fault;
        *inner = Inner {
            fault,
            read_bytes: inner.read_bytes,
            loaded_bytes: inner.loaded_bytes,
            ..Inner::new(&self.config)
        };
        self.dma.become_other(first_plan(&self.config), 0);
        self.dma.run();
        Ok(())
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, Failure> {
        let mut guard = self.alive()?;
        let inner = &mut *guard;
        inner.change_blocks(Instant::now());
        inner.trip(inner.state, Some(to.len()))?;
        let end = (inner.state == MigState::StopCopy).then(|| {
            let (plan, dma_writes) = self.dma.plan();
            End { dirty_rate: inner.dirty_rate, dma_rate: plan.rate, dma_writes, dma_window: plan.window }
        });
        let saver = inner.saver.as_mut().ok_or(Failure::Refused(Errno::INVAL))?;
        let read = saver.read(&inner.blocks, end.as_ref(), to);
        inner.state_bytes += read as u64;
        inner.read_bytes += read as u64;
        let due = inner.read_pace.ask(read, Instant::now());
        drop(guard);
        due.into_iter().for_each(sleep_until);
        Ok(read)
    }

    fn write_data(&self, from: &[u8]) -> Result<(), Failure> {
        let mut guard = self.alive()?;
        let inner = &mut *guard;
        inner.trip(inner.state, Some(from.len()))?;
        let loader = inner.loader.as_mut().ok_or(Failure::Refused(Errno::INVAL))?;
        if let Err(error) = loader.push(from) {
            (inner.loaded, inner.load_error) = (Verdict::Bad, Some(error.clone()));
            return Err(Failure::Load(error));
        }
        inner.state_bytes += from.len() as u64;
        inner.loaded_bytes += from.len() as u64;
        let due = inner.load_pace.ask(from.len(), Instant::now());
        drop(guard);
        due.into_iter().for_each(sleep_until);
        Ok(())
    }

    fn data_size(&self) -> Result<u64, Failure> {
        let mut inner = self.alive()?;
        inner.change_blocks(Instant::now());
        Ok(match &inner.saver {
            Some(saver) => saver.left_bytes(&inner.blocks),
            None => Saver::new(&inner.blocks, 0).left_bytes(&inner.blocks),
        })
    }

    /// Unread bytes, and bytes changed since their read, that can be read while running.
    fn precopy_sizes(&self) -> Result<(u64, u64), Failure> {
        let mut inner = self.alive()?;
        inner.change_blocks(Instant::now());
        let saver = inner.saver.as_ref().filter(|_| inner.state.runs());
        let saver = saver.ok_or(Failure::Refused(Errno::INVAL))?;
        Ok(saver.running_bytes(&inner.blocks))
    }

    /// Waits until hangs are ended, at most for `limit`. True if they were ended.
    fn hang(&self, limit: Option<std::time::Duration>) -> bool {
        let mut released = self.released.lock();
        match limit {
            None => self.release.wait_while(&mut released, |released| !*released),
            Some(limit) => drop(self.release.wait_while_for(&mut released, |released| !*released, limit)),
        }
        *released
    }

    fn alive(&self) -> Result<MutexGuard<'_, Inner>, Failure> {
        let inner = self.inner.lock();
        if inner.dead { Err(Failure::Dead) } else { Ok(inner) }
    }
}

impl Inner {
    fn new(config: &StateBankConfig) -> Self {
        Self {
            state: MigState::Running,
            blocks: Blocks::new(config.seed, config.state_bytes),
            dirty_rate: config.dirty_rate,
            changes: Some((Instant::now(), 0)),
            changed_blocks: 0,
            saver: None,
            loader: None,
            state_bytes: 0,
            read_pace: Pace::new(config.read_rate),
            load_pace: Pace::new(config.load_rate),
            fault: config.fault,
            dead: false,
            loaded: Verdict::None,
            looks_at_ram: false,
            ram: Verdict::None,
            load_error: None,
            read_bytes: 0,
            loaded_bytes: 0,
        }
    }

    /// Changes the blocks that are due at `now`.
    fn change_blocks(&mut self, now: Instant) {
        let Some((since, done)) = &mut self.changes else { return };
        let passed = now.saturating_duration_since(*since).as_secs_f64();
        let due = (passed * self.dirty_rate as f64 / BLOCK_BYTES as f64) as u64;
        // The count is capped: more changes than a few per block make no difference.
        let count = self.blocks.generations.len();
        let more = due.saturating_sub(*done).min(4 * count as u64);
        *done = due.max(*done);
        for _ in 0..more {
            let block = (mix(self.blocks.seed ^ self.changed_blocks) % count as u64) as usize;
            self.changed_blocks += 1;
            self.blocks.generations[block] += 1;
            if let Some(saver) = &mut self.saver {
                saver.changed(block);
            }
        }
    }

    /// Triggers the fault if it is due. It is due on the way into `state`, or within the next `bytes` moved
    /// in that state.
    fn trip(&mut self, state: MigState, bytes: Option<usize>) -> Result<(), Failure> {
        let due = |fault: &Fault| {
            fault.state == state
                && match (fault.byte, bytes) {
                    (None, None) => true,
                    (Some(at), Some(bytes)) => self.state_bytes + bytes as u64 > at,
                    _ => false,
                }
        };
        let Some(fault) = self.fault.filter(due) else { return Ok(()) };
        self.fault = None;
        self.dead = fault.kind == FaultKind::Die;
        Err(Failure::Fault(fault.kind))
    }
}

fn first_plan(config: &StateBankConfig) -> DmaPlan {
    DmaPlan { seed: config.seed, rate: config.dma_rate, window: config.dma_window.unwrap_or_default() }
}
