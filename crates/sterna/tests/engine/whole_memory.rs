//! A guest whose memory a server of its process still fills: live saves and migrations wait until it has all of its memory, at
//! the server's full speed, and give that speed back however they end.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::*;
use crate::support::eventually;
use sterna::ram::{Filling, Hurry, RamBlock};
use sterna::{
    Address, Arrival, Capabilities, LiveSave, LiveSaveOptions, MigrationError, Outcome, Parameters, RunState,
    SourceVm, Status, Vm, WaitLimits,
};
use sterna_guests::process::ProcessGuest;

/// A server that ends its work at the test's command. Its memory is there all the time.
#[derive(Debug, Default)]
struct Server {
    hurries: Arc<AtomicUsize>,
    obstacle: Arc<Mutex<Option<&'static str>>>,
}

#[derive(Debug)]
struct Speed {
    hurries: Arc<AtomicUsize>,
    obstacle: Arc<Mutex<Option<&'static str>>>,
}

impl Filling for Server {
    fn owed(&self, first: u64, count: u64, owed: &mut dyn FnMut(u64, u64)) {
        owed(first, count);
    }
    fn given_back(&self, _: u64, _: u64) {}
    fn hurry(&self) -> Box<dyn Hurry> {
        self.hurries.fetch_add(1, Ordering::SeqCst);
        Box::new(Speed { hurries: Arc::clone(&self.hurries), obstacle: Arc::clone(&self.obstacle) })
    }
}

impl Hurry for Speed {
    fn obstacle(&self) -> Option<Arc<dyn Error + Send + Sync>> {
        self.obstacle.lock().unwrap().map(|why| Arc::new(std::io::Error::other(why)) as _)
    }
}

impl Drop for Speed {
    fn drop(&mut self) {
        self.hurries.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A running guest whose memory is not complete.
struct Restored {
    guest: Arc<ProcessGuest>,
    server: Arc<Server>,
}

impl Restored {
    fn new() -> Self {
        trace();
        let guest = ProcessGuest::boot(config()).expect("source");
        guest.cont().expect("the guest starts");
        let server = Arc::<Server>::default();
        guest.ram().blocks().iter().for_each(|block| block.begin_filling(server.clone()));
        Self { guest, server }
    }

    fn hurries(&self) -> usize {
        self.server.hurries.load(Ordering::SeqCst)
    }

    fn set_obstacle(&self, why: Option<&'static str>) {
        *self.server.obstacle.lock().unwrap() = why;
    }

    fn complete(&self) {
        self.guest.ram().blocks().iter().for_each(RamBlock::end_filling);
    }

    /// The server has its speed from before, and the guest is free and runs.
    fn assert_as_before(&self) {
        assert_eq!(self.hurries(), 0);
        assert!(self.guest.ram().custody().may_leave());
        assert_eq!(self.guest.run_state(), RunState::Running);
        assert_lives_on(&self.guest);
    }
}

fn save(restored: &Restored, path: &std::path::Path) -> LiveSave {
    let vm: Arc<dyn SourceVm> = Arc::clone(&restored.guest) as _;
    let to = Address::File { path: path.to_owned(), offset: 0 };
    let (capabilities, options) = (Capabilities::default(), LiveSaveOptions::default());
    LiveSave::start(vm, &to, parameters(), capabilities, options, Arc::new(())).expect("started")
}

#[test]
fn live_save_waits_for_the_memory_while_the_guest_runs() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let restored = Restored::new();

    let save = save(&restored, &path);
    eventually("the server hurries", || restored.hurries() > 0);
    assert_lives_on(&restored.guest);
    assert_eq!(save.status(), Status::Setup);
    assert_eq!(save.statistics().missing_bytes, restored.guest.ram().total_bytes());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is written yet");

    restored.complete();
    let saved = save.wait().expect("saved");
    assert_eq!((saved.normal_pages + saved.zero_pages) * 4096, restored.guest.ram().total_bytes());
    assert_eq!(save.statistics().missing_bytes, 0);
    restored.assert_as_before();
}

#[test]
fn live_save_that_is_cancelled_or_meets_an_unreadable_page_leaves_the_guest_and_can_be_repeated() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let restored = Restored::new();

    let cancelled = save(&restored, &path);
    eventually("the server hurries", || restored.hurries() > 0);
    assert!(cancelled.cancel());
    assert!(matches!(cancelled.wait(), Err(MigrationError::Cancelled)));
    restored.assert_as_before();

    restored.set_obstacle(Some("frame 7 of the image"));
    for _ in 0..2 {
        let error = save(&restored, &path).wait().unwrap_err();
        assert!(matches!(error, MigrationError::NotLoaded(_)), "{error:?}");
        assert!(error.to_string().contains("frame 7 of the image"), "{error}");
        restored.assert_as_before();
    }
    assert!(!path.exists());

    restored.set_obstacle(None);
    let again = save(&restored, &path);
    eventually("the server hurries", || restored.hurries() > 0);
    restored.complete();
    again.wait().expect("the attempt after the failures");
    restored.assert_as_before();
}

#[test]
fn migration_connects_when_the_memory_is_whole_however_long_that_takes() {
    // The limit of the set-up is for the peer, which has nothing to answer yet.
    let limits = WaitLimits { setup: sterna_testing::stretched(Duration::from_secs(2)), ..LIMITS };
    for (settings, capabilities) in [(parameters(), Capabilities::default()), multifd(2)] {
        let restored = Restored::new();
        let target = ProcessGuest::waiting(config()).expect("destination");
        let incoming = listen(&target, &settings, capabilities);
        let params = Parameters { limits, ..settings };

        let migration = start(&restored.guest, &incoming.address(), &params, capabilities, Arc::new(()));
        eventually("the server hurries", || restored.hurries() > 0);
        std::thread::sleep(limits.setup + Duration::from_millis(200));
        assert_lives_on(&restored.guest);
        assert_eq!(migration.status(), Status::Setup);
        assert_eq!(migration.statistics().missing_bytes, restored.guest.ram().total_bytes());

        restored.complete();
        let (outcome, arrival) = (migration.wait(), incoming.wait());
        assert_arrived(&outcome, &arrival, &target);
        assert_eq!(restored.hurries(), 0);
    }
}

#[test]
fn migration_that_is_cancelled_or_meets_an_unreadable_page_leaves_the_guest_and_can_be_repeated() {
    let restored = Restored::new();
    let target = ProcessGuest::waiting(config()).expect("destination");
    let (params, capabilities) = (parameters(), Capabilities::default());
    let incoming = listen(&target, &params, capabilities);
    let begin = || start(&restored.guest, &incoming.address(), &params, capabilities, Arc::new(()));

    let cancelled = begin();
    eventually("the server hurries", || restored.hurries() > 0);
    cancelled.cancel().unwrap();
    assert!(matches!(cancelled.wait(), Outcome::Cancelled));
    restored.assert_as_before();

    restored.set_obstacle(Some("frame 7 of the image"));
    let outcome = begin().wait();
    let Outcome::Failed { error, held } = outcome else { panic!("{outcome:?}") };
    assert!(matches!(error, MigrationError::NotLoaded(_)) && !held, "{error:?}");
    restored.assert_as_before();

    restored.set_obstacle(None);
    let again = begin();
    eventually("the server hurries", || restored.hurries() > 0);
    restored.complete();
    // The destination has met no other source.
    let arrival: Arrival = incoming.wait();
    assert_arrived(&again.wait(), &arrival, &target);
}
