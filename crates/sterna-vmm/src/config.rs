//! The configuration of a machine: guest, CPUs, memory, disks, network cards and other devices.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna_devices::vhost_user::VhostUserOptions;
use sterna_disk::{Format as DiskFormat, ImageOptions};
use sterna_ram::Backing;
use sterna_standby::ByteGate;

use crate::error::VmmError;
use crate::layout::{PARAMETERS_MAX, RAM_MIN_BYTES, ranges};
use crate::ports::PortRange;

/// Highest number of vCPUs that a machine can have.
pub const VCPUS_MAX: u8 = 8;

/// Permitted numbers of entries in a vCPU's dirty ring. A kernel can require more than the smallest one.
const DIRTY_RING_ENTRIES: std::ops::RangeInclusive<u32> = 256..=65_536;

/// The code that the vCPUs execute when the machine starts.
#[derive(Debug, Clone)]
pub enum GuestImage {
    /// A boot sector, loaded at 0x7c00 and started there in real mode. The entry is on vCPU 0 with `dl` =
    /// 0x80. The other vCPUs wait for SIPI. The machine has no BIOS, so BIOS calls do not work.
    BootSector(Vec<u8>),
    /// Flat 64-bit code, loaded at 1 MiB. Its first byte is the entry of every vCPU ([`crate::layout`]).
    Flat64 {
        /// The code with its data, as one flat image.
        code: Vec<u8>,
        /// Words that the machine writes into the guest's boot-parameter page.
        parameters: Vec<u64>,
    },
    /// A Linux kernel with initrd and command line.
    Linux(LinuxImage),
}

/// A Linux kernel, with the initrd and the command line that it starts with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxImage {
    /// A bzImage or a vmlinux for x86-64.
    pub kernel: PathBuf,
    /// The initrd: the kernel's first root file system. `None` starts the kernel without one.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line, without the NUL.
    pub command_line: String,
}

/// A disk of the guest, stored in a file or a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskOptions {
    /// Path of the file or block device.
    pub path: PathBuf,
    /// Format of the disk's content. Sterna never detects it from the bytes, because the guest can have
    /// written those.
    pub format: DiskFormat,
    /// Backing file of a qcow2 file, for content that the qcow2 file does not contain. Sterna only reads it.
    /// The backing file's name in the qcow2 header is ignored, because the guest can have written that
    /// header.
    pub backing: Option<(PathBuf, DiskFormat)>,
    /// External data file of a qcow2 file, if the content is stored separately. The name in the header is
    /// ignored.
    pub data_file: Option<PathBuf>,
    /// The guest can only read the disk.
    pub is_read_only: bool,
    /// Reads and writes bypass the host's page cache (`O_DIRECT`).
    pub is_direct: bool,
    /// Queues that the guest's driver may use at the same time: 1 to [`DiskOptions::QUEUES_MAX`].
    pub queues: u16,
    /// What happens to the disk when the guest migrates.
    pub migration: DiskMigration,
}

impl DiskOptions {
    /// Highest number of queues that a disk can have.
    pub const QUEUES_MAX: u16 = 8;

    /// A writable raw disk with one queue, shared by both sides of a migration.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            format: DiskFormat::Raw,
            backing: None,
            data_file: None,
            is_read_only: false,
            is_direct: false,
            queues: 1,
            migration: DiskMigration::Shared,
        }
    }

    pub(crate) fn image(&self) -> ImageOptions {
        ImageOptions {
            path: self.path.clone(),
            format: self.format,
            backing: self.backing.clone(),
            data_file: self.data_file.clone(),
            is_read_only: self.is_read_only,
            is_direct: self.is_direct,
        }
    }
}

/// What happens to a disk when the guest migrates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskMigration {
    /// Both sides use the same file. The lock on the file is handed over with the guest, so that only one
    /// machine uses the file at a time.
    Shared,
    /// The disk's content is sent as a device stream into a disk of the destination. Both disks have the same
    /// length. The earlier content of the destination's file is lost. The content is sent over multifd
    /// channels while the guest runs. Without multifd channels, all content is sent while the guest is
    /// paused.
    Copy,
    /// The destination has its own file with the same content. Such a file is, for example, never written.
    /// Sterna does not check the content.
    None,
}

/// A network card of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetOptions {
    /// Name of the tap. It was created with packet headers (`ip tuntap add mode tap vnet_hdr NAME`), or does
    /// not exist yet.
    pub tap: String,
    /// MAC address, the same on both sides of a migration. `None` derives it from the machine's name and the
    /// card's number.
    pub mac: Option<MacAddress>,
    /// Pairs of queues that the driver may use in parallel: 1 to [`NetOptions::QUEUES_MAX`]. A tap for more
    /// than one pair must also be created with `multi_queue`.
    pub queues: u16,
}

