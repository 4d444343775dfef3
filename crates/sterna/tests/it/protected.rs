//! A guest of this process that a standby protects: checkpoints while it writes, and what the last one is worth.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::error::VmError;
use sterna::opaque::ImagePlan;
use sterna::ram::Custody;
use sterna::replica::machines::{Ruling, primary, standby};
use sterna::replica::{
    ByteGate, Claims, EpochGate, Guardians, NoOutput, OperatorsWord, Primary, PrimaryOptions, Protection,
    Secret, Standby, StandbyContact, StandbyGuest, StandbyOptions, Terms,
};
use sterna::{Address, Capabilities, Compression, Incoming, Parameters, RunState, SourceVm, TargetVm, Vm};
use sterna_guests::model::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest};
use sterna_image::MappedOptions;
use sterna_transport::Channel;

use crate::common::*;

const PATIENCE: Duration = Duration::from_secs(60);

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A lease that no busy host lets run out.
const TERMS: Terms = Terms {
    heartbeat: Duration::from_millis(20),
    lease: Duration::from_secs(60),
    drift_per_mille: 10,
    margin: Duration::from_millis(100),
    claim_interval: Duration::from_millis(50),
};

/// Gives the claim to who asks first.
#[derive(Default)]
struct Arbiter(Mutex<Option<&'static str>>);

impl Arbiter {
    fn of(self: &Arc<Self>, side: &'static str) -> Arc<dyn Claims> {
        let this = Arc::clone(self);
        Arc::new(move || {
            let owner = *this.0.lock().get_or_insert(side);
            Ok(if owner == side { Ruling::Won } else { Ruling::Lost })
        })
    }
}

/// Makes an image of what is held, in place of starting it.
struct Survivor {
    standby: Standby,
    image: PathBuf,
    has_started: AtomicBool,
}

impl StandbyGuest for Survivor {
    fn close_channels(&self) {}
    fn prepare(&self, _: u64) -> Result<(), VmError> {
        let plan = ImagePlan { path: self.image.clone(), options: MappedOptions::default(), convert: None };
        let taken = self.standby.takeover(&plan, &OperatorsWord);
        taken.map(drop).map_err(|error| VmError::new("takeover", error))
    }
    fn fence(&self) -> Result<(), VmError> {
        panic!("a guest of this process stops by itself")
    }
    fn start(&self) -> Result<(), VmError> {
        self.has_started.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn discard(&self) {}
}

struct Pair {
    guest: Arc<ProcessGuest>,
    config: ProcessConfig,
    primary: Primary,
    standby: Standby,
    contact: StandbyContact,
    survivor: Arc<Survivor>,
    arbiter: Arc<Arbiter>,
    channel: Arc<Channel>,
    directory: tempfile::TempDir,
}

fn protect(config: ProcessConfig, way: &Way, terms: Terms, gate: Arc<dyn EpochGate>) -> Pair {
    trace();
    let guest = ProcessGuest::boot(config.clone()).expect("source");
    guest.cont().expect("the guest starts");
    let directory = tempfile::tempdir().unwrap();
    let at = Address::Unix(directory.path().join("standby"));
    let (params, capabilities) = way.settings();
    let options = StandbyOptions::default();
    let standby =
        Standby::listen(&at, &options, params.clone(), capabilities, Arc::new(())).expect("listening");
    let survivor = Arc::new(Survivor {
        standby: standby.clone(),
        image: directory.path().join("image"),
        has_started: AtomicBool::new(false),
    });
    let (near, far) = Channel::pair().expect("a pair of sockets");
    let (near, far) = (Arc::new(near), Arc::new(far));
    let (arbiter, secret) = (Arc::<Arbiter>::default(), || Secret::from_bytes([3; 32]));
    let greeted = std::thread::spawn({
        let (survivor, arbiter) = (Arc::clone(&survivor), Arc::clone(&arbiter));
        move || StandbyContact::begin(&far, &secret(), survivor, |_| arbiter.of("standby")).expect("greeted")
    });
    let vm: Arc<dyn SourceVm> = Arc::clone(&guest) as _;
    let options = PrimaryOptions { checkpoint_delay: way.delay, terms, buffer_bytes: way.buffer_bytes };
    let guardians = Guardians {
        protection: Protection { id: [7; 16], generation: 1 },
        secret: secret(),
        claims: arbiter.of("primary"),
        gate,
    };
    let primary =
        Primary::protect_over(&near, vm, &at, &options, guardians, params, capabilities, Arc::new(()))
            .expect("protected");
    let contact = greeted.join().expect("greeted");
    // The standby's listener will do this: every checkpoint that is held is told.
    std::thread::spawn({
        let (standby, contact) = (standby.clone(), contact.clone());
        move || {
            while contact.state().outcome.is_none() {
                while contact.held() < standby.statistics().checkpoints {
                    if contact.checkpoint_held(contact.held() + 1).is_err() {
                        return;
                    }
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    });
    Pair { guest, config, primary, standby, contact, survivor, arbiter, channel: near, directory }
}

/// How checkpoints travel.
#[derive(Debug, Clone, Copy)]
struct Way {
    lanes: u8,
    compression: Compression,
    zero_pages: sterna::ZeroPageDetection,
    delay: Duration,
    buffer_bytes: u64,
}

const PLAIN: Way = Way {
    lanes: 0,
    compression: Compression::None,
    zero_pages: sterna::ZeroPageDetection::Multifd,
    delay: Duration::from_millis(5),
    buffer_bytes: 64 << 20,
};

impl Way {
    fn settings(&self) -> (Parameters, Capabilities) {
        let (params, capabilities) =
            if self.lanes == 0 { (parameters(), Capabilities::default()) } else { multifd(self.lanes) };
        let params = Parameters {
            multifd_compression: self.compression,
            zero_page_detection: self.zero_pages,
            ..params
        };
        (params, capabilities)
    }
}

/// A guest that writes all the time, with pages of every kind.
fn writer() -> ProcessConfig {
    let blocks = vec![("ram.low".into(), 12 << 20), ("ram.high".into(), 4 << 20)];
    ProcessConfig { blocks, fill: Fill::Half(7), workers: 2, ..config() }
}

impl Pair {
    fn wait_for_held(&self, number: u64) {
        wait_for(&format!("checkpoint {number}"), || {
            assert_eq!(self.primary.state().outcome, None, "{:?}", self.primary.state());
            self.primary.statistics().held >= number
        });
    }

    /// The last checkpoint's guest, which goes on by itself.
    fn survivor(&self) -> Arc<ProcessGuest> {
        let target = ProcessGuest::waiting(self.config.clone()).expect("destination");
        let vm: Arc<dyn TargetVm> = Arc::clone(&target) as _;
        let from = Address::File { path: self.survivor.image.clone(), offset: 0 };
        let capabilities = Capabilities { mapped_ram: true, unmanaged: true, ..Capabilities::default() };
        let incoming =
            Incoming::listen(vm, &from, parameters(), capabilities, Arc::new(())).expect("loading");
        let arrival = incoming.wait();
        assert!(matches!(arrival, sterna::Arrival::Completed(_)), "{arrival:?}");
        target
    }
}

#[test]
fn guest_that_writes_is_handed_over_whole_with_its_last_checkpoint() {
    let ways = [
        PLAIN,
        Way { lanes: 1, ..PLAIN },
        Way { lanes: 4, zero_pages: sterna::ZeroPageDetection::Legacy, ..PLAIN },
        Way { lanes: 2, compression: Compression::Zstd, ..PLAIN },
        Way { lanes: 2, compression: Compression::Zlib, ..PLAIN },
        // Nothing is staged: the guest stands until all is sent.
        Way { buffer_bytes: 4096, ..PLAIN },
        Way { lanes: 2, buffer_bytes: 4096, ..PLAIN },
    ];
    for way in ways {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        let gate =
            Arc::new(ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes)).unwrap());
        let pair = protect(writer(), &way, TERMS, gate.clone());
        pair.wait_for_held(20);
        assert!(pair.guest.wait_progress(10, PATIENCE), "{way:?}: the guest goes on");
        let statistics = pair.primary.statistics();
        assert_eq!(statistics.unbuffered > 0, way.buffer_bytes == 4096, "{way:?}: {statistics:?}");
        gate.put(b"last words");

        pair.primary.hand_over().expect("protected");

        assert_eq!(pair.primary.wait(), primary::Outcome::HandedOver, "{way:?}: {:?}", pair.primary.state());
        let last = pair.contact.wait(PATIENCE).expect("an end");
        assert!(matches!(last, standby::Outcome::Running(_)), "{way:?}: {last:?}");
        assert!(gate.wait_until_empty(PATIENCE));
        assert_eq!(*said.lock(), b"last words");
        let survivor = pair.survivor();
        let (ours, theirs) = (pair.guest.progress(), survivor.progress());
        assert!(theirs.total_steps() >= ours.total_steps(), "no step is lost: {theirs:?} after {ours:?}");
        assert_lives_on(&survivor);
        assert_eq!(pair.guest.ram().custody(), Custody::Gone);
        assert!(!pair.primary.migration().may_guest_run());
    }
}

#[test]
fn primary_that_loses_the_claim_stands_and_the_standbys_guest_is_whole() {
    for lanes in [0, 2] {
        let said = Arc::new(Mutex::new(Vec::new()));
        let writes = Arc::clone(&said);
        let gate =
            Arc::new(ByteGate::new(1 << 20, move |bytes| writes.lock().extend_from_slice(bytes)).unwrap());
        let terms = Terms { lease: Duration::from_secs(3), ..TERMS };
        // The interval after these is long: what is said in it is never held.
        let pair = protect(writer(), &Way { lanes, ..PLAIN }, terms, gate.clone());
        pair.wait_for_held(20);
        pair.primary.set_checkpoint_delay(Duration::from_secs(600)).expect("long enough");
        wait_for("the end of checkpoints", || {
            let before = pair.primary.statistics().taken;
            std::thread::sleep(Duration::from_millis(100));
            pair.primary.statistics().taken == before && pair.primary.statistics().held == before
        });
        gate.put(b"never held");
        *pair.arbiter.0.lock() = Some("standby");

        pair.channel.shutdown();

        assert_eq!(pair.primary.wait(), primary::Outcome::Lost);
        assert_eq!(pair.guest.run_state(), RunState::Paused);
        assert_eq!(pair.guest.ram().custody(), Custody::Gone);
        assert!(said.lock().is_empty(), "nothing leaves that the survivor does not know");
        let ended = pair.contact.wait(PATIENCE).expect("an end");
        assert!(matches!(ended, standby::Outcome::Running(number) if number >= 20), "{ended:?}");
        assert!(pair.survivor.has_started.load(Ordering::SeqCst));
        assert_lives_on(&pair.survivor());
    }
}

#[test]
fn protection_that_ends_leaves_the_guest_here_and_it_can_be_protected_again() {
    let pair = protect(writer(), &PLAIN, TERMS, Arc::new(NoOutput));
    pair.wait_for_held(3);
    assert!(pair.primary.migration().cancel().is_err(), "the standby has to be asked");
    // Operators stop it and let it run between checkpoints.
    for _ in 0..20 {
        pair.guest.pause().expect("it is free");
        assert_eq!(pair.guest.run_state(), RunState::Paused);
        pair.guest.cont().expect("it is free");
    }

    pair.primary.unprotect().expect("protected");

    assert_eq!(pair.primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    assert_lives_on(&pair.guest);
    drop(pair.standby);
    let (target, params) = (ProcessGuest::waiting(pair.config.clone()).expect("destination"), parameters());
    let (_, outcome, arrival) = migrate(&pair.guest, &target, &params, Capabilities::default());
    assert_arrived(&outcome, &arrival, &target);
    drop(pair.directory);
}
