//! Precopy: passes over the dirty pages while the guest runs, until the rest fits the downtime.
//!
//! Lanes do not wait for the harvest: it begins while they send the end of the running pass, early enough to be
//! done when they are, and what it finds is the next pass, which they enter as they finish. Only when the
//! harvest says that the rest fits does the control thread let the lanes run dry, look once more, and ask
//! for the switchover.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_proto::source::{Event as Fed, Refusal, Source, SwitchoverAck};
use sterna_ram::{DirtyBitmaps, PAGE_SIZE};

use super::control::Control;
use super::converging::Watch;
use super::counters::Counts;
use super::figures::per_second;
use super::file;
use super::multifd_lane::MultifdShared;
use super::pace::LONGEST;
use super::shared::lock;
use super::{ack_form, setup};
use crate::driver::Waited;
use crate::error::MigrationError;
use crate::events::Event;
use crate::forecast::{FIXED_PAUSE, Pause};
use crate::order::{Clause, Pass, SliceSize};
use crate::params::ZeroPageDetection;
use crate::stats::{Round, SyncParts};
use crate::threads::call;
use crate::vm::RunState;

const PATIENCE: Duration = Duration::from_millis(20);
/// With so many pages a network is tried that carried none with content so far: 4 MiB.
const TRIED_PAGES: u64 = 1024;
/// How long a round waits for devices, when nothing but their state is left.
const STREAM_PATIENCE: Duration = Duration::from_millis(20);
/// How long to wait for acknowledgements before the next look at the dirty bits (specs/stream.md §8).
const ACK_PATIENCE: Duration = Duration::from_millis(100);
/// Harvests closer together than this say nothing about the rate.
const RATE_WINDOW: Duration = Duration::from_millis(5);
/// A harvest begins so much earlier than it would have to by its own time: a thread must wake, a pass be made.
const HEAD_START: Duration = Duration::from_micros(500);

/// Where the rounds stand.
pub(super) struct Rounds {
    multifd: Arc<MultifdShared>,
    /// The pass that was published last.
    pass: Arc<Pass>,
    /// Harvested, and in no pass yet.
    next: DirtyBitmaps,
    round: Open,
    /// When the dirty rate was last taken, and the pages found dirty since.
    harvested_at: Instant,
    dirtied: u64,
    last_sync: Duration,
    /// Whether the rest fitted when it was looked at last.
    pub fits: bool,
    /// Whether it would have without what devices have left to be read.
    waits_for_streams: bool,
    pub watch: Watch,
}

/// The round that runs.
struct Open {
    began: Duration,
    counts: Counts,
    sync: Duration,
    sync_parts: SyncParts,
    stopped: bool,
}

impl Open {
    fn new(began: Duration, counts: Counts, stopped: bool) -> Self {
        Self { began, counts, sync: Duration::ZERO, sync_parts: SyncParts::default(), stopped }
    }
}

impl Control {
    /// Performs `StartPrecopy`: returns when the machine wants something else done.
    pub(super) fn precopy(&mut self) -> Result<(), MigrationError> {
        self.introduce_peer();
        self.count_acknowledgements();
        let shared = Arc::clone(&self.shared);
        let is_mapped = shared.capabilities.mapped_ram;
        if is_mapped {
            // Lanes into a file must know the places of pages.
            self.start_ram()?;
        }
        self.begin_streams()?;
        let multifd = setup::start_lanes(self)?;
        if !self.until(|| shared.lanes.are_through(0).then_some(())) {
            return Ok(());
        }
        call("DirtySource::start", || shared.vm.dirty_source().start())?;
        if !is_mapped {
            self.start_ram()?;
        }
        multifd.passes_merge.store(shared.violated == Some(Clause::OncePerPass), Ordering::Release);

        let all = DirtyBitmaps::new(&shared.ram);
        all.set_all();
        shared.origin.leave_out(&all);
        let look_for_absent =
            shared.origin.knows_absent() || shared.params().zero_page_detection != ZeroPageDetection::None;
        let ram = &shared.ram;
        let slices = SliceSize::for_ram(ram.total_bytes() / PAGE_SIZE as u64);
        let pass = Pass::new(1, ram, slices, all, look_for_absent, shared.violated);
        self.rounds = Some(Rounds {
            multifd,
            pass: Arc::new(pass),
            next: DirtyBitmaps::new(&shared.ram),
            round: Open::new(lock(&shared.figures).clock(), shared.counters.now(), false),
            harvested_at: Instant::now(),
            dirtied: 0,
            last_sync: Duration::ZERO,
            fits: false,
            waits_for_streams: false,
            watch: Watch::new(shared.counters.now()),
        });
        lock(&shared.figures).begin_pages(shared.counters.now());
        self.enter_pass();
        self.go_round()
    }

