//! Pages of checkpoints that are copied before the guest is paused, during the pause, or after it resumes. All have
//! the content of the moment of the pause.

use std::sync::atomic::AtomicU64;

use sterna::ram::write_protection::WriteProtection;
use sterna::ram::{
    Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PageBitmap, RamError, SyncReport,
};
use sterna::{Device, Hook, VmError};
use sterna_guests::model::Pattern;
use sterna_guests::process::Tracking;
use sterna_standby::CheckpointCopy;

use super::*;

/// Four threads that write at full speed, in an order that few copies can follow.
fn fast_writer(backing: Backing) -> ProcessConfig {
    ProcessConfig {
        tracking: Tracking::Software,
        pattern: Pattern::Random,
        workers: 4,
        backing,
        rate: 0,
        ..writer()
    }
}

/// Checking a guest prolongs its pauses. It shall run for the same time between them.
const HALF_OF_THE_TIME: CheckpointMode = CheckpointMode::Load(50);

/// Four threads that leave most pages unchanged for a while.
fn slow_writer() -> ProcessConfig {
    ProcessConfig { rate: 5000, ..fast_writer(Backing::Memfd) }
}

/// A guest whose memory is checked at every pause. By then the standby has the memory of the previous pause, because
/// the primary first asks it for room.
struct Watched {
    guest: Arc<ProcessGuest>,
    there: Arc<ProcessGuest>,
    /// Digest of the guest's memory at its last pause.
    last: Mutex<Option<u64>>,
    same: AtomicU64,
    differs: AtomicU64,
    /// Whether the guest runs briefly when all pages are re-armed, and no page is copied or protected yet. This
    /// violates clause 7 of the page order.
    goes_on_early: AtomicBool,
    unarmed: Mutex<DirtyBitmaps>,
    /// Pages that were re-armed for the next checkpoint while the guest ran.
    ahead: Mutex<DirtyBitmaps>,
    /// Whether writes to these pages before the pause are not reported.
    hides_late_writes: AtomicBool,
}

impl Watched {
    fn is_violated(&self) -> bool {
        self.goes_on_early.load(Ordering::SeqCst) || self.hides_late_writes.load(Ordering::SeqCst)
    }

