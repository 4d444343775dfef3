//! A machine without a guest: RAM, one device, and the driver's side of its queue.

#![allow(dead_code, reason = "each program of tests uses a part")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sterna::{DeviceStream, VmError};
use sterna_devices::vhost_user::{VhostUserDevice, VhostUserError, VhostUserOptions};
use sterna_ram::dirty::LoggedRange;
use sterna_ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};

use crate::back_end::{BackEnd, Fault, VERSION_1};
use crate::model::Model;
use crate::virtqueue::{Part, Virtqueue};

pub const RAM_BYTES: u64 = 16 << 20;
/// Address of the ring.
pub const RING: u64 = 0x1000;
/// Address of the requests, one cache line each.
pub const REQUESTS: u64 = 0x8000;
/// Start of the memory that the device writes.
pub const ANSWERS: u64 = 0x10_0000;
/// Highest number of requests in flight.
pub const SLOTS: u16 = 32;
/// Length of the initial state of a device that waits for another's.
pub const TARGET_BYTES: usize = 64;
/// Time limit for devices that do not answer.
pub const SHORT: Duration = Duration::from_millis(1500);
/// Time limit for devices that answer.
const LONG: Duration = Duration::from_secs(60);

pub fn ram() -> GuestRam {
    GuestRam::new(vec![RamBlock::new("ram", RAM_BYTES, Backing::Memfd).expect("a block")]).expect("RAM")
}

pub fn whole() -> LoggedRange {
    LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: RAM_BYTES / PAGE_SIZE as u64 }
}

pub fn options(back_end: &BackEnd, limit: Duration) -> VhostUserOptions {
    VhostUserOptions {
        answer_limit: limit,
        state_limit: limit,
        ..VhostUserOptions::new("fs0", back_end.socket())
    }
}

/// The machine of this module.
pub struct Machine {
    pub ram: GuestRam,
    pub back_end: BackEnd,
    pub device: Arc<VhostUserDevice>,
    pub queue: Virtqueue,
    /// The expected state of the device.
    pub model: Model,
}

impl Machine {
    /// A machine with a new device that was not started.
    pub fn waiting(directory: &Path, name: &str, state: usize, fault: Fault, limit: Duration) -> Self {
        let back_end = BackEnd::start(directory, name, state, fault);
        let ram = ram();
        let device = VhostUserDevice::connect(options(&back_end, limit), &ram, &[whole()]).expect("a device");
        Self { ram, back_end, device, queue: Virtqueue::new(RING, SLOTS), model: Model::new(state) }
    }

    /// A machine whose driver is ready.
    pub fn running(directory: &Path, name: &str, state: usize, fault: Fault) -> Self {
        Self::running_within(directory, name, state, fault, LONG)
    }

    pub fn running_within(directory: &Path, name: &str, state: usize, fault: Fault, limit: Duration) -> Self {
        let machine = Self::waiting(directory, name, state, fault, limit);
        machine.device.start(VERSION_1, &[machine.queue.ring()]).expect("a good ring");
        machine
    }

    /// A machine that waits for the guest of another machine.
    pub fn target(directory: &Path, name: &str, fault: Fault) -> Self {
        Self::waiting(directory, name, TARGET_BYTES, fault, LONG)
    }

    /// Submits a request with an answer of `len` bytes at `answer`, without waiting. False if the queue is
    /// full.
    pub fn submit(&mut self, request: u64, answer: u64, len: u32) -> bool {
        let place = REQUESTS + 64 * (request % (2 * u64::from(SLOTS)));
        self.ram.block(0).write(place, &request.to_le_bytes()).expect("inside RAM");
        let parts =
            [Part { address: place, len: 8, written: false }, Part { address: answer, len, written: true }];
        self.queue.submit(&self.ram, &parts).is_some()
    }

    /// Waits for the next answer and compares it with the model's. It must belong to `request`.
    pub fn expect(&mut self, request: u64, answer: u64, len: u32) {
        let (_, written) = self.queue.wait(&self.ram, &self.device, 0);
        assert_eq!(written, len);
        let mut expected = vec![0; len as usize];
        self.model.serve(request, &mut expected);
        let mut found = vec![0; len as usize];
        self.ram.block(0).read(answer, &mut found).expect("inside RAM");
        assert!(found == expected, "request {request} was answered by a device with another past");
    }

    /// Waits for the next answer, which must belong to `request`, without checking its content.
    pub fn expect_anything(&mut self, request: u64, len: u32) {
        let (_, written) = self.queue.wait(&self.ram, &self.device, 0);
        assert_eq!(written, len);
        self.model.serve(request, &mut vec![0; len as usize]);
    }

    /// Takes answers without checks until at most `left` requests are in flight.
    pub fn wait_until_in_flight(&mut self, left: u16) {
        while self.queue.in_flight() > left {
            self.queue.wait(&self.ram, &self.device, 0);
        }
    }

    /// Submits requests and checks that each answer matches the device's history.
    pub fn serve(&mut self, requests: std::ops::Range<u64>) {
        for request in requests {
            let answer = ANSWERS + request % 64 * 8192;
            assert!(self.submit(request, answer, 4096 + 8));
            self.expect(request, answer, 4096 + 8);
        }
    }

    /// The engine's calls at the source before the state is read.
    pub fn stop(&self) -> Result<(), VmError> {
        self.device.begin_save()?;
        self.device.quiesce()?;
        self.device.stop()
    }

    /// Reads all of the state, in pieces of an odd length.
    pub fn read_state(&self) -> Result<Vec<u8>, VmError> {
        let (mut state, mut piece) = (Vec::new(), vec![0; 100_003]);
        loop {
            let n = self.device.read(&mut piece)?;
            if n == 0 {
                return Ok(state);
            }
            state.extend(&piece[..n]);
        }
    }

    /// Takes over the guest's RAM and its driver's state from `source`.
    pub fn take_guest(&mut self, source: &Machine) {
        let mut bytes = vec![0; RAM_BYTES as usize];
        source.ram.block(0).read(0, &mut bytes).expect("inside RAM");
        self.ram.block(0).write(0, &bytes).expect("inside RAM");
        (self.queue, self.model) = (source.queue.clone(), source.model.clone());
    }

    /// Loads the state into the back end, in pieces of an odd length.
    pub fn load(&self, state: &[u8], configuration: &[u8]) -> Result<(), VmError> {
        self.device.begin_load()?;
        state.chunks(77_777).try_for_each(|piece| self.device.write(piece))?;
        self.device.finish_load(configuration)
    }
}

/// The error as text.
pub fn told(error: VmError) -> String {
    error.to_string()
}

/// The error of a device that could not be connected.
pub fn refused(back_end: &BackEnd) -> VhostUserError {
    VhostUserDevice::connect(options(back_end, LONG), &ram(), &[whole()]).expect_err("a bad back end")
}
