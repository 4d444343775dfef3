//! Examples of docs/embedding.md and docs/embedding-states.md, which show parts of this file.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::certificates::good_directory;
use crate::common::{self, assert_arrived, assert_lives_on, config, multifd, pair, parameters};
use crate::support::vm::order;
use crate::support::{PATIENCE, vms};
use sterna::ram::dirty::{DirtyBitmaps, LoggedRange, SyncReport, VhostLog};
use sterna::ram::{Backing, DirtyError, DirtySource, GuestRam, PAGE_BYTES, PageBitmap, RamBlock, RamError};
use sterna::{
    Address, Arrival, Authorization, Capabilities, CredentialsError, Decision, Incoming, Migration, Outcome,
    Parameters, RunState, SourceVm, Statistics, Status, TargetVm, Tls, TlsEndpoint, Waited,
};
use sterna_guests::process::ProcessGuest;

fn source_parameters(directory: &Path, destination: &str) -> Result<Parameters, CredentialsError> {
    let mut tls = Tls::from_directory(directory, TlsEndpoint::Client)?;
    // The destination's certificate must bear this name. With `None`: the host of the address.
    tls.hostname = Some(destination.to_owned());
    Ok(Parameters { tls: Some(tls), ..Parameters::default() })
}

fn destination_parameters(directory: &Path, source: &str) -> Result<Parameters, CredentialsError> {
    let mut tls = Tls::from_directory(directory, TlsEndpoint::Server)?;
    // The name of the source's certificate. With `None`: every certificate of a trusted authority.
    tls.authorization = Some(Authorization::only(source));
    Ok(Parameters { tls: Some(tls), ..Parameters::default() })
}

#[test]
fn credentials_of_the_guide_carry_a_guest_over_every_multifd_channel() {
    let directory = good_directory();
    let here = source_parameters(directory.path(), "localhost").expect("the client's files");
    let there = destination_parameters(directory.path(), "C=GB,O=Example,CN=client").expect("the server's");
    let (channels, capabilities) = multifd(2);
    let with = |tls: Parameters| Parameters { tls: tls.tls, ..channels.clone() };
    let (source, target) = pair(&config());
    let incoming = common::listen(&target, &with(there), capabilities);

    let migration = common::start(&source, &incoming.address(), &with(here), capabilities, Arc::new(()));

    assert_arrived(&migration.wait(), &incoming.wait(), &target);
}

struct Progress(Statistics);

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Statistics { status, rounds_begun, ram_total_bytes, ram_remaining_bytes, .. } = &self.0;
        write!(
            f,
            "{status}, round {rounds_begun}: {ram_remaining_bytes} of {ram_total_bytes} bytes remain, "
        )?;
        let dirty_rate = self.0.dirty_pages_per_second * PAGE_BYTES;
        write!(f, "{} bytes/s sent, {dirty_rate} bytes/s dirtied, ", self.0.throughput_bytes)?;
        write!(f, "downtime now {:?}", self.0.expected_downtime)
    }
}

fn wait_with_operator(
    migration: &Migration,
    show: impl Fn(Progress),
    decide: impl Fn() -> Option<Decision>,
) -> Outcome {
    loop {
        match migration.wait_timeout(Duration::from_secs(1)) {
            Waited::Ended(outcome) => return outcome,
            // The guest is stopped here, and may run at the destination.
            Waited::Undecided => {
                if let Some(decision) = decide() {
                    // Refused if the destination has answered meanwhile: the next wait returns its answer.
                    let _ = migration.decide(decision);
                }
            }
            _ => show(Progress(migration.statistics())),
        }
    }
}

