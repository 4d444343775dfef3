//! Tests that drive recorded devices like the engine.

mod faults;
mod logging;
mod moving;
mod replay;

use replay::{Replay, replay};

use super::KernelPort;
use crate::vfio::VfioDevice;

/// A device with all features, opened and found running. The port reads the state first, then `VfioDevice`.
const OPEN: &str = "
    ioctl(vfio, 0x3b75, 10000000 01000100 0000000000000000) = 0, 10000000 01000100 0700000000000000 # MIGRATION
    ioctl(vfio, 0x3b75, 08000000 09000500) = 0                            # probe GET MIG_DATA_SIZE
    ioctl(vfio, 0x3b75, 08000000 06000600) = 0                            # probe SET DMA_LOGGING_START
";

/// A query of the state; the device runs.
const RUNS: &str = "
    ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0, 10000000 02000100 02000000 ffffffff
";

/// Drives the device whose record, after its opening, is `record`.
fn with_device(record: &str, steps: impl FnOnce(&VfioDevice<KernelPort<Replay>>)) {
    replay(&[OPEN, RUNS, RUNS, record].concat(), |port| steps(&VfioDevice::new(port.unwrap()).unwrap()));
}

#[test]
#[should_panic(expected = "the call is not the one on record")]
fn replay_with_another_byte_panics() {
    replay(&OPEN.replace("01000100", "01000200"), drop);
}

#[test]
#[should_panic(expected = "this call did not come")]
fn replay_with_a_call_left_over_panics() {
    replay(&[OPEN, RUNS, RUNS].concat(), drop);
}

#[test]
#[should_panic(expected = "came after the record's end")]
fn replay_with_a_call_too_many_panics() {
    replay(OPEN, drop);
}
