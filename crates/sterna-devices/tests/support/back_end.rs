//! A back end of our own: two queues, whose requests a [`Model`] serves, and whose state moves by the protocol's
//! device-state messages. It runs in a process of its own, so that it can be stopped and killed: the test binary,
//! called again for its test [`RUNS`].

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

/// The test that is a back end if the variables say so.
pub const RUNS: &str = "back_end_runs_for_another_test";
const SOCKET: &str = "STERNA_BACK_END_SOCKET";
const STATE_BYTES: &str = "STERNA_BACK_END_STATE_BYTES";
const FAULT: &str = "STERNA_BACK_END_FAULT";

/// VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << 32;
/// VIRTIO_BLK_F_BLK_SIZE and VIRTIO_BLK_F_MQ, for devices that are disks.
pub const BLOCK_SIZE: u64 = 1 << 6;
pub const BLOCK_QUEUES: u64 = 1 << 12;

/// What a back end does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It writes half its state, and says at the end that this failed.
    SaveFails,
    /// It writes half its state, and then nothing.
    SaveHangs,
    /// It reads nothing.
    LoadHangs,
    /// It dies when its state is wanted.
    SaveDies,
    /// It dies when it is given a state.
    LoadDies,
    /// It reads its state, and says at the end that this failed.
    LoadFails,
    /// It answers with a pipe of its own, which is sound.
    OwnPipe,
    /// It answers with a pipe of its own, of whose other end it makes no use, and makes it block again and again.
    OwnPipeHangs,
    /// It answers with something that never ends and is no pipe.
    OwnDevice,
    /// It cannot move its state at all.
    NoDeviceState,
    /// It returns what it takes a while later, and says meanwhile that it has stopped.
    Lingers,
    /// It offers VIRTIO_NET_F_MAC, with which it has nothing to do.
    OffersAddress,
    /// It says nothing of its configuration space.
    NoConfiguration,
    /// It says that its configuration space is full of ones.
    WrongConfiguration,
    /// It says less of its configuration space than it is asked for.
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

/// Sectors of the disk that it says to be, before any request was served: each makes it longer by one.
pub const SECTORS: u64 = 1000;
/// How long one that lingers takes.
pub const LINGERS: Duration = Duration::from_millis(300);

/// A back end's process; killed when dropped.
pub struct BackEnd {
    process: Child,
    socket: PathBuf,
}

impl BackEnd {
    /// Starts one that listens in `directory`.
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

    /// Waits until it has made its pipe block ([`Fault::OwnPipeHangs`]), whatever this side did to it before.
    pub fn wait_until_its_pipe_blocks(&self) {
        let times = || std::fs::metadata(blocked(&self.socket)).map_or(0, |file| file.len());
        let (begin, before) = (Instant::now(), times());
        // The next one may have begun before.
        while times() < before + 2 {
            assert!(begin.elapsed() < PATIENCE, "the back end does not make its pipe block");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// SIGSTOP, and waits until it holds: it answers nothing.
    pub fn freeze(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: waitpid(2) for our own child, into a word of this frame.
        let result = unsafe { libc::waitpid(self.process.id() as i32, &mut status, libc::WUNTRACED) };
        assert!(result > 0 && libc::WIFSTOPPED(status), "{}", io::Error::last_os_error());
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.signal(libc::SIGCONT);
    }

    /// SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        self.process.kill().expect("it is ours");
        self.process.wait().expect("it is ours");
    }

    /// Waits until it has ended by itself.
    pub fn wait(&mut self) {
        let begin = Instant::now();
        while self.process.try_wait().expect("it is ours").is_none() {
            assert!(begin.elapsed() < PATIENCE, "the back end does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill(2) of our own child, which was not waited for yet.
        let result = unsafe { libc::kill(self.process.id() as i32, signal) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // An error means that it has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The body of the test [`RUNS`]: serves one connection if this process is to be a back end.
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
    // The worker thread has no exit event and would be waited for.
    std::process::exit(0);
}

type Memory = GuestMemoryMmap<BitmapMmapRegion>;

struct Service {
    model: Arc<Mutex<Model>>,
    memory: GuestMemoryAtomic<Memory>,
    transfer: Mutex<Option<JoinHandle<io::Result<()>>>>,
    /// Of a new device.
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

    /// That of a file system with the tag `model`, or of a disk, by its size.
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

    /// Called with the lock that [`Service::handle_event`] is called with: nothing is half done.
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
                    // As one does that cannot be stopped meanwhile.
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

/// Where a back end at `socket` notes, by a byte each, how often it has made its pipe block.
fn blocked(socket: &Path) -> PathBuf {
    socket.with_extension("blocked")
}

/// Keeps the other end open and, what the front end may set, the pipe blocking.
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
            // Until the other end is closed.
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
