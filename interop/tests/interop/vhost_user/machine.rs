//! A virtiofsd, and the driver's side of its queues. There is no guest, or a guest that sleeps; the driver
//! uses its RAM.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sterna::DeviceStream;
use sterna_devices::vhost_user::{VhostUserDevice, VhostUserOptions};
use sterna_interop::{Failure, Root};
use sterna_ram::dirty::LoggedRange;
use sterna_ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna_vmm::{GuestImage, KvmMachine, MachineConfig};
use tempfile::TempDir;

use super::fuse;
use crate::virtqueue::{PATIENCE, Part, Virtqueue};

const RAM_BYTES: u64 = 64 << 20;
/// Address of the queue for urgent requests. virtiofsd requires the queue, but nothing is sent over it.
const URGENT_RING: u64 = 0x200_1000;
const RING: u64 = 0x200_8000;
const REQUEST: u64 = 0x210_0000;
const ANSWER: u64 = 0x220_0000;
/// Limit of the body of an answer, in bytes.
const ANSWER_BYTES: u32 = 4096;
/// Feature bit VIRTIO_F_VERSION_1.
const VERSION_1: u64 = 1 << 32;
/// Index of the queue for requests.
const REQUESTS: usize = 1;

pub fn whole() -> LoggedRange {
    LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: RAM_BYTES / PAGE_SIZE as u64 }
}

/// Pages to which every answer is written: the first page of the answer, and the page of the used ring.
pub fn answer_pages() -> [u64; 2] {
    [ANSWER / PAGE_SIZE as u64, (RING + 8192) / PAGE_SIZE as u64]
}

/// The driver and its device. The process is killed when this is dropped.
pub struct Machine {
    _process: Process,
    /// The machine that has the device. `None`: only the test has it.
    pub host: Option<Arc<KvmMachine>>,
    pub ram: GuestRam,
    pub device: Arc<VhostUserDevice>,
    urgent: Virtqueue,
    queue: Virtqueue,
    unique: u64,
}

/// A virtiofsd that listens on a socket.
struct Process {
    child: Child,
    directory: TempDir,
}

impl Machine {
    /// Starts virtiofsd with the files in `shared`, and connects to it.
    pub fn start(root: &Root, shared: &Path, options: &[&str]) -> Result<Self, Failure> {
        let process = Process::start(root, shared, options)?;
        let block = RamBlock::new("ram", RAM_BYTES, Backing::Memfd).map_err(|error| error.to_string())?;
        let ram = GuestRam::new(vec![block]).map_err(|error| error.to_string())?;
        let device = VhostUserDevice::connect(process.options(), &ram, &[whole()])
            .map_err(|error| process.explain(&error.to_string()))?;
        Ok(Self::with(process, None, ram, device))
    }

    /// The same as a device of a KVM machine, whose guest sleeps.
    pub fn hosted(root: &Root, shared: &Path, incoming: bool) -> Result<Self, Failure> {
        let process = Process::start(root, shared, &[])?;
        // A hlt instruction in an endless loop.
        let sleeper = GuestImage::Flat64 { code: vec![0xf4, 0xeb, 0xfd], parameters: Vec::new() };
        let host = KvmMachine::new(MachineConfig {
            guest: Some(sleeper),
            incoming,
            vhost_user: vec![process.options()],
            ..MachineConfig::new("host")
        })
        .map_err(|error| process.explain(&error.to_string()))?;
        let (ram, device) = (host.ram().clone(), Arc::clone(&host.vhost_user()[0]));
        Ok(Self::with(process, Some(host), ram, device))
    }

    fn with(
        process: Process,
        host: Option<Arc<KvmMachine>>,
        ram: GuestRam,
        device: Arc<VhostUserDevice>,
    ) -> Self {
        let (urgent, queue) = (Virtqueue::new(URGENT_RING, 4), Virtqueue::new(RING, 16));
        Self { _process: process, host, ram, device, urgent, queue, unique: 0 }
    }

    /// Makes the driver ready, and mounts the file system.
    pub fn begin_session(&mut self) {
        let rings = [self.urgent.ring(), self.queue.ring()];
        self.device.start(VERSION_1, &rings).expect("good rings");
        let answer = self.ask(fuse::INIT, 0, &fuse::init());
        assert_eq!(answer[..4], 7u32.to_le_bytes(), "FUSE has another version");
    }

    /// The inode of `name` in the directory `parent`.
    pub fn lookup(&mut self, parent: u64, name: &str) -> u64 {
        fuse::word(&self.ask(fuse::LOOKUP, parent, &fuse::name(name)), 0)
    }

    /// Opens the file `inode` and returns its handle.
    pub fn open(&mut self, inode: u64) -> u64 {
        fuse::word(&self.ask(fuse::OPEN, inode, &fuse::open()), 0)
    }