    /// Writes what stands before RAM, and RAM's START section.
    fn start_ram(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let blocks = shared.origin.blocks();
        self.with_main(|stream| shared.origin.send_early(stream))?;
        if shared.capabilities.mapped_ram {
            return file::start_ram(self, &blocks);
        }
        self.with_main(|stream| {
            stream.ram_start(&blocks, shared.capabilities.multifd)?;
            shared.origin.send_setup(stream)
        })
    }

    /// Of the present form of `switchover-ack`: one is due for each device that asks (specs/stream.md §5.3).
    fn count_acknowledgements(&self) {
        let vm = &self.shared.vm;
        if ack_form(&self.shared.capabilities, &vm.machine_type()) == SwitchoverAck::Modern {
            for _ in vm.devices().iter().filter(|device| device.asks_switchover_ack()) {
                self.shared.report(Fed::DeviceAsksAck);
            }
        }
    }

    /// Says what the peer turned out to be; without a return path nobody knows.
    fn introduce_peer(&self) {
        if self.shared.capabilities.return_path {
            let peer = self.shared.driver.look(Source::peer);
            lock(&self.shared.figures).peer_is_sterna = Some(peer.sterna);
            self.shared.tell(&Event::Peer { sterna: peer.sterna, features: peer.features });
        }
    }

    fn go_round(&mut self) -> Result<(), MigrationError> {
        loop {
            let Some(pass) = self.running_pass() else { return Ok(()) };
            if !self.until_nearly_sent(&pass) {
                return Ok(());
            }
            self.harvest()?;
            if !self.rest_fits(pass.left()) {
                if !self.wait_for_streams() {
                    return Ok(());
                }
                self.next_pass();
                if !self.run_dry(&pass)? {
                    return Ok(());
                }
                self.converge()?;
                continue;
            }
            if !self.run_dry(&pass)? {
                return Ok(());
            }
            self.harvest()?;
            if self.rest_fits(0) && self.request_switchover() {
                return Ok(());
            }
            if !self.wait_for_streams() {
                return Ok(());
            }
            self.next_pass();
            self.converge()?;
        }
    }

    /// Where only devices keep the rest from fitting, round after round over a few pages would bring nothing nearer:
    /// gives them a while. False: the machine wants something else done.
    fn wait_for_streams(&mut self) -> bool {
        let waits = self.rounds.as_ref().is_some_and(|rounds| rounds.waits_for_streams);
        !waits || self.until_or(STREAM_PATIENCE, || None)
    }

    /// Waits until half of the pass is sent and lanes need no longer for its rest than twice a harvest, and a little.
    /// False: the machine wants something else done.
    fn until_nearly_sent(&mut self, pass: &Pass) -> bool {
        loop {
            if pass.is_rearmed() {
                return true;
            }
            let left = self.lanes_need(pass.left()).unwrap_or(PATIENCE);
            let head =
                self.rounds.as_ref().map_or(Duration::ZERO, |rounds| rounds.last_sync * 2) + HEAD_START;
            // A harvest sooner than in the second half would find little: what is unsent is dropped from it.
            if left <= head && pass.left() * 2 <= pass.pages() && pass.is_searched() {
                return true;
            }
            let patience = left.saturating_sub(head).clamp(HEAD_START, PATIENCE);
            if !self.until_or(patience, || pass.is_rearmed().then_some(())) {
                return false;
            }
        }
    }

    /// Asks for the switchover. False: the destination's acknowledgements are missing, go on.
    fn request_switchover(&mut self) -> bool {
        let guest_running = self.shared.vm.run_state() == RunState::Running;
        match self.shared.feed(Fed::SwitchoverRequested { guest_running }) {
            Err(Refusal::AcknowledgementsMissing { .. }) => {
                // Nothing is left to send: wait for the news, not for the processor.
                let _: Waited<()> = self.shared.driver.wait(ACK_PATIENCE, || None);
                false
            }
            Err(refusal) => {
                self.shared.note_error(MigrationError::Internal(refusal.to_string()));
                self.shared.report(Fed::LocalFailure);
                true
            }
            Ok(()) => true,
        }
    }

    /// Waits until every lane is through with `pass`, and writes its flush. False: the machine interrupts.
    pub(super) fn run_dry(&mut self, pass: &Pass) -> Result<bool, MigrationError> {
        let shared = Arc::clone(&self.shared);
        let number = pass.number();
        if !self.until(|| shared.lanes.are_through(number).then_some(())) {
            return Ok(false);
        }
        let merging = |rounds: &Rounds| rounds.multifd.passes_merge.load(Ordering::Acquire);
        if self.file.is_some() {
            // In the last round all of it is put on the disk at once, behind the devices.
            if self.rounds.as_ref().is_some_and(|rounds| !rounds.round.stopped) {
                file::settle(self)?;
            }
        } else if shared.capabilities.multifd && !self.rounds.as_ref().is_some_and(merging) {
            self.with_main(|stream| stream.ram_part(false, true))?;
        }
        shared.lanes.queue.flushed(number);
        self.close_round(pass);
        Ok(true)
    }

