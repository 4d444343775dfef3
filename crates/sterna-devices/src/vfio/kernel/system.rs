//! Performs the system calls of a VFIO device. All unsafe code of this module is here.
//!
//! The kernel accesses the memory to which an argument points. Each argument is therefore checked first: the
//! feature is known, and its data has the length that the kernel expects. The memory at an address is as
//! large as the argument's numbers say.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};
use vfio_bindings::bindings::vfio as sys;

use super::Calls;
use super::argument::{DATA_FD, HEAD, read_u32, read_u64};
use crate::vfio::feature;

// The bindings contain the base number, but not the ioctl numbers that C macros compute from it.
const RESET: Opcode = opcode::none(sys::VFIO_TYPE, sys::VFIO_BASE as u8 + 11);
const FEATURE: Opcode = opcode::none(sys::VFIO_TYPE, sys::VFIO_BASE as u8 + 17);
const PRECOPY_INFO: Opcode = opcode::none(sys::VFIO_TYPE, sys::VFIO_BASE as u8 + 21);

/// The system calls of an opened VFIO device.
#[derive(Debug)]
pub struct System {
    device: OwnedFd,
}

impl System {
    /// Takes the device's descriptor. With another kind of file, the calls fail, because the ioctl numbers
    /// belong only to VFIO.
    pub fn new(device: OwnedFd) -> Self {
        Self { device }
    }

    fn device(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.device.as_fd()
    }
}

impl Calls for System {
    type Data = OwnedFd;

