//! A back end for tests with two queues. A [`Model`] serves their requests, and its state moves by the
//! protocol's device-state messages. It runs in another process, so that tests can stop and kill it. That
//! process is the test binary, started for its test [`RUNS`].

#![allow(dead_code, reason = "each program of tests uses a part")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostTransferStateDirection, VhostTransferStatePhase};
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use vhost_user_backend::{VhostUserBackendMut, VhostUserDaemon, VringRwLock, VringT};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use crate::model::Model;
use crate::virtqueue::PATIENCE;

/// Name of the test that becomes a back end if the environment variables request it.
pub const RUNS: &str = "back_end_runs_for_another_test";
const SOCKET: &str = "STERNA_BACK_END_SOCKET";
const STATE_BYTES: &str = "STERNA_BACK_END_STATE_BYTES";
const FAULT: &str = "STERNA_BACK_END_FAULT";

/// The feature bit VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << 32;
/// VIRTIO_BLK_F_BLK_SIZE and VIRTIO_BLK_F_MQ, for disks.
pub const BLOCK_SIZE: u64 = 1 << 6;
pub const BLOCK_QUEUES: u64 = 1 << 12;

/// A deliberate fault of a back end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Writes half its state, and reports a failure at the end.
    SaveFails,
    /// Writes half its state, and then nothing.
    SaveHangs,
    /// Reads nothing of the state.
    LoadHangs,
    /// Dies when its state is requested.
    SaveDies,
    /// Dies when it gets a state.
    LoadDies,
    /// Reads its state, and reports a failure at the end.
    LoadFails,
    /// Answers with a pipe of its own, which works.
    OwnPipe,
    /// Answers with a pipe of its own, and repeatedly makes it blocking. It does not use the pipe's other
    /// end.
    OwnPipeHangs,
    /// Answers with an endless file that is no pipe.
    OwnDevice,
    /// Cannot transfer its state at all.
    NoDeviceState,
    /// Returns entries after a delay, and reports meanwhile that it has stopped.
    Lingers,
    /// Offers VIRTIO_NET_F_MAC, which only a front end implements.
    OffersAddress,
    /// Does not report its configuration space.
    NoConfiguration,
    /// Reports a configuration space that is full of ones.
    WrongConfiguration,
    /// Reports fewer bytes of its configuration space than requested.
    ShortConfiguration,
}

const FAULTS: [Fault; 16] = [
    Fault::None,
    Fault::SaveFails,
    Fault::SaveHangs,
    Fault::LoadHangs,
    Fault::SaveDies,
    Fault::LoadDies,
    Fault::LoadFails,
    Fault::OwnPipe,
    Fault::OwnPipeHangs,
    Fault::OwnDevice,
    Fault::NoDeviceState,
    Fault::Lingers,
    Fault::OffersAddress,
    Fault::NoConfiguration,
    Fault::WrongConfiguration,
    Fault::ShortConfiguration,
];

/// Sectors of the simulated disk before any request. Each request adds one.
pub const SECTORS: u64 = 1000;
/// Delay of a back end that lingers.
pub const LINGERS: Duration = Duration::from_millis(300);

/// A back end's process, killed when dropped.
pub struct BackEnd {
    process: Child,
    socket: PathBuf,
}