    /// Looks for pages that were written; what it finds belongs to the next pass. Pages that the running pass still
    /// has to send do not: it reads them later than now (clause 6).
    pub(super) fn harvest(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let Some(rounds) = &mut self.rounds else { return Ok(()) };
        let began = Instant::now();
        let harvest = call("DirtySource::harvest", || shared.vm.dirty_source().harvest(&mut rounds.next))?;
        let dropped = rounds.pass.drop_unsent(&mut rounds.next);
        rounds.dirtied += harvest.newly_dirty.saturating_sub(dropped);
        rounds.last_sync = began.elapsed();
        rounds.round.sync += rounds.last_sync;
        rounds.round.sync_parts += harvest.times;
        let since = rounds.harvested_at.elapsed();
        let mut figures = lock(&shared.figures);
        // A second look shortly after the first: its own rate would say little.
        if since >= RATE_WINDOW {
            figures.dirty_pages_per_second = per_second(rounds.dirtied, since);
            rounds.watch.dirtied_pages += rounds.dirtied;
            rounds.dirtied = 0;
            rounds.harvested_at = Instant::now();
        }
        figures.pending_bytes = rounds.next.count() * PAGE_SIZE as u64;
        Ok(())
    }

    /// Whether what is dirty, and `left` pages of the running pass, can be sent within the downtime.
    fn rest_fits(&mut self, left: u64) -> bool {
        let (fits, waits_for_streams) = self.decide(left);
        if let Some(rounds) = &mut self.rounds {
            (rounds.fits, rounds.waits_for_streams) = (fits, waits_for_streams);
        }
        fits
    }

    /// Whether the rest fits; if not, whether it would but for devices.
    fn decide(&self, left: u64) -> (bool, bool) {
        let Some(rounds) = &self.rounds else { return (false, false) };
        let pages = rounds.next.count() + left;
        let is_running = self.shared.vm.run_state() == RunState::Running;
        if !is_running {
            return (true, false);
        }
        let Some((stream_bytes, slowest_stream)) = self.streams_left() else { return (false, true) };
        if pages == 0 && stream_bytes == 0 {
            return (true, false);
        }
        // What sockets hold goes out before the last pages do.
        let queued = self.shared.unsent_bytes().div_ceil(PAGE_SIZE as u64);
        let stream_pages = stream_bytes.div_ceil(PAGE_SIZE as u64);
        let needs = |pages| self.pause_needs(pages);
        let Some((sending, moving)) =
            needs(pages + queued).zip(needs((pages + queued).saturating_add(stream_pages)))
        else {
            return (false, false);
        };
        // Devices are read and loaded beside each other, and beside the pages.
        let moving = moving.max(slowest_stream);
        let params = self.shared.params();
        let (fixed, look) = (self.fixed_pause(), rounds.last_sync);
        let mut figures = lock(&self.shared.figures);
        figures.expected_downtime = fixed + look + moving;
        let margin = figures.pace(self.shared.counters.now()).margin(params.max_bandwidth_bytes);
        let [fixed, look, sending, rest] = [fixed, look, sending, moving].map(|part| part.as_secs_f64());
        let limit = params.downtime_limit.as_secs_f64();
        let pause = Pause { fixed, look, rest, margin };
        let fits = pause.fits(limit);
        tracing::debug!(pages, queued, fixed, look, rest, margin, fits, "the rest");
        (fits, !fits && Pause { rest: sending, ..pause }.fits(limit))
    }

    /// How long what is left of devices' streams takes, if nothing else had to move.
    pub(super) fn streams_need(&self) -> Duration {
        let (bytes, slowest) = self.streams_left().unwrap_or_default();
        self.pause_needs(bytes.div_ceil(PAGE_SIZE as u64)).unwrap_or_default().max(slowest)
    }

    /// What the pause takes besides pages: stopping, devices, *prepare* and the start. Each of the latter costs a
    /// round trip.
    fn fixed_pause(&self) -> Duration {
        self.round_trip * 2 + FIXED_PAUSE
    }

    /// How long `pages` pages will take with the guest stopped; None before anything was measured.
    fn pause_needs(&self, pages: u64) -> Option<Duration> {
        match self.shared.params().avail_switchover_bandwidth_bytes {
            // `max-bandwidth` holds nobody back then, but nobody has seen what goes without it.
            0 => self.lanes_need(pages),
            stated => {
                let seconds = pages as f64 * PAGE_SIZE as f64 / stated as f64;
                Some(Duration::from_secs_f64(seconds.min(LONGEST)))
            }
        }
    }

