//! Pages with memory errors: no guest is handed over while a failed page is known, on either side and at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::*;
use crate::plain::Plain;
use sterna::ram::{Backing, GuestRam, PAGE_SIZE, PoisonedPage, RamBlock, RamError};
use sterna::{
    Address, Arrival, Capabilities, Event, Hook, Incoming, Migration, MigrationError, Observer, Outcome,
    Parameters, SourceVm, SwitchoverStep, TargetVm, VmError,
};
use sterna_testing::SmallDisk;

const PAGES: u64 = 500;
/// A page that is empty at the source.
const EMPTY: u64 = 300;
const FULL: u64 = 301;

fn plain() -> Arc<Plain> {
    let block = RamBlock::new("ram", PAGES * PAGE_SIZE as u64, Backing::Memfd).unwrap();
    Plain::new(GuestRam::new(vec![block]).unwrap())
}

fn source() -> Arc<Plain> {
    let source = plain();
    (0..PAGES).filter(|page| page % 3 != 0).for_each(|page| source.write(page, 5));
    source
}

fn mark(vm: &Plain, page: u64) {
    vm.ram.block(0).mark_poisoned(page, 1).unwrap();
}

fn place_of(page: u64) -> Vec<PoisonedPage> {
    vec![PoisonedPage { block: "ram".into(), offset: page * PAGE_SIZE as u64, guest_address: None }]
}

fn ways() -> [(Parameters, Capabilities); 2] {
    let (params, capabilities) = multifd(2);
    [(params.clone(), capabilities), (params, Capabilities { multifd: false, ..capabilities })]
}

fn listen(target: &Arc<Plain>, at: &Address, params: &Parameters, capabilities: Capabilities) -> Incoming {
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    Incoming::listen(vm, at, params.clone(), capabilities, Arc::new(())).unwrap()
}

