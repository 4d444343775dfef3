//! Connecting: the main channel, then every lane's, each with its first bytes at once (specs/stream.md §3.1).

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use sterna_transport::{Address, Channel, TransportError};
use sterna_wire::multifd::{InitialPacket, RamPacketEncoder};

use super::control::{Control, Main};
use super::file;
use super::lane::Lane;
use super::main_lane::MainLane;
use super::main_stream::{MainStream, Sink};
use super::multifd_lane::{MultifdLane, MultifdShared};
use super::origin::PageReader;
use super::shared::Shared;
use super::streams::Streams;
use crate::codec;
use crate::error::MigrationError;
use crate::order::Clause;
use crate::pages::PageWriter;
use crate::params::ZeroPageDetection;

/// Opens every channel.
pub(super) fn connect(control: &mut Control) -> Result<(), MigrationError> {
    let shared = Arc::clone(&control.shared);
    if matches!(shared.to, Address::File { .. }) {
        return file::open(control);
    }
    let params = shared.params();
    // One limit for all of them together.
    let began = Instant::now();
    let open = || -> Result<Arc<Channel>, TransportError> {
        let left = params.limits.setup.saturating_sub(began.elapsed());
        Channel::connect_with(&shared.to, params.tls.as_ref(), left, &shared.connecting, |channel| {
            channel.set_stall_limit(Some(params.limits.stall));
            shared.adopt(channel)
        })
    };
    let main = open()?;
    let sink: Arc<dyn Sink> = main.clone();
    let stream = MainStream::new(sink, Arc::clone(&shared.counters), shared.origin.section_ids());
    control.main = Some(Main { channel: Some(main), stream: Arc::new(Mutex::new(stream)) });
    if shared.capabilities.multifd {
        for id in 0..params.multifd_channels {
            let channel = open()?;
            let uuid = shared.vm.uuid().unwrap_or_default();
            let hello = InitialPacket { uuid, id }.to_bytes();
            channel.write_all(&hello)?;
            shared.counters.multifd(hello.len() as u64);
            control.multifd.push(channel);
        }
    }
    Ok(())
}

/// The first bytes of the main channel: header and configuration.
pub(super) fn greet(control: &mut Control) -> Result<(), MigrationError> {
    let mut configuration = control.shared.origin.configuration();
    if control.shared.capabilities.mapped_ram {
        configuration.capabilities.push("mapped-ram".to_owned());
    }
    control.with_main(|stream| stream.greet(configuration))?;
    if control.file.is_some() { file::record_compatibility(control) } else { Ok(()) }
}

/// Starts one thread per lane. Each writes its opening barrier and waits for passes.
pub(super) fn start_lanes(control: &mut Control) -> Result<Arc<MultifdShared>, MigrationError> {
    let shared = Arc::clone(&control.shared);
    let detection = shared.params().zero_page_detection;
    let is_mapped = shared.capabilities.mapped_ram;
    let legacy = shared.capabilities.multifd && detection == ZeroPageDetection::Legacy && !is_mapped;
    // Two pieces of I/O that write one page must never be on their way at once.
    let behind_flush = legacy || is_mapped;
    let main = control.main.as_ref().map(|main| Arc::clone(&main.stream));
    let multifd = Arc::new(MultifdShared {
        packet_number: AtomicU64::new(0),
        counters: Arc::clone(&shared.counters),
        limiter: Arc::clone(&shared.limiter),
        zeros_to: main.filter(|_| legacy),
        sync_too_early: shared.violated == Some(Clause::SyncAfterLastPage),
        passes_merge: AtomicBool::new(false),
    });
    let streams = control.streams_on_lanes();
    for (index, (mut writer, reader)) in writers(control, &multifd)?.into_iter().enumerate() {
        let (shared, streams) = (Arc::clone(&shared), streams.clone());
        control.spawn(&format!("lane {index}"), move || {
            if let Err(error) = work(
                &shared,
                index,
                detection,
                behind_flush,
                streams.as_deref(),
                (writer.as_mut(), reader.as_ref()),
            ) {
                // First the reason: what follows from closing the channel is none.
                shared.fail(error);
                writer.abort();
            }
        })?;
    }
    Ok(multifd)
}

fn work(
    shared: &Shared,
    index: usize,
    detection: ZeroPageDetection,
    behind_flush: bool,
    streams: Option<&Streams>,
    (writer, reader): (&mut dyn PageWriter, &dyn PageReader),
) -> Result<(), MigrationError> {
    let lane = Lane {
        index,
        lanes: &shared.lanes,
        ram: &shared.ram,
        dirty: shared.vm.dirty_source(),
        reader,
        detection,
        behind_flush,
        counters: &shared.counters,
        streams,
        nudge: &|| shared.driver.nudge(),
    };
    lane.run(writer)
}

fn writers(control: &Control, multifd: &Arc<MultifdShared>) -> Result<Vec<file::Pair>, MigrationError> {
    let shared = &control.shared;
    let params = shared.params();
    if shared.capabilities.mapped_ram {
        return file::lanes(control);
    }
    if !shared.capabilities.multifd {
        let Some(main) = &control.main else { return Ok(Vec::new()) };
        let channel = main.channel.clone();
        let reader = shared.origin.reader()?;
        let lane = MainLane {
            main: Arc::clone(&main.stream),
            reader: Arc::clone(&reader),
            ram: shared.ram.clone(),
            counters: Arc::clone(&shared.counters),
            limiter: Arc::clone(&shared.limiter),
            abort: Box::new(move || {
                if let Some(channel) = &channel {
                    channel.shutdown();
                }
            }),
        };
        return Ok(vec![(Box::new(lane), reader)]);
    }
    let writer = |(id, channel): (usize, &Arc<Channel>)| -> Result<file::Pair, MigrationError> {
        let reader = shared.origin.reader()?;
        let lane = MultifdLane {
            reader: Arc::clone(&reader),
            channel: Arc::clone(channel),
            name: format!("multifd channel {id}"),
            ram: shared.ram.clone(),
            packets: RamPacketEncoder::new(codec::method(params.multifd_compression)),
            codec: codec::encoder(&params)?,
            shared: Arc::clone(multifd),
            open: None,
            normal: Vec::new(),
            pages: Vec::new(),
            payload: Vec::new(),
        };
        Ok((Box::new(lane), reader))
    };
    control.multifd.iter().enumerate().map(writer).collect()
}
