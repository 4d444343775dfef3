//! What a machine is made of.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use sterna_devices::vhost_user::VhostUserOptions;
use sterna_disk::{Format as DiskFormat, ImageOptions};
use sterna_ram::Backing;

use crate::error::VmmError;
use crate::layout::{PARAMETERS_MAX, RAM_MIN_BYTES, ranges};
use crate::ports::PortRange;

/// The most vCPUs a machine may have.
pub const VCPUS_MAX: u8 = 8;

/// Entries that a vCPU's dirty ring may have. A kernel may need more than the least.
const DIRTY_RING_ENTRIES: std::ops::RangeInclusive<u32> = 256..=65_536;

/// What the vCPUs execute from the start.
#[derive(Debug, Clone)]
pub enum GuestImage {
    /// A boot sector: loaded at 0x7c00 and started there in real mode on vCPU 0 (`dl` = 0x80); the other
    /// vCPUs wait for SIPI. There is no BIOS behind it.
    BootSector(Vec<u8>),
    /// Flat 64-bit code: loaded at 1 MiB, its first byte is the entry of every vCPU ([`crate::layout`]).
    Flat64 {
        /// The code with its data.
        code: Vec<u8>,
        /// Words for the guest's boot-parameter page.
        parameters: Vec<u64>,
    },
    /// A Linux kernel.
    Linux(LinuxImage),
}

/// A kernel, and what it starts with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxImage {
    /// A bzImage or a vmlinux for x86-64.
    pub kernel: PathBuf,
    /// Its first root file system.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub command_line: String,
}

/// A disk of the guest: a file, or a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskOptions {
    /// The file or device.
    pub path: PathBuf,
    /// How the disk lies in it. It is never found out from the bytes, which a guest may have written.
    pub format: DiskFormat,
    /// Of a qcow2 file: where that content is which the file itself does not have. It is only read. The name in the file's header
    /// is not followed, since a guest may have written that, too.
    pub backing: Option<(PathBuf, DiskFormat)>,
    /// Of a qcow2 file whose content is in another one: the other one. The name in the header is not followed.
    pub data_file: Option<PathBuf>,
    /// The guest cannot write it.
    pub is_read_only: bool,
    /// Reads and writes pass by the host's page cache (`O_DIRECT`).
    pub is_direct: bool,
    /// Queues that the guest's driver may use at the same time: 1 to [`DiskOptions::QUEUES_MAX`].
    pub queues: u16,
    /// How it moves with the guest.
    pub migration: DiskMigration,
}

impl DiskOptions {
    /// The most queues that a disk may have.
    pub const QUEUES_MAX: u16 = 8;

    /// A raw disk with one queue that the guest may write, and that both sides of a migration see.
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

/// What becomes of a disk when the guest moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskMigration {
    /// Both sides see the same file: the lock on it is handed over with the guest, so that one machine at a time uses it.
    Shared,
    /// The disk travels with the guest, as a stream, into a disk of the destination of the same length. What that file held before is
    /// lost. While the guest runs it goes over multifd channels; without them all of it goes in the pause.
    Copy,
    /// The destination has a file of its own with the same content, such as one that nobody writes. Sterna does not look at it.
    None,
}

/// A network card of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetOptions {
    /// The tap that it is joined to, made with packet headers (`ip tuntap add mode tap vnet_hdr NAME`) or not there yet.
    pub tap: String,
    /// Its address; the same on both sides of a migration. Without one it follows from the machine's name and the card's number.
    pub mac: Option<MacAddress>,
    /// Pairs of queues that the guest's driver may use at the same time: 1 to [`NetOptions::QUEUES_MAX`]. For more than one the tap
    /// is made with `multi_queue`, too.
    pub queues: u16,
}

impl NetOptions {
    /// The most pairs of queues that a card may have.
    pub const QUEUES_MAX: u16 = 4;

    /// A card at that tap.
    pub fn new(tap: impl Into<String>) -> Self {
        Self { tap: tap.into(), mac: None, queues: 1 }
    }
}

/// How often, and how fast, the network is told that the guest has moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnnounceOptions {
    /// From the first time to the second.
    pub initial: Duration,
    /// The longest pause between two.
    pub max: Duration,
    /// How often; 0: not at all.
    pub rounds: u32,
    /// By how much each pause is longer than the one before.
    pub step: Duration,
}

