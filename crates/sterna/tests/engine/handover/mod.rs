//! Connections that are cut at every message of the handover: before, within and after the message. Afterwards one
//! side has the guest, and no page is stale, although the guest zeroes pages whenever it resumes at its source.

mod again;
mod same_host;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sterna::outgoing::Refusal;
use sterna::ram::missing_pages::MissingPages;
use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna::{Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, Status, TargetVm};
use sterna_testing::handover::{MESSAGES, Message, Place, Watch, Way, When};

use crate::common::{self, parameters};
use crate::plain::Plain;
use crate::support::proxy::{self, Filter, Line, Proxy, Verdict};

const PAGES: u64 = 256;

/// The form of a migration: transport and features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Form {
    lanes: u8,
    has_window: bool,
    is_postcopy: bool,
}

impl Form {
    /// Every form that this host supports.
    fn all(is_postcopy: bool) -> Vec<Self> {
        if is_postcopy && MissingPages::probe().is_err() {
            assert!(std::env::var_os("CI").is_none(), "userfaultfd is not available");
            return Vec::new();
        }
        let form = |(lanes, has_window)| Self { lanes, has_window, is_postcopy };
        [(0, false), (0, true), (2, false), (2, true)].map(form).to_vec()
    }

    fn has(self, message: &Message) -> bool {
        match message.when {
            When::Always => true,
            When::Precopy => !self.is_postcopy,
            When::Postcopy => self.is_postcopy,
            When::Window => self.has_window,
            When::SameHost => false,
        }
    }

    fn settings(self) -> (Parameters, Capabilities) {
        let window = if self.has_window { Duration::from_secs(60) } else { Duration::ZERO };
        // Postcopy is requested while the first round is sent.
        let max_bandwidth_bytes = if self.is_postcopy { 8 << 20 } else { 0 };
        let params = Parameters { reconnect_window: window, max_bandwidth_bytes, ..parameters() };
        let capabilities = Capabilities {
            multifd: self.lanes > 0,
            postcopy_ram: self.is_postcopy,
            ..Capabilities::default()
        };
        (Parameters { multifd_channels: self.lanes.max(1), ..params }, capabilities)
    }
}

/// A guest and its destination.
struct Bench {
    source: Arc<Plain>,
    target: Arc<Plain>,
}

/// Result of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Arrived { reconnections: usize },
    AtSource,
}

impl Bench {
    /// Creates a guest in which every page has content. It zeroes pages immediately before it stops, and when it
    /// resumes at its source.
    fn new() -> Self {
        let ram = || GuestRam::new(vec![RamBlock::new("m0", PAGES << 12, Backing::Memfd).unwrap()]).unwrap();
        let (source, target) = (Plain::new(ram()), Plain::new(ram()));
        (0..PAGES).for_each(|page| source.write(page, byte(page)));
        source.at_last(|vm| every(0, |page| vm.write(page, 0)));
        source.at_resume(|vm| {
            every(1, |page| vm.write(page, 0));
            every(2, |page| give_back(vm, page));
            every(3, |page| vm.write(page, byte(page) + 1));
            // New content in pages that were sent as zero.
            every(0, |page| vm.write(page, byte(page) + 2));
        });
        Self { source, target }
    }

    /// Migrates through `filter`, and checks which side has the guest, and each of its pages.
    fn migrate(&self, form: Form, filter: Filter) -> End {
        let (params, capabilities) = form.settings();
        let vm: Arc<dyn TargetVm> = self.target.clone();
        let at = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming = Incoming::listen(vm, &at, params.clone(), capabilities, Arc::new(())).unwrap();
        let proxy = Proxy::new(&incoming.address(), filter);
        let vm: Arc<dyn SourceVm> = self.source.clone();
        let migration = Migration::start(vm, &proxy.address(), params, capabilities, Arc::new(())).unwrap();
        if form.is_postcopy
            && let Err(refusal) = migration.start_postcopy()
        {
            // A cut at the first bytes may have ended the migration already.
            assert!(matches!(refusal, Refusal::NotActive { .. }), "{refusal}");
        }
        let ended = settle(&migration, &incoming, &proxy);
        let says = || format!("{ended:?}, {:?}", incoming.statistics().error);
        match &ended {
            (Outcome::Completed, Arrival::Completed(_)) => {
                assert!(!migration.may_guest_run(), "{}", says());
                let stale = self.stale();
                assert!(stale.is_empty(), "{} pages are wrong: {stale:?}; {}", stale.len(), says());
                End::Arrived { reconnections: migration.statistics().reconnections.len() }
            }
            (Outcome::Failed { held: false, .. }, Arrival::Failed(_)) => {
                assert!(migration.may_guest_run(), "{}", says());
                assert_eq!(self.target.ram.block(0).resident_bytes().unwrap(), 0, "{}", says());
                End::AtSource
            }
            _ => panic!("{}", says()),
        }
    }

