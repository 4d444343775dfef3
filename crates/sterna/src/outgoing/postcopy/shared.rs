//! The pages that follow the guest, and requests for them: the state that the threads of a migration share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SHIFT};
use sterna_wire::received_pages::ReceivedPages;

use super::work::Work;
use crate::error::{BadAnswer, MigrationError};
use crate::order::PageRun;
use crate::outgoing::lanes::limiter::Limiter;
use crate::postcopy::order::{LanePages, PageOrder};
use crate::postcopy::pace::Pace;
use crate::stats::{PostcopyStatistics, Series};

/// The most requested pages in one write.
const REQUESTED_AT_ONCE: u64 = 16;
/// The interval at which the background checks whether the channel accepts more.
const LOOK: Duration = Duration::from_micros(100);

/// The pages that follow the guest, as lanes, the return path and the threads of postcopy see them.
pub(in crate::outgoing) struct SharedPostcopy {
    is_wanted: AtomicBool,
    /// EOF is about to be written: no element may follow it.
    has_ended: AtomicBool,
    /// `max-postcopy-bandwidth`: limits background pages.
    pub(in crate::outgoing) limiter: Limiter,
    /// Paces background pages too, so that requested ones do not wait in the network's queues.
    pub(in crate::outgoing) pace: Pace,
    /// The background pages, if lanes send them.
    pub(super) lane_pages: OnceLock<Arc<LanePages>>,
    /// The time from which pages could be requested.
    began: OnceLock<Instant>,
    pub(super) work: Work,
    pub(super) lanes: Mutex<LanesTurn>,
    pub(super) lanes_changed: Condvar,
    following: Mutex<Following>,
    changed: Condvar,
}

/// State of the lanes that send background pages.
#[derive(Default)]
pub(super) struct LanesTurn {
    /// Lanes do not end with the rounds.
    pub(super) stay: bool,
    /// The guest runs at the destination: lanes begin to send.
    pub(super) go: bool,
    /// The migration ends: lanes no longer wait.
    pub(super) is_over: bool,
    /// The number of lanes that have sent their last page.
    pub(super) through: usize,
}

/// The pages that follow the guest.
#[derive(Default)]
struct Following {
    /// The pages that are left, and their order; `None` before the package.
    order: Option<PageOrder>,
    /// The destination was told to listen or to resume, so that requests are allowed.
    may_be_asked: bool,
    /// The block of the previous request.
    last: Option<usize>,
    /// The number of runs of requested pages that were taken and are not written yet.
    on_their_way: u64,
    requests: u64,
    /// The number of missing pages at [`SharedPostcopy::begin`].
    missing_pages: u64,
    /// The requests over time, for the statistics.
    faults: Series,
    is_over: bool,
}

/// The next step of the background.
pub(in crate::outgoing) enum Background {
    /// Send this run of pages.
    Run(PageRun),
    /// No page may be sent now: ask again.
    Wait,
    /// End, because no page is left.
    Done,
}

impl SharedPostcopy {
    pub(in crate::outgoing) fn new(bytes_per_second: u64) -> Self {
        Self {
            is_wanted: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            limiter: Limiter::new(bytes_per_second),
            pace: Pace::default(),
            lane_pages: OnceLock::new(),
            began: OnceLock::new(),
            work: Work::default(),
            lanes: Mutex::default(),
            lanes_changed: Condvar::new(),
            following: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Sets the limit of background pages, in bytes per second; 0 is no limit.
    pub(in crate::outgoing) fn limit(&self, bytes_per_second: u64) {
        self.limiter.set(bytes_per_second);
    }

    /// Requests the switch to postcopy.
    pub(in crate::outgoing) fn want(&self) {
        self.is_wanted.store(true, Ordering::Release);
    }

    pub(in crate::outgoing) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Acquire)
    }

    /// Records that EOF is about to be written.
    pub(in crate::outgoing) fn ends(&self) {
        self.has_ended.store(true, Ordering::Release);
    }

