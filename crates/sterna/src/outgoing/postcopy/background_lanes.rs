//! Lanes that send the background pages of postcopy (specs/extension.md §12.5).

use std::sync::Arc;

use sterna_ram::PAGE_SIZE;
use sterna_transport::Channel;

use super::shared::SharedPostcopy;
use crate::error::MigrationError;
use crate::outgoing::lanes::Lane;
use crate::pages::PageWriter;
use crate::postcopy::order::{LanePages, LanePlace};

/// The pages that a lane takes at a time: those of one packet.
const TAKE_PAGES: u64 = sterna_wire::limits::PACKET_PAGES as u64;

impl SharedPostcopy {
    /// Keeps lanes after the rounds: the destination accepts background pages over them.
    pub(in crate::outgoing) fn keep_lanes(&self) {
        self.lanes.lock().stay = true;
    }

    /// Whether lanes send the background pages.
    pub(in crate::outgoing) fn has_lanes(&self) -> bool {
        self.lane_pages.get().is_some()
    }

    /// Makes lanes begin, after the guest runs at the destination.
    pub(in crate::outgoing) fn let_lanes_begin(&self) {
        self.lanes.lock().go = true;
        self.lanes_changed.notify_all();
    }

    /// Whether `count` lanes have sent their last page, and the SYNC after it.
    pub(in crate::outgoing) fn lanes_are_through(&self, count: usize) -> bool {
        self.lanes.lock().through >= count
    }

    /// Waits until lanes begin. `None`: they will not.
    fn lane_pages(&self) -> Option<Arc<LanePages>> {
        let mut lanes = self.lanes.lock();
        while lanes.stay && !lanes.is_over {
            if lanes.go {
                return self.lane_pages.get().cloned();
            }
            self.lanes_changed.wait(&mut lanes);
        }
        None
    }
}

/// Sends a lane's share of the pages that follow the guest, after the rounds.
///
/// Returns immediately if lanes do not send these pages.
pub(in crate::outgoing) fn follow(
    lane: &Lane<'_>,
    postcopy: &SharedPostcopy,
    writer: &mut dyn PageWriter,
) -> Result<(), MigrationError> {
    let Some(pages) = postcopy.lane_pages() else { return Ok(()) };
    writer.keep_to_itself();
    let work = postcopy.work.lane(lane.index);
    let before = writer.channel().map_or(0, Channel::bytes_written);
    let count = |writer: &dyn PageWriter| {
        let bytes = writer.channel().map_or(0, Channel::bytes_written);
        work.carried(bytes - before);
    };
    let mut place = LanePlace::default();
    while let Some(run) = pages.take(&mut place, TAKE_PAGES) {
        // The limit is applied before the page is read. A page that waits in a packet meanwhile is sent
        // immediately if it is requested.
        lane.counters.throttled(postcopy.limiter.take(run.count * PAGE_SIZE as u64));
        lane.send_pages(run, true, writer)?;
        work.background(run.count);
        count(writer);
        if let Some(channel) = writer.channel() {
            postcopy.pace.keep(lane.index, channel);
        }
    }
    writer.barrier()?;
    count(writer);
    postcopy.lanes.lock().through += 1;
    (lane.nudge)();
    Ok(())
}

#[cfg(test)]
mod tests {
    use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SHIFT, RamBlock};

    use super::*;
    use crate::outgoing::postcopy::shared::Background;

    fn guest(pages: u64) -> (GuestRam, DirtyBitmaps) {
        let ram = GuestRam::new(vec![RamBlock::without_memory("m0", pages << PAGE_SHIFT).unwrap()]).unwrap();
        let unsent = DirtyBitmaps::new(&ram);
        unsent.set_all();
        (ram, unsent)
    }

    #[test]
    fn lanes_end_with_the_rounds_unless_they_are_kept_and_wait_no_longer_than_the_migration() {
        let (ram, unsent) = guest(64);
        let postcopy = SharedPostcopy::new(0);
        assert!(postcopy.lane_pages().is_none());
        postcopy.keep_lanes();
        postcopy.begin(&ram, &unsent);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| postcopy.lane_pages().is_some());
            postcopy.let_lanes_begin();
            assert!(waits.join().unwrap());
        });
        postcopy.stop();
        assert!(postcopy.lane_pages().is_none());
    }

    #[test]
    fn page_that_a_lane_has_in_hand_goes_once_more_if_it_is_requested_and_not_behind_the_end() {
        let (ram, unsent) = guest(256);
        unsent.block(0).clear(7);
        let postcopy = SharedPostcopy::new(0);
        postcopy.keep_lanes();
        postcopy.begin(&ram, &unsent);
        postcopy.let_lanes_begin();
        let (pages, mut place) = (postcopy.lane_pages().unwrap(), LanePlace::default());
        assert_eq!(pages.take(&mut place, 4).map(|run| (run.first, run.count)), Some((0, 4)));

        for _ in 0..3 {
            postcopy.request(&ram, Some("m0"), 2 << 12, 6 << 12).unwrap();
        }
        let requested = || postcopy.next_requested().map(|run| (run.first, run.count));
        assert_eq!(requested(), Some((2, 5)), "2 and 3 are with the lane, 7 was there before");
        assert!(!postcopy.ends_if_answered(), "it is taken, and not written");
        postcopy.has_sent_requested();
        postcopy.request(&ram, None, 2 << 12, 5 << 12).unwrap();
        assert_eq!(pages.take(&mut place, 128).map(|run| (run.first, run.count)), Some((8, 56)));
        while pages.take(&mut place, 128).is_some() {}
        assert_eq!(postcopy.left_bytes(), 0);

        assert!(postcopy.ends_if_answered(), "the second time is nothing");
        postcopy.request(&ram, None, 100 << 12, 4096).unwrap();
        postcopy.stop();
        assert_eq!(requested(), None, "it came over a lane, and EOF went out");
        let next = postcopy.next_background(std::time::Duration::ZERO, false, || false);
        assert!(matches!(next, Background::Wait | Background::Done));
    }
}
