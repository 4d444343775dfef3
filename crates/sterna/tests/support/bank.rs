//! A device with large state, in this process. Its bytes are a function of a seed and their position, so that loading
//! notices any lost, torn or misplaced byte. It can fail on request, and records its calls.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::{Device, DeviceStream, RemainingState, VmError};

/// Calls of all banks of one VM, in order: the bank, and the name of the call.
pub type Calls = Arc<Mutex<Vec<(u32, &'static str)>>>;

pub struct Bank {
    pub name: String,
    pub instance: u32,
    pub seed: u64,
    /// Bytes of the stream.
    pub bytes: u64,
    /// Part of `bytes` that can be read while the device runs.
    pub running_bytes: u64,
    /// Name of the call that fails from now on.
    pub fails: Mutex<Option<&'static str>>,
    /// Duration of a read call while the device runs.
    pub read_delay: Mutex<Duration>,
    /// Duration of a load call.
    pub load_delay: Mutex<Duration>,
    pub asks_ack: bool,
    /// Bytes that it reports as readable after it has stopped, independent of the truth.
    pub claims: Mutex<Option<u64>>,
    /// Bytes per second that it reports as its expected rate.
    pub expects: Mutex<Option<u64>>,
    pub calls: Calls,
    /// Further bytes that become readable while it runs, one entry each time when all readable bytes were read.
    pub changes: Mutex<Vec<u64>>,
    /// Bytes that can be read while it runs, including those of `changes` so far.
    readable: AtomicU64,
    state: Mutex<State>,
    /// Number of bytes that were read or written.
    at: AtomicU64,
    inside: AtomicU32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Running,
    Quiesced,
    Stopped,
    Loading,
    Loaded,
}

/// Entry among the calls that marks the end of a read.
pub const HAS_READ: &str = "has read";

impl Bank {
    pub fn new(instance: u32, seed: u64, bytes: u64, running_bytes: u64, calls: &Calls) -> Self {
        Self {
            name: "bank".into(),
            instance,
            seed,
            bytes,
            running_bytes: running_bytes.min(bytes),
            fails: Mutex::new(None),
            read_delay: Mutex::new(Duration::ZERO),
            load_delay: Mutex::new(Duration::ZERO),
            asks_ack: false,
            claims: Mutex::new(None),
            expects: Mutex::new(None),
            calls: Arc::clone(calls),
            changes: Mutex::default(),
            readable: AtomicU64::new(running_bytes.min(bytes)),
            state: Mutex::new(State::Running),
            at: AtomicU64::new(0),
            inside: AtomicU32::new(0),
        }
    }

    /// Makes the bank require an acknowledgement before the switchover.
    pub fn asking(self) -> Self {
        Self { asks_ack: true, ..self }
    }

    /// Prevents a switchover before its running bytes have been read, however slow this machine is.
    pub fn read_while_running(self) -> Self {
        Self { claims: Mutex::new(Some(0)), expects: Mutex::new(Some(1)), ..self }
    }

    /// The destination's counterpart, which knows only the identity of the expected stream.
    pub fn waiting(&self, calls: &Calls) -> Self {
        let bank = Self::new(self.instance, self.seed, self.bytes, self.running_bytes, calls);
        *bank.state.lock().unwrap() = State::Idle;
        Self { asks_ack: self.asks_ack, ..bank }
    }

    pub fn fail(&self, call: Option<&'static str>) {
        *self.fails.lock().unwrap() = call;
    }

    /// Number of bytes of its stream that were read or loaded.
    pub fn position(&self) -> u64 {
        self.at.load(Ordering::SeqCst)
    }

    pub fn runs(&self) -> bool {
        *self.state.lock().unwrap() == State::Running
    }

    fn call<T>(&self, name: &'static str, act: impl FnOnce() -> Result<T, VmError>) -> Result<T, VmError> {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two calls to one device at once");
        self.calls.lock().unwrap().push((self.instance, name));
        let result = match *self.fails.lock().unwrap() {
            Some(call) if call == name => Err(VmError::new(name, "told to fail")),
            _ => act(),
        };
        self.inside.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn enter(&self, from: &[State], to: State) -> Result<(), VmError> {
        let mut state = self.state.lock().unwrap();
        if !from.contains(&state) {
            return Err(VmError::new("a device's state", format!("{to:?} behind {state:?}")));
        }
        *state = to;
        Ok(())
    }

    fn is(&self, states: &[State]) -> bool {
        states.contains(&self.state.lock().unwrap())
    }
}

/// Writes the stream of `seed` from byte `at` on, word by word, because tests move hundreds of MiB.
fn fill(seed: u64, mut at: u64, mut to: &mut [u8]) {
    while !to.is_empty() {
        let mut word = (seed ^ (at / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word ^= word >> 32;
        let word = word.wrapping_mul(0xd6e8_feb8_6659_fd93).to_le_bytes();
        let part = &word[(at % 8) as usize..];
        let (now, rest) = to.split_at_mut(part.len().min(to.len()));
        now.copy_from_slice(&part[..now.len()]);
        at += now.len() as u64;
        to = rest;
    }
}

impl DeviceStream for Bank {
    fn begin_save(&self) -> Result<(), VmError> {
        self.call("begin_save", || {
            self.at.store(0, Ordering::SeqCst);
            Ok(())
        })
    }

    fn remaining(&self) -> Result<RemainingState, VmError> {
        self.call("remaining", || {
            let at = self.at.load(Ordering::SeqCst);
            let initial_bytes = self.running_bytes.saturating_sub(at);
            let readable = self.readable.load(Ordering::SeqCst);
            let dirty_bytes = readable.saturating_sub(at) - initial_bytes;
            let stopped_bytes = self.bytes - readable.max(at);
            let stopped_bytes = self.claims.lock().unwrap().unwrap_or(stopped_bytes);
            Ok(RemainingState { initial_bytes, dirty_bytes, stopped_bytes })
        })
    }

    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        let has_stopped = self.is(&[State::Stopped]);
        let name = if has_stopped { "read stopped" } else { "read running" };
        self.call(name, || {
            let at = self.at.load(Ordering::SeqCst);
            let end = if has_stopped { self.bytes } else { self.readable.load(Ordering::SeqCst) };
            let count = end.saturating_sub(at).min(to.len() as u64) as usize;
            fill(self.seed, at, &mut to[..count]);
            if !has_stopped {
                std::thread::sleep(*self.read_delay.lock().unwrap());
            }
            self.at.fetch_add(count as u64, Ordering::SeqCst);
            if at < end && at + count as u64 == end && !has_stopped {
                let changed = self.changes.lock().unwrap().pop().unwrap_or(0);
                self.readable.store((end + changed).min(self.bytes), Ordering::SeqCst);
            }
            self.calls.lock().unwrap().push((self.instance, HAS_READ));
            Ok(count)
        })
    }

    fn quiesce(&self) -> Result<(), VmError> {
        // Also from `Loaded`: the device has never run if the start of another device has failed.
        let from = [State::Running, State::Loaded];
        // If the guest stays paused, the device has already stopped in an earlier switchover.
        self.call("quiesce", || {
            if self.is(&[State::Stopped]) { Ok(()) } else { self.enter(&from, State::Quiesced) }
        })
    }

    fn stop(&self) -> Result<(), VmError> {
        self.call("stop", || self.enter(&[State::Quiesced, State::Stopped], State::Stopped))
    }

    fn configuration(&self) -> Result<Vec<u8>, VmError> {
        self.call("configuration", || Ok(self.seed.to_be_bytes().to_vec()))
    }

    fn end_save(&self) -> Result<(), VmError> {
        self.call("end_save", || Ok(()))
    }

    fn begin_load(&self) -> Result<(), VmError> {
        self.call("begin_load", || {
            self.at.store(0, Ordering::SeqCst);
            self.enter(&[State::Idle], State::Loading)
        })
    }

    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        self.call("write", || {
            std::thread::sleep(*self.load_delay.lock().unwrap());
            let at = self.at.fetch_add(bytes.len() as u64, Ordering::SeqCst);
            let mut expected = vec![0; bytes.len()];
            fill(self.seed, at, &mut expected);
            let first_wrong = || bytes.iter().zip(&expected).position(|(is, should)| is != should);
            match if bytes == expected { None } else { first_wrong() } {
                Some(i) => Err(VmError::new("load", format!("byte {} is another", at + i as u64))),
                None if self.is(&[State::Loading]) => Ok(()),
                None => Err(VmError::new("load", "not loading")),
            }
        })
    }

    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError> {
        self.call("finish_load", || {
            let at = self.at.load(Ordering::SeqCst);
            if at != self.bytes || configuration != self.seed.to_be_bytes() {
                return Err(VmError::new("load", format!("{at} of {} bytes", self.bytes)));
            }
            self.enter(&[State::Loading], State::Loaded)
        })
    }

    fn end_load(&self) -> Result<(), VmError> {
        self.call("end_load", || {
            let from = [State::Idle, State::Loading, State::Loaded, State::Quiesced, State::Stopped];
            self.enter(&from, State::Idle)
        })
    }

    fn expected_bytes_per_second(&self) -> Option<u64> {
        *self.expects.lock().unwrap()
    }

    fn run(&self) -> Result<(), VmError> {
        self.call("run", || {
            let from = [State::Running, State::Quiesced, State::Stopped, State::Loaded];
            self.enter(&from, State::Running)
        })
    }
}

/// A bank as one of a VM's devices.
pub struct BankDevice(pub Arc<Bank>);

impl Device for BankDevice {
    fn name(&self) -> String {
        self.0.name.clone()
    }
    fn instance(&self) -> u32 {
        self.0.instance
    }
    fn save(&self) -> Result<Vec<u8>, VmError> {
        Ok(Vec::new())
    }
    fn load(&self, _: u32, body: &[u8]) -> Result<(), VmError> {
        if body.is_empty() { Ok(()) } else { Err(VmError::new("load", "a body")) }
    }
    fn asks_switchover_ack(&self) -> bool {
        self.0.asks_ack
    }
    fn stream(&self) -> Option<Arc<dyn DeviceStream>> {
        Some(Arc::clone(&self.0) as _)
    }
}
