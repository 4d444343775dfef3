//! Performs actions on a device, as its driver, the operator and the outside do.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;
use sterna::FreePages;
use sterna_vmm::fuzzing::Bench;
use sterna_vmm::{DiskMigration, DiskOptions, MachineConfig};

use super::{Action, Kind, Network};

/// Address and length of the two pieces of RAM, with a gap between them.
const RAM: [(u64, u64); 2] = [(0, 0x4_0000), (0x6_0000, 0x1_0000)];
const DISK_BYTES: u64 = 64 << 10;
/// Memory for each queue: descriptors, available ring, used ring.
const QUEUE_BYTES: u64 = 0x2000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x1800;
/// Buffers of requests, after the memory of the queues.
const HEADER: u64 = 0x1_0000;
const READ: u64 = 0x1_1000;
const WRITTEN: u64 = 0x2_2000;
const STATUS: u64 = 0x3_f000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Register offsets of virtio-mmio.
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SELECT: u64 = 0x24;
const QUEUE_SELECT: u64 = 0x30;
const QUEUE_SIZE_MOST: u64 = 0x34;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const DEVICE_STATUS: u64 = 0x70;
const DEVICE_FEATURES: u64 = 0x10;
const DEVICE_FEATURES_SELECT: u64 = 0x14;
/// Bits of the status register.
const FEATURES_OK: u32 = 8;
const DRIVER_OK: u32 = 4;
const NEEDS_RESET: u32 = 64;
const VERSION_1: u64 = 1 << 32;

/// One device, and the driver's view of its queues.
pub(super) struct Driver {
    pub(super) bench: Bench,
    kind: Kind,
    network: Network,
    /// For each queue, the number of chains offered and of descriptors used.
    offered: [u16; 8],
    described: [u16; 8],
    /// Number of entries of each queue.
    size: u16,
}

impl Driver {
    pub(super) fn new(kind: Kind) -> Self {
        let (bench, network) = bench(kind);
        Self { bench, kind, network, offered: [0; 8], described: [0; 8], size: 1 }
    }

    pub(super) fn act(&mut self, action: &Action<'_>) {
        match *action {
            Action::Memory(at, bytes) => drop(self.bench.write_memory(u64::from(at) * 8, bytes)),
            Action::Descriptor(queue, index, at, length, flags, next) => {
                let at = u64::from(at) * 16;
                self.describe(queue, index.into(), (at, length.into()), flags.into(), next.into());
            }
            Action::Register(number, value) => self.set(u64::from(number) * 4, value),
            Action::SetUp(features, queues, size) => self.set_up(features, queues, size),
            Action::Offer(queue, head) => self.offer(queue, head.into()),
            Action::Request(queue, read, written) => drop(self.request(queue, read, written)),
            Action::Header(kind, sector, more) => {
                let header = [
                    [u32::from(kind), more.into(), sector.into()].map(u32::to_le_bytes).concat(),
                    vec![0; 4],
                ];
                self.bench.write_memory(HEADER, &header.concat());
            }
            Action::Run(true) => self.bench.run(),
            Action::Run(false) => self.bench.pause(),
            Action::Outside(bytes) => self.come(bytes),
            Action::Load(bytes) => {
                self.bench.pause();
                let _ = self.bench.load(bytes);
            }
            Action::Change(before_end, value) => {
                self.bench.pause();
                let mut state = self.bench.save();
                let at = state.len().checked_sub(1 + usize::from(before_end));
                if let Some(byte) = at.and_then(|at| state.get_mut(at)) {
                    *byte = value;
                }
                let _ = self.bench.load(&state);
            }
            Action::Move => {
                self.bench.pause();
                self.move_state();
            }
            Action::Read(number, bytes) => {
                self.bench.read(u64::from(number) * 4, &mut vec![0; usize::from(bytes % 17)]);
            }
        }
    }

    /// Saves the state of a paused device and loads it. A machine of the same kind must accept the state.
    pub(super) fn move_state(&self) {
        let state = self.bench.save();
        let loaded = self.bench.load(&state);
        loaded.unwrap_or_else(|error| panic!("{:?}: its own state is refused: {error}", self.kind));
        assert_eq!(self.bench.save(), state, "{:?}", self.kind);
    }

