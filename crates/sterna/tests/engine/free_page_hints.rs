//! Pages that the guest does not use are not sent, unless the guest writes them afterwards.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::*;
use crate::plain::{Plain, byte_of};
use crate::support::eventually;
use sterna::ram::{
    Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, SyncReport,
};
use sterna::{
    Address, Arrival, Capabilities, Device, FreePageHints, FreePages, Incoming, Migration, MigrationError,
    Outcome, Parameters, RunState, SourceVm, Vm, VmError,
};

/// The pages of eight chunks.
const PAGES: u64 = 4096;
const FREE: std::ops::Range<u64> = 2500..4000;
const WRITTEN: u64 = 3500;
/// Bytes per second. The first round takes about half a second.
const SLOW: u64 = 32 << 20;

/// A guest without zero pages, which runs a callback when it is asked for hints.
struct Asked {
    plain: Arc<Plain>,
    run_state: RunState,
    calls: Mutex<Vec<&'static str>>,
    free: Mutex<Option<FreePages>>,
    does: fn(&Plain, &FreePages),
}

fn ram(byte: u8) -> GuestRam {
    let ram = GuestRam::new(vec![RamBlock::new("ram", PAGES * PAGE_SIZE as u64, Backing::Memfd).unwrap()]);
    let ram = ram.unwrap();
    ram.block(0).write(0, &vec![byte; PAGES as usize * PAGE_SIZE]).unwrap();
    ram
}

impl Asked {
    fn new(does: fn(&Plain, &FreePages)) -> Arc<Self> {
        Arc::new(Self::with(RunState::Running, does))
    }

    fn with(run_state: RunState, does: fn(&Plain, &FreePages)) -> Self {
        let plain = Plain::new(ram(7));
        Self { plain, run_state, calls: Mutex::default(), free: Mutex::default(), does }
    }

    fn called(&self, name: &'static str) {
        self.calls.lock().unwrap().push(name);
    }

    /// Gives a hint now.
    fn hint(&self, first: u64, count: u64) -> bool {
        self.free.lock().unwrap().as_ref().is_some_and(|free| free.hint(0, first, count))
    }
}

impl FreePageHints for Asked {
    fn begin(&self, free: FreePages) {
        self.called("begin");
        (self.does)(&self.plain, &free);
        *self.free.lock().unwrap() = Some(free);
    }
    fn stop(&self) {
        self.called("stop");
        assert!(!self.hint(0, PAGES), "a hint counts that comes too late");
    }
    fn end(&self) {
        self.called("end");
    }
}

impl Vm for Asked {
    fn machine_type(&self) -> String {
        self.plain.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.plain.ram.clone()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }
}

impl SourceVm for Asked {
    fn dirty_source(&self) -> &dyn DirtySource {
        self
    }
    fn run_state(&self) -> RunState {
        self.run_state
    }
    fn stop(&self) -> Result<(), VmError> {
        assert!(!self.hint(0, PAGES), "a hint counts that comes too late");
        self.plain.stop()
    }
    fn resume(&self) -> Result<(), VmError> {
        self.plain.resume()
    }
    fn free_page_hints(&self) -> Option<&dyn FreePageHints> {
        Some(self)
    }
}

impl DirtySource for Asked {
    fn start(&self) -> Result<(), DirtyError> {
        self.plain.log.start()
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.plain.log.stop()
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        self.called("sync");
        self.plain.log.sync(into)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.plain.log.rearm(block, first, count, synced)
    }
    fn name(&self) -> &'static str {
        self.plain.log.name()
    }
}

fn begin(source: &Arc<Asked>, to: &Address, params: &Parameters, capabilities: Capabilities) -> Migration {
    let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
    Migration::start(vm, to, params.clone(), capabilities, Arc::new(())).expect("started")
}

fn listen(target: &Arc<Plain>, at: &Address, params: &Parameters, capabilities: Capabilities) -> Incoming {
    Incoming::listen(Arc::clone(target) as _, at, params.clone(), capabilities, Arc::new(())).unwrap()
}

/// Migrates the guest to memory with other content, over a file or a socket.
fn moved(
    source: &Arc<Asked>,
    file: Option<&Path>,
    channels: Option<u8>,
    capabilities: Capabilities,
) -> (Migration, Arc<Plain>) {
    moved_while(source, file, channels, capabilities, |_| ())
}

/// The same, and calls `meanwhile` after the start.
fn moved_while(
    source: &Arc<Asked>,
    file: Option<&Path>,
    channels: Option<u8>,
    capabilities: Capabilities,
    meanwhile: impl FnOnce(&Migration),
) -> (Migration, Arc<Plain>) {
    let params = Parameters {
        multifd_channels: channels.unwrap_or(1),
        max_bandwidth_bytes: SLOW,
        downtime_limit: Duration::from_secs(2),
        ..parameters()
    };
    let capabilities = Capabilities { multifd: channels.is_some(), ..capabilities };
    let target = Plain::new(ram(9));
    let (migration, arrival) = if let Some(path) = file {
        let at = Address::File { path: path.to_owned(), offset: 0 };
        let migration = begin(source, &at, &params, capabilities);
        meanwhile(&migration);
        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
        (migration, listen(&target, &at, &params, capabilities).wait())
    } else {
        let incoming = listen(&target, &"tcp:127.0.0.1:0".parse().unwrap(), &params, capabilities);
        let migration = begin(source, &incoming.address(), &params, capabilities);
        meanwhile(&migration);
        assert!(matches!(migration.wait(), Outcome::Completed), "{:?}", migration.outcome());
        (migration, incoming.wait())
    };
    assert!(matches!(arrival, Arrival::Completed(_)), "{arrival:?}");
    (migration, target)
}

