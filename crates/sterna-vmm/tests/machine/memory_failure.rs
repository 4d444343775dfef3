//! Tests of host memory failures during a migration. Each must give an error that names the page. Process and
//! guest must continue.

use std::sync::Arc;

use sterna::ram::{Backing, GuestRam, PAGE_SIZE, PoisonedPage, RamBlock};
use sterna::{
    Address, Arrival, Capabilities, Compression, Incoming, Migration, MigrationError, Outcome, Parameters,
    SourceVm, StartError, TargetVm, ZeroPageDetection,
};

use crate::broken::break_page;
use crate::plain::{Plain, byte_of};

const PAGES: u64 = 2000;
const BROKEN: u64 = 1234;

fn empty_vm() -> Arc<Plain> {
    let block = RamBlock::new("ram", PAGES * PAGE_SIZE as u64, Backing::Memfd).unwrap();
    Plain::new(GuestRam::new(vec![block.at_guest_address(0x10_0000)]).unwrap())
}

fn source() -> Arc<Plain> {
    let source = empty_vm();
    (0..PAGES).filter(|page| page % 3 != 0).for_each(|page| source.write(page, 5));
    source
}

fn broken() -> Vec<PoisonedPage> {
    let offset = BROKEN * PAGE_SIZE as u64;
    vec![PoisonedPage { block: "ram".into(), offset, guest_address: Some(0x10_0000 + offset) }]
}

/// Settings in which pages are scanned, copied, or read by the kernel.
fn ways() -> Vec<(Parameters, Capabilities)> {
    let mut ways = Vec::new();
    for multifd in [true, false] {
        for detection in [ZeroPageDetection::Multifd, ZeroPageDetection::None] {
            for compression in [Compression::None, Compression::Zstd] {
                if compression != Compression::None && !multifd {
                    continue;
                }
                let params = Parameters {
                    max_bandwidth_bytes: 0,
                    multifd_channels: 2,
                    multifd_compression: compression,
                    zero_page_detection: detection,
                    ..Parameters::default()
                };
                ways.push((params, Capabilities { multifd, ..Capabilities::default() }));
            }
        }
    }
    ways
}

fn run(
    source: &Arc<Plain>,
    target: &Arc<Plain>,
    params: &Parameters,
    capabilities: Capabilities,
) -> (Outcome, Arrival) {
    let any: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let vm: Arc<dyn TargetVm> = Arc::clone(target) as _;
    let incoming = Incoming::listen(vm, &any, params.clone(), capabilities, Arc::new(())).unwrap();
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    let to = incoming.address();
    let migration = Migration::start(vm, &to, params.clone(), capabilities, Arc::new(())).unwrap();
    (migration.wait(), incoming.wait())
}

fn assert_names_the_page(error: &MigrationError) {
    let MigrationError::Poisoned { pages, .. } = error else { panic!("{error}") };
    assert_eq!(*pages, broken());
    assert!(error.to_string().contains("guest address 0x5d2000"), "{error}");
}

#[test]
fn page_that_fails_at_the_source_fails_the_migration_and_not_the_guest() {
    sterna_vmm::forward_sigbus().unwrap();
    for (params, capabilities) in ways() {
        let (source, target) = (source(), empty_vm());
        break_page(source.ram.block(0), BROKEN);

        let (outcome, arrival) = run(&source, &target, &params, capabilities);

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?} {params:?}") };
        assert_names_the_page(error);
        assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
        assert_eq!(target.ram.block(0).resident_bytes().unwrap(), 0, "nothing is left");
        assert_eq!(byte_of(&source.ram, 1), 5);
        // The failed page is known now, so the next migration does not begin.
        let to: Address = "tcp:127.0.0.1:1".parse().unwrap();
        let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;
        let again = Migration::start(vm, &to, params, capabilities, Arc::new(()));
        let Err(StartError::Poisoned { pages }) = again.map(drop) else { panic!("it began") };
        assert_eq!(pages, broken());
    }
}