    /// Resets the device and sends a request by the rules. The device must answer, whatever was done to it
    /// before.
    pub(super) fn assert_works_after_reset(&mut self) {
        let (queue, read, written) = match self.kind {
            Kind::Disk | Kind::ReadOnlyDisk => (0, 16, 513),
            Kind::Card | Kind::LargeCard | Kind::Console => (1, 64, 0),
            Kind::Entropy => (0, 0, 32),
            Kind::Reporting => (2, 0, 0x1000),
            Kind::Hinting => (2, 4, 0),
        };
        self.set(DEVICE_STATUS, 0);
        assert_eq!(self.get(DEVICE_STATUS), 0, "{:?}", self.kind);
        // Clears the queues' memory, because the content from before the reset must not matter.
        for at in (0..QUEUE_BYTES * 8).step_by(0x1000) {
            self.bench.write_memory(at, &[0; 0x1000]);
        }
        self.bench.write_memory(HEADER, &[0; 16]);
        self.bench.write_memory(STATUS, &[0xff]);
        self.set_up_with(u64::MAX, u8::MAX, 4, false);
        let status = self.request(queue, read, written);
        self.set(DEVICE_STATUS, FEATURES_OK | DRIVER_OK);
        self.bench.pause();
        let mut used = [0; 2];
        self.bench.read_memory(u64::from(queue) * QUEUE_BYTES + USED + 2, &mut used);
        assert_eq!(self.get(DEVICE_STATUS) & NEEDS_RESET, 0, "{:?} needs a reset", self.kind);
        assert_eq!(u16::from_le_bytes(used), 1, "{:?} has not answered", self.kind);
        if let (Kind::Disk | Kind::ReadOnlyDisk, Some(at)) = (self.kind, status) {
            let mut status = [0xff];
            self.bench.read_memory(at, &mut status);
            assert_eq!(status, [0], "a read of the disk has failed");
        }
    }

    fn set(&self, register: u64, value: u32) {
        self.bench.write(register, &value.to_le_bytes());
    }