    fn look(&self) {
        let now = digest(&self.guest.ram());
        let Some(before) = self.last.lock().replace(now) else { return };
        // The held checkpoint may not be applied to memory yet.
        let patience = if self.is_violated() { Duration::from_secs(1) } else { PATIENCE };
        let begin = Instant::now();
        while digest(&self.there.ram()) != before {
            if begin.elapsed() > patience {
                self.differs.fetch_add(1, Ordering::SeqCst);
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.same.fetch_add(1, Ordering::SeqCst);
    }
}

fn digest(ram: &GuestRam) -> u64 {
    let mut sum = 0u64;
    let mut bytes = vec![0; 1 << 20];
    for block in ram.blocks() {
        for at in (0..block.len_bytes()).step_by(bytes.len()) {
            block.read(at, &mut bytes).expect("sound memory");
            for word in bytes.chunks_exact(8) {
                let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
                sum = (sum.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            }
        }
    }
    sum
}

impl Vm for Watched {
    fn machine_type(&self) -> String {
        self.guest.machine_type()
    }
    fn ram(&self) -> GuestRam {
        self.guest.ram()
    }
    fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.guest.devices()
    }
    fn compatibility(&self) -> Option<Arc<dyn Device>> {
        self.guest.compatibility()
    }
    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        self.guest.hooks()
    }
}

impl SourceVm for Watched {
    fn dirty_source(&self) -> &dyn DirtySource {
        self
    }
    fn may_hold_writes(&self) -> bool {
        true
    }
    fn run_state(&self) -> RunState {
        self.guest.run_state()
    }
    fn stop(&self) -> Result<(), VmError> {
        let was_running = self.guest.run_state() == RunState::Running;
        SourceVm::stop(&*self.guest)?;
        if was_running {
            self.look();
        }
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.guest.resume()
    }
}

impl DirtySource for Watched {
    fn start(&self) -> Result<(), DirtyError> {
        self.guest.dirty_source().start()
    }
    fn stop(&self) -> Result<(), DirtyError> {
        self.guest.dirty_source().stop()
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let mut found = DirtyBitmaps::new(&self.guest.ram());
        let report = self.guest.dirty_source().sync(&mut found)?;
        if self.guest.run_state() == RunState::Paused {
            let ahead = std::mem::replace(&mut *self.ahead.lock(), DirtyBitmaps::new(&self.guest.ram()));
            if self.hides_late_writes.load(Ordering::SeqCst) {
                for (found, ahead) in found.blocks().iter().zip(ahead.blocks()) {
                    (0..found.pages()).filter(|page| ahead.get(*page)).for_each(|page| {
                        found.clear(page);
                    });
                }
            }
        }
        into.or_from(&found);
        let mut unarmed = DirtyBitmaps::new(&self.guest.ram());
        unarmed.or_from(into);
        *self.unarmed.lock() = unarmed;
        Ok(report)
    }
    fn rearm(&self, block: usize, first: u64, count: u64, synced: &PageBitmap) -> Result<(), DirtyError> {
        self.guest.dirty_source().rearm(block, first, count, synced)?;
        if self.guest.run_state() == RunState::Running {
            let ahead = self.ahead.lock();
            (first..first + count).filter(|page| synced.get(*page)).for_each(|page| {
                ahead.block(block).set(page);
            });
        }
        let unarmed = self.unarmed.lock();
        let last = unarmed.block(block).clear_range(first, count) > 0 && unarmed.count() == 0;
        if last && self.goes_on_early.load(Ordering::SeqCst) && self.guest.run_state() == RunState::Paused {
            self.guest.resume().expect("it stands");
            assert!(self.guest.wait_progress(4, PATIENCE));
            SourceVm::stop(&*self.guest).expect("it runs");
        }
        Ok(())
    }
    fn initially_set(&self) -> bool {
        self.guest.dirty_source().initially_set()
    }
    fn mark_absent(
        &self,
        ram: &GuestRam,
        block: usize,
        first: u64,
        count: u64,
        absent: &PageBitmap,
    ) -> Result<(), RamError> {
        self.guest.dirty_source().mark_absent(ram, block, first, count, absent)
    }
    fn name(&self) -> &'static str {
        "watched"
    }
}

fn watched(config: &ProcessConfig, way: &Way) -> (Pair, Arc<Watched>) {
    let (guest, _) = pair(config);
    // A standby places the guest in this memory only if it is shared.
    let there = ProcessConfig { backing: Backing::Memfd, ..config.clone() };
    let there = ProcessGuest::waiting(there).expect("destination");
    let watched = Arc::new(Watched {
        unarmed: Mutex::new(DirtyBitmaps::new(&guest.ram())),
        ahead: Mutex::new(DirtyBitmaps::new(&guest.ram())),
        hides_late_writes: AtomicBool::default(),
        guest: Arc::clone(&guest),
        there: Arc::clone(&there),
        last: Mutex::default(),
        same: AtomicU64::default(),
        differs: AtomicU64::default(),
        goes_on_early: AtomicBool::default(),
    });
    let vms: (Arc<dyn SourceVm>, Arc<dyn TargetVm>) = (Arc::clone(&watched) as _, Arc::clone(&there) as _);
    (join((guest, there), vms, way, TERMS, Arc::new(NoOutput)).expect("protected"), watched)
}

/// Whether this host can block writes.
#[allow(clippy::print_stderr, reason = "says what was not tested")]
fn is_possible(config: &ProcessConfig) -> bool {
    let (guest, _) = pair(config);
    let held = WriteProtection::new(&guest.ram());
    held.inspect_err(|why| eprintln!("SKIPPED copy-on-write: {why}")).is_ok()
}

fn looked_at(pair: &Pair, watched: &Watched, way: &Way, times: u64) {
    wait_for("checkpoints that are looked at", || {
        let (state, error) = (pair.primary.state(), pair.primary.migration().outcome());
        assert_eq!(state.outcome, None, "{way:?}: {state:?}, {error:?}, {:?}", pair.standby.state());
        watched.same.load(Ordering::SeqCst) + watched.differs.load(Ordering::SeqCst) >= times
    });
}

