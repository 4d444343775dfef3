//! Offers the guest's memory to a destination on this host, as descriptors (specs/extension.md §11).

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use sterna_proto::source::Source;
use sterna_transport::Channel;
use sterna_wire::extension::{self, Features, HandedOver, MemoryAnswer, MemoryOffer};
use sterna_wire::main::Command;

use super::super::main_channel::MainChannel;
use super::super::shared::Shared;
use super::super::waits::Waits;
use crate::error::{Awaited, Ending, MemoryDifference, MigrationError};
use crate::interruption::Break;
use crate::params::Parameters;
use crate::same_host::check_peer;
use crate::threads::call;

const CHANNEL: &str = "memory connection";

/// Gives the destination the descriptors of all memory.
///
/// The guest continues to run in it, because the destination only reads it before the commit.
pub(in crate::outgoing) fn hand_memory_over(
    shared: &Shared,
    main: &MainChannel,
    waits: &mut Waits,
) -> Result<(), Break> {
    let params = shared.params();
    let peer = shared.driver.inspect(Source::peer);
    if !peer.sterna || !Features(peer.features).contains(Features::MEMORY) {
        return Err(MigrationError::from(MemoryDifference::CopiesThere).into());
    }
    main.commands(&[Command::Ping(extension::MEMORY_PING)])?;
    let is_expected = || shared.session.memory_is_expected.load(Ordering::Acquire).then_some(());
    let after = params.limits.setup;
    if waits.at_most(after, is_expected)?.is_none() {
        return Err(MigrationError::Limit { what: Awaited::Memory, after }.into());
    }
    Ok(hand_over(shared, &params)?)
}

/// Sends the descriptors over a separate connection, and waits for the mapping.
///
/// The destination answers after it has mapped the memory.
fn hand_over(shared: &Shared, params: &Parameters) -> Result<(), MigrationError> {
    let (mut table, mut files) = (Vec::new(), Vec::new());
    for block in shared.guest.ram.blocks() {
        let memory = block.sharable()?;
        let (len_bytes, page_bytes) = (block.len_bytes(), block.page_bytes());
        let name = block.name().to_owned();
        HandedOver::Block { name, len_bytes, page_bytes, offset: memory.offset }.encode(&mut table);
        files.push(memory.file);
    }
    let mut of_devices = Vec::new();
    for held in shared.guest.vm.host_descriptors() {
        let (name, instance) = (held.name(), held.instance());
        let given = call(format!("HostDescriptors::give of {name:?}"), || held.give())?;
        HandedOver::Device { name, instance, count: given.len() as u32 }.encode(&mut table);
        of_devices.extend(given);
    }
    let setup = params.limits.setup;
    let channel =
        Channel::connect_with(&shared.session.to, None, setup, &shared.session.connecting, |channel| {
            channel.set_stall_limit(Some(setup));
            shared.adopt(channel)
        })?;
    check_peer(&channel, params)?;
    let mut head = Vec::new();
    MemoryOffer::new(shared.handover.identity.id, &shared.handover.identity.secret, &table).encode(&mut head);
    channel.write_all(&head)?;
    let descriptors: Vec<_> =
        files.iter().map(|file| file.as_fd()).chain(of_devices.iter().map(AsFd::as_fd)).collect();
    channel.send_descriptors(&descriptors)?;
    channel.write_all(&table)?;
    let answer = answer(&channel);
    channel.shutdown();
    match answer? {
        MemoryAnswer::Taken => Ok(()),
        MemoryAnswer::Refused(why) => Err(MemoryDifference::RefusedThere { why }.into()),
    }
}

fn answer(channel: &Channel) -> Result<MemoryAnswer, MigrationError> {
    let mut bytes = Vec::new();
    loop {
        let mut more = [0; 512];
        let count = channel.read_some(&mut more)?;
        if count == 0 {
            return Err(Ending::NoMemoryAnswer.into());
        }
        bytes.extend_from_slice(&more[..count]);
        if let Some((answer, _)) = MemoryAnswer::decode(&bytes).map_err(MigrationError::wire(CHANNEL))? {
            return Ok(answer);
        }
    }
}
