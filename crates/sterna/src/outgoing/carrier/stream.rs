//! The parts of the stream that several carriers write.

use std::sync::Arc;

use sterna_transport::Channel;
use sterna_wire::multifd::InitialPacket;

use crate::error::MigrationError;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::{MainStream, Sink};
use crate::outgoing::shared::Shared;

/// The main channel over `channel`.
pub(in crate::outgoing) fn main_channel(shared: &Shared, channel: Arc<Channel>) -> Arc<MainChannel> {
    let sink: Arc<dyn Sink> = channel.clone();
    let stream =
        MainStream::new(sink, Arc::clone(&shared.measures.counters), shared.guest.source.section_ids());
    MainChannel::new(Some(channel), stream)
}

/// Writes the beginning of a stream to a peer.
pub(in crate::outgoing) fn greet(shared: &Shared, main: &MainChannel) -> Result<(), MigrationError> {
    main.with(|stream| stream.greet(shared.guest.source.configuration()))
}

/// Writes the START section of RAM, and what the guest's source has to say after it.
pub(in crate::outgoing) fn begin_ram(shared: &Shared, main: &MainChannel) -> Result<(), MigrationError> {
    main.with(|stream| {
        stream.ram_start(&shared.guest.source.blocks(), shared.capabilities.multifd)?;
        shared.guest.source.send_setup(stream)
    })
}

/// Writes the first packet of a multifd channel.
pub(in crate::outgoing) fn say_hello(
    shared: &Shared,
    channel: &Channel,
    id: u8,
) -> Result<(), MigrationError> {
    let uuid = shared.guest.vm.uuid().unwrap_or_default();
    let hello = InitialPacket { uuid, id }.to_bytes();
    channel.write_all(&hello)?;
    shared.measures.counters.multifd(hello.len() as u64);
    Ok(())
}
