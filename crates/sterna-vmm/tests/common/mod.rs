//! Helpers that the tests share. There are guests in assembly, a console that records its output, and a
//! migration within one process.
#![allow(dead_code, clippy::print_stderr, missing_docs)]

pub mod guests;
pub mod tides;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sterna::{SourceVm, TargetVm, Vm};
use sterna_vmm::{GuestImage, KvmMachine, MachineConfig};

/// Whether machines can be built on this host. Prints a message if not.
pub fn kvm_or_skip(test: &str) -> bool {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => true,
        Err(error) => {
            eprintln!("SKIPPED {test}: /dev/kvm: {error}");
            false
        }
    }
}

/// Prints that a test cannot run on this host.
pub fn skip(test: &str, why: impl std::fmt::Display) {
    eprintln!("SKIPPED {test}: {why}");
}

/// Like [`kvm_or_skip`], for machines with dirty rings.
pub fn rings_or_skip(test: &str) -> bool {
    use std::os::fd::AsFd;
    if !kvm_or_skip(test) {
        return false;
    }
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").unwrap();
    let has = sterna_ram::dirty::KvmDirtyRings::most_entries(kvm.as_fd()) > 0;
    if !has {
        eprintln!("SKIPPED {test}: the kernel has no dirty rings");
    }
    has
}

#[derive(Clone, Default)]
pub struct Console(Arc<Mutex<Vec<u8>>>);

impl Console {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub fn flat(code: &[u8]) -> Option<GuestImage> {
    Some(GuestImage::Flat64 { code: code.to_vec(), parameters: vec![] })
}

/// A machine with the given vCPUs and RAM that waits for a migration.
pub fn target(vcpus: u8, ram_bytes: u64, console: &Console) -> Arc<KvmMachine> {
    let config = MachineConfig {
        vcpus,
        ram_bytes,
        incoming: true,
        serial: Box::new(console.clone()),
        ..MachineConfig::new("target")
    };
    KvmMachine::new(config).unwrap()
}

/// Copies every populated page.
pub fn copy_ram(from: &KvmMachine, to: &KvmMachine) {
    for (source, target) in from.ram().blocks().iter().zip(to.ram().blocks()) {
        let absent = sterna_ram::PageBitmap::new(source.pages());
        source.mark_absent(0, source.pages(), &absent).unwrap();
        let mut page = vec![0; 4096];
        for index in (0..source.pages()).filter(|index| !absent.get(*index)) {
            source.read(index * 4096, &mut page).unwrap();
            if page.iter().any(|byte| *byte != 0)
                || target.slice(index * 4096, 4096).unwrap().as_ptr().is_null()
            {
                target.write(index * 4096, &page).unwrap();
            }
        }
    }
}

/// Saves all devices; the bodies are in save order.
pub fn save(machine: &KvmMachine) -> Vec<Vec<u8>> {
    machine.devices().iter().map(|device| device.save().unwrap()).collect()
}

pub fn load(machine: &KvmMachine, bodies: &[Vec<u8>]) {
    for (device, body) in machine.devices().iter().zip(bodies) {
        device.load(device.version(), body).unwrap();
    }
    for hook in Vm::hooks(machine) {
        hook.acquire().unwrap();
    }
}

/// Migrates a guest like the engine, but without the wire: stop, compare, RAM, devices, start.
pub fn move_guest(from: &KvmMachine, to: &KvmMachine) {
    SourceVm::stop(from).unwrap();
    let record = from.compatibility().save().unwrap();
    to.compatibility().load(1, &record).unwrap();
    copy_ram(from, to);
    load(to, &save(from));
    TargetVm::start(to).unwrap();
}

/// Waits for a condition that the guest must fulfil. A guest that hangs fails the test.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the guest did not get there: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
