//! Precopy: passes over the dirty pages while the guest runs, until the rest fits the downtime.
//!
//! Lanes do not wait for the harvest: it begins when the running pass is re-armed everywhere, and what
//! it finds is the next pass, which lanes enter as they finish. Only when the harvest says that the rest
//! fits does the control thread let the lanes run dry, look once more, and ask for the switchover.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sterna_proto::source::{Event as Fed, Refusal, Source, SwitchoverAck};
use sterna_ram::{DirtyBitmaps, PAGE_SIZE};

use super::control::Control;
use super::counters::Counts;
use super::figures::per_second;
use super::file;
use super::multifd_lane::MultifdShared;
use super::shared::lock;
use super::{ack_form, setup};
use crate::driver::Waited;
use crate::error::MigrationError;
use crate::events::Event;
use crate::order::{Clause, Pass};
use crate::params::ZeroPageDetection;
use crate::stats::Round;
use crate::vm::RunState;

const PATIENCE: Duration = Duration::from_millis(20);
/// How long to wait for acknowledgements before the next look at the dirty bits (specs/stream.md §8).
const ACK_PATIENCE: Duration = Duration::from_millis(100);
/// Harvests closer together than this say nothing about the rate.
const RATE_WINDOW: Duration = Duration::from_millis(5);

/// Where the rounds stand.
pub(super) struct Rounds {
    multifd: Arc<MultifdShared>,
    /// The pass that was published last.
    pass: Arc<Pass>,
    /// Harvested, and in no pass yet.
    next: DirtyBitmaps,
    round: Open,
    first_pass_began: Instant,
    /// When the dirty rate was last taken, and the pages found dirty since.
    harvested_at: Instant,
    dirtied: u64,
    last_sync: Duration,
}

/// The round that runs.
struct Open {
    began: Duration,
    counts: Counts,
    sync: Duration,
    stopped: bool,
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
        let multifd = setup::start_lanes(self)?;
        if !self.until(|| shared.lanes.are_through(0).then_some(())) {
            return Ok(());
        }
        shared.vm.dirty_source().start()?;
        if !is_mapped {
            self.start_ram()?;
        }
        multifd.passes_merge.store(shared.violated == Some(Clause::OncePerPass), Ordering::Release);

        let all = DirtyBitmaps::new(shared.vm.ram());
        all.set_all();
        shared.origin.leave_out(&all);
        let look_for_absent =
            shared.origin.knows_absent() || shared.params().zero_page_detection != ZeroPageDetection::None;
        let pass = Pass::new(1, shared.vm.ram(), all, look_for_absent, shared.violated);
        self.rounds = Some(Rounds {
            multifd,
            pass: Arc::new(pass),
            next: DirtyBitmaps::new(shared.vm.ram()),
            round: Open {
                began: lock(&shared.figures).clock(),
                counts: shared.counters.now(),
                sync: Duration::ZERO,
                stopped: false,
            },
            first_pass_began: Instant::now(),
            harvested_at: Instant::now(),
            dirtied: 0,
            last_sync: Duration::ZERO,
        });
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
        self.with_main(|stream| stream.ram_start(&blocks, shared.capabilities.multifd))
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
            if !self.until(|| pass.is_rearmed().then_some(())) {
                return Ok(());
            }
            self.harvest()?;
            if !self.rest_fits(pass.left()) {
                self.next_pass();
                if !self.run_dry(&pass)? {
                    return Ok(());
                }
                continue;
            }
            if !self.run_dry(&pass)? {
                return Ok(());
            }
            self.harvest()?;
            if self.rest_fits(0) && self.request_switchover() {
                return Ok(());
            }
            self.next_pass();
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

