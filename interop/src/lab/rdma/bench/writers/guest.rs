//! A guest in this process that does the same as the boot sector. One thread waits actively for its time,
//! compares a page with its content from the previous pass, and writes it again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use sterna::{Device, RunState, SourceVm, TargetVm, Vm, VmError};
use sterna_ram::dirty::SoftwareLog;
use sterna_ram::{Backing, DirtySource, GuestRam, RamBlock};

use super::super::content::Load;
use super::super::{BLOCK, MEMORY_MIB, MIB};
use crate::Failure;
use crate::workload::{PLACES, Sweep};

/// The guest's machine, on either side.
pub(super) struct Writer(Arc<Inner>);

struct Inner {
    ram: GuestRam,
    log: SoftwareLog,
    pace: Duration,
    phase: Mutex<Phase>,
}

/// Number of steps, time of the last one, and longest time between two. In ns of the clock that all processes
/// share.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    pub(super) steps: u64,
    last_ns: u64,
    /// Time at which the last step was due.
    due_ns: u64,
    pub(super) longest_gap_ns: u64,
    pub(super) wrong_pages: u64,
}

enum Phase {
    Stopped(Progress),
    Running {
        stop: Arc<AtomicBool>,
        thread: JoinHandle<Result<Progress, Failure>>,
    },
    /// The guest's thread failed.
    Lost,
}

impl Writer {
    /// Makes memory that waits for a guest.
    pub(super) fn waiting(pace: Duration) -> Result<Self, Failure> {
        let block = RamBlock::new(BLOCK, MEMORY_MIB * MIB, Backing::Anonymous).map_err(said)?;
        let ram = GuestRam::new(vec![block]).map_err(said)?;
        let log = SoftwareLog::new(&ram);
        Ok(Self(Arc::new(Inner { ram, log, pace, phase: Mutex::new(Phase::Stopped(Progress::default())) })))
    }

    /// Makes a stopped guest after its first pass. The rest of its memory is noise.
    pub(super) fn boot(pace: Duration) -> Result<Self, Failure> {
        let writer = Self::waiting(pace)?;
        let block = &writer.0.ram.blocks()[0];
        for at in (sweep().end()..MEMORY_MIB * MIB).step_by(MIB as usize) {
            if let Some(bytes) = Load::Random.piece(at, MEMORY_MIB * MIB) {
                block.write(at, &bytes).map_err(said)?;
            }
        }
        let mut progress = Progress::default();
        for _ in 0..sweep().pages() {
            writer.0.step(&mut progress)?;
        }
        (progress.last_ns, progress.due_ns) = (now_ns(), now_ns());
        *writer.0.phase.lock() = Phase::Stopped(progress);
        Ok(writer)
    }

    /// Address of the guest's RAM in this process.
    pub(super) fn address(&self) -> u64 {
        self.0.ram.blocks()[0].host_address() as u64
    }

    /// Stops the guest and returns its progress.
    pub(super) fn stopped(&self) -> Result<Progress, Failure> {
        self.0.stopped()
    }

    pub(super) fn run(&self) -> Result<(), Failure> {
        self.0.run()
    }
}

impl Inner {
    fn run(self: &Arc<Self>) -> Result<(), Failure> {
        let mut phase = self.phase.lock();
        let Phase::Stopped(progress) = *phase else { return Ok(()) };
        let (stop, inner) = (Arc::new(AtomicBool::new(false)), Arc::clone(self));
        let over = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("writer".into());
        let thread = thread.spawn(move || inner.write_until(&over, progress)).map_err(said)?;
        *phase = Phase::Running { stop, thread };
        Ok(())
    }

    fn stopped(&self) -> Result<Progress, Failure> {
        let mut phase = self.phase.lock();
        let progress = match std::mem::replace(&mut *phase, Phase::Lost) {
            Phase::Stopped(progress) => progress,
            Phase::Running { stop, thread } => {
                stop.store(true, Ordering::Relaxed);
                thread.join().map_err(|_| "the writer panicked")??
            }
            Phase::Lost => return Err("the writer is lost".into()),
        };
        *phase = Phase::Stopped(progress);
        Ok(progress)
    }

