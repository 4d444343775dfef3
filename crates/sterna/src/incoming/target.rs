//! What a guest arrives in: a VM whose machine and devices are known ([`super::known`]), or something that
//! keeps what it cannot know ([`crate::opaque`]).
//!
//! Loader, lanes, rounds and control are the same for both. What differs: who says how the stream must be
//! made up, when RAM's blocks are known (before, or only when the block list has come), where pages go, and
//! what it means that the guest is taken over.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use sterna_ram::GuestRam;
use sterna_transport::Channel;
use sterna_wire::extension::HandedOver;
use sterna_wire::main::{Configuration, Expectations, SectionKind, SectionKnowledge, Tail, TailEnd};
use sterna_wire::multifd::BlockTable;
use sterna_wire::ram::BlockList;

use crate::error::MigrationError;
use crate::hooks::Hook;
use crate::incoming::follower::Follower;
use crate::pages::{PageSink, RamSink};
use crate::params::Capabilities;
use crate::vm::Device;

/// Takes a guest in. Called by loader and control thread, each call after the other's results are in.
pub(crate) trait Target: Send + Sync {
    /// Whether what came of RAM can be kept while the connection is lost ([`Target::forget_devices`]).
    fn keeps_pages(&self) -> bool {
        false
    }
    /// The connection was lost, and the source will come back: forgets what came of devices, and that RAM has ended. Pages stay.
    /// Whether anything had come.
    fn forget_devices(&self) -> Result<bool, MigrationError> {
        Ok(false)
    }
    /// Whether the guest's RAM is memory of this process, so that it can be loaded from a file to where it is.
    fn is_in_memory(&self) -> bool {
        false
    }
    /// Where pages go that come without this side's doing, by RDMA; `None` where the guest is not in memory.
    fn ram_sink(&self) -> Option<&RamSink> {
        None
    }
    /// The RAM of the VM that the guest comes into; `None` where it lies elsewhere.
    fn guest(&self) -> Option<&GuestRam> {
        None
    }
    /// Whether the guest can run before its pages are there.
    fn can_run_early(&self) -> bool {
        false
    }
    /// What else has the guest's RAM mapped, and would see zeros where pages are missing.
    fn shares_ram_with(&self) -> Option<String> {
        None
    }
    /// The threads of the guest's vCPUs (`gettid(2)`).
    fn threads_of_vcpus(&self) -> Vec<u32> {
        Vec::new()
    }
    /// What follows the guest behind the acknowledgement; `None` where the source lets go of it.
    fn follower(&self) -> Option<&dyn Follower> {
        None
    }
    /// A primary's hello has come on `channel`, and nothing of it was read. An error closes the connection and changes nothing
    /// else.
    fn contact(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        let what = format!(
            "{}: a primary wants to be in contact with its standby, and none is here: use `sterna standby`",
            channel.peer()
        );
        Err(MigrationError::PeerIncompatible { what })
    }
    /// A connection has said that a guest's disk is written over it. An error closes it and changes nothing else.
    fn disk(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        let what = format!(
            "{}: a primary wants to write to its guest's disk at a standby, and none is here: use `sterna standby`",
            channel.peer()
        );
        Err(MigrationError::PeerIncompatible { what })
    }
    /// Whether a guest may come now, over this connection. An error refuses the connection, and nothing else.
    fn admits_stream(&self, _: &Channel) -> Result<(), MigrationError> {
        Ok(())
    }
    /// The UUID that multifd channels must state, zero for none; `None` takes any, the same on all.
    fn uuid(&self) -> Option<[u8; 16]>;
    /// What the main channel has to agree with.
    fn expectations(&self, capabilities: &Capabilities) -> Expectations;
    /// How sections are delimited.
    fn knowledge(&self) -> Box<dyn SectionKnowledge + Send>;
    /// Devices that `switchover-ack` may have to wait for.
    fn devices(&self) -> Vec<Arc<dyn Device>>;
    /// RAM, if it is known before the stream says it. `lanes`: multifd channels.
    fn known_layout(&self, lanes: usize) -> Result<Option<Layout>, MigrationError>;