    fn get(&self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.bench.read(register, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set_up(&mut self, features: u64, queues: u8, size: u8) {
        self.set(DEVICE_STATUS, 0);
        self.set_up_with(features, queues, size, true);
    }

    /// Sets up a device that was reset, with the requested features that it offers.
    fn set_up_with(&mut self, features: u64, queues: u8, size: u8, is_ready: bool) {
        self.offered = [0; 8];
        self.described = [0; 8];
        for select in [0, 1] {
            self.set(DEVICE_FEATURES_SELECT, select);
            let offered = self.get(DEVICE_FEATURES);
            self.set(DRIVER_FEATURES_SELECT, select);
            let wanted = ((features | VERSION_1) >> (32 * select)) as u32;
            self.set(DRIVER_FEATURES, offered & wanted);
        }
        self.set(DEVICE_STATUS, FEATURES_OK);
        self.size = 1 << (size % 9);
        for queue in 0..u32::from(queues.min(8)) {
            self.set(QUEUE_SELECT, queue);
            let most = self.get(QUEUE_SIZE_MOST);
            if most == 0 {
                break;
            }
            self.size = self.size.min(most as u16);
            self.set(QUEUE_SIZE, self.size.into());
            let at = queue * QUEUE_BYTES as u32;
            for (register, at) in [(0x80, at), (0x90, at + AVAILABLE as u32), (0xa0, at + USED as u32)] {
                self.set(register, at);
                self.set(register + 4, 0);
            }
            self.set(QUEUE_READY, 1);
        }
        if is_ready {
            self.set(DEVICE_STATUS, FEATURES_OK | DRIVER_OK);
        }
    }

    fn describe(&self, queue: u8, index: u16, (at, length): (u64, u32), flags: u16, next: u16) {
        let descriptor =
            [&at.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
        let table = u64::from(queue % 8) * QUEUE_BYTES;
        self.bench.write_memory(table + 16 * u64::from(index % 256), &descriptor.concat());
    }

    fn offer(&mut self, queue: u8, head: u16) {
        let queue = usize::from(queue % 8);
        let ring = queue as u64 * QUEUE_BYTES + AVAILABLE;
        let offered = self.offered[queue];
        self.bench.write_memory(ring + 4 + 2 * u64::from(offered % self.size), &head.to_le_bytes());
        self.offered[queue] = offered.wrapping_add(1);
        self.bench.write_memory(ring + 2, &self.offered[queue].to_le_bytes());
    }

    /// Offers a chain: the header and more bytes to read, then bytes to write, the last one in a descriptor of
    /// its own. Returns the address of that last byte.
    fn request(&mut self, queue: u8, read: u16, written: u16) -> Option<u64> {
        let mut parts: Vec<(u64, u32, u16)> = Vec::new();
        let (header, body) = (read.min(16), read.saturating_sub(16));
        parts.extend((header > 0).then_some((HEADER, header.into(), 0)));
        parts.extend((body > 0).then_some((READ, body.into(), 0)));
        let body = written.saturating_sub(1);
        parts.extend((body > 0).then_some((WRITTEN, body.into(), WRITE)));
        let status = (written > 0).then_some(STATUS);
        parts.extend(status.map(|at| (at, 1, WRITE)));
        let head = self.described[usize::from(queue % 8)];
        for (number, (at, length, flags)) in parts.iter().enumerate() {
            let this = (head + number as u16) % self.size;
            let next = (this + 1) % self.size;
            let flags = if number + 1 < parts.len() { flags | NEXT } else { *flags };
            self.describe(queue, this, (*at, *length), flags, next);
        }
        self.described[usize::from(queue % 8)] = (head + parts.len() as u16) % self.size;
        self.offer(queue, head);
        status
    }

    /// Delivers input from outside the guest.
    fn come(&mut self, bytes: &[u8]) {
        match self.kind {
            Kind::Console => drop(self.bench.type_in(bytes)),
            Kind::Card | Kind::LargeCard => {
                let mut sent = [0; 256];
                for network in &self.network {
                    // The guest's packets are received, so that the socket has room for more.
                    while network.recv(&mut sent).is_ok() {}
                    // An odd first byte makes the packet as long as a large packet.
                    let repeat = if bytes.first().is_some_and(|byte| byte % 2 == 1) { 64 } else { 1 };
                    let _ = network.send(&[&[0; 12][..], &bytes.repeat(repeat)].concat());
                }
            }
            Kind::Hinting => {
                let pages: u64 = RAM.iter().map(|(_, bytes)| bytes / 4096).sum();
                let take = move |block: usize, first: u64, count: u64| {
                    assert!(
                        block < RAM.len() && count > 0 && first + count <= pages,
                        "{block}, {first}, {count}"
                    );
                };
                let bench = &self.bench;
                bench.ask_for_free_pages(FreePages::new(take), || {
                    bench.run();
                    let id = bytes.first().copied().unwrap_or(2);
                    bench.write_memory(HEADER, &u32::from(id).to_le_bytes());
                    bench.pause();
                });
            }
            Kind::Disk | Kind::ReadOnlyDisk | Kind::Entropy | Kind::Reporting => {}
        }
    }
}

/// A device of this kind, and the host's ends of its network.
fn bench(kind: Kind) -> (Bench, Network) {
    let mut config = MachineConfig::new("fuzzing");
    let mut network = Network::new();
    let made = match kind {
        Kind::Card | Kind::LargeCard => {
            let pairs = if kind == Kind::Card { 1 } else { 2 };
            let pairs: Result<Vec<_>, _> = (0..pairs).map(|_| UnixDatagram::pair()).collect();
            let (ours, theirs): (Network, Network) =
                pairs.unwrap_or_else(|error| panic!("a pair of sockets: {error}")).into_iter().unzip();
            for socket in &ours {
                socket.set_nonblocking(true).unwrap_or_else(|error| panic!("a socket: {error}"));
            }
            network = ours;
            Bench::card(theirs, &RAM)
        }
        Kind::Disk | Kind::ReadOnlyDisk => {
            let mut disk = DiskOptions::new(format!("/proc/self/fd/{}", disk().as_raw_fd()));
            disk.migration = DiskMigration::None;
            disk.is_read_only = kind == Kind::ReadOnlyDisk;
            config.disks.push(disk);
            Bench::new(&mut config, &RAM)
        }
        Kind::Console => {
            config.virtio_console = true;
            Bench::new(&mut config, &RAM)
        }
        Kind::Entropy => {
            config.entropy = true;
            Bench::new(&mut config, &RAM)
        }
        Kind::Reporting | Kind::Hinting => {
            config.free_page_reporting = true;
            config.free_page_hinting = kind == Kind::Hinting;
            Bench::new(&mut config, &RAM)
        }
    };
    (made.unwrap_or_else(|error| panic!("{kind:?}: {error}")), network)
}

/// The disk's file, in memory. Its content affects only the data that requests read.
fn disk() -> &'static File {
    static DISK: OnceLock<File> = OnceLock::new();
    DISK.get_or_init(|| {
        let made = rustix::fs::memfd_create("disk", MemfdFlags::CLOEXEC).map(File::from);
        let made =
            made.map_err(std::io::Error::from).and_then(|file| file.set_len(DISK_BYTES).map(|()| file));
        made.unwrap_or_else(|error| panic!("a file in memory: {error}"))
    })
}
