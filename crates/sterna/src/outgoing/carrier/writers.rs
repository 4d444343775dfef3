//! The writers of lanes that write to channels.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use sterna_transport::Channel;
use sterna_wire::multifd::RamPacketEncoder;

use crate::codec;
use crate::error::MigrationError;
use crate::outgoing::lanes::{LaneEnds, MainLane, MultifdLane, MultifdShared, SharedDeltas};
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::protection::{DeltaCache, Scratch, SentPages};
use crate::outgoing::shared::Shared;
use crate::params::ZeroPageDetection;

/// The reader and writer of each lane, and the rule for the begin of rounds.
pub(in crate::outgoing) struct Writers {
    pub lanes: Vec<LaneEnds>,
    pub detection: ZeroPageDetection,
    /// A lane begins a round only after the flush of the previous one.
    ///
    /// Without a receiver that orders them, two I/O requests for one page must never be in flight at the same
    /// time.
    pub after_flush: bool,
}

impl Writers {
    pub(in crate::outgoing) fn new(shared: &Shared, lanes: Vec<LaneEnds>, after_flush: bool) -> Self {
        Self { lanes, detection: shared.params().zero_page_detection, after_flush }
    }
}

/// Whether multifd lanes send zero pages on the main channel.
pub(in crate::outgoing) fn sends_zeros_on_main(shared: &Shared) -> bool {
    shared.capabilities.multifd && shared.params().zero_page_detection == ZeroPageDetection::Legacy
}

/// The state that multifd lanes share.
pub(in crate::outgoing) fn multifd_shared(shared: &Shared, main: &MainChannel) -> Arc<MultifdShared> {
    Arc::new(MultifdShared {
        packet_number: AtomicU64::new(0),
        counters: Arc::clone(&shared.measures.counters),
        limiter: Arc::clone(&shared.session.limiter),
        zeros_to: sends_zeros_on_main(shared).then(|| Arc::clone(&main.stream)),
        deltas: delta_cache(shared)
            .filter(|_| shared.capabilities.multifd)
            .map(|cache| SharedDeltas { cache, main: Arc::clone(&main.stream) }),
        sent: sent_pages(shared),
    })
}

/// The lane of a migration that has only the main channel.
pub(in crate::outgoing) fn main_lane(
    shared: &Shared,
    main: &MainChannel,
) -> Result<LaneEnds, MigrationError> {
    let channel = main.channel.clone();
    let reader = shared.reader()?;
    let lane = MainLane {
        deltas: delta_cache(shared).map(|cache| (cache, Scratch::default())),
        sent: sent_pages(shared),
        marks: shared.reconnection.confirms_rounds(),
        has_begun: false,
        main: Arc::clone(&main.stream),
        reader: Arc::clone(&reader),
        ram: shared.guest.ram.clone(),
        counters: Arc::clone(&shared.measures.counters),
        limiter: Arc::clone(&shared.session.limiter),
        abort: Box::new(move || {
            if let Some(channel) = &channel {
                channel.shutdown();
            }
        }),
    };
    Ok(LaneEnds { writer: Box::new(lane), reader })
}

/// The sums of checkpoints' pages, for a migration to a standby.
fn sent_pages(shared: &Shared) -> Option<Arc<SentPages>> {
    shared.protecting.as_ref().map(|protecting| protecting.sent())
}

/// The cache for differences, if checkpoints send them.
fn delta_cache(shared: &Shared) -> Option<DeltaCache> {
    let protecting = shared.protecting.as_ref().filter(|_| shared.capabilities.xbzrle)?;
    let limit_bytes = shared.params.lock().xbzrle_cache_bytes;
    protecting.delta_cache(&shared.guest.ram, limit_bytes)
}

pub(super) fn multifd_lanes(
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
            ram: shared.guest.ram.clone(),
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