    /// The configuration has come and was held against the expectations.
    fn configuration(&self, configuration: &Configuration) -> Result<(), MigrationError>;
    /// A command has come that is none of the return path's.
    fn command(&self, bytes: &[u8]) -> Result<(), MigrationError>;
    /// The block list has come.
    fn ram_starts(&self, start: &RamStart<'_>) -> Result<RamStarted, MigrationError>;
    /// A section of RAM has ended.
    fn ram_section_ended(&self, kind: SectionKind);
    /// Memory of the source's process has come as descriptors, and is to be mapped so that nothing here writes it or gives it back.
    /// An error takes nothing.
    fn take_memory(&self, table: &[HandedOver], descriptors: Vec<OwnedFd>) -> Result<(), MigrationError> {
        let (_, _) = (table, descriptors);
        let what = "this destination copies what comes and takes no memory as descriptors: set mode to normal at the source";
        Err(MigrationError::PeerIncompatible { what: what.to_owned() })
    }
    /// The source has given its memory up: the guest may write it from now on. Called again if it has failed.
    fn keep_memory(&self) -> Result<(), MigrationError> {
        Ok(())
    }
    /// A section has come, before the tail if there is one.
    fn section(&self, section: &Section<'_>) -> Result<(), MigrationError>;
    /// What is to be kept of device state that nobody here knows; `None` where every section is known.
    fn tail(&self) -> Option<Tail> {
        None
    }
    /// Device state has come, up to `end`, before the source asks to prepare or after its EOF.
    fn devices_came(&self, tail: &Tail, end: &TailEnd) -> Result<(), MigrationError> {
        let (_, _) = (tail, end);
        Ok(())
    }
    /// After the answer to *prepare*: EOF has come, and the description if the source sent one.
    fn end_came(&self, description: Option<Vec<u8>>) {
        let _ = description;
    }

    /// Everything was read: is all there? Makes durable what must outlive this process. Returns whether the
    /// guest wants to run.
    fn finish_loading(&self) -> Result<bool, MigrationError>;
    /// As [`Target::finish_loading`], of a guest whose memory comes while it runs.
    fn finish_devices(&self) -> Result<bool, MigrationError> {
        Err(MigrationError::Internal("a guest that cannot run before its memory is there".to_owned()))
    }
    /// Disks, locks, network: in the order of acquisition.
    fn hooks(&self) -> Vec<Arc<dyn Hook>>;
    /// Takes the guest over. An error means: it is not here and never will be.
    fn start(&self) -> Result<(), MigrationError>;
    /// Whether [`Target::start`] lets the guest run.
    fn runs_guests(&self) -> bool;
    /// Takes the guest over as it is, paused. An error is reported and undoes nothing.
    fn take_over_paused(&self) -> Result<(), MigrationError>;
    /// The source believes that it has completed, and the guest could not be taken over: sees to it that
    /// [`Target::reset`] leaves what came, and says where it is. None where nothing can be kept.
    fn keep_only_copy(&self) -> Option<PathBuf> {
        None
    }
    /// Forgets everything. What could not be undone is returned.
    fn reset(&self) -> Vec<String>;
    /// Zero pages that had to be cleared.
    fn cleared_pages(&self) -> u64;
}

/// The blocks of RAM, and where their pages go.
pub(crate) struct Layout {
    /// Names and lengths; the bytes may be elsewhere.
    pub ram: GuestRam,
    /// For the names in packets; same indices.
    pub table: BlockTable,
    /// One for each multifd lane, and one more for the main channel.
    pub sinks: Vec<Arc<dyn PageSink>>,
}

/// The START section of RAM, up to its block list.
pub(crate) struct RamStart<'a> {
    pub section_id: u32,
    pub blocks: &'a BlockList,
    /// As the indices of the stream's items count them.
    pub table: &'a BlockTable,
    pub lanes: usize,
    /// The source has said that it is a Sterna.
    pub is_sterna: bool,
}

/// What came of [`Target::ram_starts`].
#[derive(Default)]
pub(crate) struct RamStarted {
    /// Unless it was known before.
    pub layout: Option<Layout>,
    /// What an operator should know.
    pub warning: Option<String>,
}

/// A section of a device.
pub(crate) struct Section<'a> {
    pub id: u32,
    pub name: &'a str,
    pub instance: u32,
    pub version: u32,
    pub kind: SectionKind,
    pub body: &'a [u8],
}