#[test]
fn every_checkpoint_has_the_memory_of_the_moment_in_which_the_guest_stood() {
    use CheckpointCopy::{Auto, Copy, CopyOnWrite};
    let ways = [
        (Backing::Memfd, Way { copy: CopyOnWrite, ..PLAIN }),
        (Backing::Memfd, Way { copy: CopyOnWrite, lanes: 1, ..PLAIN }),
        (Backing::Anonymous, Way { copy: CopyOnWrite, lanes: 2, ..PLAIN }),
        (Backing::Memfd, Way { copy: CopyOnWrite, lanes: 4, compression: Compression::Zstd, ..PLAIN }),
        (Backing::Memfd, Way { copy: CopyOnWrite, delta: true, ..PLAIN }),
        (Backing::Memfd, Way { copy: Auto, lanes: 2, ..PLAIN }),
        (Backing::Memfd, Way { copy: Copy, ..PLAIN }),
        (Backing::Memfd, Way { copy: Copy, lanes: 4, ..PLAIN }),
    ];
    let is_possible = is_possible(&fast_writer(Backing::Memfd));
    for (backing, way) in ways {
        let (pair, watched) = watched(&fast_writer(backing), &way);
        looked_at(&pair, &watched, &way, 8);
        assert!(pair.guest.wait_progress(10, PATIENCE), "{way:?}: the guest goes on");
        pair.primary.hand_over().expect("protected");
        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver, "{way:?}: {:?}", pair.primary.state());
        assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));

        assert_eq!(watched.differs.load(Ordering::SeqCst), 0, "{backing:?}, {way:?}");
        assert_lives_on(&pair.there);
        let statistics = pair.primary.statistics();
        assert!(way.copy != Copy || statistics.copied_on_write == 0, "{way:?}: {statistics:?}");
        if is_possible && way.copy == CopyOnWrite {
            assert!(statistics.copied_on_write > 0 && statistics.held_writes > 0, "{way:?}: {statistics:?}");
            assert_eq!(pair.primary.why_copied(), None);
        }
    }
}

#[test]
fn checkpoints_that_wait_and_those_that_do_not_fit_are_whole_with_copy_on_write() {
    let ways = [
        Way { buffer_bytes: 6 << 20, lanes: 2, ..PLAIN },
        Way { delay: Duration::from_millis(1), in_flight: 4, ..PLAIN },
        Way { in_flight: 3, lanes: 2, compression: Compression::Zlib, ..PLAIN },
    ];
    for way in ways {
        let way = Way { copy: CheckpointCopy::CopyOnWrite, ..way };
        let pair = protect(fast_writer(Backing::Memfd), &way, TERMS, Arc::new(NoOutput));
        pair.wait_for_held(15);
        pair.primary.hand_over().expect("protected");
        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver, "{way:?}: {:?}", pair.primary.state());
        assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
        assert_lives_on(&pair.there);
    }
}

#[test]
fn pages_that_were_copied_ahead_are_those_of_the_moment_in_which_the_guest_stood() {
    use CheckpointCopy::{Copy, CopyOnWrite};
    let ways = [
        Way { copy: Copy, ..PLAIN },
        Way { copy: CopyOnWrite, ..PLAIN },
        Way { copy: Copy, lanes: 2, compression: Compression::Zlib, ..PLAIN },
        Way { copy: Copy, lanes: 2, delta: true, ..PLAIN },
    ];
    for way in ways {
        let way = Way { delay: Duration::from_millis(50), mode: HALF_OF_THE_TIME, ..way };
        let (pair, watched) = watched(&slow_writer(), &way);
        looked_at(&pair, &watched, &way, 8);
        wait_for("pages that are copied ahead", || pair.primary.statistics().copied_ahead > 2000);
        pair.primary.hand_over().expect("protected");
        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver, "{way:?}: {:?}", pair.primary.state());
        assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
        assert_eq!(watched.differs.load(Ordering::SeqCst), 0, "{way:?}");
        assert_lives_on(&pair.there);
    }
}

#[test]
fn write_to_a_page_that_was_copied_ahead_is_noticed_if_nobody_says_it() {
    let way =
        Way { copy: CheckpointCopy::Copy, delay: Duration::from_millis(50), mode: HALF_OF_THE_TIME, ..PLAIN };
    let (pair, watched) = watched(&slow_writer(), &way);
    looked_at(&pair, &watched, &way, 3);
    assert_eq!(watched.differs.load(Ordering::SeqCst), 0);

    watched.hides_late_writes.store(true, Ordering::SeqCst);

    wait_for("the violation", || watched.differs.load(Ordering::SeqCst) > 0);
}