    /// How long `pages` pages take as lanes go; None before anything was measured.
    fn lanes_need(&self, pages: u64) -> Option<Duration> {
        let limit = self.shared.params().max_bandwidth_bytes;
        lock(&self.shared.figures).pace(self.shared.counters.now()).time_for(pages, limit)
    }

    /// Makes the next pass of what was harvested.
    pub(super) fn next_pass(&mut self) {
        let ram = &self.shared.ram;
        let is_untried = !lock(&self.shared.figures).pace(self.shared.counters.now()).is_tried();
        let Some(rounds) = &mut self.rounds else { return };
        let bits = std::mem::replace(&mut rounds.next, DirtyBitmaps::new(ram));
        // Devices' state may be large: what the network carries is tried with pages that nobody would send.
        let tries = rounds.waits_for_streams && is_untried;
        if tries {
            let block = bits.block(0);
            block.set_range(0, TRIED_PAGES.min(block.pages()));
            self.shared.origin.leave_out(&bits);
        }
        let number = rounds.pass.number() + 1;
        let slices = rounds.pass.next_slices().at_most(ram.total_bytes() / PAGE_SIZE as u64);
        let pass = Pass::new(number, ram, slices, bits, false, self.shared.violated);
        rounds.pass = Arc::new(if tries { pass.sending_zeros() } else { pass });
        self.enter_pass();
    }

    pub(super) fn running_pass(&self) -> Option<Arc<Pass>> {
        self.rounds.as_ref().map(|rounds| Arc::clone(&rounds.pass))
    }

    /// Lets the lanes begin the pass that was made last.
    fn enter_pass(&mut self) {
        let Some(pass) = self.running_pass() else { return };
        let mut figures = lock(&self.shared.figures);
        figures.rounds_begun = pass.number();
        figures.pending_bytes = 0;
        figures.left_bytes = pass.pages() * PAGE_SIZE as u64;
        drop(figures);
        self.shared.lanes.queue.publish(Arc::clone(&pass));
        self.streams_enter_round(pass.number());
        self.shared.tell(&Event::Pass(pass.number()));
    }

    fn close_round(&mut self, pass: &Pass) {
        let counts = self.shared.counters.now();
        let Some(rounds) = &mut self.rounds else { return };
        let mut figures = lock(&self.shared.figures);
        figures.observe(counts);
        let (now, open) = (figures.clock(), &rounds.round);
        // What its harvest found is the next pass already, or waits for more.
        let is_followed = rounds.pass.number() > pass.number();
        let found = if is_followed { rounds.pass.pages() } else { rounds.next.count() };
        let took = now - open.began;
        let mut lanes = figures.lanes_between(open.counts, counts);
        // A wait is counted when it is over: it may have begun before the round, as an operator's in pre-switchover.
        lanes.idle = lanes.idle.min(took.saturating_sub(lanes.busy() + lanes.throttled));
        figures.push_round(Round {
            number: pass.number(),
            began: open.began,
            took,
            pages: pass.pages(),
            bytes: counts.bytes() - open.counts.bytes(),
            lanes,
            sync: open.sync,
            sync_parts: open.sync_parts,
            dirtied_pages: found,
            stopped: open.stopped,
        });
        let stopped = figures.at_stop.is_some();
        rounds.round = Open::new(now, counts, stopped);
        figures.left_bytes = rounds.pass.left() * PAGE_SIZE as u64;
    }

    /// Marks the round that begins now as one with the guest stopped.
    pub(super) fn open_last_round(&mut self) {
        let (counts, began) = (self.shared.counters.now(), lock(&self.shared.figures).clock());
        let Some(rounds) = &mut self.rounds else { return };
        rounds.multifd.passes_merge.store(false, Ordering::Release);
        rounds.round = Open::new(began, counts, true);
    }

    /// Waits for `check`, keeping the figures. False: the machine wants something else done.
    pub(super) fn until(&mut self, mut check: impl FnMut() -> Option<()>) -> bool {
        let mut is_there = false;
        while !is_there {
            let mut look = || check().inspect(|()| is_there = true);
            if !self.until_or(PATIENCE, &mut look) {
                return false;
            }
        }
        true
    }

    /// As [`Control::until`], and no longer than `patience`.
    fn until_or(&mut self, patience: Duration, check: impl FnMut() -> Option<()>) -> bool {
        match self.shared.driver.wait(patience, check) {
            Waited::Got(()) => true,
            Waited::Interrupted => false,
            Waited::TimedOut => {
                if let Some(pass) = self.running_pass() {
                    lock(&self.shared.figures).left_bytes = pass.left() * PAGE_SIZE as u64;
                }
                self.idle();
                true
            }
        }
    }
}