    /// Whether EOF is about to be written, or was written.
    pub(in crate::outgoing) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Allows requests from now on. `unsent` are the pages that the destination lacks.
    ///
    /// Lanes that [stay](Self::keep_lanes) will send the background pages.
    pub(in crate::outgoing) fn begin(&self, ram: &GuestRam, unsent: &DirtyBitmaps) {
        let mut order = PageOrder::of_unsent(unsent.blocks());
        if self.lanes.lock().stay {
            let units: Vec<_> = ram.blocks().iter().map(|block| block.page_bytes() >> PAGE_SHIFT).collect();
            // The value is set only once, because a postcopy begins once.
            let _ = self.lane_pages.set(order.share(&units));
        }
        let mut following = self.following.lock();
        self.began.get_or_init(Instant::now);
        following.missing_pages = order.unsent_pages();
        following.order = Some(order);
        following.may_be_asked = true;
    }

    /// Updates the pages that are left, after the connection broke.
    ///
    /// The destination has exactly the pages `received`.
    ///
    /// No thread sends any more.
    ///
    /// # Errors
    /// The destination claims to have a page that was never sent.
    pub(in crate::outgoing) fn recover(
        &self,
        ram: &GuestRam,
        received: &[(usize, ReceivedPages)],
    ) -> Result<(), MigrationError> {
        let mut following = self.following.lock();
        let Some(order) = following.order.as_mut() else {
            return Err(MigrationError::Internal("a recovery without pages that follow".to_owned()));
        };
        for (block, received) in received {
            if let Some(page) = order.unsent_among(*block, received) {
                let block = ram.block(*block).name().to_owned();
                return Err(BadAnswer::NeverSent { block, offset: page << PAGE_SHIFT }.into());
            }
        }
        order.forget_requests();
        received.iter().for_each(|(block, received)| order.received(*block, received));
        (following.last, following.is_over) = (None, false);
        self.has_ended.store(false, Ordering::Release);
        self.limiter.close();
        Ok(())
    }

    /// Allows requests again, before the destination is told to resume.
    pub(in crate::outgoing) fn may_be_asked(&self) {
        self.following.lock().may_be_asked = true;
    }

    /// Forbids requests after the connection broke.
    pub(in crate::outgoing) fn pause(&self) {
        self.following.lock().may_be_asked = false;
    }

    /// Bytes of pages that are left.
    pub(in crate::outgoing) fn left_bytes(&self) -> u64 {
        if let Some(pages) = self.lane_pages.get() {
            // The lanes' pages are counted without the lock that requests need.
            return pages.left() << PAGE_SHIFT;
        }
        self.following.lock().order.as_ref().map_or(0, PageOrder::unsent_pages) << PAGE_SHIFT
    }

    /// The number of requests so far.
    pub(in crate::outgoing) fn requests(&self) -> u64 {
        self.following.lock().requests
    }

