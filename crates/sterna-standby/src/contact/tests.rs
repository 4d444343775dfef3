//! Tests of the lease, with a clock that the test controls, and of the watchdog.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::error::VmError;
use sterna::internals::Clock;
use sterna_proto::replica::Ruling;
use sterna_proto::replica::primary::{self, Because, Outcome, State};
use sterna_proto::replica::standby;
use sterna_transport::Channel;

use super::{
    Claims, ContactError, Greeting, PrimaryContact, PrimaryGuest, Protection, Secret, StandbyContact,
    StandbyGuest, Terms, Watchdog,
};

const PROTECTION: Protection = Protection { id: [7; 16], generation: 1 };
/// So long that no test reaches them in real time: only the injected clock ends a lease.
const TERMS: Terms = Terms {
    heartbeat: Duration::from_millis(20),
    lease: Duration::from_secs(600),
    drift_per_mille: 10,
    margin: Duration::from_millis(100),
    claim_interval: Duration::from_millis(50),
};
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Guest {
    /// Whether stopping the guest fails.
    is_stubborn: AtomicBool,
    is_stopped: AtomicBool,
    fences: AtomicU32,
}

impl PrimaryGuest for Guest {
    fn stop(&self) -> Result<(), VmError> {
        if self.is_stubborn.load(Ordering::SeqCst) {
            return Err(VmError::new("guest", "told not to stop"));
        }
        self.is_stopped.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.is_stopped.store(false, Ordering::SeqCst);
        Ok(())
    }
    fn destroy(&self) {}
    fn close_channels(&self) {}
    fn take_last_checkpoint(&self, _: &dyn Fn(u64)) -> Result<(), VmError> {
        Ok(())
    }
    fn release(&self, _: u64) {}
    fn open_gate(&self) {}
    fn drop_output(&self) {}
}