    /// Looks for pages that were written; what it finds belongs to the next pass.
    pub(super) fn harvest(&mut self) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let Some(rounds) = &mut self.rounds else { return Ok(()) };
        let began = Instant::now();
        rounds.dirtied += shared.vm.dirty_source().harvest(&mut rounds.next)?.newly_dirty;
        rounds.last_sync = began.elapsed();
        rounds.round.sync += rounds.last_sync;
        let since = rounds.harvested_at.elapsed();
        let mut figures = lock(&shared.figures);
        // A second look shortly after the first: its own rate would say little.
        if since >= RATE_WINDOW {
            figures.dirty_pages_per_second = per_second(rounds.dirtied, since);
            rounds.dirtied = 0;
            rounds.harvested_at = Instant::now();
        }
        figures.pending_bytes = rounds.next.count() * PAGE_SIZE as u64;
        Ok(())
    }

    /// Whether what is dirty, and `left` pages of the running pass, can be sent within the downtime.
    fn rest_fits(&mut self, left: u64) -> bool {
        let Some(rounds) = &self.rounds else { return false };
        let bytes = (rounds.next.count() + left) * PAGE_SIZE as u64;
        let guest_stands = self.shared.vm.run_state() != RunState::Running;
        let params = self.shared.params();
        let bandwidth = match params.avail_switchover_bandwidth_bytes {
            0 => self.bandwidth(rounds),
            stated => stated,
        };
        let moving = Duration::from_secs_f64(bytes as f64 / bandwidth.max(1) as f64);
        let expected = rounds.last_sync + moving;
        lock(&self.shared.figures).expected_downtime = expected;
        guest_stands || bytes == 0 || expected <= params.downtime_limit
    }

    /// Bytes per second while bytes move; before the first window has passed, the average so far.
    fn bandwidth(&self, rounds: &Rounds) -> u64 {
        let measured = lock(&self.shared.figures).bandwidth_bytes();
        if measured > 0 {
            return measured;
        }
        per_second(self.shared.counters.now().bytes(), rounds.first_pass_began.elapsed())
    }

    /// Makes the next pass of what was harvested.
    pub(super) fn next_pass(&mut self) {
        let ram = self.shared.vm.ram();
        let Some(rounds) = &mut self.rounds else { return };
        let bits = std::mem::replace(&mut rounds.next, DirtyBitmaps::new(ram));
        let number = rounds.pass.number() + 1;
        rounds.pass = Arc::new(Pass::new(number, ram, bits, false, self.shared.violated));
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
        let throttled = figures.throttled_between(open.counts, counts);
        figures.push_round(Round {
            number: pass.number(),
            began: open.began,
            took,
            pages: pass.pages(),
            bytes: counts.bytes() - open.counts.bytes(),
            moving: took.saturating_sub(throttled),
            sync: open.sync,
            throttled,
            dirtied_pages: found,
            stopped: open.stopped,
        });
        let stopped = figures.at_stop.is_some();
        rounds.round = Open { began: now, counts, sync: Duration::ZERO, stopped };
        figures.left_bytes = rounds.pass.left() * PAGE_SIZE as u64;
    }

    /// Marks the round that begins now as one with the guest stopped.
    pub(super) fn open_last_round(&mut self) {
        let (counts, began) = (self.shared.counters.now(), lock(&self.shared.figures).clock());
        let Some(rounds) = &mut self.rounds else { return };
        rounds.multifd.passes_merge.store(false, Ordering::Release);
        rounds.round = Open { began, counts, sync: Duration::ZERO, stopped: true };
    }

    /// Waits for `check`, keeping the figures. False: the machine wants something else done.
    pub(super) fn until(&mut self, mut check: impl FnMut() -> Option<()>) -> bool {
        loop {
            match self.shared.driver.wait(PATIENCE, &mut check) {
                Waited::Got(()) => return true,
                Waited::Interrupted => return false,
                Waited::TimedOut => {
                    if let Some(pass) = self.running_pass() {
                        lock(&self.shared.figures).left_bytes = pass.left() * PAGE_SIZE as u64;
                    }
                    self.idle();
                }
            }
        }
    }
}
