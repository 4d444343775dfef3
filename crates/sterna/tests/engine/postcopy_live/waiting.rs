//! Callbacks of the VMM that wait for a page while the connection breaks: an operator's stop, the start, an
//! announcement.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::ram::{Backing, Custody, GuestRam, PAGE_SIZE, RamBlock};
use sterna::{
    Arrival, Device, Event, Hook, Incoming, Migration, Outcome, Parameters, RunState, SourceVm, Status,
    TargetVm, Vm, VmError,
};
use sterna_guests::Verdict;
use sterna_guests::process::ProcessGuest;
use sterna_wire::main::Command;
use sterna_wire::ram::RamRecordWriter;
use sterna_wire::return_path::ReturnMessage;

use super::peer::HandMadeSource;
use super::recovery::{Cable, Split};
use super::{capabilities, config, slow};
use crate::common::{self, Log};
use crate::plain::Plain;
use crate::support::{eventually, has_warning, until_status};

const PAGES: u64 = 8192;
/// The last page that the background sends.
const LAST: u64 = PAGES - 1;

/// Stops the guest in another thread, like an operator's `stop` does through the engine.
fn stop_by_operator(split: &Split) -> Receiver<Result<(), Custody>> {
    let (ram, target) = (split.target.ram(), Arc::clone(&split.target));
    let (tell, stopped) = channel();
    std::thread::spawn(move || {
        let done = ram.while_free(|| target.pause().expect("there is a guest"));
        let _ = tell.send(done);
    });
    stopped
}

#[test]
fn operators_stop_that_waits_for_a_page_does_not_keep_the_connection_from_being_recovered() {
    let Some(split) = Split::plain(false) else { return };
    split.cable.hold_main();
    eventually("a writer waits", || !split.target.wait_progress(1, Duration::from_millis(500)));
    let stopped = stop_by_operator(&split);
    assert!(stopped.recv_timeout(Duration::from_millis(300)).is_err(), "it waits for the vCPU");

    split.cable.cut();

    split.paused();
    assert_eq!(split.target.ram().while_free(|| ()), Err(Custody::Arriving { is_free: false }));
    split.migration.resume(&split.cable.at).unwrap();
    let stopped = stopped.recv_timeout(Duration::from_secs(30));
    assert_eq!(stopped, Ok(Ok(())), "the page came");
    assert!(matches!(split.migration.wait(), Outcome::Completed));
    let arrival = split.incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
    assert_eq!(split.target.run_state(), RunState::Paused, "the operator's word");
    let verdict = split.target.check().unwrap();
    assert!(matches!(verdict, Verdict::Consistent { .. }), "every page is there: {verdict:?}");
    split.target.cont().unwrap();
    common::assert_lives_on(&split.target);
}

/// Breaks the connection, once.
type Cuts = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// Breaks the connection, then waits for a page of guest memory that cannot arrive over it.
fn touches(ram: &GuestRam, cuts: &Cuts) {
    if let Some(cut) = cuts.lock().unwrap().take() {
        cut();
    }
    let mut content = [0; PAGE_SIZE];
    ram.block(0).read(LAST * PAGE_SIZE as u64, &mut content).unwrap();
    assert_eq!(content, [byte(LAST); PAGE_SIZE], "the guest's page, not zeros");
}

/// Breaks the connection and then touches a page of guest memory, in the named callbacks.
struct Touching {
    plain: Arc<Plain>,
    cuts: Cuts,
    in_start: bool,
    in_announcement: bool,
    fails: AtomicBool,
    starts: AtomicU32,
    takes_over: AtomicU32,
}

impl Touching {
    fn new(in_start: bool, in_announcement: bool) -> Arc<Self> {
        Arc::new(Self {
            plain: Plain::new(ram()),
            cuts: Cuts::default(),
            in_start,
            in_announcement,
            fails: AtomicBool::new(false),
            starts: AtomicU32::new(0),
            takes_over: AtomicU32::new(0),
        })
    }
}

impl Vm for Touching {
    fn machine_type(&self) -> String {
        self.plain.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.plain.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        let touches = self.in_announcement.then(|| Arc::clone(&self.cuts));
        vec![Arc::new(Announces { ram: self.plain.ram.clone(), touches })]
    }
}