    fn write_until(&self, stop: &AtomicBool, mut progress: Progress) -> Result<Progress, Failure> {
        let pace = self.pace.as_nanos() as u64;
        while !stop.load(Ordering::Relaxed) {
            // A late guest catches up. The limit is the same as the boot sector's, which has a counter of 32
            // bits.
            let now = now_ns();
            if now.saturating_sub(progress.due_ns) < pace {
                continue;
            }
            let gap = now.saturating_sub(progress.last_ns);
            progress.longest_gap_ns = progress.longest_gap_ns.max(gap);
            progress.last_ns = now;
            progress.due_ns = (progress.due_ns + pace).max(now.saturating_sub(MOST_LATE_NS));
            self.step(&mut progress)?;
        }
        Ok(progress)
    }

    fn step(&self, progress: &mut Progress) -> Result<(), Failure> {
        let block = &self.ram.blocks()[0];
        let (address, word) = sweep().written_in(progress.steps);
        if let Some(last) = progress.steps.checked_sub(u64::from(sweep().pages())) {
            let wanted = sweep().written_in(last).1;
            progress.wrong_pages += u64::from(words(block, address)? != [wanted; 3]);
        }
        for place in PLACES {
            block.write(address + place, &word.to_le_bytes()).map_err(said)?;
        }
        progress.steps += 1;
        // The boot sector's counters are also in a page that it writes with each step.
        block.write_u64(COUNTER, progress.steps).map_err(said)?;
        for written in [address, COUNTER] {
            self.log.mark(0, written >> 12);
        }
        Ok(())
    }
}

/// Minimum time that the lower 32 bits of the time-stamp counter can represent.
const MOST_LATE_NS: u64 = 1_000_000_000;
/// Address at which the boot sector stores the time of its last step, aligned.
const COUNTER: u64 = 0x7de0;

pub(super) fn sweep() -> Sweep {
    Sweep::scattered(MEMORY_MIB)
}

fn words(block: &RamBlock, address: u64) -> Result<[u32; 3], Failure> {
    let mut words = [0; 3];
    for (word, place) in words.iter_mut().zip(PLACES) {
        let mut bytes = [0; 4];
        block.read(address + place, &mut bytes).map_err(said)?;
        *word = u32::from_le_bytes(bytes);
    }
    Ok(words)
}

fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Vm for Writer {
    fn machine_type(&self) -> String {
        "sterna-lab-writer".into()
    }

    fn ram(&self) -> GuestRam {
        self.0.ram.clone()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        vec![Arc::new(Counts(Arc::clone(&self.0)))]
    }
}

impl SourceVm for Writer {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.0.log
    }

    fn run_state(&self) -> RunState {
        match *self.0.phase.lock() {
            Phase::Running { .. } => RunState::Running,
            _ => RunState::Paused,
        }
    }

    fn stop(&self) -> Result<(), VmError> {
        self.0.stopped().map(drop).map_err(|why| VmError::new("stop the writer", why))
    }

    fn resume(&self) -> Result<(), VmError> {
        self.0.run().map_err(|why| VmError::new("let the writer run", why))
    }
}

impl TargetVm for Writer {
    fn start(&self) -> Result<(), VmError> {
        self.resume()
    }

    fn reset(&self) {
        *self.0.phase.lock() = Phase::Stopped(Progress::default());
    }
}

/// The guest's progress, as the state of a device.
struct Counts(Arc<Inner>);

impl Device for Counts {
    fn name(&self) -> String {
        "writer".into()
    }

    fn save(&self) -> Result<Vec<u8>, VmError> {
        match *self.0.phase.lock() {
            Phase::Stopped(Progress { steps, last_ns, due_ns, longest_gap_ns, wrong_pages }) => {
                Ok([steps, last_ns, due_ns, longest_gap_ns, wrong_pages].map(u64::to_be_bytes).concat())
            }
            _ => Err(VmError::new("save the writer", "it is not stopped")),
        }
    }

    fn load(&self, _: u32, body: &[u8]) -> Result<(), VmError> {
        let number =
            |index: usize| body.get(index * 8..)?.first_chunk().map(|word| u64::from_be_bytes(*word));
        let loaded = || {
            Some(Progress {
                steps: number(0)?,
                last_ns: number(1)?,
                due_ns: number(2)?,
                longest_gap_ns: number(3)?,
                wrong_pages: number(4)?,
            })
        };
        let progress = loaded().ok_or_else(|| VmError::new("load the writer", "its state is too short"))?;
        *self.0.phase.lock() = Phase::Stopped(progress);
        Ok(())
    }
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