impl NetOptions {
    /// Highest number of queue pairs that a card can have.
    pub const QUEUES_MAX: u16 = 4;

    /// A card with one queue pair on the named tap, with a derived MAC address.
    pub fn new(tap: impl Into<String>) -> Self {
        Self { tap: tap.into(), mac: None, queues: 1 }
    }
}

/// How often, and at which intervals, a network card announces the guest's new location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnnounceOptions {
    /// Time from the first announcement to the second.
    pub initial: Duration,
    /// Longest time between two announcements.
    pub max: Duration,
    /// Number of announcements. 0 disables them.
    pub rounds: u32,
    /// Time by which each interval is longer than the previous one.
    pub step: Duration,
}

impl Default for AnnounceOptions {
    /// QEMU's defaults: 5 announcements, the first interval is 50 ms. Each further interval is 100 ms longer,
    /// up to 550 ms.
    fn default() -> Self {
        let milliseconds = Duration::from_millis;
        Self { initial: milliseconds(50), max: milliseconds(550), rounds: 5, step: milliseconds(100) }
    }
}

/// The MAC address of a network card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Address of card `index` of a machine without a configured address. It lies in QEMU's range of locally
    /// administered addresses.
    pub(crate) fn of_machine(name: &str, index: usize) -> Self {
        // FNV-1a.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        let [a, b, ..] = hash.to_le_bytes();
        Self([0x52, 0x54, 0, a, b, index as u8])
    }
}

impl std::str::FromStr for MacAddress {
    type Err = String;

    /// Accepts the form `52:54:00:12:34:56`. The address must be unicast.
    fn from_str(text: &str) -> Result<Self, String> {
        let pairs: Option<Vec<u8>> = text
            .split(':')
            .map(|pair| {
                u8::from_str_radix(pair, 16).ok().filter(|_| pair.len() == 2 && !pair.starts_with('+'))
            })
            .collect();
        match pairs.and_then(|pairs| <[u8; 6]>::try_from(pairs).ok()) {
            Some(bytes) if bytes[0] & 1 == 1 => {
                Err(format!("{text} is a multicast address, not the address of a network card"))
            }
            Some(bytes) => Ok(Self(bytes)),
            None => Err(format!(
                "`{text}` is not a network card's address: write six pairs of hex digits, such as 52:54:00:12:34:56"
            )),
        }
    }
}

/// Everything that [`crate::KvmMachine::new`] needs to build a machine.
pub struct MachineConfig {
    /// The machine's name, for messages and `query-name`.
    pub name: String,
    /// UUID. If present, both sides of a migration compare it.
    pub uuid: Option<[u8; 16]>,
    /// Number of vCPUs, 1 to 8.
    pub vcpus: u8,
    /// Size of RAM: at least 64 MiB, at most what the host's address space permits. A multiple of 4 KiB, or
    /// of the huge page.
    pub ram_bytes: u64,
    /// Kind of host memory that backs guest RAM.
    pub backing: Backing,
    /// Entries of each vCPU's dirty ring; `None` uses the dirty log. A power of two from 256 to 65,536; every
    /// kernel accepts 1024. Corresponds to QEMU's `-accel kvm,dirty-ring-size=N`. The cost of a sync depends
    /// on the number of written pages instead of the size of RAM. A vCPU's dirty rate can be limited.
    pub dirty_ring_size: Option<u32>,
    /// The guest to start. Ignored if `incoming` is set.
    pub guest: Option<GuestImage>,
    /// The machine waits for a migration instead of starting `guest`.
    pub incoming: bool,
    /// Sink for the serial console's output. It is called on vCPU threads, one byte at a time. It must not
    /// block for long, because `stop` waits for it.
    pub serial: Box<dyn Write + Send>,
    /// The gate that `serial` writes to, if it is one. While the gate is full, a vCPU that has written to the
    /// serial port waits. The output of the virtio console stays in its queue.
    pub serial_gate: Option<Arc<ByteGate>>,
    /// Sockets of vfio-user devices, which other processes serve. Each device gets all of RAM and migrates
    /// with the guest. RAM must be backed by memory that can be shared.
    pub vfio_user: Vec<PathBuf>,
    /// Virtio devices that other processes serve over vhost-user. Each gets all of RAM and migrates with the
    /// guest. RAM must be backed by memory that can be shared.
    pub vhost_user: Vec<VhostUserOptions>,
    /// Virtio disks, which the guest names `vda`, `vdb` and so on.
    pub disks: Vec<DiskOptions>,
    /// Virtio network cards, in the order of their numbers.
    pub nets: Vec<NetOptions>,
    /// The guest reports unused memory through virtio. The host takes that memory back, and a migration does
    /// not send it.
    pub free_page_reporting: bool,
    /// The guest reports unused memory through virtio during a migration. That memory is not sent.
    pub free_page_hinting: bool,
    /// The guest gets random bytes from the host through a virtio entropy device.
    pub entropy: bool,
    /// The guest has a virtio console (`hvc0`) in addition to the serial port. Both write to
    /// [`MachineConfig::serial`]. Typed input goes to the virtio console as soon as its driver is active.
    pub virtio_console: bool,
    /// With `incoming`: another process on this host hands over the guest (`mode` `cpr-transfer`). It also
    /// hands over the guest's memory, its taps and the connections to its vhost-user devices. The machine has
    /// no memory before the handover, so huge pages are needed only once. Its taps may be in use. It connects
    /// to no vhost-user device.
    pub takes_over: bool,
    /// Additional port devices of the embedder. Their state does not migrate.
    pub ports: Vec<PortRange>,
}