/// Each way in which pages are sent, with a name.
fn ways() -> [(&'static str, bool, Option<u8>, bool); 5] {
    [
        ("main channel", false, None, false),
        ("multifd", false, Some(3), false),
        ("legacy file", true, None, false),
        ("mapped-ram", true, None, true),
        ("mapped-ram, multifd", true, Some(2), true),
    ]
}

#[test]
fn free_pages_are_not_sent_and_read_as_zero_but_for_one_that_is_written_later() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, is_file, channels, mapped_ram) in ways() {
        let source = Asked::new(|plain, free| {
            assert!(free.hint(0, FREE.start, FREE.end - FREE.start));
            free.complete();
            plain.write(WRITTEN, 5);
            // These pages do not exist.
            assert!(free.hint(1, 0, 1) && free.hint(0, PAGES, 1) && free.hint(0, u64::MAX, u64::MAX));
        });
        let path = directory.path().join(name);
        let capabilities = Capabilities { mapped_ram, ..Capabilities::default() };
        let (migration, target) = moved(&source, is_file.then_some(&*path), channels, capabilities);

        for page in 0..PAGES {
            let wanted = match page {
                WRITTEN => 5,
                page if FREE.contains(&page) => 0,
                _ => 7,
            };
            assert_eq!(byte_of(&target.ram, page), wanted, "{name}: page {page}");
        }
        let statistics = migration.statistics();
        let free = FREE.end - FREE.start;
        assert_eq!(statistics.free_pages, free, "{name}");
        assert_eq!(statistics.normal_pages + statistics.zero_pages, PAGES - free + 1, "{name}");
        assert_eq!(statistics.ram_remaining_bytes, 0, "{name}");
        assert_eq!(statistics.rounds[0].pages, PAGES, "{name}");
        let calls = source.calls.lock().unwrap().clone();
        assert_eq!((&calls[..3], calls.last()), (&["begin", "stop", "sync"][..], Some(&"end")), "{name}");
        assert_eq!(calls.iter().filter(|call| **call != "sync").count(), 3, "{name}: {calls:?}");
    }
}

#[test]
fn pages_that_are_sent_already_stay() {
    let source = Asked::new(|_, _| ());
    // The guest names all pages while lanes are sending. Lanes wait a second for its answer.
    let names_all = |migration: &Migration| {
        eventually("a page", || migration.statistics().normal_pages > 0);
        source.hint(0, PAGES);
    };
    let (migration, target) = moved_while(&source, None, Some(2), Capabilities::default(), names_all);

    let left_out = (0..PAGES).filter(|page| byte_of(&target.ram, *page) == 0).count() as u64;
    assert_eq!(migration.statistics().free_pages, left_out);
    assert!(left_out < PAGES, "lanes did not begin without the guest");
    assert!((0..PAGES).all(|page| [0, 7].contains(&byte_of(&target.ram, page))));
}

#[test]
fn guest_gets_its_pages_back_after_a_cancel() {
    let source = Asked::new(|_, free| assert!(free.hint(0, FREE.start, FREE.end - FREE.start)));
    let params = Parameters { max_bandwidth_bytes: 1 << 20, ..parameters() };
    let target = Plain::new(ram(9));
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = listen(&target, &at, &params, Capabilities::default());
    let migration = begin(&source, &incoming.address(), &params, Capabilities::default());
    let until = Instant::now() + Duration::from_secs(10);
    while source.calls.lock().unwrap().is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    migration.cancel().unwrap();

    assert!(matches!(migration.wait(), Outcome::Cancelled), "{:?}", migration.outcome());
    assert_eq!(*source.calls.lock().unwrap(), ["begin", "stop", "end"]);
    assert!(!source.hint(0, 1));
    assert!((0..PAGES).all(|page| byte_of(&source.plain.ram, page) == 7));
}

#[test]
fn panic_in_the_question_fails_the_migration_and_the_guest_is_told() {
    let source = Asked::new(|_, _| panic!("planted"));
    let target = Plain::new(ram(9));
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let incoming = listen(&target, &at, &parameters(), Capabilities::default());
    let migration = begin(&source, &incoming.address(), &parameters(), Capabilities::default());

    let Outcome::Failed { error, held: false } = migration.wait() else { panic!("it did not fail") };
    let MigrationError::Panicked { callback, .. } = &error else { panic!("{error:?}") };
    assert_eq!(callback, "FreePageHints::begin");
    assert_eq!(*source.calls.lock().unwrap(), ["begin", "stop", "end"]);
}

#[test]
fn paused_guest_is_not_asked() {
    let source = Arc::new(Asked::with(RunState::Paused, |_, _| panic!("it was asked")));
    let (migration, target) = moved(&source, None, None, Capabilities::default());

    assert_eq!(migration.statistics().free_pages, 0);
    assert!((0..PAGES).all(|page| byte_of(&target.ram, page) == 7));
    assert!(source.calls.lock().unwrap().iter().all(|call| *call == "sync"));
}
