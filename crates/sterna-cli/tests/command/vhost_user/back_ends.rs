//! Back ends of a disk and of a network card, as threads of the test. They survive the guest's processes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna_guests::ledger;
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::bitmap::BitmapMmapRegion;
use vhost_user_backend::{VhostUserBackendMut, VhostUserDaemon, VringRwLock, VringT};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use crate::support::protection::wait;

const SECTOR: u64 = 512;
const QUEUE_SIZE: usize = 256;
/// Length of the header before each packet of a card.
const HEADER_BYTES: usize = 12;
/// Delay of each disk request, so that one is in flight whenever the guest stops.
const SLOW: Duration = Duration::from_millis(2);

type Memory = GuestMemoryMmap<BitmapMmapRegion>;

/// The kind of a back end, and its observations.
pub enum Kind {
    /// Reads and writes a file.
    Disk(File),
    /// Records the numbers of the ledger's packets.
    Card(Arc<Mutex<Vec<u64>>>),
}

/// Counts the connections of a back end: begun and ended.
pub struct BackEnd {
    connections: Arc<Mutex<(usize, usize)>>,
}

impl BackEnd {
    /// Serves front ends at `socket`, one after the other.
    pub fn start(socket: &Path, kind: Kind) -> Self {
        let connections = Arc::<Mutex<(usize, usize)>>::default();
        let (counted, path) = (Arc::clone(&connections), socket.to_owned());
        std::thread::spawn(move || {
            let memory = GuestMemoryAtomic::new(Memory::new());
            let service = Arc::new(Mutex::new(Service { kind, memory: memory.clone() }));
            loop {
                let daemon =
                    VhostUserDaemon::new("back end".to_owned(), Arc::clone(&service), memory.clone());
                let mut daemon = daemon.unwrap();
                let mut listener = vhost::vhost_user::Listener::new(&path, true).unwrap();
                daemon.start(&mut listener).unwrap();
                counted.lock().unwrap().0 += 1;
                let _ = daemon.wait();
                counted.lock().unwrap().1 += 1;
                // Dropping the daemon would wait for its worker thread, which has no exit event.
                std::mem::forget(daemon);
            }
        });
        wait("the back end", || socket.exists());
        Self { connections }
    }

    /// The number of connections so far, and how many have ended.
    pub fn connections(&self) -> (usize, usize) {
        *self.connections.lock().unwrap()
    }
}

struct Service {
    kind: Kind,
    memory: GuestMemoryAtomic<Memory>,
}

impl VhostUserBackendMut for Service {
    type Bitmap = BitmapMmapRegion;
    type Vring = VringRwLock<GuestMemoryAtomic<Memory>>;

    fn num_queues(&self) -> usize {
        match self.kind {
            Kind::Disk(_) => 1,
            Kind::Card(_) => 2,
        }
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        1 << 32 | VhostUserVirtioFeatures::LOG_ALL.bits() | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
    }

    fn get_config(&self, _offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = vec![0; size as usize];
        match self.kind {
            Kind::Disk(_) => bytes[..8].copy_from_slice(&(ledger::DISK_BYTES / SECTOR).to_le_bytes()),
            Kind::Card(_) => bytes[..6].copy_from_slice(b"\x02ledgr"),
        }
        bytes
    }

    fn set_event_idx(&mut self, _enabled: bool) {}

    fn update_memory(&mut self, memory: GuestMemoryAtomic<Memory>) -> io::Result<()> {
        self.memory = memory;
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
        // The first queue of a card is for packets to the guest. This back end sends none.
        if event == 0 && matches!(self.kind, Kind::Card(_)) {
            return Ok(());
        }
        let memory = self.memory.memory();
        loop {
            let mut state = vring.get_mut();
            if !state.get_queue().ready() {
                return Ok(());
            }
            let Some(chain) = state.get_queue_mut().pop_descriptor_chain(memory.clone()) else { break };
            drop(state);
            let head = chain.head_index();
            let parts: Vec<_> = chain.map(|part| (part.addr(), part.len() as usize)).collect();
            let written = self.serve(&memory, &parts)?;
            vring.add_used(head, written).map_err(io::Error::other)?;
        }
        vring.signal_used_queue()
    }
}

impl Service {
    /// Handles a request or a packet. Returns the number of bytes written to guest memory.
    fn serve(&self, memory: &Memory, parts: &[(vm_memory::GuestAddress, usize)]) -> io::Result<u32> {
        let read = |index: usize| {
            let (at, length) = parts[index];
            let mut bytes = vec![0; length];
            memory.read_slice(&mut bytes, at).map(|()| bytes).map_err(io::Error::other)
        };
        let write =
            |index: usize, bytes: &[u8]| memory.write_slice(bytes, parts[index].0).map_err(io::Error::other);
        match &self.kind {
            Kind::Card(numbers) => {
                let packet = read(0)?;
                numbers.lock().unwrap().extend(ledger::number_of_packet(&packet[HEADER_BYTES..]));
                Ok(0)
            }
            Kind::Disk(file) => {
                std::thread::sleep(SLOW);
                let header = read(0)?;
                let sector = u64::from_le_bytes(header[8..16].try_into().unwrap());
                let mut data = read(1)?;
                let written = match header[0] {
                    0 => {
                        file.read_exact_at(&mut data, sector * SECTOR)?;
                        write(1, &data)?;
                        data.len() as u32
                    }
                    _ => {
                        file.write_all_at(&data, sector * SECTOR)?;
                        0
                    }
                };
                write(2, &[0])?;
                Ok(written + 1)
            }
        }
    }
}