impl TargetVm for Touching {
    fn start(&self) -> Result<(), VmError> {
        self.starts.fetch_add(1, Ordering::SeqCst);
        if self.in_start {
            touches(&self.plain.ram, &self.cuts);
        }
        match self.fails.load(Ordering::SeqCst) {
            true => Err(VmError::new("start", "told to fail")),
            false => Ok(()),
        }
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.takes_over.fetch_add(1, Ordering::SeqCst);
        touches(&self.plain.ram, &self.cuts);
        Ok(())
    }
    fn reset(&self) {}
}

/// Announces the guest's new place to the network, through a queue in guest memory.
struct Announces {
    ram: GuestRam,
    touches: Option<Cuts>,
}

impl Hook for Announces {
    fn name(&self) -> String {
        "network".to_owned()
    }
    fn announce(&self) -> Result<(), VmError> {
        if let Some(cuts) = &self.touches {
            touches(&self.ram, cuts);
        }
        Ok(())
    }
}

fn ram() -> GuestRam {
    GuestRam::new(vec![RamBlock::new("m0", PAGES * PAGE_SIZE as u64, Backing::Memfd).unwrap()]).unwrap()
}

fn byte(page: u64) -> u8 {
    1 + (page % 200) as u8
}

/// A source whose guest runs at `target` before its pages arrive, over a cable that `target` cuts.
struct Begun {
    target: Arc<Touching>,
    source: Arc<Plain>,
    incoming: Incoming,
    migration: Migration,
    cable: Arc<Cable>,
    log: Arc<Log>,
}

impl Begun {
    fn new(target: Arc<Touching>, params: &Parameters, autostart: bool) -> Option<Self> {
        let on = capabilities(false)?;
        let source = Plain::new(ram());
        (0..PAGES).for_each(|page| source.write(page, byte(page)));
        let log = Arc::new(Log::default());
        let at = "tcp:127.0.0.1:0".parse().unwrap();
        let incoming =
            Incoming::listen(Arc::clone(&target) as _, &at, params.clone(), on, log.clone()).unwrap();
        assert!(incoming.set_autostart(autostart));
        let cable = Arc::new(Cable::to(&incoming.address()));
        let cuts = Arc::clone(&cable);
        *target.cuts.lock().unwrap() = Some(Box::new(move || {
            cuts.cut();
            std::thread::sleep(Duration::from_millis(200));
        }));
        let vm: Arc<dyn SourceVm> = source.clone();
        let migration = Migration::start(vm, &cable.at, params.clone(), on, Arc::new(())).unwrap();
        migration.start_postcopy().unwrap();
        Some(Self { target, source, incoming, migration, cable, log })
    }

    fn paused(&self) {
        until_status(&self.migration, Status::PostcopyPaused);
        eventually("the pause", || self.incoming.status() == Status::PostcopyPaused);
        self.incoming.cancel().expect_err("pages are missing that only the source has");
        self.migration.cancel().expect_err("the guest is at the destination");
        assert!(!self.source.ram.custody().may_run());
    }

    /// Waits until every page has arrived. Returns the result.
    fn recovered(&self) -> Arrival {
        self.migration.resume(&self.cable.at).unwrap();
        assert!(matches!(self.migration.wait(), Outcome::Completed));
        let arrival = self.incoming.wait();
        let page = |page: u64| crate::plain::byte_of(&self.target.plain.ram, page);
        assert!((0..PAGES).all(|index| page(index) == byte(index)), "every page is there");
        arrival
    }
}

#[test]
fn start_that_waits_for_a_page_when_the_connection_breaks_ends_after_the_recovery() {
    let Some(begun) = Begun::new(Touching::new(true, false), &slow(), true) else { return };
    begun.paused();
    assert!(!begun.target.plain.ram.custody().may_run(), "no operator's act before it is started");

    let arrival = begun.recovered();

    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
    assert_eq!(begun.target.starts.load(Ordering::SeqCst), 1);
    assert_eq!(begun.target.plain.ram.custody(), Custody::Arrived);
    let resumed = |event: &&Event| matches!(event, Event::Resumed);
    assert_eq!(begun.log.events().iter().filter(resumed).count(), 1);
}