    /// Adds a request. A request without a block name means the block of the previous request.
    pub(in crate::outgoing) fn request(
        &self,
        ram: &GuestRam,
        block: Option<&str>,
        start: u64,
        length: u64,
    ) -> Result<(), MigrationError> {
        let at = self.since_begin();
        let mut following = self.following.lock();
        let last = match block {
            Some(name) => ram.blocks().iter().position(|known| known.name() == name),
            None => following.last,
        };
        let may_be_asked = following.may_be_asked;
        let Some(order) = following.order.as_mut().filter(|_| may_be_asked) else {
            return Err(BadAnswer::EarlyRequest.into());
        };
        let Some(block) = last else {
            let why = match block {
                Some(name) => BadAnswer::UnknownBlock { block: name.to_owned() },
                None => BadAnswer::RequestWithoutBlock,
            };
            return Err(why.into());
        };
        order.request_at(block, start, length, at).map_err(|why| {
            let block = ram.block(block).name().to_owned();
            BadAnswer::Request { block, start, length, why }
        })?;
        following.last = Some(block);
        following.requests += 1;
        following.faults.add(at, 1);
        drop(following);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the next requested pages. `None`: the connection has ended.
    pub(in crate::outgoing) fn next_requested(&self) -> Option<PageRun> {
        let mut following = self.following.lock();
        loop {
            if following.is_over {
                return None;
            }
            let order = following.order.as_mut().filter(|_| !self.has_ended());
            let run = order.and_then(|order| order.take_requested_at(REQUESTED_AT_ONCE));
            if let Some((run, at)) = run {
                following.on_their_way += 1;
                self.work.answers(at);
                return Some(run);
            }
            self.changed.wait(&mut following);
        }
    }

    /// Counts requested pages that were written, over the preempt channel or the main channel.
    pub(in crate::outgoing) fn has_answered(&self, is_preempt: bool, pages: u64, bytes: u64) {
        if let Some(began) = self.began.get() {
            self.work.sent_requested(*began, is_preempt, pages, bytes);
        }
    }

    /// Completes the statistics of a postcopy. `since_start` converts an instant to the time since the
    /// migration's start.
    pub(in crate::outgoing) fn report(
        &self,
        mut statistics: PostcopyStatistics,
        since_start: impl Fn(Instant) -> Duration,
    ) -> PostcopyStatistics {
        let began = self.began.get().copied().map(since_start).unwrap_or_default();
        {
            let following = self.following.lock();
            statistics.missing_bytes = following.missing_pages << PAGE_SHIFT;
            statistics.faults = following.faults.snapshot(began);
        }
        self.work.put(&mut statistics);
        statistics
    }

    fn since_begin(&self) -> Duration {
        self.began.get().map(Instant::elapsed).unwrap_or_default()
    }

    /// Records that the thread has written the requested pages that it took.
    pub(in crate::outgoing) fn has_sent_requested(&self) {
        self.following.lock().on_their_way -= 1;
        self.changed.notify_all();
    }

    /// The next step of the background, after at most `patience`.
    ///
    /// `gives_way`: requested pages use the same channel and are sent first. `is_full`: many bytes already wait
    /// on that channel.
    pub(in crate::outgoing) fn next_background(
        &self,
        patience: Duration,
        gives_way: bool,
        is_full: impl Fn() -> bool,
    ) -> Background {
        let until = Instant::now() + patience;
        let mut following = self.following.lock();
        loop {
            let is_busy = following.on_their_way > 0;
            let Some(order) = following.order.as_mut() else { return Background::Done };
            let has_requests = order.has_requests() || is_busy;
            if !(gives_way && (has_requests || is_full())) {
                match order.take_background() {
                    Some(run) => return Background::Run(run),
                    None if !has_requests => return Background::Done,
                    None => {}
                }
            }
            if Instant::now() >= until {
                return Background::Wait;
            }
            self.changed.wait_for(&mut following, LOOK);
        }
    }

    /// Records that EOF is about to be written, unless requested pages are not written yet. True: EOF follows.
    pub(in crate::outgoing) fn ends_if_answered(&self) -> bool {
        // The check uses the lock under which requested pages are taken, so that none is taken in between.
        let following = self.following.lock();
        let has_requests = following.order.as_ref().is_some_and(PageOrder::has_requests);
        if has_requests || following.on_their_way > 0 {
            return false;
        }
        self.ends();
        true
    }

    /// Unblocks all waiting threads.
    pub(in crate::outgoing) fn stop(&self) {
        self.following.lock().is_over = true;
        self.changed.notify_all();
        self.lanes.lock().is_over = true;
        self.lanes_changed.notify_all();
        self.limiter.open();
    }
}

#[cfg(test)]
mod tests {
    use sterna_ram::RamBlock;

    use super::*;
    use crate::error::{BadRequest, Misbehaviour};

    fn answer(error: MigrationError) -> BadAnswer {
        match error {
            MigrationError::PeerMisbehaved(Misbehaviour::Answer(why)) => why,
            error => panic!("{error}"),
        }
    }

    fn guest() -> (GuestRam, DirtyBitmaps) {
        let block = |name, pages: u64| RamBlock::without_memory(name, pages << PAGE_SHIFT).unwrap();
        let ram = GuestRam::new(vec![block("m0", 256), block("rom", 16)]).unwrap();
        let unsent = DirtyBitmaps::new(&ram);
        unsent.set_all();
        (ram, unsent)
    }