    /// Pages that differ at the destination: number, present content, expected content.
    fn stale(&self) -> Vec<(u64, u8, u8)> {
        let read = |ram: &GuestRam, page: u64| {
            let mut content = [0; PAGE_SIZE];
            ram.block(0).read(page * PAGE_SIZE as u64, &mut content).unwrap();
            content
        };
        let both = (0..PAGES).map(|page| (page, read(&self.target.ram, page), read(&self.source.ram, page)));
        both.filter(|(_, there, here)| there != here)
            .map(|(page, there, here)| (page, there[0], here[0]))
            .collect()
    }
}

fn byte(page: u64) -> u8 {
    1 + (page % 200) as u8
}

/// An eighth of all pages; a different eighth for each kind.
fn every(kind: u64, act: impl FnMut(u64)) {
    (0..PAGES).filter(|page| page % 8 == 2 * kind).for_each(act);
}

/// A balloon takes the page: its memory is given back, and the dirty log records that.
fn give_back(vm: &Plain, page: u64) {
    vm.ram.block(0).discard_pages(page, 1).unwrap();
    vm.log.mark(0, page);
}

/// Waits for both ends. If postcopy is paused, an operator resumes it.
fn settle(migration: &Migration, incoming: &Incoming, proxy: &Proxy) -> (Outcome, Arrival) {
    let began = Instant::now();
    loop {
        if let (Some(outcome), Some(arrival)) = (migration.outcome(), incoming.arrival()) {
            return (outcome, arrival);
        }
        if [migration.status(), incoming.status()] == [Status::PostcopyPaused; 2] {
            // Refused if the reconnect window makes the source connect by itself.
            let _ = migration.resume(&proxy.address());
        }
        // Either no source has connected, or the last message of a failed source was lost. The destination then waits
        // for the whole window.
        let is_alone = migration.outcome().is_some() && began.elapsed() > Duration::from_secs(20);
        if is_alone || migration.outcome().is_some() && incoming.status() == Status::Setup {
            let _ = incoming.cancel();
        }
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "source {:?} {:?}, destination {:?} {:?}",
            migration.status(),
            migration.statistics().error,
            incoming.status(),
            incoming.statistics().error
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Cuts every connection at this place, once.
fn cut_at(message: Message, place: Place, struck: &Arc<AtomicBool>) -> Filter {
    let (mut watch, struck) = (Some(Watch::new(message)), Arc::clone(struck));
    Box::new(move |line, way, _, piece| {
        if (line, way) != (Line::Main, way_of(message.way)) {
            return Verdict::Pass;
        }
        let Some(at) = watch.as_mut().and_then(|watch| watch.passes(piece, place)) else {
            return Verdict::Pass;
        };
        watch = None;
        struck.store(true, Ordering::SeqCst);
        piece.truncate(at);
        if place == Place::After { Verdict::CutSettled } else { Verdict::Cut }
    })
}

fn way_of(way: Way) -> proxy::Way {
    match way {
        Way::Forward => proxy::Way::Forward,
        Way::Back => proxy::Way::Back,
    }
}

/// Runs one migration with this cut. If it fails, the guest's next migration must transfer every page.
fn cut(form: Form, message: Message, place: Place) {
    let bench = Bench::new();
    let struck = Arc::new(AtomicBool::new(false));
    let end = bench.migrate(form, cut_at(message, place, &struck));
    assert!(struck.load(Ordering::SeqCst), "the message was not sent: {end:?}");
    // The answer to *prepare* is the last message before the commit, and it has arrived.
    let is_final = message.way == Way::Back && message.name == "PONG prepare" && place == Place::After;
    if form.has_window && !form.is_postcopy && message.resumes && !is_final {
        assert_eq!(end, End::Arrived { reconnections: 1 });
    }
    if end == End::AtSource {
        let undisturbed = Form { is_postcopy: false, ..form };
        let end = bench.migrate(undisturbed, Box::new(|_, _, _, _| Verdict::Pass));
        assert_eq!(end, End::Arrived { reconnections: 0 }, "the next migration");
    }
}

/// Cuts at every message of that direction, and prints the name of each failed case.
fn cut_everywhere(way: Way, is_postcopy: bool) {
    common::trace();
    let mut failures = Vec::new();
    for form in Form::all(is_postcopy) {
        for message in MESSAGES.iter().filter(|message| message.way == way && form.has(message)) {
            for place in Place::ALL {
                let played = std::panic::catch_unwind(|| cut(form, *message, place));
                if let Err(why) = played {
                    let why = why.downcast_ref::<String>().cloned().unwrap_or_default();
                    failures.push(format!("{place:?} {} ({form:?}): {why}", message.name));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} cases:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn precopy_cut_at_any_message_of_the_source_leaves_one_whole_guest() {
    cut_everywhere(Way::Forward, false);
}

#[test]
fn precopy_cut_at_any_message_of_the_destination_leaves_one_whole_guest() {
    cut_everywhere(Way::Back, false);
}

#[test]
fn postcopy_cut_at_any_message_of_the_source_leaves_one_whole_guest() {
    cut_everywhere(Way::Forward, true);
}

#[test]
fn postcopy_cut_at_any_message_of_the_destination_leaves_one_whole_guest() {
    cut_everywhere(Way::Back, true);
}