#[test]
fn source_with_a_reconnect_window_recovers_a_start_that_waits_by_itself() {
    let params = Parameters { reconnect_window: Duration::from_secs(20), ..slow() };
    let Some(begun) = Begun::new(Touching::new(true, false), &params, true) else { return };

    assert!(matches!(begun.migration.wait(), Outcome::Completed));

    let arrival = begun.incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
}

#[test]
fn guest_that_stays_paused_and_is_taken_over_while_the_connection_breaks_is_recovered() {
    let Some(begun) = Begun::new(Touching::new(true, false), &slow(), false) else { return };
    begun.paused();

    let arrival = begun.recovered();

    assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
    let calls = [&begun.target.starts, &begun.target.takes_over].map(|calls| calls.load(Ordering::SeqCst));
    assert_eq!(calls, [0, 1]);
}

/// By then the source knows that the destination has the guest.
#[test]
fn start_that_fails_after_the_recovery_leaves_the_guest_paused_at_the_destination() {
    let target = Touching::new(true, false);
    target.fails.store(true, Ordering::SeqCst);
    let Some(begun) = Begun::new(target, &slow(), true) else { return };
    begun.paused();

    let arrival = begun.recovered();

    assert!(matches!(arrival, Arrival::Completed(RunState::Paused)), "{arrival:?}");
    let calls = [&begun.target.starts, &begun.target.takes_over].map(|calls| calls.load(Ordering::SeqCst));
    assert_eq!(calls, [1, 1]);
    assert_eq!(begun.source.ram.custody(), Custody::Gone);
    assert_eq!(begun.target.plain.ram.custody(), Custody::Arrived, "an operator may start it");
    let events = begun.log.events();
    assert!(has_warning(&events, &["told to fail", "cont"]), "{events:#?}");
}

#[test]
fn announcement_that_waits_for_a_page_does_not_keep_the_connection_from_being_recovered() {
    let target = Touching::new(false, true);
    let Some(begun) = Begun::new(target, &slow(), true) else { return };
    begun.paused();

    let arrival = begun.recovered();

    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
}

/// A guest whose start lasts until the test allows it.
struct HeldBack {
    guest: Arc<ProcessGuest>,
    go: Mutex<Receiver<()>>,
}

impl Vm for HeldBack {
    fn machine_type(&self) -> String {
        self.guest.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.guest.devices()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.guest.hooks()
    }
}

impl TargetVm for HeldBack {
    fn start(&self) -> Result<(), VmError> {
        self.go.lock().unwrap().recv().unwrap();
        self.guest.start()
    }
    fn take_over_paused(&self) -> Result<(), VmError> {
        self.guest.take_over_paused()
    }
    fn reset(&self) {
        self.guest.reset();
    }
}

/// The stream has ended, and the destination waits for a page of the preempt channel. The end of the start interrupts
/// this wait.
#[test]
fn last_page_that_comes_after_the_end_of_the_stream_and_of_the_start_ends_the_migration() {
    let Some(on) = capabilities(true) else { return };
    let (source, target) = common::pair(&config());
    assert!(source.wait_progress(20, Duration::from_secs(20)));
    let (go, wait) = channel();
    let vm = Arc::new(HeldBack { guest: Arc::clone(&target), go: Mutex::new(wait) });
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = Incoming::listen(vm, &at, slow(), on, Arc::new(())).unwrap();
    let mut played = HandMadeSource::of(&source, &incoming.address());
    played.open(PAGE_SIZE as u64);
    played.hear_pong(0x10);
    let mut preempt = played.preempt();
    played.discard_all();
    let devices = played.devices();
    played.package(&devices, &[Command::Ping(3), Command::PostcopyRun]);
    played.hear_pong(3);
    let pages = played.every_page();
    let (last, others) = pages.split_last().unwrap();
    others.chunks(64).for_each(|pages| played.pages(pages.iter().copied()));
    played.end();
    std::thread::sleep(Duration::from_millis(300));

    go.send(()).unwrap();

    assert!(target.wait_progress(1, Duration::from_secs(30)), "the guest runs");
    let mut record = Vec::new();
    played.record(&mut RamRecordWriter::new(), last.0, last.1, &mut record);
    preempt.write_all(&record).unwrap();
    let mut answers = std::iter::from_fn(|| played.hear());
    assert!(answers.any(|answer| answer == ReturnMessage::Shut(0)), "the source may end");
    drop(played);
    let arrival = incoming.wait();
    assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
}
