//! Replays a record of system calls instead of a device.
//!
//! A record is text in the style of strace, with every structure as hexadecimal bytes. Blanks are ignored,
//! and `#` begins a comment. `vfio` is the device's descriptor; numbers are data descriptors. The memory at
//! an address follows `&`, and the address itself is 0.
//!
//! ```text
//! ioctl(vfio, 0x3b75, 10000000 02000200 04000000 ffffffff) = 0, 10000000 02000200 04000000 09000000
//! ioctl(vfio, 0x3b75, ARGUMENT, &MEMORY) = 0, ARGUMENT, &MEMORY   # what is left out has not changed
//! ioctl(vfio, 0x3b6f) = -1 EIO
//! ioctl(9, 0x3b79, ARGUMENT) = 0, ARGUMENT
//! read(9, 4096) = 2, abcd
//! write(9, abcd) = 2
//! close(9) = 0
//! ```
//!
//! Calls must match the record in order, byte for byte, to its last line. Any difference panics.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;

use super::super::{Calls, KernelPort};
use crate::vfio::PortError;

/// Opens the recorded device, runs `steps` with it, and drops it. The record must then be at its end.
pub(super) fn replay(record: &str, steps: impl FnOnce(Result<KernelPort<Replay>, PortError>)) {
    let replay = Replay::new(record);
    steps(KernelPort::over(replay.clone(), "0000:08:00.2"));
    if let Some(line) = replay.lines().front() {
        panic!("this call did not come: {line}");
    }
}

#[derive(Debug, Clone)]
pub(super) struct Replay {
    lines: Arc<Mutex<VecDeque<String>>>,
}

/// A data descriptor in the record.
#[derive(Debug)]
pub(super) struct Data {
    number: i32,
    replay: Replay,
}

impl Drop for Data {
    fn drop(&mut self) {
        // The first panic of a failed test names the cause; a second one would hide it.
        if !std::thread::panicking() {
            let closed = self.replay.answer(&format!("close({})", self.number));
            assert!(closed.is_ok(), "close does not fail");
        }
    }
}

struct Answer {
    number: usize,
    argument: Option<Vec<u8>>,
    memory: Option<Vec<u8>>,
}

impl Replay {
    fn new(record: &str) -> Self {
        let bare = |line: &str| line.split('#').next().unwrap_or_default().replace(char::is_whitespace, "");
        let lines = record.lines().map(bare).filter(|line| !line.is_empty()).collect();
        Self { lines: Arc::new(Mutex::new(lines)) }
    }

    fn lines(&self) -> parking_lot::MutexGuard<'_, VecDeque<String>> {
        self.lines.lock()
    }

    fn answer(&self, call: &str) -> Result<Answer, Errno> {
        let line = self.lines().pop_front().unwrap_or_else(|| panic!("{call} came after the record's end"));
        let (expected, answer) = line.split_once(")=").expect("a line has an answer");
        assert_eq!(call.strip_suffix(')'), Some(expected), "the call is not the one on record: {line}");
        if let Some(name) = answer.strip_prefix("-1") {
            return Err(errno(name));
        }
        let mut parts = answer.split(',');
        let number = parts.next().unwrap_or_default().parse().expect("a number is answered");
        let mut answer = Answer { number, argument: None, memory: None };
        for part in parts {
            match part.strip_prefix('&') {
                Some(memory) => answer.memory = Some(bytes(memory)),
                None => answer.argument = Some(bytes(part)),
            }
        }
        Ok(answer)
    }

    fn ioctl(&self, call: &str, argument: &mut [u8]) -> Result<Answer, Errno> {
        let answer = self.answer(call)?;
        if let Some(bytes) = &answer.argument {
            argument.copy_from_slice(bytes);
        }
        Ok(answer)
    }
}

impl Calls for Replay {
    type Data = Data;

    fn feature(&self, argument: &mut [u8], pointed: &mut [u64]) -> Result<Option<Data>, Errno> {
        let mut call = format!("ioctl(vfio,0x3b75,{}", hex(argument));
        if !pointed.is_empty() {
            let memory: Vec<u8> = pointed.iter().flat_map(|word| word.to_le_bytes()).collect();
            write!(call, ",&{}", hex(&memory)).unwrap();
        }
        let answer = self.ioctl(&(call + ")"), argument)?;
        if let Some(memory) = answer.memory {
            assert_eq!(memory.len(), pointed.len() * 8, "the record's memory is not as large as the call's");
            for (word, bytes) in pointed.iter_mut().zip(memory.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
        }
        let sets_state = argument[4..8] == [2, 0, 2, 0];
        let number = sets_state.then(|| i32::from_le_bytes(argument[12..16].try_into().unwrap()));
        Ok(number.filter(|number| *number >= 0).map(|number| Data { number, replay: self.clone() }))
    }

    fn reset(&self) -> Result<(), Errno> {
        self.answer("ioctl(vfio,0x3b6f)").map(drop)
    }

    fn precopy_info(&self, data: &Data, argument: &mut [u8; 24]) -> Result<(), Errno> {
        self.ioctl(&format!("ioctl({},0x3b79,{})", data.number, hex(argument)), argument).map(drop)
    }

    fn read(&self, data: &Data, to: &mut [u8]) -> Result<usize, Errno> {
        let answer = self.answer(&format!("read({},{})", data.number, to.len()))?;
        let came = answer.argument.unwrap_or_default();
        to[..came.len()].copy_from_slice(&came);
        Ok(answer.number)
    }

    fn write(&self, data: &Data, from: &[u8]) -> Result<usize, Errno> {
        self.answer(&format!("write({},{})", data.number, hex(from))).map(|answer| answer.number)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    assert!(hex.len().is_multiple_of(2), "half a byte in {hex}");
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("bytes are in hex");
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn errno(name: &str) -> Errno {
    match name {
        "EBUSY" => Errno::BUSY,
        "EINTR" => Errno::INTR,
        "EINVAL" => Errno::INVAL,
        "EIO" => Errno::IO,
        "ENODEV" => Errno::NODEV,
        "ENOMSG" => Errno::NOMSG,
        "ENOTTY" => Errno::NOTTY,
        "EPIPE" => Errno::PIPE,
        _ => panic!("the record has the error {name}, which has no number here"),
    }
}
