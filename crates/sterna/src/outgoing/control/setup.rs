//! Connecting: the main channel, then every lane's, each with its first bytes at once (specs/stream.md §3.1).

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use sterna_transport::{Address, Channel, TransportError};
use sterna_wire::multifd::{InitialPacket, RamPacketEncoder};

use crate::codec;
use crate::error::MigrationError;
use crate::outgoing::file::{self, SaveFile};
use crate::outgoing::lanes::{Lane, LaneEnds, MainLane, MultifdLane, MultifdShared, SharedDeltas};
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::{MainStream, Sink};
use crate::outgoing::postcopy::lanes::follow;
use crate::outgoing::protection::{DeltaCache, Scratch, SentPages};
use crate::outgoing::rdma::{self, PacketLane, RdmaLane, RdmaSource, Work};
use crate::outgoing::shared::Shared;
use crate::outgoing::streams::Streams;
use crate::outgoing::workers::Workers;
use crate::params::ZeroPageDetection;

/// What is open once all is connected.
pub(super) struct Connected {
    pub main: Arc<MainChannel>,
    pub multifd: Vec<Arc<Channel>>,
    /// The file, where the guest goes into one.
    pub file: Option<SaveFile>,
    /// The other side of the main channel, where memory is written by RDMA.
    pub rdma: Option<Arc<RdmaSource>>,
}

/// Opens every channel, and writes the first bytes of each.
pub(super) fn connect(shared: &Shared) -> Result<Connected, MigrationError> {
    let connected = open(shared)?;
    let mut configuration = shared.guest_source.configuration();
    if shared.capabilities.mapped_ram {
        configuration.capabilities.push("mapped-ram".to_owned());
    }
    connected.main.with(|stream| stream.greet(configuration))?;
    if connected.file.is_some() {
        file::record_compatibility(shared, &connected.main)?;
    }
    Ok(connected)
}

fn open(shared: &Shared) -> Result<Connected, MigrationError> {
    if matches!(shared.to, Address::File { .. }) {
        let (file, main) = SaveFile::open(shared)?;
        return Ok(Connected { main, multifd: Vec::new(), file: Some(file), rdma: None });
    }
    let params = shared.params();
    if matches!(shared.to, Address::Rdma { .. }) {
        let rdma = rdma::connect(shared, &params)?;
        let main = main_channel(shared, Arc::clone(&rdma.channel));
        let multifd: Vec<_> = rdma.lanes.iter().map(|(_, channel)| Arc::clone(channel)).collect();
        for (id, channel) in (0..).zip(&multifd) {
            say_hello(shared, channel, id)?;
        }
        return Ok(Connected { main, multifd, file: None, rdma: Some(rdma) });
    }
    // One limit for all of them together.
    let began = Instant::now();
    let open = || -> Result<Arc<Channel>, TransportError> {
        let left = params.limits.setup.saturating_sub(began.elapsed());
        Channel::connect_with(&shared.to, params.tls.as_ref(), left, &shared.connecting, |channel| {
            channel.set_stall_limit(Some(params.limits.stall));
            if !params.reconnect_window.is_zero() {
                // A network that falls silent is noticed where nothing is to be sent, too.
                channel.probe_peer(params.limits.stall);
            }
            shared.adopt(channel)
        })
    };
    let main = main_channel(shared, open()?);
    let mut multifd = Vec::new();
    if shared.capabilities.multifd {
        for id in 0..params.multifd_channels {
            let channel = open()?;
            say_hello(shared, &channel, id)?;
            multifd.push(channel);
        }
    }
    Ok(Connected { main, multifd, file: None, rdma: None })
}

/// The first packet of a multifd channel.
fn say_hello(shared: &Shared, channel: &Channel, id: u8) -> Result<(), MigrationError> {
    let uuid = shared.vm.uuid().unwrap_or_default();
    let hello = InitialPacket { uuid, id }.to_bytes();
    channel.write_all(&hello)?;
    shared.counters.multifd(hello.len() as u64);
    Ok(())
}

pub(super) fn main_channel(shared: &Shared, channel: Arc<Channel>) -> Arc<MainChannel> {
    let sink: Arc<dyn Sink> = channel.clone();
    let stream = MainStream::new(sink, Arc::clone(&shared.counters), shared.guest_source.section_ids());
    MainChannel::new(Some(channel), stream)
}

/// What lanes work between, and what multifd lanes share.
pub(super) struct Writers {
    lanes: Vec<LaneEnds>,
    detection: ZeroPageDetection,
    after_flush: bool,
}

/// Makes a writer for each lane.
pub(super) fn writers(
    shared: &Arc<Shared>,
    main: &Arc<MainChannel>,
    (channels, file, rdma): (&[Arc<Channel>], Option<&SaveFile>, Option<&Arc<Work>>),
) -> Result<Writers, MigrationError> {
    let detection = shared.params().zero_page_detection;
    let is_mapped = shared.capabilities.mapped_ram;
    let legacy = shared.capabilities.multifd && detection == ZeroPageDetection::Legacy && !is_mapped;
    let multifd = Arc::new(MultifdShared {
        packet_number: AtomicU64::new(0),
        counters: Arc::clone(&shared.counters),
        limiter: Arc::clone(&shared.limiter),
        zeros_to: legacy.then(|| Arc::clone(&main.stream)),
        deltas: delta_cache(shared)
            .filter(|_| shared.capabilities.multifd)
            .map(|cache| SharedDeltas { cache, main: Arc::clone(&main.stream) }),
        sent: sent_pages(shared),
    });
    let lanes = match file {
        Some(file) if is_mapped => file.lanes(shared)?,
        _ if rdma.is_some() => {
            rdma.map_or(Ok(Vec::new()), |work| rdma_lanes(shared, main, work, &multifd))?
        }
        _ if shared.capabilities.multifd => multifd_lanes(shared, &multifd, channels)?,
        _ => vec![main_lane(shared, main)?],
    };
    // Two pieces of I/O that write one page must never be on their way at once: no receiver would put them in order.
    Ok(Writers { lanes, detection, after_flush: legacy || is_mapped || rdma.is_some() })
}

