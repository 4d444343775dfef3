//! Connecting: the main channel, then every lane's, each with its first bytes at once (specs/stream.md §3.1).

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use sterna_transport::{Channel, TlsEndpoint, TransportError};
use sterna_wire::main::FileHeader;
use sterna_wire::multifd::{InitialPacket, RamPacketEncoder};

use super::control::{Control, Main};
use super::lane::Lane;
use super::main_lane::MainLane;
use super::main_stream::MainStream;
use super::multifd_lane::{MultifdLane, MultifdShared};
use super::origin::PageReader;
use super::shared::Shared;
use crate::codec;
use crate::error::MigrationError;
use crate::order::Clause;
use crate::pages::PageWriter;
use crate::params::ZeroPageDetection;

/// Opens every channel.
pub(super) fn connect(control: &mut Control) -> Result<(), MigrationError> {
    let shared = Arc::clone(&control.shared);
    let params = shared.params();
    // One limit for all of them together.
    let began = Instant::now();
    let open = || -> Result<Arc<Channel>, TransportError> {
        let left = || params.limits.setup.saturating_sub(began.elapsed());
        let channel = Channel::connect(&shared.to, left(), &shared.connecting)?;
        channel.set_stall_limit(Some(params.limits.stall));
        let channel = shared.adopt(channel);
        if let Some(tls) = &params.tls {
            channel.start_tls(tls, TlsEndpoint::Client, shared.to.host(), left(), &shared.connecting)?;
        }
        Ok(channel)
    };
    let main = open()?;
    let stream =
        MainStream::new(Arc::clone(&main), Arc::clone(&shared.counters), shared.origin.section_ids());
    control.main = Some(Main { channel: main, stream: Arc::new(Mutex::new(stream)) });
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
    let configuration = control.shared.origin.configuration();
    control.with_main(|stream| {
        stream.send(|out| {
            FileHeader.encode(out);
            configuration.encode(out)
        })
    })
}

/// Starts one thread per lane. Each writes its opening barrier and waits for passes.
pub(super) fn start_lanes(control: &mut Control) -> Result<Arc<MultifdShared>, MigrationError> {
    let shared = Arc::clone(&control.shared);
    let detection = shared.params().zero_page_detection;
    let legacy = shared.capabilities.multifd && detection == ZeroPageDetection::Legacy;
    let main = control.main.as_ref().map(|main| Arc::clone(&main.stream));
    let multifd = Arc::new(MultifdShared {
        packet_number: AtomicU64::new(0),
        counters: Arc::clone(&shared.counters),
        limiter: Arc::clone(&shared.limiter),
        zeros_to: main.filter(|_| legacy),
        sync_too_early: shared.violated == Some(Clause::SyncAfterLastPage),
        passes_merge: AtomicBool::new(false),
    });
    for (index, (mut writer, reader)) in writers(control, &multifd)?.into_iter().enumerate() {
        let shared = Arc::clone(&shared);
        control.spawn(&format!("lane {index}"), move || {
            if let Err(error) = work(&shared, index, detection, legacy, writer.as_mut(), reader.as_ref()) {
                writer.abort();
                shared.fail(error);
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
    writer: &mut dyn PageWriter,
    reader: &dyn PageReader,
) -> Result<(), MigrationError> {
    let lane = Lane {
        index,
        lanes: &shared.lanes,
        vm: shared.vm.as_ref(),
        reader,
        detection,
        behind_flush,
        count_absent: &|pages| shared.counters.absent(pages),
        nudge: &|| shared.driver.nudge(),
    };
    lane.run(writer)
}

fn writers(
    control: &Control,
    multifd: &Arc<MultifdShared>,
) -> Result<Vec<(Box<dyn PageWriter>, Arc<dyn PageReader>)>, MigrationError> {
    let shared = &control.shared;
    let params = shared.params();
    if !shared.capabilities.multifd {
        let Some(main) = &control.main else { return Ok(Vec::new()) };
        let channel = Arc::clone(&main.channel);
        let reader = shared.origin.reader()?;
        let lane = MainLane {
            main: Arc::clone(&main.stream),
            reader: Arc::clone(&reader),
            ram: shared.vm.ram().clone(),
            counters: Arc::clone(&shared.counters),
            limiter: Arc::clone(&shared.limiter),
            abort: Box::new(move || channel.shutdown()),
        };
        return Ok(vec![(Box::new(lane), reader)]);
    }
    type Pair = (Box<dyn PageWriter>, Arc<dyn PageReader>);
    let writer = |(id, channel): (usize, &Arc<Channel>)| -> Result<Pair, MigrationError> {
        let reader = shared.origin.reader()?;
        let lane = MultifdLane {
            reader: Arc::clone(&reader),
            channel: Arc::clone(channel),
            name: format!("multifd channel {id}"),
            ram: shared.vm.ram().clone(),
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
