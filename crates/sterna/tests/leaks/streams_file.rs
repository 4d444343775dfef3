//! A device's stream that is loaded from a file is never buffered completely. The test measures the memory of the
//! whole process, so each case runs alone.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, multifd};
use crate::support::bank::{Bank, Calls};
use crate::support::{TestVm, case, small, vm};
use sterna::{Address, Arrival, Capabilities, Incoming, Outcome};

const STATE: u64 = 192 << 20;
const CEILING: u64 = 4 << 20;

#[test]
fn stream_in_a_file_of_either_form_is_loaded_in_bounded_memory() {
    case("stream in a file", || {
        let directory = tempfile::tempdir().unwrap();
        for mapped_ram in [false, true] {
            let (saves, loads) = (Calls::default(), Calls::default());
            let bank = Arc::new(Bank::new(0, 5, STATE, 0, &saves));
            let (source, target) = common::pair(&small());
            let target = TestVm::with_banks(target, vec![Arc::new(bank.waiting(&loads))]);
            let source = TestVm::with_banks(source, vec![bank]);
            let to = Address::File { path: directory.path().join(format!("image-{mapped_ram}")), offset: 0 };
            let (mut params, _) = multifd(1);
            params.max_queued_stream_bytes = CEILING;
            // All of the state is written while the guest is stopped, on a machine that may be busy.
            params.limits.switchover = Duration::from_secs(300);
            let capabilities = Capabilities { mapped_ram, ..Capabilities::default() };
            let outcome = vm::start(&source, &to, &params, capabilities, Arc::new(())).wait();
            assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
            let before = forget_peak();

            let place = Arc::clone(&target) as Arc<dyn sterna::TargetVm>;
            let incoming = Incoming::listen(place, &to, params, capabilities, Arc::new(())).unwrap();
            let arrival = incoming.wait();

            assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
            assert!(target.banks.iter().all(|bank| bank.runs()));
            let received = incoming.statistics().received_bytes;
            // Each byte of the file counts once, although a stream is read twice.
            let length =
                std::fs::metadata(directory.path().join(format!("image-{mapped_ram}"))).unwrap().len();
            assert!((STATE..=length).contains(&received), "{received} of {length} bytes");
            let held = peak() - before;
            assert!(held < STATE / 4, "mapped-ram {mapped_ram}: {held} bytes more than before");
        }
    });
}

/// Peak resident memory of this process, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB")).unwrap();
    kib.trim().parse::<u64>().unwrap() * 1024
}

/// Resets [`peak`]: see `clear_refs` in proc(5).
fn forget_peak() -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    peak()
}
