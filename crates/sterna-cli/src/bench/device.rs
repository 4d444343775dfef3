//! A device with large state for `sterna bench downtime`.
//! Its state is a buffer in memory that is read and loaded at a configured rate. Reading is a plain copy, the
//! cheapest that a device can offer. After each run, the loaded state is compared with the original, outside
//! the measured time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::{Device, DeviceStream, RemainingState, VmError};

/// Maximum delay for which a device compensates by moving its next bytes faster.
const SLACK: Duration = Duration::from_millis(2);

/// A benchmark device with its state, its rate limit and its read position.
pub struct BenchDevice {
    number: u32,
    /// The state; at the destination, a buffer of the same size that the state is loaded into.
    state: Mutex<Vec<u8>>,
    /// Bytes that can be read while the guest runs.
    running_bytes: usize,
    /// Bytes per second for reading and loading; 0: no limit.
    rate: u64,
    at: AtomicUsize,
    has_stopped: Mutex<bool>,
    /// When the last transfer should end at the configured rate.
    due: Mutex<Option<Instant>>,
}

impl BenchDevice {
    /// Device `number` with `bytes` of state. Every page is touched, so that no page fault is measured.
    pub fn new(number: u32, bytes: usize, precopy_percent: u8, rate: u64, is_source: bool) -> Arc<Self> {
        let mut state = vec![1u8; bytes];
        if is_source {
            fastrand::Rng::with_seed(u64::from(number)).fill(&mut state);
        }
        Arc::new(Self {
            number,
            state: Mutex::new(state),
            running_bytes: (bytes as u64 * u64::from(precopy_percent) / 100) as usize,
            rate,
            at: AtomicUsize::new(0),
            has_stopped: Mutex::new(false),
            due: Mutex::new(None),
        })
    }

    /// Resets position and rate limit before the next run.
    pub fn rewind(&self) {
        self.at.store(0, Ordering::Relaxed);
        *self.has_stopped.lock() = false;
        *self.due.lock() = None;
    }

    /// Compares the state with the one that `other` has loaded.
    /// Then changes `other`'s buffer, so that the next run cannot pass with old data.
    pub fn arrived_as(&self, other: &Self) -> bool {
        let (ours, mut theirs) = (self.state.lock(), other.state.lock());
        let same = *ours == *theirs;
        theirs.chunks_mut(4096).for_each(|page| page[0] ^= 0xff);
        same
    }

    /// Sleeps for as long as `bytes` take at the device's rate.
    fn keep_pace(&self, bytes: usize) {
        if self.rate == 0 {
            return;
        }
        let now = Instant::now();
        // An idle device must not save up time to move faster later. It only compensates for a late wake-up,
        // at most `SLACK`.
        let since = self.due.lock().unwrap_or(now).max(now.checked_sub(SLACK).unwrap_or(now));
        let due = since + Duration::from_secs_f64(bytes as f64 / self.rate as f64);
        *self.due.lock() = Some(due);
        std::thread::sleep(due.saturating_duration_since(now));
    }
}

impl DeviceStream for BenchDevice {
    fn begin_save(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn remaining(&self) -> Result<RemainingState, VmError> {
        let (at, bytes) = (self.at.load(Ordering::Relaxed), self.state.lock().len());
        let initial_bytes = self.running_bytes.saturating_sub(at) as u64;
        let stopped_bytes = (bytes - self.running_bytes.max(at)) as u64;
        Ok(RemainingState { initial_bytes, dirty_bytes: 0, stopped_bytes })
    }

    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        let state = self.state.lock();
        let end = if *self.has_stopped.lock() { state.len() } else { self.running_bytes };
        let at = self.at.load(Ordering::Relaxed);
        let count = end.saturating_sub(at).min(to.len());
        to[..count].copy_from_slice(&state[at..at + count]);
        drop(state);
        self.at.store(at + count, Ordering::Relaxed);
        self.keep_pace(count);
        Ok(count)
    }

    fn stop(&self) -> Result<(), VmError> {
        *self.has_stopped.lock() = true;
        Ok(())
    }

    fn end_save(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn begin_load(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        let at = self.at.load(Ordering::Relaxed);
        let mut state = self.state.lock();
        let place = state.get_mut(at..at + bytes.len());
        let Some(place) = place else {
            return Err(VmError::new("load a device", "its state is longer than the source device's"));
        };
        place.copy_from_slice(bytes);
        drop(state);
        self.at.store(at + bytes.len(), Ordering::Relaxed);
        self.keep_pace(bytes.len());
        Ok(())
    }

    fn finish_load(&self, _: &[u8]) -> Result<(), VmError> {
        let (came, bytes) = (self.at.load(Ordering::Relaxed), self.state.lock().len());
        if came == bytes {
            return Ok(());
        }
        Err(VmError::new("load a device", format!("{came} of {bytes} bytes arrived")))
    }

    fn end_load(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn run(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn expected_bytes_per_second(&self) -> Option<u64> {
        (self.rate > 0).then_some(self.rate)
    }
}

/// A `BenchDevice` as the device of a VM.
pub struct Plugged(pub Arc<BenchDevice>);

impl Device for Plugged {
    fn name(&self) -> String {
        "bench-device".into()
    }
    fn instance(&self) -> u32 {
        self.0.number
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }
    fn load(&self, _: u32, _: &[u8]) -> Result<(), VmError> {
        Ok(())
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(self.0.clone())
    }
}