#[test]
fn operator_of_the_guide_sees_progress_and_the_end() {
    let (source, target) = pair(&config());
    let incoming = common::listen(&target, &parameters(), Capabilities::default());
    let migration =
        common::start(&source, &incoming.address(), &parameters(), Capabilities::default(), Arc::new(()));

    let outcome = wait_with_operator(&migration, |_| (), || None);

    let text = Progress(migration.statistics()).to_string();
    assert!(text.starts_with("completed, round ") && text.contains(" bytes remain, "), "{text}");
    assert_arrived(&outcome, &incoming.wait(), &target);
}

fn for_files() -> Capabilities {
    Capabilities { mapped_ram: true, ..Capabilities::default() }
}

fn save(vm: Arc<dyn SourceVm>, to: &Address) -> Result<Migration, Box<dyn Error>> {
    let migration = Migration::start(vm, to, Parameters::default(), for_files(), Arc::new(()))?;
    match migration.wait() {
        // The file is complete and on the disk. The guest is stopped here, without its hooks.
        Outcome::Completed => Ok(migration),
        Outcome::Failed { error, .. } => Err(error.into()),
        _ => Err("the save was cancelled".into()),
    }
}

fn restore(
    vm: Arc<dyn TargetVm>,
    from: &Address,
    is_repaired: impl Fn() -> bool,
) -> Result<RunState, Box<dyn Error>> {
    let incoming = Incoming::listen(vm, from, Parameters::default(), for_files(), Arc::new(()))?;
    while incoming.wait_timeout(Duration::from_millis(100)).is_none() {
        // Everything is loaded, and a hook, `prepare_start` or `start` has failed. A warning has the reason.
        if incoming.status() == Status::Held {
            // `discard` ends the restore with that reason. The file still has the guest.
            if is_repaired() { incoming.release()? } else { incoming.discard()? }
        }
    }
    // No source can ask about a file, so no time is needed for questions.
    match incoming.settle(Duration::ZERO) {
        Arrival::Completed(run_state) => Ok(run_state),
        Arrival::Failed(error) => Err(error.into()),
        other => Err(format!("{other:?}").into()),
    }
}

#[test]
fn guest_of_the_guide_is_saved_and_restored() {
    let directory = tempfile::tempdir().expect("a directory");
    let file: Address = format!("file:{}", directory.path().join("guest").display()).parse().expect("a file");
    let (source, target) = pair(&config());

    let saved = save(source.clone(), &file).expect("saved");

    assert_eq!(restore(target.clone(), &file, || false).expect("restored"), RunState::Running);
    assert_arrived(&Outcome::Completed, &Arrival::Completed(RunState::Running), &target);
    assert!(saved.is_saved());
    saved.resume_saved().expect("the guest of the save resumes");
    assert_eq!(source.run_state(), RunState::Running);
    SourceVm::stop(&*source).expect("stopped");
}

#[test]
fn restore_of_the_guide_whose_start_fails_ends_as_the_operator_decides() {
    let directory = tempfile::tempdir().expect("a directory");
    let file: Address = format!("file:{}", directory.path().join("guest").display()).parse().expect("a file");
    let (source, target) = vms();
    save(source, &file).expect("saved");
    let (ended, has_ended) = std::sync::mpsc::channel();

    // On another thread, because the failure of this test is a call that does not return.
    std::thread::spawn(move || {
        order(&target.fail_start, true);
        let refused = restore(target.clone(), &file, || false).expect_err("it cannot start").to_string();
        let repair = || {
            order(&target.fail_start, false);
            true
        };
        order(&target.fail_start, true);
        let restored = restore(target.clone(), &file, repair).map_err(|error| error.to_string());
        ended.send((refused, restored, target.guest.clone())).expect("the test waits");
    });

    let (refused, restored, guest) = has_ended.recv_timeout(PATIENCE).expect("the restore ends");
    assert!(refused.contains("told to fail"), "{refused}");
    assert_eq!(restored, Ok(RunState::Running));
    assert_lives_on(&guest);
}

