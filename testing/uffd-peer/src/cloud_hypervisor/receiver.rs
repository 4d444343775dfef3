//! The VMM that waits for a machine (`receive-migration`).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use super::{Machine, OK, command, wire};

/// A VMM that listens.
#[derive(Debug)]
pub struct Receiver {
    listener: UnixListener,
    is_lazy: bool,
}

/// What the VMM answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// The status.
    Status(u16),
    /// Nothing: it closes the connection.
    Close,
}

/// What has arrived of a machine.
#[derive(Debug, Default)]
pub struct Arrived {
    /// Number and memory of each slot.
    pub memory: Vec<(u32, File)>,
    /// The `Config`.
    pub config: Vec<u8>,
    /// The `State`.
    pub state: Vec<u8>,
    /// The last command that came; 0 if none did.
    pub last: u16,
    /// The connection for page requests.
    pub faults: Option<UnixStream>,
    control: Option<UnixStream>,
}

impl Receiver {
    /// Listens. `is_lazy`: memory_mode=postcopy.
    ///
    /// # Errors
    /// The error of the system.
    pub fn bind(socket: &Path, is_lazy: bool) -> io::Result<Self> {
        Ok(Self { listener: UnixListener::bind(socket)?, is_lazy })
    }

    /// Receives a machine, up to its end, or to the end of the connection. `reply` says what each command gets; it sees what
    /// has arrived up to then.
    ///
    /// # Errors
    /// The error of the system.
    pub fn receive(&self, mut reply: impl FnMut(u16, &Arrived) -> Reply) -> io::Result<Arrived> {
        let stream = wire::patient(self.listener.accept()?.0)?;
        let mut arrived = Arrived::default();
        while let Some((number, length)) = wire::receive(&stream)? {
            arrived.last = number;
            match number {
                command::MEMORY_FD => {
                    let mut slot = [0; 4];
                    let descriptor = wire::receive_descriptor(&stream, &mut slot)?;
                    let file = descriptor.ok_or_else(|| io::Error::other("memory without a descriptor"))?;
                    arrived.memory.push((u32::from_le_bytes(slot), file.into()));
                }
                _ => {
                    let mut payload = vec![0; length as usize];
                    (&stream).read_exact(&mut payload)?;
                    match number {
                        command::CONFIG => arrived.config = payload,
                        command::STATE => arrived.state = payload,
                        _ => {}
                    }
                }
            }
            match reply(number, &arrived) {
                Reply::Status(status) => wire::send(&stream, &wire::header(status, 0), &[])?,
                Reply::Close => return Ok(arrived),
            }
            if number == command::CONFIG && self.is_lazy {
                let faults = wire::patient(self.listener.accept()?.0)?;
                let mut role = [0; 2];
                (&faults).read_exact(&mut role)?;
                assert_eq!(role, [2, 0], "the role of the second connection");
                arrived.faults = Some(faults);
            }
            if matches!(number, command::COMPLETE | command::COMPLETE_PAUSED | command::ABANDON) {
                break;
            }
        }
        arrived.control = Some(stream);
        Ok(arrived)
    }

    /// Receives a machine, and accepts everything.
    ///
    /// # Errors
    /// The error of the system.
    pub fn accept(&self) -> io::Result<Arrived> {
        self.receive(|_, _| Reply::Status(OK))
    }
}

impl Arrived {
    /// Requests pages. The status of the answer; `None`: the connection is closed.
    ///
    /// # Errors
    /// The error of the system.
    pub fn request(&self, address: u64, bytes: u64) -> io::Result<Option<u16>> {
        let stream =
            self.faults.as_ref().ok_or_else(|| io::Error::other("no connection for page requests"))?;
        // As Cloud Hypervisor sends it: the header, and then the range.
        wire::send(stream, &wire::header(command::PAGE_FAULT, 16), &[])?;
        wire::send(stream, &[address.to_le_bytes(), bytes.to_le_bytes()].concat(), &[])?;
        Ok(wire::receive(stream)?.map(|(status, _)| status))
    }

    /// Requests all memory in ascending order, page by page. Returns the first status that is not right.
    ///
    /// # Errors
    /// The error of the system.
    pub fn walk(&self, machine: &Machine) -> io::Result<Option<u16>> {
        for slot in &machine.slots {
            for page in 0..slot.bytes / crate::PAGE {
                let status = self.request(slot.address + page * crate::PAGE, crate::PAGE)?;
                if status != Some(OK) {
                    return Ok(status);
                }
            }
        }
        Ok(Some(OK))
    }

    /// The memory in the order of the machine's slots.
    ///
    /// # Errors
    /// The error of the system, or a slot that is missing.
    pub fn memory_of(&self, machine: &Machine) -> io::Result<Vec<u8>> {
        let mut memory = Vec::with_capacity(machine.memory.len());
        for slot in &machine.slots {
            let mut content = vec![0; slot.bytes as usize];
            self.file(slot.number)?.read_exact_at(&mut content, slot.file_offset)?;
            memory.extend(content);
        }
        Ok(memory)
    }

    /// The memory of a slot.
    ///
    /// # Errors
    /// The slot is missing.
    pub fn file(&self, slot: u32) -> io::Result<&File> {
        let found = self.memory.iter().find(|(number, _)| *number == slot);
        found.map(|(_, file)| file).ok_or_else(|| io::Error::other(format!("slot {slot} is missing")))
    }
}