/// Starts one thread per lane. Each writes its opening barrier and waits for rounds.
pub(super) fn start_lanes(
    shared: &Arc<Shared>,
    writers: Writers,
    streams: Option<Arc<Streams>>,
    workers: &mut Workers,
) -> Result<(), MigrationError> {
    let Writers { lanes, detection, after_flush } = writers;
    for (index, LaneEnds { mut writer, reader }) in lanes.into_iter().enumerate() {
        let (shared, streams) = (Arc::clone(shared), streams.clone());
        workers.spawn(&format!("lane {index}"), move || {
            let lane = Lane {
                index,
                lanes: &shared.lanes,
                ram: &shared.ram,
                dirty: shared.vm.dirty_source(),
                reader: reader.as_ref(),
                detection,
                after_flush,
                counters: &shared.counters,
                streams: streams.as_deref(),
                nudge: &|| shared.driver.nudge(),
            };
            let ended = lane.run(writer.as_mut());
            if let Err(error) = ended.and_then(|()| follow(&lane, &shared.postcopy, writer.as_mut())) {
                // First the reason: what follows from closing the channel is none.
                shared.fail(error);
                writer.abort();
            }
        })?;
    }
    Ok(())
}

/// Starts the threads that work for a lane over RDMA. They end with it.
pub(super) fn start_rdma(
    shared: &Arc<Shared>,
    main: &Arc<MainChannel>,
    work: &Arc<Work>,
    workers: &mut Workers,
) -> Result<(), MigrationError> {
    type Run = fn(&Work, &MainChannel, &Shared) -> Result<(), MigrationError>;
    let threads: [(&str, Run); 2] = [
        ("rdma windows", |work, main, shared| match shared.capabilities.multifd {
            true => rdma::ask_for_lanes(work, main, &shared.counters),
            false => rdma::ask(work, &shared.counters),
        }),
        ("rdma memory", |work, _, _| rdma::register(work)),
    ];
    for (name, run) in threads {
        let (shared, main, work) = (Arc::clone(shared), Arc::clone(main), Arc::clone(work));
        workers.spawn(name, move || {
            if let Err(error) = run(&work, &main, &shared) {
                shared.fail(error);
            }
        })?;
    }
    Ok(())
}

/// The one lane of the main connection; with multifd one for each connection.
fn rdma_lanes(
    shared: &Shared,
    main: &Arc<MainChannel>,
    work: &Arc<Work>,
    multifd: &Arc<MultifdShared>,
) -> Result<Vec<LaneEnds>, MigrationError> {
    if !shared.capabilities.multifd {
        let measures = (Arc::clone(&shared.counters), Arc::clone(&shared.limiter));
        let lane = RdmaLane::new(Arc::clone(work), Arc::clone(main), measures);
        return Ok(vec![LaneEnds { writer: Box::new(lane), reader: shared.reader()? }]);
    }
    let lanes = PacketLane::all(work, &shared.ram, multifd);
    let ends = |lane| Ok(LaneEnds { writer: Box::new(lane), reader: shared.reader()? });
    lanes.into_iter().map(ends).collect()
}

fn main_lane(shared: &Shared, main: &MainChannel) -> Result<LaneEnds, MigrationError> {
    let channel = main.channel.clone();
    let reader = shared.reader()?;
    let lane = MainLane {
        deltas: delta_cache(shared).map(|cache| (cache, Scratch::default())),
        sent: sent_pages(shared),
        marks: shared.unconfirmed.get().is_some(),
        has_begun: false,
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
    Ok(LaneEnds { writer: Box::new(lane), reader })
}

/// Where checkpoints are summed up.
fn sent_pages(shared: &Shared) -> Option<Arc<SentPages>> {
    shared.protecting.as_ref().map(|protecting| Arc::clone(&protecting.sent))
}

/// Where checkpoints bring differences.
fn delta_cache(shared: &Shared) -> Option<DeltaCache> {
    let protecting = shared.protecting.as_ref().filter(|_| shared.capabilities.xbzrle)?;
    let limit_bytes = shared.params.lock().xbzrle_cache_bytes;
    Some(DeltaCache::new(&shared.ram, limit_bytes, Arc::clone(&protecting.deltas)))
}

fn multifd_lanes(
    shared: &Shared,
    multifd: &Arc<MultifdShared>,
    channels: &[Arc<Channel>],
) -> Result<Vec<LaneEnds>, MigrationError> {
    let params = shared.params();
    let lane = |(id, channel): (usize, &Arc<Channel>)| -> Result<LaneEnds, MigrationError> {
        let reader = shared.reader()?;
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
            keeps_zeros: false,
            changes: None,
        };
        Ok(LaneEnds { writer: Box::new(lane), reader })
    };
    channels.iter().enumerate().map(lane).collect()
}
