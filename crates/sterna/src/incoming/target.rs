//! The interface to the place where a guest arrives. It is either a VM with a known machine and devices
//! ([`super::vm_target`]), or a store that keeps unknown state unchanged (`sterna-opaque`).
//!
//! Loader, lanes, rounds and control are the same for both. The differences are:
//!
//! * the rules that the stream must obey,
//! * the time at which RAM's blocks are known: before the stream, or with the block list,
//! * the places of pages,
//! * the meaning of taking the guest over.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use sterna_ram::GuestRam;
use sterna_transport::Channel;
use sterna_wire::extension::HandedOver;
use sterna_wire::main::{Configuration, Expectations, SectionKind, SectionKnowledge, Tail, TailEnd};
use sterna_wire::multifd::BlockTable;
use sterna_wire::ram::BlockList;

use crate::error::{MemoryDifference, MigrationError, ProtectionDifference};
use crate::hooks::Hook;
use crate::incoming::follower::Follower;
use crate::pages::{PageSink, RamSink};
use crate::params::Capabilities;
use crate::vm::Device;

/// Receives a guest. Loader and control thread call it, each only after the other's results are stored.
pub trait Target: Send + Sync {
    /// Whether received pages can be kept while the connection is lost ([`Target::forget_devices`]).
    fn keeps_pages(&self) -> bool {
        false
    }
    /// Discards device state and the end of RAM after a loss, because the source will reconnect. Pages are
    /// kept. Returns whether device state had arrived.
    fn forget_devices(&self) -> Result<bool, MigrationError> {
        Ok(false)
    }
    /// Whether the guest's RAM is memory of this process, so that a file can be loaded directly into it.
    fn is_in_memory(&self) -> bool {
        false
    }
    /// The sink for pages that the source writes by RDMA or that arrive in postcopy. `None` if the guest is not
    /// in memory.
    fn ram_sink(&self) -> Option<&RamSink> {
        None
    }
    /// The RAM of the VM in which the guest arrives. `None` if it is stored elsewhere.
    fn guest(&self) -> Option<&GuestRam> {
        None
    }
    /// Whether the guest can run while pages are missing.
    fn can_run_early(&self) -> bool {
        false
    }
    /// Another user of the guest's RAM, which would read zeros where pages are missing.
    fn shares_ram_with(&self) -> Option<String> {
        None
    }
    /// The threads of the guest's vCPUs (`gettid(2)`).
    fn threads_of_vcpus(&self) -> Vec<u32> {
        Vec::new()
    }
    /// The standby that receives checkpoints after the acknowledgement. `None` if the source releases the
    /// guest.
    fn follower(&self) -> Option<&dyn Follower> {
        None
    }
    /// Takes a connection on which a primary's hello has arrived and is unread. An error only closes the
    /// connection.
    fn contact(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        Err(ProtectionDifference::NoStandby { peer: channel.peer().to_owned() }.into())
    }
    /// Takes a connection over which a guest's disk is written. An error only closes the connection.
    fn disk(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        Err(ProtectionDifference::NoStandbyForDisk { peer: channel.peer().to_owned() }.into())
    }
    /// Whether a guest may arrive over this connection now. An error only refuses the connection.
    fn admits_stream(&self, _: &Channel) -> Result<(), MigrationError> {
        Ok(())
    }
    /// The UUID that multifd channels must state, zero for none. `None` accepts any, if all channels state the
    /// same.
    fn uuid(&self) -> Option<[u8; 16]>;
    /// The properties that the main channel must match.
    fn expectations(&self, capabilities: &Capabilities) -> Expectations;
    /// The rules by which the decoder finds the ends of sections.
    fn knowledge(&self) -> Box<dyn SectionKnowledge + Send>;
    /// Devices for which `switchover-ack` may have to wait.
    fn devices(&self) -> Vec<Arc<dyn Device>>;
    /// RAM's layout, if it is known before the stream describes it. `lanes`: number of multifd channels.
    fn known_layout(&self, lanes: usize) -> Result<Option<Layout>, MigrationError>;

