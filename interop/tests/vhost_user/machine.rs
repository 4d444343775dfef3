//! A virtiofsd, and the driver's side of its queues without a guest.

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
use tempfile::TempDir;

use crate::fuse;
use crate::virtqueue::{PATIENCE, Part, Virtqueue};

const RAM_BYTES: u64 = 8 << 20;
/// The queue for what is urgent; virtiofsd wants it, nothing is sent over it.
const URGENT_RING: u64 = 0x1000;
const RING: u64 = 0x8000;
const REQUEST: u64 = 0x10_0000;
const ANSWER: u64 = 0x20_0000;
/// The longest body of an answer.
const ANSWER_BYTES: u32 = 4096;
/// VIRTIO_F_VERSION_1.
const VERSION_1: u64 = 1 << 32;
/// Which queue takes requests.
const REQUESTS: usize = 1;

pub fn whole() -> LoggedRange {
    LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: RAM_BYTES / PAGE_SIZE as u64 }
}

/// Pages that every answer is written to: the answer's first, and the used ring's.
pub fn answer_pages() -> [u64; 2] {
    [ANSWER / PAGE_SIZE as u64, (RING + 8192) / PAGE_SIZE as u64]
}

/// See the module. The process is killed when dropped.
pub struct Machine {
    process: Child,
    log: std::path::PathBuf,
    _directory: TempDir,
    pub ram: GuestRam,
    pub device: Arc<VhostUserDevice>,
    urgent: Virtqueue,
    queue: Virtqueue,
    unique: u64,
}

impl Machine {
    /// Starts virtiofsd over the files in `shared`, and connects to it.
    pub fn start(root: &Root, shared: &Path, options: &[&str]) -> Result<Self, Failure> {
        let directory = TempDir::new().map_err(|error| error.to_string())?;
        let (socket, log) = (directory.path().join("socket"), directory.path().join("log"));
        let file = std::fs::File::create(&log).map_err(|error| error.to_string())?;
        let mut command = root.command("virtiofsd");
        command.arg("--shared-dir").arg(shared).arg("--socket-path").arg(&socket);
        command.args(["--sandbox", "none", "--seccomp", "none", "--inode-file-handles=never"]);
        command.args(["--migration-mode", "find-paths", "--rlimit-nofile", "0"]).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let mut process = command.spawn().map_err(|error| format!("cannot start virtiofsd: {error}"))?;
        let connected = listening(&mut process, &socket).and_then(|()| {
            let block = RamBlock::new("ram", RAM_BYTES, Backing::Memfd).map_err(|error| error.to_string())?;
            let ram = GuestRam::new(vec![block]).map_err(|error| error.to_string())?;
            let options = VhostUserOptions { queues: 2, ..VhostUserOptions::new("virtiofs", &socket) };
            let device =
                VhostUserDevice::connect(options, &ram, &[whole()]).map_err(|error| error.to_string())?;
            Ok((ram, device))
        });
        match connected {
            Ok((ram, device)) => {
                let (urgent, queue) = (Virtqueue::new(URGENT_RING, 4), Virtqueue::new(RING, 16));
                Ok(Self { process, log, _directory: directory, ram, device, urgent, queue, unique: 0 })
            }
            Err(why) => {
                // An error means that it has ended by itself.
                let _ = process.kill();
                let _ = process.wait();
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                Err(format!("{why}; virtiofsd said: {}", said.trim()))
            }
        }
    }

    /// The driver is ready, and mounts.
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

    /// A handle.
    pub fn open(&mut self, inode: u64) -> u64 {
        fuse::word(&self.ask(fuse::OPEN, inode, &fuse::open()), 0)
    }

    pub fn read(&mut self, inode: u64, handle: u64, offset: u64, len: u32) -> Vec<u8> {
        // The device fills what room there is, as the kernel gives it no more than it wants.
        self.ask_for(fuse::READ, inode, &fuse::place(handle, offset, len), len)
    }

    /// How much was written.
    pub fn write(&mut self, inode: u64, handle: u64, offset: u64, bytes: &[u8]) -> u32 {
        let body = [&fuse::place(handle, offset, bytes.len() as u32), bytes].concat();
        let answer = self.ask(fuse::WRITE, inode, &body);
        u32::from_le_bytes(answer[0..4].try_into().expect("four bytes"))
    }

    /// All of the stopped device's state.
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

    /// The guest with its RAM, and what its driver knows, comes from `source`.
    pub fn take_guest(&mut self, source: &Machine) {
        let mut bytes = vec![0; RAM_BYTES as usize];
        source.ram.block(0).read(0, &mut bytes).expect("inside RAM");
        self.ram.block(0).write(0, &bytes).expect("inside RAM");
        (self.urgent, self.queue) = (source.urgent.clone(), source.queue.clone());
        self.unique = source.unique;
    }

    /// One request and its answer's body.
    fn ask(&mut self, opcode: u32, inode: u64, body: &[u8]) -> Vec<u8> {
        self.ask_for(opcode, inode, body, ANSWER_BYTES)
    }

    /// As [`ask`](Self::ask), with room for so many bytes.
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

impl Drop for Machine {
    fn drop(&mut self) {
        // An error means that it has ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            let said = std::fs::read_to_string(&self.log).unwrap_or_default();
            #[allow(clippy::print_stderr, reason = "a failing test says what it knows")]
            {
                eprintln!("virtiofsd {} said: {}", self.process.id(), said.trim());
            }
        }
    }
}

fn listening(process: &mut Child, socket: &Path) -> Result<(), Failure> {
    let begin = Instant::now();
    while !socket.exists() {
        if let Ok(Some(status)) = process.try_wait() {
            return Err(format!("virtiofsd ended with {status}"));
        }
        if begin.elapsed() > PATIENCE {
            return Err("virtiofsd does not listen".into());
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