#[test]
fn page_that_fails_while_a_guest_is_saved_fails_the_save() {
    sterna_vmm::forward_sigbus().unwrap();
    let directory = tempfile::tempdir().unwrap();
    for (mapped_ram, multifd) in [(true, true), (true, false), (false, false)] {
        let source = source();
        break_page(source.ram.block(0), BROKEN);
        let to: Address = format!("file:{}/image", directory.path().display()).parse().unwrap();
        let capabilities = Capabilities { mapped_ram, multifd, ..Capabilities::default() };
        let params = Parameters { zero_page_detection: ZeroPageDetection::None, ..Parameters::default() };
        let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;

        let outcome = Migration::start(vm, &to, params, capabilities, Arc::new(())).unwrap().wait();

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
        assert_names_the_page(error);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "no file is left");
    }
}

#[test]
fn page_that_fails_at_the_destination_fails_the_migration_and_not_the_process() {
    sterna_vmm::forward_sigbus().unwrap();
    for (params, capabilities) in ways() {
        let (source, target) = (source(), empty_vm());
        break_page(target.ram.block(0), BROKEN);

        let (outcome, arrival) = run(&source, &target, &params, capabilities);

        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        let Arrival::Failed(error) = &arrival else { panic!("{arrival:?}") };
        assert_names_the_page(error);
    }
}

#[test]
fn page_that_is_known_to_have_failed_is_refused_at_the_start_and_before_the_handover() {
    // No signal is raised in this test, because the page itself is sound.
    for (params, capabilities) in ways() {
        let source = source();
        source.ram.block(0).mark_poisoned(BROKEN, 1).unwrap();
        let to: Address = "tcp:127.0.0.1:1".parse().unwrap();
        let vm: Arc<dyn SourceVm> = Arc::clone(&source) as _;
        let refused = Migration::start(vm, &to, params.clone(), capabilities, Arc::new(()));
        let Err(StartError::Poisoned { pages }) = refused.map(drop) else { panic!("it began") };
        assert_eq!(pages, broken());

        // The failure is reported after all memory was sent and the guest was stopped.
        source.ram.block(0).clear_poisoned(BROKEN, 1).unwrap();
        source.at_last(|vm| vm.ram.block(0).mark_poisoned(BROKEN, 1).unwrap());
        let (outcome, arrival) = run(&source, &empty_vm(), &params, capabilities);

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
        assert_names_the_page(error);
        assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
    }
}

/// One lane scans, and one copies. Both report the failed page.
#[test]
fn page_that_a_copy_met_is_named_without_a_look_at_all_others() {
    sterna_vmm::forward_sigbus().unwrap();
    let scans = (Parameters { max_bandwidth_bytes: 0, ..Parameters::default() }, Capabilities::default());
    let copies = (
        Parameters {
            multifd_channels: 1,
            multifd_compression: Compression::Zstd,
            zero_page_detection: ZeroPageDetection::None,
            ..scans.0.clone()
        },
        Capabilities { multifd: true, ..Capabilities::default() },
    );
    for (params, capabilities) in [scans, copies] {
        let source = source();
        break_page(source.ram.block(0), BROKEN);
        break_page(source.ram.block(0), PAGES - 1);

        let (outcome, _) = run(&source, &empty_vm(), &params, capabilities);

        let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
        assert_names_the_page(error);
        assert_eq!(source.ram.poisoned(), broken(), "the kernel was asked about the others");
    }
}

/// The kernel found the failed page, and does not report which one it is.
#[test]
fn page_that_fails_in_the_switchover_is_looked_for_when_the_guest_runs_again() {
    sterna_vmm::forward_sigbus().unwrap();
    let source = source();
    source.at_last(|vm| {
        break_page(vm.ram.block(0), BROKEN);
        vm.log.mark(0, BROKEN);
    });
    let (tell, told) = std::sync::mpsc::channel();
    source.at_resume(move |vm| tell.send(vm.ram.poisoned()).unwrap());
    let params = Parameters { zero_page_detection: ZeroPageDetection::None, ..Parameters::default() };

    let (outcome, _) = run(&source, &empty_vm(), &params, Capabilities::default());

    let Outcome::Failed { error, held: false } = &outcome else { panic!("{outcome:?}") };
    assert_names_the_page(error);
    assert_eq!(told.recv().unwrap(), [], "the guest stood still meanwhile");
}