impl Default for AnnounceOptions {
    /// As QEMU does unless it is told otherwise.
    fn default() -> Self {
        let milliseconds = Duration::from_millis;
        Self { initial: milliseconds(50), max: milliseconds(550), rounds: 5, step: milliseconds(100) }
    }
}

/// The address of a network card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Of card `index` of a machine, if nobody has chosen one: in QEMU's range of locally administered addresses.
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

    /// Of a form such as `52:54:00:12:34:56`; of one card, and not of a group.
    fn from_str(text: &str) -> Result<Self, String> {
        let pairs: Option<Vec<u8>> = text
            .split(':')
            .map(|pair| {
                u8::from_str_radix(pair, 16).ok().filter(|_| pair.len() == 2 && !pair.starts_with('+'))
            })
            .collect();
        match pairs.and_then(|pairs| <[u8; 6]>::try_from(pairs).ok()) {
            Some(bytes) if bytes[0] & 1 == 1 => {
                Err(format!("{text} is the address of a group, not of a card"))
            }
            Some(bytes) => Ok(Self(bytes)),
            None => Err(format!(
                "`{text}` is no card's address: write six pairs of hex digits, as 52:54:00:12:34:56"
            )),
        }
    }
}

/// What [`crate::KvmMachine::new`] builds.
pub struct MachineConfig {
    /// For messages and `query-name`.
    pub name: String,
    /// Compared between the two sides of a migration, if given.
    pub uuid: Option<[u8; 16]>,
    /// 1 to 8.
    pub vcpus: u8,
    /// From 64 MiB to what the host's address space takes; a multiple of 4 KiB, or of the huge page.
    pub ram_bytes: u64,
    /// What RAM is made of.
    pub backing: Backing,
    /// Writes are tracked by dirty rings of so many entries for each vCPU (a power of two from 256 to 65,536; 1024
    /// is enough everywhere) instead of the dirty log: QEMU's `-accel kvm,dirty-ring-size=N`. Costs what was
    /// written instead of what there is, and lets a vCPU's dirty rate be limited.
    pub dirty_ring_size: Option<u32>,
    /// What runs; not looked at if `incoming`.
    pub guest: Option<GuestImage>,
    /// Wait for a migration instead of starting `guest`.
    pub incoming: bool,
    /// Where the serial console's output goes. Called on vCPU threads, one byte at a time: it must not
    /// block for long, since `stop` waits for it.
    pub serial: Box<dyn Write + Send>,
    /// Sockets of devices in processes of their own, over vfio-user, which get all of RAM and migrate with it. RAM
    /// must be made of something that can be shared.
    pub vfio_user: Vec<PathBuf>,
    /// Virtio devices in processes of their own, over vhost-user, which get all of RAM and migrate with it. RAM must
    /// be made of something that can be shared.
    pub vhost_user: Vec<VhostUserOptions>,
    /// Virtio disks, which the guest sees as `vda`, `vdb`, ...
    pub disks: Vec<DiskOptions>,
    /// Virtio network cards.
    pub nets: Vec<NetOptions>,
    /// The guest says which memory it does not use, by virtio: it is given back to the host, and not sent.
    pub free_page_reporting: bool,
    /// The guest says, when it is migrated, which memory it does not use, by virtio: that is not sent.
    pub free_page_hinting: bool,
    /// The guest gets random bytes of the host, by virtio.
    pub entropy: bool,
    /// The guest has a virtio console (`hvc0`) besides the serial port. Both write to [`MachineConfig::serial`]; what is typed goes
    /// to this one as soon as it has a driver.
    pub virtio_console: bool,
    /// With `incoming`: the guest comes from another process on this host, which hands over its memory, its taps and the connections
    /// to its vhost-user devices (`mode` `cpr-transfer`). The machine has no memory before, so huge pages are there once, its taps may
    /// be in use, and it connects to no vhost-user device.
    pub takes_over: bool,
    /// Further port devices. Their state does not migrate.
    pub ports: Vec<PortRange>,
}

impl MachineConfig {
    /// One vCPU, 64 MiB of shared memory, nothing to run, console output thrown away.
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
            return refuse("vcpus", format!("{} asked for, 1 to {VCPUS_MAX} are possible", self.vcpus));
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
            let why = "a huge page that is given back may not be had again: use ordinary memory".to_owned();
            return refuse("free page reporting", why);
        }
        if self.incoming && self.takes_over && !self.vfio_user.is_empty() {
            let why = "a device's process has the guest's memory mapped and cannot follow it from one process to another: let the guest \
                       move with mode normal (without `--same-host`)";
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