impl MachineConfig {
    /// One vCPU, 64 MiB of shared memory, no guest; console output is discarded.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            uuid: None,
            vcpus: 1,
            ram_bytes: RAM_MIN_BYTES,
            backing: Backing::Memfd,
            dirty_ring_size: None,
            guest: None,
            incoming: false,
            serial: Box::new(std::io::sink()),
            serial_gate: None,
            vfio_user: Vec::new(),
            vhost_user: Vec::new(),
            disks: Vec::new(),
            nets: Vec::new(),
            free_page_reporting: false,
            free_page_hinting: false,
            entropy: false,
            virtio_console: false,
            takes_over: false,
            ports: Vec::new(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), VmmError> {
        let refuse = |what, why: String| Err(VmmError::Config { what, why });
        if !(1..=VCPUS_MAX).contains(&self.vcpus) {
            return refuse("vcpus", format!("{} requested; 1 to {VCPUS_MAX} are possible", self.vcpus));
        }
        if self.ram_bytes < RAM_MIN_BYTES {
            return refuse(
                "ram",
                format!("{} bytes requested, but at least 64 MiB are required", self.ram_bytes),
            );
        }
        if let Some(entries) = self.dirty_ring_size
            && !(entries.is_power_of_two() && DIRTY_RING_ENTRIES.contains(&entries))
        {
            let (least, most) = (DIRTY_RING_ENTRIES.start(), DIRTY_RING_ENTRIES.end());
            let why =
                format!("{entries} entries requested; it must be a power of two from {least} to {most}");
            return refuse("dirty-ring-size", why);
        }
        if self.free_page_reporting && matches!(self.backing, Backing::Huge2M | Backing::Huge1G) {
            let why =
                "a huge page that is returned to the host may not be available again: use ordinary memory"
                    .to_owned();
            return refuse("free page reporting", why);
        }
        if self.incoming && self.takes_over && !self.vfio_user.is_empty() {
            let why = "a device's process has mapped the guest's memory and cannot change to another VM process: move \
                       the guest with mode normal (without `--same-host`)";
            return refuse("vfio-user", why.to_owned());
        }
        match &self.guest {
            _ if self.incoming => Ok(()),
            None => refuse("guest", "none given, and no incoming migration is configured".into()),
            Some(GuestImage::BootSector(code)) if code.is_empty() || code.len() > 512 => {
                refuse("boot sector", format!("{} bytes, 1 to 512 are possible", code.len()))
            }
            Some(GuestImage::Flat64 { code, parameters }) => self.check_flat(code, parameters),
            _ => Ok(()),
        }
    }

    fn check_flat(&self, code: &[u8], parameters: &[u64]) -> Result<(), VmmError> {
        let room = ranges(self.ram_bytes)[0].len_bytes / 2;
        if code.is_empty() || code.len() as u64 > room {
            let why = format!("{} bytes of code; it must have 1 to {room} bytes", code.len());
            return Err(VmmError::Config { what: "guest", why });
        }
        if parameters.len() > PARAMETERS_MAX {
            let why = format!("{} given, at most {PARAMETERS_MAX} fit", parameters.len());
            return Err(VmmError::Config { what: "guest parameters", why });
        }
        Ok(())
    }
}