impl StandbyGuest for Guest {
    fn close_channels(&self) {}
    fn prepare(&self, _: u64) -> Result<(), VmError> {
        Ok(())
    }
    fn fence(&self) -> Result<(), VmError> {
        self.fences.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn start(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn discard(&self) {}
}

/// A primary, and a standby that answers and holds checkpoint 1.
struct Sides {
    primary: PrimaryContact,
    standby: StandbyContact,
    guest: Arc<Guest>,
    there: Arc<Guest>,
    /// Sum of the clock's jumps, in ms.
    jumped: Arc<AtomicU64>,
    ruling: Arc<Mutex<Option<Ruling>>>,
}

impl Sides {
    fn protected() -> Self {
        Self::begin(TERMS)
    }

    fn begin(terms: Terms) -> Self {
        let (near, far) = Channel::pair().expect("a pair of sockets");
        let (near, far) = (Arc::new(near), Arc::new(far));
        let secret = || Secret::from_bytes([3; 32]);
        let ruling = Arc::<Mutex<Option<Ruling>>>::default();
        let (there, rules) = (Arc::<Guest>::default(), Arc::clone(&ruling));
        let opposite = move || match *rules.lock() {
            Some(Ruling::Won) => Ok(Ruling::Lost),
            Some(Ruling::Lost) => Ok(Ruling::Won),
            None => Err("undecided".to_owned()),
        };
        let survivor = Arc::clone(&there);
        let greeted = std::thread::spawn(move || {
            StandbyContact::begin_fencing(&far, &secret(), survivor, true, |_| Arc::new(opposite))
        });
        let (guest, jumped) = (Arc::<Guest>::default(), Arc::<AtomicU64>::default());
        let (began, jumps, rules) = (Instant::now(), Arc::clone(&jumped), Arc::clone(&ruling));
        let clock =
            Clock::injected(move || began.elapsed() + Duration::from_millis(jumps.load(Ordering::SeqCst)));
        let config = primary::Config { protection: PROTECTION, terms, in_flight: 1 };
        let greeting = Greeting { needs_fence: false, sends_differences: false };
        let claims: Arc<dyn Claims> = Arc::new(move || rules.lock().ok_or_else(|| "undecided".to_owned()));
        let primary =
            PrimaryContact::begin_with(&near, config, greeting, &secret(), guest.clone(), claims, clock);
        let (primary, standby) =
            (primary.expect("greeted"), greeted.join().expect("no panic").expect("greeted"));
        primary.checkpoint_taken(1).expect("the first");
        standby.checkpoint_held(1).expect("the first");
        let this = Self { primary, standby, guest, there, jumped, ruling };
        this.wait_for("checkpoint 1", |sides| sides.primary.held() == 1);
        this
    }

    fn suspend(&self, time: Duration) {
        self.jumped.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
    }

    fn wait_for(&self, what: &str, is: impl Fn(&Self) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is(self) {
            assert!(Instant::now() < until, "{what} did not come: {:?}", self.primary.state());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn suspend_of_the_primarys_host_ends_its_lease() {
    let sides = Sides::protected();
    assert!(sides.primary.may_say(1) && sides.primary.may_guest_run());

    sides.suspend(TERMS.lease);

    assert!(!sides.primary.may_say(1) && !sides.primary.may_guest_run(), "before any thread has run");
    sides.wait_for("the stop", |sides| sides.guest.is_stopped.load(Ordering::SeqCst));
    assert_eq!(sides.primary.state().state, State::Asking);
}

#[test]
fn standby_with_a_fence_uses_it_for_a_primary_that_stops_by_itself_too() {
    let sides = Sides::begin(Terms { lease: Duration::from_secs(2), ..TERMS });
    assert!(sides.standby.needs_fence());
    *sides.ruling.lock() = Some(Ruling::Lost);

    sides.standby.take_over(false).expect("it follows");

    assert_eq!(sides.standby.wait(PATIENCE), Some(standby::Outcome::Running(1)));
    assert_eq!(sides.there.fences.load(Ordering::SeqCst), 1);
    assert_eq!(sides.primary.wait(), Outcome::Lost);
}

/// The standby closes the connection after its last message. A heartbeat that meets the closed connection must not
/// hide the message.
#[test]
fn requested_end_is_no_loss_although_a_heartbeat_meets_the_closed_connection() {
    for _ in 0..300 {
        let sides = Sides::begin(Terms { heartbeat: Duration::from_micros(200), ..TERMS });

        *sides.ruling.lock() = Some(Ruling::Won);
        sides.primary.unprotect().expect("protected");

        assert_eq!(sides.primary.wait(), Outcome::Alone(Because::Never), "{:?}", sides.primary.state());
    }
}

/// Records the calls.
#[derive(Default)]
struct Dog {
    shortest: Duration,
    feeds: AtomicU32,
    is_armed: AtomicBool,
}

impl Watchdog for Dog {
    fn arm(&self, longest: Duration) -> Result<Duration, String> {
        if self.shortest > longest {
            return Err(format!("it has no timeout below {:?}", self.shortest));
        }
        self.is_armed.store(true, Ordering::SeqCst);
        Ok(Duration::from_millis(80))
    }
    fn feed(&self) -> Result<(), String> {
        self.feeds.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn disarm(&self) -> Result<(), String> {
        self.is_armed.store(false, Ordering::SeqCst);
        Ok(())
    }
}

impl Dog {
    fn is_fed(&self) -> bool {
        let before = self.feeds.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(200));
        self.feeds.load(Ordering::SeqCst) > before
    }
}

#[test]
fn watchdog_starves_while_a_guest_without_a_lease_is_not_stopped() {
    let (sides, dog) = (Sides::protected(), Arc::<Dog>::default());
    sides.primary.arm(dog.clone()).expect("armed");
    sides.wait_for("food while the lease lasts", |_| dog.is_fed());

    sides.guest.is_stubborn.store(true, Ordering::SeqCst);
    // The suspend is longer than lease and margin together.
    sides.suspend(TERMS.lease + TERMS.margin);
    sides.wait_for("the lease's end", |sides| sides.primary.state().state == State::Asking);
    // The watchdog may have been about to call `feed` when the clock jumped.
    sides.wait_for("hunger, which resets the host", |_| !dog.is_fed());

    sides.guest.is_stubborn.store(false, Ordering::SeqCst);
    sides.wait_for("the stop", |sides| sides.guest.is_stopped.load(Ordering::SeqCst));
    sides.wait_for("food", |_| dog.is_fed());
    *sides.ruling.lock() = Some(Ruling::Won);

    assert_eq!(sides.primary.wait(), Outcome::Alone(Because::Claim));
    sides.wait_for("the end of the watchdog", |_| !dog.is_armed.load(Ordering::SeqCst));
}

#[test]
fn watchdog_that_is_slower_than_the_lease_is_refused_and_does_not_run() {
    let (sides, dog) = (Sides::protected(), Arc::new(Dog { shortest: TERMS.lease, ..Dog::default() }));

    let refused = sides.primary.arm(dog.clone());

    assert!(matches!(refused, Err(ContactError::Watchdog(_))), "{refused:?}");
    assert!(!dog.is_armed.load(Ordering::SeqCst));
    assert_eq!(sides.primary.state().state, State::Protected, "it goes on without one");
}