#[test]
fn restore_that_settles_waits_for_no_question_because_a_file_asks_none() {
    let directory = tempfile::tempdir().expect("a directory");
    let file: Address = format!("file:{}", directory.path().join("guest").display()).parse().expect("a file");
    let (source, target) = pair(&config());
    save(source, &file).expect("saved");
    let vm: Arc<dyn TargetVm> = Arc::<ProcessGuest>::clone(&target);
    let incoming = Incoming::listen(vm, &file, parameters(), for_files(), Arc::new(())).expect("loading");
    let arrival = incoming.wait();
    let began = Instant::now();

    incoming.settle(Duration::from_secs(60));

    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_arrived(&Outcome::Completed, &arrival, &target);
}

/// Replaces the VMM's connection to a vhost back end: records whether the back end was told to log its writes.
#[derive(Default)]
struct BackEnd {
    logs: AtomicBool,
}

impl BackEnd {
    fn begin_log(&self, _memory: BorrowedFd<'_>, bytes: u64, _offset: u64) -> io::Result<()> {
        assert!(bytes > 0);
        self.logs.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn end_log(&self) -> io::Result<()> {
        self.logs.store(false, Ordering::SeqCst);
        Ok(())
    }
}

struct BackEndLog {
    log: VhostLog,
    back_end: BackEnd,
}

impl BackEndLog {
    fn new(ram: &GuestRam, back_end: BackEnd) -> Result<Self, DirtyError> {
        let range = |(block, memory): (usize, &RamBlock)| {
            let guest_address = memory.guest_address().expect("stated by the VMM");
            LoggedRange { guest_address, block, first_page: 0, pages: memory.pages() }
        };
        let ranges = ram.blocks().iter().enumerate().map(range).collect();
        // Allocates the log: a memfd with one bit for each 4096 bytes, up to the highest guest address.
        Ok(Self { log: VhostLog::new(ram, ranges)?, back_end })
    }
    fn failed(call: &'static str) -> impl Fn(io::Error) -> DirtyError {
        move |source| DirtyError::System { origin: "back end", call, what: "device", index: 0, source }
    }
}

impl DirtySource for BackEndLog {
    fn start(&self) -> Result<(), DirtyError> {
        self.log.start()?;
        // SET_LOG_BASE, then F_LOG_ALL in SET_FEATURES, then F_LOG in each ring's SET_VRING_ADDR.
        let (memory, bytes, offset) = (self.log.file(), self.log.len_bytes(), self.log.offset());
        self.back_end.begin_log(memory, bytes, offset).map_err(Self::failed("begin to log"))
    }
    fn stop(&self) -> Result<(), DirtyError> {
        let ended = self.back_end.end_log().map_err(Self::failed("end the log"));
        ended.and(self.log.stop())
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        self.log.sync(into)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.log.rearm(block, first, count, synced)
    }
    fn name(&self) -> &'static str {
        "back end"
    }
}

#[test]
fn log_of_the_guide_reports_a_write_of_a_back_end_in_its_block() -> Result<(), Box<dyn Error>> {
    let block = |name: &str, at| {
        Ok::<_, RamError>(RamBlock::new(name, 1 << 20, Backing::Memfd)?.at_guest_address(at))
    };
    let ram = GuestRam::new(vec![block("low", 0)?, block("high", 4 << 30)?])?;
    let source = BackEndLog::new(&ram, BackEnd::default())?;
    source.start()?;
    assert!(source.back_end.logs.load(Ordering::SeqCst));

    let page = (4 << 30) / PAGE_BYTES + 3;
    File::from(source.log.file().try_clone_to_owned()?).write_all_at(&[1 << (page % 8)], page / 8)?;
    let mut dirty = DirtyBitmaps::new(&ram);
    assert_eq!(source.sync(&mut dirty)?.newly_dirty, 1);

    assert!(dirty.blocks()[1].get(3));
    source.stop()?;
    assert!(!source.back_end.logs.load(Ordering::SeqCst));
    Ok(())
}
