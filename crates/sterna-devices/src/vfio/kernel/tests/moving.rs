//! Tests of saves and loads without faults.

use sterna::{DeviceStream, RemainingState};

use super::{RUNS, replay, with_device};
use crate::vfio::{MigState, MigrationFeatures, MigrationPort, VfioDevice};

#[test]
fn save_of_a_full_device_reads_while_it_runs_and_after() {
    let record = "
        ioctl(vfio, 0x3b75, 10000000 02000200 06000000 ffffffff) = 0, 10000000 02000200 06000000 07000000 # PRE_COPY
        ioctl(7, 0x3b79, 18000000 00000000 0000000000000000 0000000000000000) = 0, 18000000 00000000 0500000000000000 0200000000000000
        ioctl(vfio, 0x3b75, 10000000 09000100 0000000000000000) = 0, 10000000 09000100 0b00000000000000 # MIG_DATA_SIZE
        read(7, 8) = 5, 6669727374
        read(7, 8) = -1 EINTR
        read(7, 8) = 2, 2d31
        read(7, 8) = -1 ENOMSG                                          # nothing now
        read(7, 8) = 1, 32                                              # and again something
        ioctl(vfio, 0x3b75, 10000000 02000200 07000000 ffffffff) = 0    # PRE_COPY_P2P, the same descriptor
        read(7, 8) = -1 ENOMSG
        ioctl(vfio, 0x3b75, 10000000 02000200 03000000 ffffffff) = 0    # STOP_COPY, the same descriptor
        ioctl(vfio, 0x3b75, 10000000 09000100 0000000000000000) = 0, 10000000 09000100 0400000000000000
        read(7, 8) = 4, 72657374
        read(7, 8) = 0
        ioctl(vfio, 0x3b75, 10000000 02000200 01000000 ffffffff) = 0    # STOP
        close(7) = 0
        ioctl(vfio, 0x3b75, 10000000 02000200 02000000 ffffffff) = 0    # RUNNING
    ";
    with_device(record, |device| {
        let stream: &dyn DeviceStream = device;
        let mut state: Vec<u8> = Vec::new();
        let mut read = || {
            let mut chunk = [0; 8];
            let came = stream.read(&mut chunk).unwrap();
            state.extend(&chunk[..came]);
            came
        };

        stream.begin_save().unwrap();
        let running = stream.remaining().unwrap();
        assert_eq!((read(), read(), read(), read()), (5, 2, 0, 1));
        stream.quiesce().unwrap();
        assert_eq!(read(), 0);
        stream.stop().unwrap();
        let stopped = stream.remaining().unwrap();
        assert_eq!((read(), read(), read()), (4, 0, 0));
        stream.end_save().unwrap();
        stream.run().unwrap();

        assert_eq!(state, b"first-12rest");
        assert_eq!(running, RemainingState { initial_bytes: 5, dirty_bytes: 2, stopped_bytes: 4 });
        assert_eq!(stopped, RemainingState { stopped_bytes: 4, ..RemainingState::default() });
    });
}

#[test]
fn load_writes_all_although_the_device_takes_parts() {
    let record = "
        ioctl(vfio, 0x3b75, 10000000 02000200 04000000 ffffffff) = 0, 10000000 02000200 04000000 09000000 # RESUMING
        write(9, 66697273742d31) = 5
        write(9, 2d31) = -1 EINTR
        write(9, 2d31) = 2
        write(9, 72657374) = 4
        ioctl(vfio, 0x3b75, 10000000 02000200 01000000 ffffffff) = 0    # STOP: it checks what came
        close(9) = 0
        ioctl(vfio, 0x3b75, 10000000 02000200 02000000 ffffffff) = 0    # RUNNING
    ";
    with_device(record, |device| {
        let stream: &dyn DeviceStream = device;
        stream.begin_load().unwrap();
        stream.write(b"first-1").unwrap();
        stream.write(b"rest").unwrap();
        stream.finish_load(&[]).unwrap();
        stream.run().unwrap();

        assert_eq!(device.state(), MigState::Running);
    });
}

#[test]
fn save_of_a_device_with_the_least_goes_straight_to_stop_copy() {
    // The device has only STOP_COPY. It reports no size and has no log.
    let open = "
        ioctl(vfio, 0x3b75, 10000000 01000100 0000000000000000) = 0, 10000000 01000100 0100000000000000
        ioctl(vfio, 0x3b75, 08000000 09000500) = -1 ENOTTY
        ioctl(vfio, 0x3b75, 08000000 06000600) = -1 ENOTTY
    ";
    let save = "
        ioctl(vfio, 0x3b75, 10000000 02000200 03000000 ffffffff) = 0, 10000000 02000200 03000000 05000000
        read(5, 4) = 4, 01020304
        read(5, 4) = 0
        ioctl(vfio, 0x3b75, 10000000 02000200 01000000 ffffffff) = 0
        close(5) = 0
    ";
    replay(&[open, RUNS, RUNS, save].concat(), |port| {
        let device = VfioDevice::new(port.unwrap()).unwrap();
        let stream: &dyn DeviceStream = &device;
        let mut state = [0; 4];

        stream.begin_save().unwrap();
        assert_eq!(stream.remaining().unwrap(), RemainingState::default());
        stream.quiesce().unwrap();
        stream.stop().unwrap();
        assert_eq!((stream.read(&mut state).unwrap(), state), (4, [1, 2, 3, 4]));
        assert_eq!(stream.read(&mut [0; 4]).unwrap(), 0);
        stream.end_save().unwrap();

        assert_eq!(device.port().features(), MigrationFeatures::default());
        assert!(!device.port().logs_dma());
    });
}

#[test]
fn save_of_a_device_without_p2p_stays_in_pre_copy_until_it_stops() {
    let open = "
        ioctl(vfio, 0x3b75, 10000000 01000100 0000000000000000) = 0, 10000000 01000100 0500000000000000
        ioctl(vfio, 0x3b75, 08000000 09000500) = 0
        ioctl(vfio, 0x3b75, 08000000 06000600) = 0
    ";
    let save = "
        ioctl(vfio, 0x3b75, 10000000 02000200 06000000 ffffffff) = 0, 10000000 02000200 06000000 07000000
        ioctl(vfio, 0x3b75, 10000000 02000200 03000000 ffffffff) = 0
        read(7, 4) = 0
        ioctl(vfio, 0x3b75, 10000000 02000200 01000000 ffffffff) = 0
        close(7) = 0
    ";
    replay(&[open, RUNS, RUNS, save].concat(), |port| {
        let device = VfioDevice::new(port.unwrap()).unwrap();
        let stream: &dyn DeviceStream = &device;

        stream.begin_save().unwrap();
        stream.quiesce().unwrap();
        assert_eq!(device.state(), MigState::PreCopy);
        stream.stop().unwrap();
        assert_eq!(stream.read(&mut [0; 4]).unwrap(), 0);
        stream.end_save().unwrap();
    });
}