fn start(
    source: &Arc<Plain>,
    to: &Address,
    params: &Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> Migration {
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    Migration::start(vm, to, params.clone(), capabilities, observer).unwrap()
}

fn run(
    source: &Arc<Plain>,
    target: &Arc<Plain>,
    params: &Parameters,
    capabilities: Capabilities,
    observer: Arc<dyn Observer>,
) -> (Outcome, Arrival) {
    let incoming = listen(target, &"tcp:127.0.0.1:0".parse().unwrap(), params, capabilities);
    let migration = start(source, &incoming.address(), params, capabilities, observer);
    (migration.wait(), incoming.wait())
}

/// Asserts that the destination failed because of `page`, and the source's guest continues to run.
fn assert_refused_there(outcome: &Outcome, arrival: &Arrival, page: u64) {
    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    assert!(matches!(error, MigrationError::DestinationFailed(1)), "{error}");
    let Arrival::Failed(MigrationError::Poisoned { pages, .. }) = arrival else { panic!("{arrival:?}") };
    assert_eq!(*pages, place_of(page));
}

/// Asserts that the source failed because of `page`, and its guest continues to run.
fn assert_refused_here(outcome: &Outcome, arrival: &Arrival, page: u64) {
    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    let MigrationError::Poisoned { pages, .. } = error else { panic!("{error}") };
    assert_eq!(*pages, place_of(page));
    assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
}

/// Runs a callback when all state is loaded, before *prepare* is answered.
struct Acts<F> {
    acquired: F,
    given_back: AtomicU32,
}

impl<F: Fn() + Send + Sync> Acts<F> {
    fn at(vm: &Plain, acquired: F) -> Arc<Self>
    where
        F: 'static,
    {
        let hook = Arc::new(Self { acquired, given_back: AtomicU32::new(0) });
        vm.add_hook(Arc::clone(&hook) as _);
        hook
    }
}

impl<F: Fn() + Send + Sync> Hook for Acts<F> {
    fn name(&self) -> String {
        "acts".into()
    }
    fn acquire(&self) -> Result<(), VmError> {
        (self.acquired)();
        Ok(())
    }
    fn give_back(&self) {
        self.given_back.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn page_that_failed_at_the_destination_after_its_bytes_came_is_noticed_before_prepare_is_answered() {
    for (params, capabilities) in ways() {
        let (source, target) = (source(), plain());
        let ram = target.ram.clone();
        let hook = Acts::at(&target, move || ram.block(0).mark_poisoned(FULL, 1).unwrap());

        let (outcome, arrival) = run(&source, &target, &params, capabilities, Arc::new(()));

        assert_refused_there(&outcome, &arrival, FULL);
        assert_eq!(hook.given_back.load(Ordering::SeqCst), 1);
        assert_eq!(target.ram.block(0).resident_bytes().unwrap(), 0, "nothing is left");
        assert!(target.ram.poisoned().is_empty(), "the page went with the rest");
    }
}

#[test]
fn page_that_failed_at_the_destination_and_for_which_no_byte_came_is_noticed() {
    for (params, capabilities) in ways() {
        let (source, target) = (source(), plain());
        mark(&target, EMPTY);

        let (outcome, arrival) = run(&source, &target, &params, capabilities, Arc::new(()));

        assert_refused_there(&outcome, &arrival, EMPTY);
    }
}

#[test]
fn page_that_failed_where_a_guest_is_restored_is_noticed_before_the_guest_starts() {
    let directory = tempfile::tempdir().unwrap();
    for mapped_ram in [false, true] {
        // Arrange: an image of the guest.
        let at: Address = format!("file:{}/{mapped_ram}", directory.path().display()).parse().unwrap();
        let capabilities = Capabilities { mapped_ram, ..Capabilities::default() };
        let saved = start(&source(), &at, &parameters(), capabilities, Arc::new(())).wait();
        assert!(matches!(saved, Outcome::Completed), "{saved:?}");
        let target = plain();
        mark(&target, EMPTY);

        let arrival = listen(&target, &at, &parameters(), capabilities).wait();

        let Arrival::Failed(MigrationError::Poisoned { pages, .. }) = &arrival else { panic!("{arrival:?}") };
        assert_eq!(*pages, place_of(EMPTY));
        // The memory was given back, so that the next attempt has sound pages.
        let again = listen(&target, &at, &parameters(), capabilities).wait();
        assert!(matches!(again, Arrival::Completed(_)), "{again:?}");
    }
}

#[test]
fn page_that_fails_at_the_source_while_devices_are_saved_is_noticed_before_the_commit() {
    for (params, capabilities) in ways() {
        for return_path in [true, false] {
            let capabilities = Capabilities { return_path, ..capabilities };
            let (source, target) = (source(), plain());
            let marked = Arc::clone(&source);
            let observer = move |event: &Event| {
                if matches!(event, Event::SwitchoverStep { step: SwitchoverStep::Devices, .. }) {
                    mark(&marked, FULL);
                }
            };

            let (outcome, arrival) = run(&source, &target, &params, capabilities, Arc::new(observer));

            assert_refused_here(&outcome, &arrival, FULL);
        }
    }
}

#[test]
fn page_that_fails_at_the_source_while_the_destination_prepares_is_noticed_before_the_commit() {
    for (params, capabilities) in ways() {
        let (source, target) = (source(), plain());
        let ram = source.ram.clone();
        let hook = Acts::at(&target, move || ram.block(0).mark_poisoned(FULL, 1).unwrap());

        let (outcome, arrival) = run(&source, &target, &params, capabilities, Arc::new(()));

        assert_refused_here(&outcome, &arrival, FULL);
        assert_eq!(hook.given_back.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn destination_whose_file_system_is_full_does_not_blame_the_memory() {
    let test = "destination_whose_file_system_is_full_does_not_blame_the_memory";
    let Some(disk) = SmallDisk::mount_for(test, 64 << 10) else { return };
    let path = disk.path().join("ram");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(PAGES * PAGE_SIZE as u64).unwrap();
    let block = RamBlock::of_file("ram", PAGES * PAGE_SIZE as u64, file).unwrap();
    let target = Plain::new(GuestRam::new(vec![block]).unwrap());
    let (params, capabilities) = multifd(2);

    let (outcome, arrival) = run(&source(), &target, &params, capabilities, Arc::new(()));

    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    let Arrival::Failed(error) = arrival else { panic!("{arrival:?}") };
    let MigrationError::Ram(cause) = &error else { panic!("{error}") };
    assert!(matches!(cause.downcast_ref(), Some(RamError::NoSpace { .. })), "{error}");
}