    #[test]
    fn bad_requests_are_refused_by_name_and_take_nothing() {
        let (ram, unsent) = guest();
        let postcopy = SharedPostcopy::new(0);
        let early = postcopy.request(&ram, Some("m0"), 0, 4096).unwrap_err();
        assert_eq!(answer(early), BadAnswer::EarlyRequest);
        postcopy.begin(&ram, &unsent);
        let error = |block, start, length| answer(postcopy.request(&ram, block, start, length).unwrap_err());
        assert_eq!(error(None, 0, 4096), BadAnswer::RequestWithoutBlock);
        assert_eq!(error(Some("vga"), 0, 4096), BadAnswer::UnknownBlock { block: "vga".into() });
        let outside = BadRequest::Outside { block_bytes: 16 << 12 };
        for (start, length, why) in [
            (16 << 12, 4096, outside),
            (1, 4096, BadRequest::Unaligned),
            (0, 0, BadRequest::Empty),
            (u64::MAX - 4095, 4096, outside),
        ] {
            let block = "rom".to_owned();
            assert_eq!(error(Some("rom"), start, length), BadAnswer::Request { block, start, length, why });
        }
        assert_eq!(postcopy.requests(), 0);
    }

    #[test]
    fn a_million_requests_for_a_page_are_one() {
        let (ram, unsent) = guest();
        let postcopy = SharedPostcopy::new(0);
        postcopy.begin(&ram, &unsent);
        for _ in 0..1_000_000 {
            postcopy.request(&ram, Some("m0"), 5 << 12, 4096).unwrap();
        }
        assert_eq!(postcopy.next_requested().map(|run| (run.first, run.count)), Some((5, 1)));
        postcopy.request(&ram, None, 5 << 12, 4096).unwrap();
        postcopy.stop();
        assert_eq!(postcopy.next_requested(), None, "it was sent");
    }

    #[test]
    fn background_gives_way_to_requests_on_its_channel_and_ends_when_all_is_written() {
        let (ram, unsent) = guest();
        let postcopy = SharedPostcopy::new(0);
        postcopy.begin(&ram, &unsent);
        postcopy.request(&ram, Some("rom"), 0, 16 << 12).unwrap();
        let next = |gives_way| postcopy.next_background(Duration::ZERO, gives_way, || false);
        assert!(matches!(next(true), Background::Wait));
        assert!(matches!(next(false), Background::Run(PageRun { block: 0, first: 0, .. })));
        assert!(postcopy.next_requested().is_some());
        assert!(matches!(next(true), Background::Wait), "taken, and not written");
        while let Background::Run(_) = next(false) {}
        assert!(matches!(next(false), Background::Wait), "the end does not overtake it");
        postcopy.has_sent_requested();
        assert!(matches!(next(true), Background::Done));
        assert_eq!(postcopy.left_bytes(), 0);
    }

    #[test]
    fn recovery_sends_what_was_lost_and_believes_nobody_who_has_what_was_never_sent() {
        let (ram, unsent) = guest();
        let postcopy = SharedPostcopy::new(0);
        postcopy.begin(&ram, &unsent);
        let Background::Run(sent) = postcopy.next_background(Duration::ZERO, false, || false) else {
            panic!()
        };
        postcopy.request(&ram, Some("rom"), 0, 4096).unwrap();
        postcopy.stop();
        postcopy.pause();
        let early = postcopy.request(&ram, Some("m0"), 200 << 12, 4096).unwrap_err();
        assert_eq!(answer(early), BadAnswer::EarlyRequest);

        // Every second page of the sent ones has arrived.
        let mut came = ReceivedPages::none(256);
        (sent.first..sent.end()).step_by(2).for_each(|page| came.add(page));
        let mut lie = came.clone();
        lie.add(255);
        let none = || (1, ReceivedPages::none(16));
        let error = postcopy.recover(&ram, &[(0, lie), none()]).unwrap_err();
        assert_eq!(answer(error), BadAnswer::NeverSent { block: "m0".into(), offset: 0xff000 });

        postcopy.recover(&ram, &[(0, came), none()]).unwrap();
        postcopy.may_be_asked();
        assert_eq!(postcopy.left_bytes() >> PAGE_SHIFT, 256 - sent.count / 2 + 16);
        assert!(postcopy.request(&ram, None, 0, 4096).is_err(), "the first request names its block");
        postcopy.request(&ram, Some("m0"), (sent.first + 1) << 12, 4096).unwrap();
        assert_eq!(postcopy.next_requested().map(|run| (run.block, run.first)), Some((0, sent.first + 1)));
    }
}