    fn feature(&self, argument: &mut [u8], pointed: &mut [u64]) -> Result<Option<OwnedFd>, Errno> {
        let flags = read_u32(argument, 4);
        let address_at = check(argument, pointed.len())?;
        if let Some(at) = address_at {
            let address = pointed.as_mut_ptr().expose_provenance() as u64;
            argument[at..at + 8].copy_from_slice(&address.to_ne_bytes());
        }
        let opens = flags & (feature::SET | feature::PROBE | feature::MASK)
            == feature::SET | u32::from(feature::MIG_DEVICE_STATE);
        if opens {
            argument[DATA_FD..DATA_FD + 4].copy_from_slice(&(-1i32).to_ne_bytes());
        }
        // SAFETY: `check` verified that `argument` has the length of this feature's structure, and that
        // `pointed` is as long as the numbers in `argument` say. `pointed` outlives the call, and no other
        // code uses it. Its address was exposed above, and is the only one in the argument.
        let asked = unsafe { call(self.device(), FEATURE, argument.as_mut_ptr().cast()) };
        if let Some(at) = address_at {
            argument[at..at + 8].fill(0);
        }
        asked?;
        if !opens {
            return Ok(None);
        }
        let descriptor = read_u32(argument, DATA_FD) as i32;
        // SAFETY: the value was -1 before the successful call. Any other number is a descriptor that the
        // kernel has just opened for this process, and no other code knows it.
        Ok((descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    fn reset(&self) -> Result<(), Errno> {
        // SAFETY: the call has no argument.
        unsafe { call(self.device(), RESET, std::ptr::null_mut()) }
    }

    fn precopy_info(&self, data: &OwnedFd, argument: &mut [u8; 24]) -> Result<(), Errno> {
        use std::os::fd::AsFd;
        argument[..4].copy_from_slice(&24u32.to_ne_bytes());
        // SAFETY: `argument` is as long as `struct vfio_precopy_info`, contains this length, and has no
        // addresses.
        unsafe { call(data.as_fd(), PRECOPY_INFO, argument.as_mut_ptr().cast()) }
    }

    fn read(&self, data: &OwnedFd, to: &mut [u8]) -> Result<usize, Errno> {
        rustix::io::read(data, to)
    }

    fn write(&self, data: &OwnedFd, from: &[u8]) -> Result<usize, Errno> {
        rustix::io::write(data, from)
    }
}

/// Refuses requests for which the kernel would access memory outside the buffers. Returns the offset of an
/// address in the argument.
fn check(argument: &[u8], pointed_words: usize) -> Result<Option<usize>, Errno> {
    let (size, flags) = (read_u32(argument, 0), read_u32(argument, 4));
    if argument.len() < HEAD || size as usize != argument.len() {
        return Err(Errno::INVAL);
    }
    if flags & feature::PROBE != 0 {
        return Ok(None);
    }
    let (words, address_at, needed) = match (flags & feature::MASK) as u16 {
        feature::MIGRATION | feature::MIG_DEVICE_STATE | feature::MIG_DATA_SIZE => (1, None, 0),
        feature::DMA_LOGGING_STOP => (0, None, 0),
        feature::DMA_LOGGING_START => {
            let ranges = read_u32(argument, HEAD + 8);
            (3, Some(HEAD + 16), u64::from(ranges) * 2)
        }
        feature::DMA_LOGGING_REPORT => {
            let (length, page_size) = (read_u64(argument, HEAD + 8), read_u64(argument, HEAD + 16));
            if !page_size.is_power_of_two() || !length.is_multiple_of(page_size) {
                return Err(Errno::INVAL);
            }
            (4, Some(HEAD + 24), (length / page_size).div_ceil(64))
        }
        _ => return Err(Errno::INVAL),
    };
    if argument.len() != HEAD + words * 8 || (pointed_words as u64) < needed {
        return Err(Errno::INVAL);
    }
    Ok(address_at)
}

/// # Safety
/// `argument` must be memory as long as the call's structure, and no other code may use it during the call.
/// The same holds for all memory that it points to.
unsafe fn call(file: BorrowedFd<'_>, opcode: Opcode, argument: *mut c_void) -> Result<(), Errno> {
    // SAFETY: the caller guarantees the requirements of the call.
    unsafe { rustix::ioctl::ioctl(file, Call { opcode, argument }) }
}

struct Call {
    opcode: Opcode,
    argument: *mut c_void,
}

// SAFETY: the opcode and the pointer are passed on unchanged. The kernel may write through the pointer, so
// the call is declared as mutating. The returned value is not interpreted.
unsafe impl Ioctl for Call {
    type Output = ();

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::argument::Argument;
    use super::*;

    #[test]
    fn numbers_are_those_of_the_uapi() {
        if cfg!(target_arch = "x86_64") {
            assert_eq!((RESET, FEATURE, PRECOPY_INFO), (0x3b6f, 0x3b75, 0x3b79));
        }
    }

    #[test]
    fn call_on_another_kind_of_file_is_refused() {
        let calls = System::new(std::fs::File::open("/dev/null").unwrap().into());

        let mut argument = Argument::state(feature::SET, 3);
        assert_eq!(calls.feature(&mut argument.bytes, &mut []).err(), Some(Errno::NOTTY));
        assert_eq!(calls.reset(), Err(Errno::NOTTY));
    }

    #[test]
    fn data_descriptor_is_read_and_written() {
        let calls = System::new(std::fs::File::open("/dev/null").unwrap().into());
        let (from, to) = rustix::pipe::pipe().unwrap();

        assert_eq!(calls.write(&to, b"state"), Ok(5));
        let mut read = [0; 9];
        assert_eq!(calls.read(&from, &mut read), Ok(5));
        assert_eq!(&read[..5], b"state");
        assert_eq!(calls.precopy_info(&from, &mut [0; 24]), Err(Errno::NOTTY));
    }

    #[test]
    fn check_of_memory_that_is_not_there_refuses() {
        let report = |pages: u64, page_size| {
            Argument::new(feature::GET, feature::DMA_LOGGING_REPORT, &[0, pages * 4096, page_size, 0]).bytes
        };
        assert_eq!(check(&report(64, 4096), 1), Ok(Some(32)));
        assert_eq!(check(&report(65, 4096), 1), Err(Errno::INVAL));
        assert_eq!(check(&report(64, 0), 1), Err(Errno::INVAL));
        assert_eq!(check(&Argument::start_logging(4096, 2).bytes, 4), Ok(Some(24)));
        assert_eq!(check(&Argument::start_logging(4096, 3).bytes, 4), Err(Errno::INVAL));
        assert_eq!(check(&report(64, 4096)[..32], 1), Err(Errno::INVAL));
        assert_eq!(check(&Argument::new(feature::GET, 11, &[0, 0]).bytes, 9), Err(Errno::INVAL));
        assert_eq!(check(&[16, 0, 0], 0), Err(Errno::INVAL));
    }
}
