//! The smallest machine that can run a tide: RAM, vCPUs, and a serial port whose output is stored.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use sterna_guests::tide::{LOAD_ADDRESS, RamRange, boot};
use sterna_ram::{Backing, GuestRam, RamBlock};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

const TABLES: u64 = 0x9000;

/// Opens KVM, or returns the reason why it is not available.
pub fn open() -> Result<Kvm, String> {
    Kvm::new().map_err(|error| format!("/dev/kvm: {error}"))
}

pub struct Machine {
    pub ram: GuestRam,
    pub serial: Arc<Mutex<Vec<u8>>>,
    vcpus: Vec<VcpuFd>,
    running: Vec<(JoinHandle<VcpuFd>, Arc<AtomicBool>)>,
    stop: Arc<AtomicBool>,
    // The machine and its memory slots must live as long as the vCPUs.
    _vm: VmFd,
    _kvm: Kvm,
}

pub enum Mode {
    Long,
    Real,
}

impl Machine {
    /// A machine with RAM in these ranges (blocks in their order); the guest is not loaded.
    pub fn new(kvm: Kvm, ranges: &[RamRange], vcpus: usize, mode: Mode) -> Self {
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(0xfffb_d000).unwrap();
        let name = |range: &RamRange| format!("ram.{}", range.block);
        let blocks =
            ranges.iter().map(|range| RamBlock::new(name(range), range.len_bytes, Backing::Memfd).unwrap());
        let ram = GuestRam::new(blocks.collect()).unwrap();
        for (slot, range) in ranges.iter().enumerate() {
            let region = kvm_userspace_memory_region {
                slot: slot as u32,
                flags: 0,
                guest_phys_addr: range.guest_address,
                memory_size: range.len_bytes,
                userspace_addr: ram.blocks()[range.block].host_address() as u64,
            };
            // SAFETY: the block stays mapped while `ram` lives, which this machine owns.
            unsafe { vm.set_user_memory_region(region) }.unwrap();
        }
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        write_tables(&ram, ranges);
        let vcpus = (0..vcpus).map(|index| new_vcpu(&vm, index, &cpuid, &mode)).collect();
        let (serial, stop) = (Arc::default(), Arc::default());
        Self { ram, serial, vcpus, running: Vec::new(), stop, _vm: vm, _kvm: kvm }
    }

    pub fn run(&mut self) {
        extern "C" fn nothing(_: i32, _: *mut libc::siginfo_t, _: *mut std::ffi::c_void) {}
        register_signal_handler(SIGRTMIN(), nothing).unwrap();
        self.stop.store(false, Ordering::SeqCst);
        for mut vcpu in self.vcpus.drain(..) {
            let (stop, serial, ended) =
                (Arc::clone(&self.stop), Arc::clone(&self.serial), Arc::<AtomicBool>::default());
            let done = Arc::clone(&ended);
            let thread = std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    match vcpu.run() {
                        Ok(VcpuExit::IoOut(0x3f8, data)) => serial.lock().unwrap().extend_from_slice(data),
                        Ok(exit) => panic!("unexpected exit {exit:?}"),
                        Err(error) if error.errno() == 4 || error.errno() == 11 => {}
                        Err(error) => panic!("KVM_RUN: {error}"),
                    }
                }
                // A port write is complete only when KVM is entered again.
                vcpu.set_kvm_immediate_exit(1);
                assert!(vcpu.run().is_err());
                vcpu.set_kvm_immediate_exit(0);
                done.store(true, Ordering::SeqCst);
                vcpu
            });
            self.running.push((thread, ended));
        }
    }

    /// Stops every vCPU at an arbitrary instruction.
    pub fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for (thread, ended) in self.running.drain(..) {
            // A signal between the check of the flag and KVM_RUN is lost, so it is sent again.
            while !ended.load(Ordering::SeqCst) && !thread.is_finished() {
                thread.kill(SIGRTMIN()).unwrap();
                std::thread::sleep(Duration::from_micros(200));
            }
            self.vcpus.push(thread.join().unwrap());
        }
    }

    /// Registers of the stopped vCPUs.
    pub fn registers(&self) -> Vec<(kvm_regs, kvm_bindings::kvm_sregs)> {
        self.vcpus.iter().map(|vcpu| (vcpu.get_regs().unwrap(), vcpu.get_sregs().unwrap())).collect()
    }

    /// Sets registers that [`Machine::registers`] returned for another machine.
    pub fn set_registers(&self, registers: &[(kvm_regs, kvm_bindings::kvm_sregs)]) {
        for (vcpu, (regs, sregs)) in self.vcpus.iter().zip(registers) {
            vcpu.set_sregs(sregs).unwrap();
            vcpu.set_regs(regs).unwrap();
        }
    }

    pub fn serial_text(&self) -> String {
        String::from_utf8(self.serial.lock().unwrap().clone()).unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Waits until `done` returns true, at most a minute.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what} within a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn new_vcpu(vm: &VmFd, index: usize, cpuid: &CpuId, mode: &Mode) -> VcpuFd {
    let vcpu = vm.create_vcpu(index as u64).unwrap();
    vcpu.set_cpuid2(cpuid).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    let mut regs = kvm_regs { rflags: 2, rdi: index as u64, ..Default::default() };
    match mode {
        Mode::Real => {
            for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
                (segment.base, segment.selector) = (0, 0);
            }
            regs.rip = boot::LOAD_ADDRESS;
        }
        Mode::Long => {
            let flat = |selector, type_, code: u8| kvm_segment {
                limit: u32::MAX,
                selector,
                type_,
                present: 1,
                s: 1,
                g: 1,
                l: code,
                db: 1 - code,
                ..Default::default()
            };
            (sregs.cs, sregs.ds) = (flat(8, 11, 1), flat(16, 3, 0));
            (sregs.es, sregs.ss) = (sregs.ds, sregs.ds);
            (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (0x8000_0011, TABLES, 0x20, 0x500);
            regs.rip = LOAD_ADDRESS;
        }
    }
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&regs).unwrap();
    vcpu
}

/// An identity mapping of 8 GiB in pages of 2 MiB.
fn write_tables(ram: &GuestRam, ranges: &[RamRange]) {
    assert_eq!((ranges[0].block, ranges[0].guest_address), (0, 0));
    let low = &ram.blocks()[0];
    low.write_u64(TABLES, TABLES + 0x1003).unwrap();
    for gib in 0..8 {
        let table = TABLES + 0x2000 + gib * 0x1000;
        low.write_u64(TABLES + 0x1000 + gib * 8, table | 3).unwrap();
        (0..512).for_each(|page| low.write_u64(table + page * 8, (gib << 30) | (page << 21) | 0x83).unwrap());
    }
}