impl BackEnd {
    /// Starts a back end that listens in `directory`.
    pub fn start(directory: &Path, name: &str, state_bytes: usize, fault: Fault) -> Self {
        let socket = directory.join(name);
        let fault = FAULTS.iter().position(|known| *known == fault).expect("a known fault");
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", RUNS, "--nocapture"]);
        command.env(SOCKET, &socket).env(STATE_BYTES, state_bytes.to_string()).env(FAULT, fault.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let process = command.spawn().expect("a process");
        let begin = Instant::now();
        while !socket.exists() {
            assert!(begin.elapsed() < PATIENCE, "the back end does not listen");
            thread::sleep(Duration::from_millis(5));
        }
        Self { process, socket }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Waits until the back end has made its pipe blocking ([`Fault::OwnPipeHangs`]). This side may have
    /// changed the pipe before.
    pub fn wait_until_its_pipe_blocks(&self) {
        let times = || std::fs::metadata(blocked(&self.socket)).map_or(0, |file| file.len());
        let (begin, before) = (Instant::now(), times());
        // Two more times, because the next one may have begun before this call.
        while times() < before + 2 {
            assert!(begin.elapsed() < PATIENCE, "the back end does not make its pipe block");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends SIGSTOP and waits until the process is stopped. It answers nothing then.
    pub fn freeze(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: waitpid(2) for our own child, into a word of this frame.
        let result = unsafe { libc::waitpid(self.process.id() as i32, &mut status, libc::WUNTRACED) };
        assert!(result > 0 && libc::WIFSTOPPED(status), "{}", io::Error::last_os_error());
    }

    /// Sends SIGCONT, after which the process continues.
    pub fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Sends SIGKILL and waits for the process to end.
    pub fn kill(&mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }

    /// Waits until the process has ended by itself.
    pub fn wait(&mut self) {
        let begin = Instant::now();
        while self.process.try_wait().expect("it is ours").is_none() {
            assert!(begin.elapsed() < PATIENCE, "the back end does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill(2) for our own child, which was not waited for yet.
        let result = unsafe { libc::kill(self.process.id() as i32, signal) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // An error means that the process has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The body of the test [`RUNS`]. Serves one connection if this process must be a back end.
pub fn run_if_asked() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse().ok()).expect("a number");
    let (bytes, fault): (usize, usize) = (number(STATE_BYTES), number(FAULT));
    let memory = GuestMemoryAtomic::new(Memory::new());
    let service = Service {
        model: Arc::new(Mutex::new(Model::new(bytes))),
        memory: memory.clone(),
        transfer: Mutex::default(),
        state_bytes: bytes,
        fault: FAULTS[fault],
    };
    let service = Arc::new(Mutex::new(service));
    let mut daemon = VhostUserDaemon::new("back end".to_owned(), service, memory).expect("a daemon");
    daemon.serve(PathBuf::from(socket)).expect("a good connection");
    // The worker thread has no exit event, so a normal return would wait for it.
    std::process::exit(0);
}

type Memory = GuestMemoryMmap<BitmapMmapRegion>;

struct Service {
    model: Arc<Mutex<Model>>,
    memory: GuestMemoryAtomic<Memory>,
    transfer: Mutex<Option<JoinHandle<io::Result<()>>>>,
    /// Length of a new device's state in bytes.
    state_bytes: usize,
    fault: Fault,
}

impl VhostUserBackendMut for Service {
    type Bitmap = BitmapMmapRegion;
    type Vring = VringRwLock<GuestMemoryAtomic<Memory>>;

    fn num_queues(&self) -> usize {
        2
    }

    fn max_queue_size(&self) -> usize {
        256
    }

    fn features(&self) -> u64 {
        let address = if self.fault == Fault::OffersAddress { 1 << 5 } else { 0 };
        address
            | VERSION_1
            | BLOCK_SIZE
            | BLOCK_QUEUES
            | VhostUserVirtioFeatures::LOG_ALL.bits()
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        let all = VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::DEVICE_STATE;
        match self.fault {
            Fault::NoDeviceState => all - VhostUserProtocolFeatures::DEVICE_STATE,
            Fault::NoConfiguration => all - VhostUserProtocolFeatures::CONFIG,
            _ => all,
        }
    }

    /// The configuration space of a file system with the tag `model`, or of a disk. The size decides which.
    fn get_config(&self, _offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = vec![0; size as usize];
        match (self.fault, size) {
            (Fault::WrongConfiguration, _) => bytes.fill(0xff),
            (Fault::ShortConfiguration, _) => bytes.truncate(size as usize - 1),
            (_, 40) => {
                bytes[..5].copy_from_slice(b"model");
                bytes[36] = 1;
            }
            (_, 60) => {
                let sectors = SECTORS + self.model.lock().expect("no panic").served();
                bytes[..8].copy_from_slice(&sectors.to_le_bytes());
                bytes[20..24].copy_from_slice(&512u32.to_le_bytes());
                bytes[34] = 2;
            }
            _ => {}
        }
        bytes
    }

    fn reset_device(&mut self) {
        *self.model.lock().expect("no panic") = Model::new(self.state_bytes);
    }

    fn set_event_idx(&mut self, _enabled: bool) {}

    fn update_memory(&mut self, memory: GuestMemoryAtomic<Memory>) -> io::Result<()> {
        self.memory = memory;
        Ok(())
    }

    /// Called under the lock of [`Service::handle_event`], so no entry is half served.
    fn stop_vring(&mut self, _queue: u32) -> io::Result<()> {
        Ok(())
    }

    fn handle_event(
        &mut self,
        event: u16,
        _set: EventSet,
        vrings: &[Self::Vring],
        _thread: usize,
    ) -> io::Result<()> {
        let Some(vring) = vrings.get(usize::from(event)) else { return Ok(()) };
        let memory = self.memory.memory();
        loop {
            let mut state = vring.get_mut();
            if !state.get_queue().ready() {
                return Ok(());
            }
            let Some(chain) = state.get_queue_mut().pop_descriptor_chain(memory.clone()) else { break };
            drop(state);
            let head = chain.head_index();
            let (mut request, mut written) = (0, 0);
            for part in chain {
                if part.is_write_only() {
                    let mut answer = vec![0; part.len() as usize];
                    self.model.lock().expect("no panic").serve(request, &mut answer);
                    memory.write_slice(&answer, part.addr()).map_err(io::Error::other)?;
                    written += part.len();
                } else {
                    request = memory.read_obj(part.addr()).map_err(io::Error::other)?;
                }
            }
            if self.fault == Fault::Lingers {
                let vring = vring.clone();
                thread::spawn(move || {
                    thread::sleep(LINGERS);
                    // Ends like a back end that cannot be stopped while it serves an entry.
                    if !vring.get_ref().get_queue().ready() {
                        std::process::exit(4);
                    }
                    vring.add_used(head, written).expect("a ring");
                    let _ = vring.signal_used_queue();
                });
                continue;
            }
            vring.add_used(head, written).map_err(io::Error::other)?;
        }
        vring.signal_used_queue()
    }

    fn set_device_state_fd(
        &mut self,
        direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        file: File,
    ) -> io::Result<Option<File>> {
        let (model, fault) = (Arc::clone(&self.model), self.fault);
        if fault == Fault::OwnDevice {
            return File::options().read(true).write(true).open("/dev/zero").map(Some);
        }
        if fault == Fault::OwnPipeHangs {
            let (reader, writer) = rustix::pipe::pipe()?;
            let (theirs, other) = match direction {
                VhostTransferStateDirection::SAVE => (reader, writer),
                VhostTransferStateDirection::LOAD => (writer, reader),
            };
            make_it_block(theirs.try_clone()?, other);
            return Ok(Some(theirs.into()));
        }
        let (file, theirs) = match (fault, direction) {
            (Fault::OwnPipe, VhostTransferStateDirection::SAVE) => {
                let (reader, writer) = rustix::pipe::pipe()?;
                (writer.into(), Some(reader.into()))
            }
            (Fault::OwnPipe, VhostTransferStateDirection::LOAD) => {
                let (reader, writer) = rustix::pipe::pipe()?;
                (reader.into(), Some(writer.into()))
            }
            _ => (file, None),
        };
        let transfer = match direction {
            VhostTransferStateDirection::SAVE => thread::spawn(move || save(&model, fault, file)),
            VhostTransferStateDirection::LOAD => thread::spawn(move || load(&model, fault, file)),
        };
        *self.transfer.lock().expect("no panic") = Some(transfer);
        Ok(theirs)
    }

    fn check_device_state(&self) -> io::Result<()> {
        let transfer = self.transfer.lock().expect("no panic").take();
        transfer.ok_or(io::ErrorKind::NotFound)?.join().map_err(|_| io::ErrorKind::Other)?
    }
}

/// File that counts, one byte each, how often a back end made its pipe blocking. The back end listens at
/// `socket`.
fn blocked(socket: &Path) -> PathBuf {
    socket.with_extension("blocked")
}

/// Keeps the other end open, and the pipe blocking. The front end may change the latter.
fn make_it_block(theirs: std::os::fd::OwnedFd, other: std::os::fd::OwnedFd) {
    let socket = std::env::var_os(SOCKET).expect("a back end has one");
    let mut times = File::create(blocked(Path::new(&socket))).expect("a file");
    thread::spawn(move || {
        loop {
            rustix::fs::fcntl_setfl(&theirs, rustix::fs::OFlags::empty()).expect("a pipe");
            times.write_all(b".").expect("room");
            thread::sleep(Duration::from_millis(1));
            let _ = &other;
        }
    });
}

fn save(model: &Mutex<Model>, fault: Fault, mut file: File) -> io::Result<()> {
    let state = model.lock().expect("no panic").save();
    let half = &state[..state.len() / 2];
    match fault {
        Fault::SaveDies => std::process::exit(3),
        Fault::SaveFails => file.write_all(half).and(Err(io::ErrorKind::InvalidData.into())),
        Fault::SaveHangs => {
            file.write_all(half)?;
            // Waits until the other end is closed.
            rustix::event::poll(
                &mut [rustix::event::PollFd::new(&file, rustix::event::PollFlags::empty())],
                None,
            )?;
            Ok(())
        }
        _ => file.write_all(&state),
    }
}

fn load(model: &Mutex<Model>, fault: Fault, mut file: File) -> io::Result<()> {
    match fault {
        Fault::LoadDies => std::process::exit(3),
        Fault::LoadHangs => {
            rustix::event::poll(
                &mut [rustix::event::PollFd::new(&file, rustix::event::PollFlags::empty())],
                None,
            )?;
            return Ok(());
        }
        _ => {}
    }
    let mut state = Vec::new();
    file.read_to_end(&mut state)?;
    if fault == Fault::LoadFails {
        return Err(io::ErrorKind::InvalidData.into());
    }
    *model.lock().expect("no panic") = Model::load(&state).ok_or(io::ErrorKind::InvalidData)?;
    Ok(())
}
