//! The end of a migration: what a destination must still do for its source, and what it must not report yet.

use crate::common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support;
use crate::support::recording::Recording;
use crate::support::{TestVm, case, vm, vms};
use sterna::ram::GuestRam;
use sterna::{Arrival, Capabilities, Device, Incoming, Status, TargetVm, Vm, VmError};

/// A QEMU source writes its description after EOF, with a delay. If the connection breaks meanwhile, QEMU fails and
/// resumes its guest.
#[test]
fn source_that_describes_its_devices_late_is_heard_out() {
    case("late description", || {
        let recording = Recording::take("sterna-process", 0).with_return_path();
        let eof = recording.find(b"{\"configuration\"") - 6;
        let (target, incoming) = support::waiting(&common::parameters(), Capabilities::default());
        let mut socket = TcpStream::connect(("127.0.0.1", support::port(&incoming.address()))).unwrap();
        socket.write_all(&recording.main[..=eof]).unwrap();
        let mut shut = [0; 8];
        socket.read_exact(&mut shut).unwrap();
        assert_eq!(shut, [0, 1, 0, 4, 0, 0, 0, 0], "SHUT 0");

        for part in recording.main[eof + 1..].chunks(64) {
            std::thread::sleep(Duration::from_millis(5));
            socket.write_all(part).expect("the destination reads to the end");
        }
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).expect("closed in order");
        assert!(rest.is_empty(), "{rest:?}");
        assert!(matches!(incoming.wait(), Arrival::Completed(_)));
        drop(target);
    });
}

/// Delegates to another VM, but needs time to reset.
struct SlowToReset {
    vm: Arc<TestVm>,
    may_end: AtomicBool,
}

impl Vm for SlowToReset {
    fn machine_type(&self) -> String {
        self.vm.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.vm.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.vm.devices()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.vm.compatibility()
    }
}

impl TargetVm for SlowToReset {
    fn prepare_start(&self) -> Result<(), VmError> {
        self.vm.prepare_start()
    }
    fn start(&self) -> Result<(), VmError> {
        self.vm.start()
    }
    fn reset(&self) {
        support::eventually("leave to end", || self.may_end.load(Ordering::SeqCst));
        self.vm.reset();
    }
}

/// Otherwise a monitor would start the next migration, whose pages would then be discarded by the reset.
#[test]
fn failed_destination_does_not_look_free_until_it_is_undone() {
    case("slow reset", || {
        let (source, target) = vms();
        let slow = Arc::new(SlowToReset { vm: target, may_end: AtomicBool::new(false) });
        let params = sterna::Parameters { max_bandwidth_bytes: 1 << 20, ..common::parameters() };
        let at = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming = Incoming::listen(
            Arc::clone(&slow) as _,
            &at,
            params.clone(),
            Capabilities::default(),
            Arc::new(()),
        )
        .unwrap();
        let migration =
            vm::start(&source, &incoming.address(), &params, Capabilities::default(), Arc::new(()));
        support::until_status(&migration, Status::Active);
        incoming.cancel().expect("giving up");
        for _ in 0..20 {
            assert_eq!(incoming.status(), Status::Failing);
            assert!(incoming.arrival().is_none());
            std::thread::sleep(Duration::from_millis(5));
        }
        slow.may_end.store(true, Ordering::SeqCst);
        assert!(matches!(incoming.wait(), Arrival::Failed(_)));
        assert_eq!(incoming.status(), Status::Failed);
        migration.wait();
        common::assert_lives_on(&source.guest);
    });
}