    /// The configuration was read and matches the expectations.
    fn configuration(&self, configuration: &Configuration) -> Result<(), MigrationError>;
    /// A command was read that is not part of the return path's handling.
    fn command(&self, bytes: &[u8]) -> Result<(), MigrationError>;
    /// The block list was read.
    fn ram_starts(&self, start: &RamStart<'_>) -> Result<RamStarted, MigrationError>;
    /// A section of RAM has ended.
    fn ram_section_ended(&self, kind: SectionKind);
    /// Maps memory of the source's process that arrived as descriptors. This side must neither write the memory
    /// nor give it back to the host. An error maps nothing.
    fn take_memory(&self, table: &[HandedOver], descriptors: Vec<OwnedFd>) -> Result<(), MigrationError> {
        let (_, _) = (table, descriptors);
        Err(MemoryDifference::CopiesHere.into())
    }
    /// Makes the memory writable for the guest, because the source has given it up. Called again after an
    /// error.
    fn keep_memory(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    /// A section was read, before the tail if there is one.
    fn section(&self, section: &Section<'_>) -> Result<(), MigrationError>;
    /// The store for device state of unknown devices. `None` if every section is known.
    fn tail(&self) -> Option<Tail> {
        None
    }
    /// Device state up to `end` has arrived, before the source requests *prepare* or after its EOF.
    fn devices_came(&self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        let (_, _) = (tail, end);
        Ok(())
    }
    /// EOF was read after the answer to *prepare*, with the description if the source sent one.
    fn end_came(&self, description: Option<Vec<u8>>) {
        let _ = description;
    }

    /// Checks that everything has arrived, and makes durable whatever must outlive this process. Returns
    /// whether the guest ran at the source.
    fn finish_loading(&self) -> Result<bool, MigrationError>;
    /// As [`Target::finish_loading`], for a guest whose memory arrives while it runs.
    fn finish_devices(&self) -> Result<bool, MigrationError> {
        Err(MigrationError::Internal("a guest that cannot run before its memory is there".to_owned()))
    }
    /// The hooks of disks, locks and network, in the order of acquisition.
    fn hooks(&self) -> Vec<Arc<dyn Hook>>;
    /// Whether the guest's memory is shared with the source.
    fn shares_memory(&self) -> bool {
        false
    }
    /// Finds obstacles to [`Target::start`], before anything on this side may write guest memory.
    fn prepare_start(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    /// Takes the guest over. After an error the guest is not here and will not be.
    fn start(&self) -> Result<(), MigrationError>;
    /// Whether [`Target::start`] lets the guest run.
    fn runs_guests(&self) -> bool;
    /// Takes the guest over paused. An error is reported and undoes nothing.
    fn take_over_paused(&self) -> Result<(), MigrationError>;
    /// Makes [`Target::reset`] keep the received data. Returns their place, or `None` if nothing can be kept.
    ///
    /// Called if the guest could not be taken over although the source assumes that it has completed.
    fn keep_only_copy(&self) -> Option<PathBuf> {
        None
    }
    /// Discards everything. Returns the errors.
    fn reset(&self) -> Vec<String>;
    /// Number of zero pages that had to be cleared.
    fn cleared_pages(&self) -> u64;
}

/// The blocks of RAM, and the places of their pages.
pub struct Layout {
    /// Names and lengths of the blocks. The bytes may be stored elsewhere.
    pub ram: GuestRam,
    /// Finds blocks by the names in packets, with the same indices as `ram`.
    pub table: BlockTable,
    /// One sink for each multifd lane, and one for the main channel at the end.
    pub sinks: Vec<Arc<dyn PageSink>>,
}

/// The START section of RAM, up to its block list.
#[doc(hidden)]
pub struct RamStart<'a> {
    pub section_id: u32,
    pub blocks: &'a BlockList,
    /// The blocks with the indices that the stream's items use.
    pub table: &'a BlockTable,
    pub lanes: usize,
    /// The source has identified itself as a Sterna.
    pub is_sterna: bool,
}

/// The result of [`Target::ram_starts`].
#[derive(Default)]
pub struct RamStarted {
    /// The layout, unless it was known before.
    pub layout: Option<Layout>,
    /// A warning for the operator.
    pub warning: Option<String>,
}

/// A device's section as the decoder found it.
#[doc(hidden)]
pub struct Section<'a> {
    pub id: u32,
    pub name: &'a str,
    pub instance: u32,
    pub version: u32,
    pub kind: SectionKind,
    pub body: &'a [u8],
}
