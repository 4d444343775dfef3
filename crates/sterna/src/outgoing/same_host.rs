//! A guest moves to another process of this host, and its memory stays where it is: the destination gets descriptors of it.
//!
//! Nothing is tracked and no page is sent: there is one memory, and what the guest writes until it stops is in it.

use std::os::fd::AsFd;
use std::sync::Arc;

use sterna_ram::{DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, SyncReport};
use sterna_transport::Channel;
use sterna_wire::extension::{HandedOver, MemoryAnswer, MemoryOffer};
use sterna_wire::main::Configuration;
use sterna_wire::ram::BlockList;

use super::guest_source::{GuestSource, LiveVm, PageReader};
use super::main_stream::MainStream;
use super::shared::Shared;
use crate::error::{MigrationError, VmError};
use crate::hooks::Hook;
use crate::params::Parameters;
use crate::same_host::check_peer;
use crate::threads::{call, tried};
use crate::throttle::Throttle;
use crate::vm::{Device, HostDescriptors, RunState, SourceVm, Vm};

const CHANNEL: &str = "memory connection";

/// A VM of this process whose memory is not sent.
pub(super) struct SharedMemory {
    live: LiveVm,
    vm: Arc<dyn SourceVm>,
}

impl SharedMemory {
    pub(super) fn new(vm: Arc<dyn SourceVm>) -> Self {
        Self { live: LiveVm::new(Arc::clone(&vm)), vm: Arc::new(Untracked { vm, nothing: NothingDirty }) }
    }
}

/// Sends the descriptors over a connection of their own, and waits until the destination has mapped the memory.
pub(super) fn hand_over(shared: &Shared, params: &Parameters) -> Result<(), MigrationError> {
    let (mut table, mut files) = (Vec::new(), Vec::new());
    for block in shared.ram.blocks() {
        let memory = block.sharable()?;
        let (len_bytes, page_bytes) = (block.len_bytes(), block.page_bytes());
        let name = block.name().to_owned();
        HandedOver::Block { name, len_bytes, page_bytes, offset: memory.offset }.encode(&mut table);
        files.push(memory.file);
    }
    let mut of_devices = Vec::new();
    for held in shared.vm.host_descriptors() {
        let (name, instance) = (held.name(), held.instance());
        let given = call(format!("HostDescriptors::give of {name:?}"), || held.give())?;
        HandedOver::Device { name, instance, count: given.len() as u32 }.encode(&mut table);
        of_devices.extend(given);
    }
    let setup = params.limits.setup;
    let channel = Channel::connect_with(&shared.to, None, setup, &shared.connecting, |channel| {
        channel.set_stall_limit(Some(setup));
        shared.adopt(channel)
    })?;
    check_peer(&channel, params)?;
    let mut head = Vec::new();
    MemoryOffer::new(shared.identity.id, &shared.identity.secret, &table).encode(&mut head);
    channel.write_all(&head)?;
    let descriptors: Vec<_> =
        files.iter().map(|file| file.as_fd()).chain(of_devices.iter().map(AsFd::as_fd)).collect();
    channel.send_descriptors(&descriptors)?;
    channel.write_all(&table)?;
    let answer = answer(&channel);
    channel.shutdown();
    match answer? {
        MemoryAnswer::Taken => Ok(()),
        MemoryAnswer::Refused(why) => Err(MigrationError::PeerIncompatible {
            what: format!("the destination does not take the guest's memory: {why}"),
        }),
    }
}

fn answer(channel: &Channel) -> Result<MemoryAnswer, MigrationError> {
    let mut bytes = Vec::new();
    loop {
        let mut more = [0; 512];
        let count = channel.read_some(&mut more)?;
        if count == 0 {
            let what = "the destination closed the memory connection without an answer: see its log";
            return Err(MigrationError::Transport(what.to_owned(), None));
        }
        bytes.extend_from_slice(&more[..count]);
        if let Some((answer, _)) = MemoryAnswer::decode(&bytes).map_err(MigrationError::wire(CHANNEL))? {
            return Ok(answer);
        }
    }
}

/// The destination has the guest, and its memory with it.
pub(super) fn let_go(vm: &dyn SourceVm, ram: &GuestRam) {
    for held in vm.host_descriptors() {
        if let Err(error) = tried("HostDescriptors::let_go", || {
            held.let_go();
            Ok::<(), MigrationError>(())
        }) {
            tracing::error!("descriptors that the destination has: {error}");
        }
    }
    for block in ram.blocks() {
        if let Err(error) = block.let_go() {
            // Nobody here accesses it any more, whatever is still mapped.
            tracing::error!("memory that the destination has: {error}");
        }
    }
}

impl GuestSource for SharedMemory {
    fn is_in_memory(&self) -> bool {
        true
    }

    fn vm(&self) -> &Arc<dyn SourceVm> {
        &self.vm
    }

    fn ram(&self) -> &GuestRam {
        self.live.ram()
    }

    fn configuration(&self) -> Configuration {
        self.live.configuration()
    }

    fn blocks(&self) -> BlockList {
        self.live.blocks()
    }

    fn section_ids(&self) -> (u32, u32) {
        self.live.section_ids()
    }

    fn reader(&self) -> Result<Arc<dyn PageReader>, MigrationError> {
        self.live.reader()
    }

    /// None is sent.
    fn leave_out(&self, pages: &DirtyBitmaps) {
        pages.clear_all();
    }

    fn knows_absent(&self) -> bool {
        false
    }

    fn send_early(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        self.live.send_early(stream)
    }

    fn send_switchover_start(&self, stream: &mut MainStream) -> Result<bool, MigrationError> {
        self.live.send_switchover_start(stream)
    }

    fn send_devices(&self, stream: &mut MainStream, run_state: &str) -> Result<(), MigrationError> {
        self.live.send_devices(stream, run_state)
    }

    fn send_end(&self, stream: &mut MainStream) -> Result<(), MigrationError> {
        self.live.send_end(stream)
    }
}

/// The VM, whose writes nobody needs to know.
struct Untracked {
    vm: Arc<dyn SourceVm>,
    nothing: NothingDirty,
}

impl Vm for Untracked {
    fn machine_type(&self) -> String {
        self.vm.machine_type()
    }

    fn uuid(&self) -> Option<[u8; 16]> {
        self.vm.uuid()
    }

    fn ram(&self) -> GuestRam {
        self.vm.ram()
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.vm.devices()
    }

    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.vm.compatibility()
    }

    fn shares_ram_with(&self) -> Option<String> {
        self.vm.shares_ram_with()
    }

    fn host_descriptors(&self) -> Vec<Arc<dyn HostDescriptors>> {
        self.vm.host_descriptors()
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.vm.hooks()
    }
}

impl SourceVm for Untracked {
    fn dirty_source(&self) -> &dyn DirtySource {
        &self.nothing
    }

    fn run_state(&self) -> RunState {
        self.vm.run_state()
    }

    fn stop(&self) -> Result<(), VmError> {
        self.vm.stop()
    }

    fn resume(&self) -> Result<(), VmError> {
        self.vm.resume()
    }

    fn throttle(&self) -> Option<&dyn Throttle> {
        self.vm.throttle()
    }
}

/// No page has to be sent because it was written.
struct NothingDirty;

impl DirtySource for NothingDirty {
    fn start(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        Ok(())
    }

    fn sync(&self, _: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        Ok(SyncReport::default())
    }

    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }

    fn name(&self) -> &'static str {
        "none"
    }
}
