//! The configuration of a hosted VM.

use sterna::ram::Backing;

/// The configuration of a hosted VM.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name of the VM, for people.
    pub name: String,
    /// Must be equal on both sides of a migration.
    pub uuid: Option<[u8; 16]>,
    /// Bytes of guest RAM.
    pub ram_bytes: u64,
    /// Number of vCPUs, or of threads of the process guest.
    pub vcpus: u8,
    /// The kind of memory that backs guest RAM.
    pub backing: Backing,
    /// Entries of each vCPU's dirty ring; none: the dirty log tracks writes.
    pub dirty_ring_size: Option<u32>,
    /// Sockets of vfio-user devices.
    pub vfio_user: Vec<std::path::PathBuf>,
    /// Virtio devices in other processes.
    pub vhost_user: Vec<crate::vhost_user::VhostUser>,
    /// Virtio disks of the guest.
    pub disks: Vec<sterna_vmm::DiskOptions>,
    /// Virtio network cards of the guest.
    pub nets: Vec<sterna_vmm::NetOptions>,
    /// Whether the guest can report unused memory at any time (free page reporting).
    pub free_page_reporting: bool,
    /// Whether the guest can report unused memory during a migration (free page hints).
    pub free_page_hinting: bool,
    /// Whether the guest has a virtio entropy device.
    pub entropy: bool,
    /// Whether the guest has a virtio console.
    pub virtio_console: bool,
    /// Whether the guest arrives from another process on this host, with its memory and its taps.
    pub takes_over: bool,
    /// Whether the VM waits for a guest instead of booting one.
    pub incoming: bool,
    /// How the guest writes its memory.
    pub load: Load,
    /// The rate of a guest after its arrival; none: unchanged.
    pub arrival_rate: Option<u64>,
}

/// How the guest writes its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The order in which pages are written.
    pub pattern: sterna_guests::Pattern,
    /// The content of RAM before the first write.
    pub fill: sterna_guests::Fill,
    /// Pages per second and vCPU; 0: as fast as possible.
    pub rate: u64,
    /// Bytes that the guest writes repeatedly, over all vCPUs; none: all RAM.
    pub working_set_bytes: Option<u64>,
}