    pub fn read(&mut self, inode: u64, handle: u64, offset: u64, len: u32) -> Vec<u8> {
        // The device fills the available room. The kernel therefore offers only the requested length.
        self.ask_for(fuse::READ, inode, &fuse::place(handle, offset, len), len)
    }

    /// Writes to a file, and returns the number of bytes written.
    pub fn write(&mut self, inode: u64, handle: u64, offset: u64, bytes: &[u8]) -> u32 {
        let body = [&fuse::place(handle, offset, bytes.len() as u32), bytes].concat();
        let answer = self.ask(fuse::WRITE, inode, &body);
        u32::from_le_bytes(answer[0..4].try_into().expect("four bytes"))
    }

    /// The complete state of the stopped device.
    pub fn read_state(&self) -> Result<Vec<u8>, Failure> {
        let (mut state, mut piece) = (Vec::new(), vec![0; 65_536]);
        loop {
            match self.device.read(&mut piece).map_err(|error| error.to_string())? {
                0 => return Ok(state),
                n => state.extend(&piece[..n]),
            }
        }
    }

    /// Loads a state, without starting the device.
    pub fn load(&self, state: &[u8], configuration: &[u8]) -> Result<(), Failure> {
        self.device
            .begin_load()
            .and_then(|()| state.chunks(10_000).try_for_each(|piece| self.device.write(piece)))
            .and_then(|()| self.device.finish_load(configuration))
            .map_err(|error| error.to_string())
    }

    /// Copies the guest's RAM and the driver's state from `source`.
    pub fn take_guest(&mut self, source: &Machine) {
        let mut bytes = vec![0; RAM_BYTES as usize];
        source.ram.block(0).read(0, &mut bytes).expect("inside RAM");
        self.ram.block(0).write(0, &bytes).expect("inside RAM");
        self.take_driver(source);
    }

    /// Copies the driver's state from `source`, after the guest has arrived.
    pub fn take_driver(&mut self, source: &Machine) {
        (self.urgent, self.queue) = (source.urgent.clone(), source.queue.clone());
        self.unique = source.unique;
    }

    /// Sends a request and returns the body of its answer.
    fn ask(&mut self, opcode: u32, inode: u64, body: &[u8]) -> Vec<u8> {
        self.ask_for(opcode, inode, body, ANSWER_BYTES)
    }

    /// Like [`ask`](Self::ask), with room for `room` bytes.
    fn ask_for(&mut self, opcode: u32, inode: u64, body: &[u8], room: u32) -> Vec<u8> {
        assert!(room <= ANSWER_BYTES);
        let room = fuse::OUT_HEADER as u32 + room;
        self.unique += 2;
        let request = fuse::request(opcode, self.unique, inode, body);
        let block = self.ram.block(0);
        block.write(REQUEST, &request).expect("inside RAM");
        let parts = [
            Part { address: REQUEST, len: request.len() as u32, written: false },
            Part { address: ANSWER, len: room, written: true },
        ];
        self.queue.submit(&self.ram, &parts).expect("a free slot");
        let (_, written) = self.queue.wait(&self.ram, &self.device, REQUESTS);
        let mut answer = vec![0; written.min(room) as usize];
        block.read(ANSWER, &mut answer).expect("inside RAM");
        fuse::answer(&answer, self.unique).to_vec()
    }
}

impl Process {
    fn start(root: &Root, shared: &Path, options: &[&str]) -> Result<Self, Failure> {
        let directory = TempDir::new().map_err(|error| error.to_string())?;
        let log = File::create(directory.path().join("log")).map_err(|error| error.to_string())?;
        let mut command = root.command("virtiofsd");
        command.arg("--shared-dir").arg(shared).arg("--socket-path").arg(directory.path().join("socket"));
        command.args(["--sandbox", "none", "--seccomp", "none", "--inode-file-handles=never"]);
        command.args(["--migration-mode", "find-paths", "--rlimit-nofile", "0"]).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|error| format!("cannot start virtiofsd: {error}"))?;
        let mut process = Self { child, directory };
        process.wait_for_socket().map_err(|why| process.explain(&why))?;
        Ok(process)
    }

    fn options(&self) -> VhostUserOptions {
        VhostUserOptions {
            queues: 2,
            ..VhostUserOptions::new("virtiofs", self.directory.path().join("socket"))
        }
    }

    fn wait_for_socket(&mut self) -> Result<(), Failure> {
        let begin = Instant::now();
        while !sterna_interop::is_listening(&self.directory.path().join("socket")) {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("virtiofsd ended with {status}"));
            }
            if begin.elapsed() > PATIENCE {
                return Err("virtiofsd does not listen".into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// `why`, with the output of virtiofsd.
    fn explain(&self, why: &str) -> Failure {
        let said = std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        format!("{why}; virtiofsd said: {}", said.trim())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that the process has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            #[allow(clippy::print_stderr, reason = "a failing test says what it knows")]
            {
                eprintln!("{}", self.explain("the test failed"));
            }
        }
    }
}