#[test]
fn guest_that_goes_on_before_its_pages_are_kept_is_noticed() {
    for copy in [CheckpointCopy::Copy, CheckpointCopy::CopyOnWrite] {
        let way = Way { copy, ..PLAIN };
        let (pair, watched) = watched(&fast_writer(Backing::Memfd), &way);
        looked_at(&pair, &watched, &way, 3);
        assert_eq!(watched.differs.load(Ordering::SeqCst), 0, "{copy:?}");

        watched.goes_on_early.store(true, Ordering::SeqCst);

        wait_for("the violation", || watched.differs.load(Ordering::SeqCst) > 0);
    }
}

#[test]
fn way_is_changed_while_the_guest_is_protected_and_no_write_is_held_afterwards() {
    let config = fast_writer(Backing::Memfd);
    let is_possible = is_possible(&config);
    for unprotects in [true, false] {
        let pair =
            protect(config.clone(), &Way { copy: CheckpointCopy::Copy, ..PLAIN }, TERMS, Arc::new(NoOutput));
        pair.wait_for_held(3);
        assert_eq!(pair.primary.statistics().copied_on_write, 0);
        for way in [CheckpointCopy::CopyOnWrite, CheckpointCopy::Copy, CheckpointCopy::CopyOnWrite] {
            pair.primary.set_checkpoint_copy(way);
            let before = pair.primary.statistics();
            pair.wait_for_held(before.held + 5);
            let after = pair.primary.statistics();
            let is_on_write = is_possible && way == CheckpointCopy::CopyOnWrite;
            assert!(!is_on_write || after.copied_on_write > before.copied_on_write, "{after:?}");
        }
        if unprotects {
            pair.primary.unprotect().expect("protected");
        } else {
            *pair.arbiter.0.lock() = Some("primary");
            pair.link.knobs.cut.store(0, Ordering::SeqCst);
        }
        assert!(matches!(pair.primary.wait(), primary::Outcome::Alone(_)));
        assert_lives_on(&pair.guest);
        // The memory is no longer registered with a userfaultfd.
        assert!(!is_possible || WriteProtection::new(&pair.guest.ram()).is_ok());
    }
}

#[test]
fn where_writes_cannot_be_held_pages_are_copied_and_it_is_said_why() {
    let tracked = ProcessConfig { tracking: Tracking::Userfaultfd, ..fast_writer(Backing::Memfd) };
    if !Tracking::available().contains(&Tracking::Userfaultfd) {
        return;
    }
    let pair =
        protect(tracked, &Way { copy: CheckpointCopy::CopyOnWrite, ..PLAIN }, TERMS, Arc::new(NoOutput));
    pair.wait_for_held(5);

    let why = pair.primary.why_copied().expect("a reason");
    assert!(why.contains("userfaultfd"), "{why}");
    assert_eq!(pair.primary.statistics().copied_on_write, 0);
    pair.primary.hand_over().expect("protected");
    assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver);
    assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
    assert_lives_on(&pair.there);
}

#[test]
fn guest_goes_on_where_a_thread_for_its_writes_is_not_to_be_had_or_dies() {
    for (thread, dies) in [
        ("held writes", false),
        ("checkpoint copier", false),
        ("held writes", true),
        ("checkpoint copier", true),
    ] {
        let name = format!("{thread}{}", if dies { ", begun" } else { "" });
        sterna::refuse_threads(Some(&name));
        let way = Way { copy: CheckpointCopy::CopyOnWrite, ..PLAIN };
        let pair = protect(fast_writer(Backing::Memfd), &way, TERMS, Arc::new(NoOutput));
        sterna::refuse_threads(None);
        pair.wait_for_held(10);
        assert!(pair.guest.wait_progress(10, PATIENCE), "{name}: the guest stands");

        let why = pair.primary.why_copied();
        assert!(why.is_some(), "{name}: {:?}", pair.primary.statistics());
        pair.primary.hand_over().expect("protected");
        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver);
        assert!(matches!(pair.ended_there(), standby::Outcome::Running(_)));
        assert_lives_on(&pair.there);
    }
}
