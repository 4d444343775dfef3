//! Tests of devices that fail in each state, and of their recovery.

use sterna::DeviceStream;

use super::{OPEN, RUNS, replay, with_device};
use crate::vfio::{MigState, MigrationPort, PortError};

const TO_PRE_COPY: &str = "
    ioctl(vfio, 0x3b75, 10000000 02000200 06000000 ffffffff) = 0, 10000000 02000200 06000000 07000000
";
const TO_RESUMING: &str = "
    ioctl(vfio, 0x3b75, 10000000 02000200 04000000 ffffffff) = 0, 10000000 02000200 04000000 09000000
";
const IS_IN_ERROR: &str = "
    ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0
";
const IS_RUNNING_P2P: &str = "
    ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0, 10000000 02000100 05000000 ffffffff
";

#[test]
fn open_of_a_device_that_cannot_migrate_says_so() {
    let record = "ioctl(vfio, 0x3b75, 10000000 01000100 0000000000000000) = -1 ENOTTY";
    replay(record, |port| {
        let error = port.unwrap_err();
        assert!(matches!(error, PortError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("0000:08:00.2"), "{error}");
    });
    // The device has P2P but not STOP_COPY.
    let record =
        "ioctl(vfio, 0x3b75, 10000000 01000100 0000000000000000) = 0, 10000000 01000100 0200000000000000";
    replay(record, |port| assert!(matches!(port, Err(PortError::Unsupported { .. }))));
}

#[test]
fn open_of_a_device_in_a_state_that_there_is_not_is_refused() {
    let state =
        "ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0, 10000000 02000100 08000000 ffffffff";
    replay(&[OPEN, state].concat(), |port| {
        let error = port.unwrap_err();
        assert!(matches!(error, PortError::Misbehaved { .. }), "{error}");
    });
}

#[test]
fn stop_that_ends_in_error_closes_the_data_and_only_a_reset_helps() {
    let fails = "ioctl(vfio, 0x3b75, 10000000 02000200 03000000 ffffffff) = -1 EIO";
    let reset = "
        close(7) = 0
        ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0    # asked again: ERROR
        ioctl(vfio, 0x3b6f) = 0                                         # VFIO_DEVICE_RESET
    ";
    let ends = "close(9) = 0";
    let record = [TO_PRE_COPY, fails, IS_IN_ERROR, reset, RUNS, TO_RESUMING, ends].concat();
    with_device(&record, |device| {
        let stream: &dyn DeviceStream = device;
        stream.begin_save().unwrap();

        let failed = stream.stop().unwrap_err().to_string();
        stream.end_save().unwrap();
        let refused = stream.run().unwrap_err().to_string();

        assert!(failed.contains("PRE_COPY") && failed.contains("the change to STOP_COPY failed"), "{failed}");
        assert!(failed.contains("it is now in ERROR"), "{failed}");
        assert!(refused.contains("only a reset repairs it"), "{refused}");
        assert_eq!(device.state(), MigState::Error);
        // A load begins with the reset.
        stream.begin_load().unwrap();
        assert_eq!(device.state(), MigState::Resuming);
    });
}

#[test]
fn stop_that_fails_on_the_way_is_brought_back_from_there() {
    let fails = "ioctl(vfio, 0x3b75, 10000000 02000200 03000000 ffffffff) = -1 EBUSY";
    let back = "
        close(7) = 0                                                    # its session is over
        ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0, 10000000 02000100 05000000 ffffffff
        ioctl(vfio, 0x3b75, 10000000 02000200 02000000 ffffffff) = 0    # RUNNING
    ";
    with_device(&[TO_PRE_COPY, fails, IS_RUNNING_P2P, back].concat(), |device| {
        let stream: &dyn DeviceStream = device;
        stream.begin_save().unwrap();

        let failed = stream.stop().unwrap_err().to_string();
        stream.end_save().unwrap();
        stream.run().unwrap();

        assert!(failed.contains("it is now in RUNNING_P2P"), "{failed}");
        assert_eq!(device.state(), MigState::Running);
    });
}

#[test]
fn load_that_the_device_refuses_ends_in_a_reset() {
    let record = "
        write(9, 6e6f) = 2
        ioctl(vfio, 0x3b75, 10000000 02000200 01000000 ffffffff) = -1 EINVAL
        ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0, 10000000 02000100 04000000 ffffffff
        ioctl(vfio, 0x3b6f) = 0
    ";
    with_device(&[TO_RESUMING, record, RUNS, "close(9) = 0"].concat(), |device| {
        let stream: &dyn DeviceStream = device;
        stream.begin_load().unwrap();
        stream.write(b"no").unwrap();

        let failed = stream.finish_load(&[]).unwrap_err().to_string();
        stream.end_load().unwrap();

        assert!(failed.contains("it is now in RESUMING"), "{failed}");
        assert_eq!(device.state(), MigState::Running);
    });
}

#[test]
fn reset_that_does_not_lead_to_running_is_an_error() {
    with_device(
        &["ioctl(vfio, 0x3b6f) = 0\n", IS_IN_ERROR, "ioctl(vfio, 0x3b6f) = -1 ENOTTY"].concat(),
        |device| {
            let stays = device.port().reset().unwrap_err();
            let cannot = device.port().reset().unwrap_err();

            assert!(matches!(stays, PortError::Misbehaved { .. }), "{stays}");
            assert!(matches!(cannot, PortError::Unsupported { .. }), "{cannot}");
        },
    );
}

#[test]
fn read_from_data_that_hung_up_fails_and_leaves_nothing_open() {
    let record = "
        read(7, 4) = -1 ENODEV
        ioctl(vfio, 0x3b75, 10000000 02000100 00000000 ffffffff) = 0    # ERROR
        close(7) = 0
    ";
    with_device(&[TO_PRE_COPY, record].concat(), |device| {
        let stream: &dyn DeviceStream = device;
        stream.begin_save().unwrap();

        let failed = stream.read(&mut [0; 4]).unwrap_err().to_string();
        let again = stream.read(&mut [0; 4]).unwrap_err().to_string();
        stream.end_save().unwrap();

        assert!(
            failed.contains("0000:08:00.2") && failed.contains("the connection to the device is lost"),
            "{failed}"
        );
        assert!(again.contains("bytes are missing"), "{again}");
        assert_eq!(device.state(), MigState::Error);
    });
}

#[test]
fn write_to_data_that_hung_up_fails() {
    let record = "
        write(9, 6f6e65) = 0
        write(9, 6f6e65) = -1 EPIPE
        close(9) = 0
    ";
    with_device(&[TO_RESUMING, record].concat(), |device| {
        let port = device.port();
        port.set_state(MigState::Resuming).unwrap();

        let nothing = port.write_data(b"one").unwrap_err();
        let hung_up = port.write_data(b"one").unwrap_err();

        assert!(matches!(nothing, PortError::Gone { .. }), "{nothing}");
        assert!(matches!(hung_up, PortError::Gone { .. }), "{hung_up}");
    });
}

#[test]
fn answers_that_cannot_be_are_refused() {
    let record = "
        ioctl(vfio, 0x3b75, 10000000 02000200 06000000 ffffffff) = 0    # PRE_COPY without a descriptor
        ioctl(vfio, 0x3b75, 10000000 02000200 01000000 ffffffff) = 0, 10000000 02000200 01000000 03000000 # STOP with one
        close(3) = 0
        ioctl(vfio, 0x3b75, 10000000 02000200 03000000 ffffffff) = 0, 10000000 02000200 03000000 05000000 # STOP_COPY
        read(5, 4) = 5, 01020304
        read(5, 4) = -1 ENOMSG                                          # it does not run
        close(5) = 0
    ";
    with_device(record, |device| {
        let port = device.port();
        let misbehaves = |error: PortError| assert!(matches!(error, PortError::Misbehaved { .. }), "{error}");

        misbehaves(port.set_state(MigState::PreCopy).unwrap_err());
        assert!(matches!(port.read_data(&mut [0; 4]), Err(PortError::System { .. })));
        misbehaves(port.set_state(MigState::Stop).unwrap_err());
        port.set_state(MigState::StopCopy).unwrap();
        misbehaves(port.read_data(&mut [0; 4]).unwrap_err());
        assert!(matches!(port.read_data(&mut [0; 4]), Err(PortError::Refused { .. })));
    });
}
