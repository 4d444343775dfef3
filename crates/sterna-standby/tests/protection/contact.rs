//! Primary and standby of a protected guest in contact. The guests only record the calls that they get.

mod flood;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna::error::VmError;
use sterna_standby::machines::{Ruling, primary, standby};
use sterna_standby::{
    ArbiterIdentity, ArbiterStore, Claims, ContactError, PrimaryContact, PrimaryGuest, Protection, Secret,
    StandbyContact, StandbyGuest, Terms,
};
use sterna_transport::Channel;

use crate::support::{PATIENCE, wait_for};

const PROTECTION: Protection = Protection { id: [7; 16], generation: 1 };

/// A lease that does not end on a busy host, or a short one.
fn terms(is_long: bool) -> Terms {
    Terms {
        heartbeat: Duration::from_millis(20),
        lease: if is_long { Duration::from_secs(60) } else { Duration::from_millis(200) },
        drift_per_mille: 10,
        margin: Duration::from_millis(100),
        claim_interval: Duration::from_millis(50),
    }
}

fn secret() -> Secret {
    Secret::from_bytes([3; 32])
}

/// The guest, on either side.
#[derive(Default)]
struct Guest {
    runs: AtomicBool,
    released: AtomicU64,
    log: Mutex<Vec<&'static str>>,
    /// Panics when it is stopped for the first time.
    panics: AtomicBool,
    /// Number of times that preparing a checkpoint fails.
    unready: AtomicU64,
    /// The other side, which holds the last checkpoint as soon as it was taken.
    peer: Mutex<Option<StandbyContact>>,
}

impl Guest {
    fn running() -> Arc<Self> {
        Arc::new(Self { runs: AtomicBool::new(true), ..Self::default() })
    }

    fn did(&self, what: &'static str) {
        self.log.lock().push(what);
    }

    fn has_done(&self, what: &str) -> bool {
        self.log.lock().contains(&what)
    }

    fn runs(&self) -> bool {
        self.runs.load(Ordering::SeqCst)
    }
}

impl PrimaryGuest for Guest {
    fn stop(&self) -> Result<(), VmError> {
        assert!(!self.panics.swap(false, Ordering::SeqCst), "told to panic");
        self.runs.store(false, Ordering::SeqCst);
        self.did("stop");
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        self.runs.store(true, Ordering::SeqCst);
        self.did("resume");
        Ok(())
    }
    fn destroy(&self) {
        self.runs.store(false, Ordering::SeqCst);
        self.did("destroy");
    }
    fn close_channels(&self) {
        self.did("close");
    }
    fn take_last_checkpoint(&self, taken: &dyn Fn(u64)) -> Result<(), VmError> {
        self.runs.store(false, Ordering::SeqCst);
        self.did("last");
        taken(2);
        if let Some(peer) = self.peer.lock().take() {
            peer.checkpoint_held(2).expect("it follows");
        }
        Ok(())
    }
    fn release(&self, epoch: u64) {
        self.released.store(epoch, Ordering::SeqCst);
    }
    fn open_gate(&self) {
        self.did("open");
    }
    fn drop_output(&self) {
        self.did("drop");
    }
}

impl StandbyGuest for Guest {
    fn close_channels(&self) {
        self.did("close");
    }
    fn prepare(&self, _: u64) -> Result<(), VmError> {
        self.did("prepare");
        let failed =
            self.unready.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        match failed {
            Ok(_) => Err(VmError::new("guest".to_owned(), "told to fail")),
            Err(_) => Ok(()),
        }
    }
    fn fence(&self) -> Result<(), VmError> {
        self.did("fence");
        Ok(())
    }
    fn start(&self) -> Result<(), VmError> {
        self.runs.store(true, Ordering::SeqCst);
        self.did("start");
        Ok(())
    }
    fn discard(&self) {
        self.did("discard");
    }
}

/// Gives the claim to the side that asks first.
#[derive(Default)]
struct Arbiter {
    owner: Mutex<Option<&'static str>>,
    is_away: AtomicBool,
    /// The side that cannot reach the arbiter, if only one cannot.
    is_away_from: Mutex<Option<&'static str>>,
}

impl Arbiter {
    fn of(self: &Arc<Self>, side: &'static str) -> Arc<dyn Claims> {
        Arc::new(AsksArbiter { arbiter: Arc::clone(self), side })
    }
}

struct AsksArbiter {
    arbiter: Arc<Arbiter>,
    side: &'static str,
}

impl Claims for AsksArbiter {
    fn claim(&self) -> Result<Ruling, String> {
        self.look()?;
        let owner = *self.arbiter.owner.lock().get_or_insert(self.side);
        Ok(if owner == self.side { Ruling::Won } else { Ruling::Lost })
    }

    fn look(&self) -> Result<(), String> {
        let is_away = self.arbiter.is_away.load(Ordering::SeqCst);
        match is_away || *self.arbiter.is_away_from.lock() == Some(self.side) {
            true => Err("told to be away".to_owned()),
            false => Ok(()),
        }
    }
}

struct Pair {
    here: Arc<Guest>,
    there: Arc<Guest>,
    primary: PrimaryContact,
    standby: StandbyContact,
    arbiter: Arc<Arbiter>,
    channel: Arc<Channel>,
}

/// Both sides in contact, with checkpoint 1 held. On a busy host a short lease may end before that.
fn pair(terms: Terms, needs_fence: bool) -> Pair {
    pair_with(terms, needs_fence, Arc::default())
}

fn pair_with(terms: Terms, needs_fence: bool, arbiter: Arc<Arbiter>) -> Pair {
    let (near, far) = Channel::pair().expect("a pair of sockets");
    let (near, far) = (Arc::new(near), Arc::new(far));
    let (here, there) = (Guest::running(), Arc::<Guest>::default());
    let greeted = std::thread::spawn({
        let (there, arbiter, far) = (Arc::clone(&there), Arc::clone(&arbiter), Arc::clone(&far));
        move || {
            StandbyContact::begin(&far, &secret(), there, |protection| {
                assert_eq!(protection, PROTECTION);
                arbiter.of("standby")
            })
        }
    });
    let guest = Arc::clone(&here);
    let primary =
        PrimaryContact::begin(&near, PROTECTION, terms, needs_fence, &secret(), guest, arbiter.of("primary"))
            .expect("greeted");
    let standby = greeted.join().expect("no panic").expect("greeted");
    primary.checkpoint_taken(1).expect("the first");
    standby.checkpoint_held(1).expect("the first");
    if terms.lease == self::terms(true).lease {
        wait_for("the release", || here.released.load(Ordering::SeqCst) == 1);
    }
    Pair { here, there, primary, standby, arbiter, channel: near }
}

#[test]
fn what_was_said_may_leave_when_its_checkpoint_is_held() {
    let Pair { primary, standby, .. } = pair(terms(true), false);
    assert!(primary.may_say(1) && !primary.may_say(2));
    primary.checkpoint_taken(2).expect("the second");
    assert!(!primary.may_say(2), "taken, and not held");
    standby.checkpoint_held(2).expect("the second");
    wait_for("the answer", || primary.may_say(2));
    assert_eq!((primary.held(), standby.held()), (2, 2));
    assert!(standby.checkpoint_held(7).is_err(), "out of order");
}

#[test]
fn primary_that_loses_its_standby_goes_on_by_claim_without_a_pause() {
    let Pair { here, primary, channel, .. } = pair(terms(true), false);

    channel.shutdown();

    assert_eq!(primary.wait(), primary::Outcome::Alone(primary::Because::Claim));
    assert!(here.runs() && here.has_done("open") && here.has_done("close") && !here.has_done("stop"));
    assert!(primary.may_say(99));
    assert!(primary.state().trouble.is_some(), "why contact was lost");
}

#[test]
fn connection_that_breaks_leaves_the_guest_on_exactly_one_side() {
    for turn in 0..20 {
        let Pair { here, there, primary, standby, channel, .. } = pair(terms(false), turn % 2 == 1);

        channel.shutdown();

        let (ours, theirs) = (primary.wait(), standby.wait(PATIENCE).expect("an end"));
        match (ours, theirs) {
            (primary::Outcome::Alone(_), standby::Outcome::Discarded(_)) => {
                assert!(here.runs() && !there.runs());
            }
            (primary::Outcome::Lost, standby::Outcome::Running(1)) => {
                assert!(!here.runs() && there.runs() && here.has_done("destroy") && here.has_done("drop"));
                assert_eq!(there.has_done("fence"), turn % 2 == 1);
            }
            other => panic!("turn {turn}: {other:?}"),
        }
    }
}

#[test]
fn primary_without_arbiter_stops_its_guest_when_the_lease_ends_and_goes_on_when_it_has_won() {
    let away = Arc::new(Arbiter { is_away: AtomicBool::new(true), ..Arbiter::default() });
    let Pair { here, primary, channel, arbiter, .. } = pair_with(terms(false), false, away);
    here.panics.store(true, Ordering::SeqCst);

    channel.shutdown();
    wait_for("the stop, after a panic", || !here.runs());
    assert_eq!(primary.state().state, primary::State::Asking);
    assert!(!primary.may_say(1) && !primary.may_guest_run());

    *arbiter.owner.lock() = Some("primary");
    arbiter.is_away.store(false, Ordering::SeqCst);
    assert_eq!(primary.wait(), primary::Outcome::Alone(primary::Because::Claim));
    assert!(here.runs());
}

#[test]
fn protection_ends_with_the_standbys_last_word() {
    let Pair { here, there, primary, standby, arbiter, .. } = pair(terms(true), false);

    primary.unprotect().expect("it is protected");

    assert_eq!(primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    let discarded = standby::Outcome::Discarded(standby::Because::Unprotected);
    assert_eq!(standby.wait(PATIENCE), Some(discarded));
    assert!(here.runs() && there.has_done("discard") && !there.has_done("prepare"));
    assert_eq!(*arbiter.owner.lock(), None, "nobody asked");
    assert!(primary.unprotect().is_err(), "it is over");
    // The end of the other side's connection arrives afterwards and is no problem.
    drop(primary);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(standby.state().trouble, None);
}

#[test]
fn planned_takeover_moves_the_guest_with_its_last_checkpoint() {
    let Pair { here, there, primary, standby, .. } = pair(terms(true), true);
    *here.peer.lock() = Some(standby.clone());

    standby.take_over(true).expect("in contact");

    assert_eq!(primary.wait(), primary::Outcome::HandedOver);
    assert_eq!(standby.wait(PATIENCE), Some(standby::Outcome::Running(2)));
    assert!(there.runs() && !here.runs() && here.has_done("destroy"));
    assert!(!there.has_done("fence"), "the primary has stopped it");
    assert_eq!(here.released.load(Ordering::SeqCst), 2, "nothing that was said is lost");
}

#[test]
fn planned_takeover_that_cannot_start_leaves_the_guest_where_it_was() {
    let Pair { here, there, primary, standby, arbiter, .. } = pair(terms(true), false);
    *here.peer.lock() = Some(standby.clone());
    there.unready.store(1, Ordering::SeqCst);

    primary.hand_over().expect("protected");

    assert_eq!(primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    assert!(here.runs() && !there.runs());
    assert_eq!(*arbiter.owner.lock(), None, "nobody asked");
}

#[test]
fn planned_takeover_without_an_arbiter_is_refused_before_the_guest_is_stopped() {
    for needs_fence in [false, true] {
        let Pair { here, there, primary, standby, arbiter, .. } = pair(terms(true), needs_fence);
        *here.peer.lock() = Some(standby.clone());
        arbiter.is_away.store(true, Ordering::SeqCst);

        let refused = standby.take_over(true).expect_err("without an arbiter");
        assert_eq!(refused, standby::Refusal::ArbiterOutOfReach);
        let refused = primary.hand_over().expect_err("without an arbiter");
        assert_eq!(refused, primary::Refusal::ArbiterOutOfReach);

        assert!(here.runs() && !here.has_done("last"));
        assert_eq!(
            (primary.state().state, standby.state().state),
            (primary::State::Protected, standby::State::Following)
        );
        // The protection continues, and a takeover succeeds when the arbiter can be reached.
        arbiter.is_away.store(false, Ordering::SeqCst);
        standby.take_over(true).expect("with an arbiter");
        assert_eq!(standby.wait(PATIENCE), Some(standby::Outcome::Running(2)));
        assert_eq!(primary.wait(), primary::Outcome::HandedOver);
        assert!(there.runs() && !here.runs());
    }
}

#[test]
fn guest_that_was_given_goes_on_at_the_primary_if_its_standby_finds_no_arbiter() {
    let Pair { here, there, primary, standby, arbiter, .. } = pair(terms(true), false);
    *here.peer.lock() = Some(standby.clone());
    // Only the primary reaches the arbiter.
    *arbiter.is_away_from.lock() = Some("standby");

    primary.hand_over().expect("the primary has looked");

    assert_eq!(primary.wait(), primary::Outcome::Alone(primary::Because::Never));
    let discarded = standby::Outcome::Discarded(standby::Because::ArbiterOutOfReach);
    assert_eq!(standby.wait(PATIENCE), Some(discarded));
    assert!(here.runs() && !there.runs());
    assert_eq!(*arbiter.owner.lock(), None, "nobody asked");
}

#[test]
fn standby_that_cannot_start_claims_nothing_until_it_can() {
    // The primary's guest is paused and waits meanwhile.
    let away = Arc::new(Arbiter { is_away: AtomicBool::new(true), ..Arbiter::default() });
    let Pair { there, primary, standby, arbiter, .. } = pair_with(terms(false), false, away);
    there.unready.store(u64::MAX, Ordering::SeqCst);

    // On a busy host, the standby may already have lost its patience.
    let _ = standby.take_over(false);
    wait_for("the failure", || standby.state().state == standby::State::Unready);
    assert!(standby.state().trouble.expect("said").contains("told to fail"));
    assert!(standby.vouch().is_err(), "there is nothing to vouch for");
    assert_eq!(*arbiter.owner.lock(), None, "nobody asked");

    there.unready.store(0, Ordering::SeqCst);
    standby.retry().expect("it waits for the operator");
    *arbiter.owner.lock() = Some("standby");
    arbiter.is_away.store(false, Ordering::SeqCst);
    assert_eq!(standby.wait(PATIENCE), Some(standby::Outcome::Running(1)));
    assert_eq!(primary.wait(), primary::Outcome::Lost);
}

#[test]
fn stranger_is_refused_by_either_side() {
    for is_standby_wrong in [true, false] {
        let (near, far) = Channel::pair().expect("a pair of sockets");
        let (near, far) = (Arc::new(near), Arc::new(far));
        let arbiter = Arc::<Arbiter>::default();
        let other = Secret::from_bytes([4; 32]);
        let secrets = if is_standby_wrong { (secret(), other) } else { (other, secret()) };
        let claims = arbiter.of("standby");
        let answered = std::thread::spawn(move || {
            let begun = StandbyContact::begin(&far, &secrets.1, Arc::<Guest>::default(), |_| claims);
            far.shutdown();
            begun.map(|_| ())
        });
        let (guest, claims) = (Guest::running(), arbiter.of("primary"));
        let greeted = PrimaryContact::begin(&near, PROTECTION, terms(true), false, &secrets.0, guest, claims)
            .map(|_| ());
        assert!(matches!(greeted, Err(ContactError::Transport(_))), "{greeted:?}");
        let refused = answered.join().expect("no panic").expect_err("a stranger");
        assert!(matches!(refused, ContactError::Stranger { .. }), "{refused}");
    }
}

/// One side's result of asking its arbiter.
struct Finds(Result<ArbiterIdentity, String>, Arc<AtomicUsize>);

impl Claims for Finds {
    fn claim(&self) -> Result<Ruling, String> {
        panic!("no protection has begun")
    }
    fn arbiter(&self) -> Result<ArbiterIdentity, String> {
        self.0.clone()
    }
    fn arbiters_compared(&self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

/// Results of a greeting at the primary and at the standby, and the number of calls that allow the primary to remove
/// its token.
fn greetings(
    here: Result<ArbiterIdentity, String>,
    there: Result<ArbiterIdentity, String>,
) -> (Result<(), ContactError>, Result<(), ContactError>, usize) {
    let (near, far) = Channel::pair().expect("a pair of sockets");
    let (near, far) = (Arc::new(near), Arc::new(far));
    let compared = Arc::<AtomicUsize>::default();
    let answered = std::thread::spawn(move || {
        let claims = Arc::new(Finds(there, Arc::default()));
        let begun = StandbyContact::begin(&far, &secret(), Arc::<Guest>::default(), |_| claims);
        if begun.is_err() {
            far.shutdown();
        }
        begun.map(|_| ())
    });
    let claims = Arc::new(Finds(here, Arc::clone(&compared)));
    let begun =
        PrimaryContact::begin(&near, PROTECTION, terms(true), false, &secret(), Guest::running(), claims);
    let begun = begun.map(|contact| contact.unprotect().expect("in the seeding"));
    near.shutdown();
    (begun, answered.join().expect("no panic"), compared.load(Ordering::SeqCst))
}

fn found(name: &str, store: ArbiterStore) -> Result<ArbiterIdentity, String> {
    Ok(ArbiterIdentity { name: name.to_owned(), store })
}

fn token(text: &str) -> ArbiterStore {
    ArbiterStore::Token(text.to_owned())
}

#[test]
fn sides_that_ask_two_arbiters_begin_no_protection_and_name_both() {
    let nothing = || ArbiterStore::Nothing;
    for (here, there, why) in [
        (found("file:/a", token("1")), found("file:/b", token("2")), "do not share it"),
        // Directories of the same name on different hosts.
        (found("file:/a", token("1")), found("file:/a", token("2")), "do not share it"),
        (found("file:/a", token("1")), found("ask", nothing()), "of two kinds"),
        (found("exec:/a", nothing()), found("exec:/b", nothing()), "cannot be proved"),
    ] {
        let names = [&here, &there].map(|found| found.clone().expect("found").name);
        let (primary, standby, compared) = greetings(here, there);
        for error in [primary.expect_err("refused"), standby.expect_err("refused")] {
            assert!(matches!(error, ContactError::TwoArbiters { .. }), "{error}");
            let text = error.to_string();
            let named = format!("the primary's arbiter is {}, and the standby's {}", names[0], names[1]);
            assert!(text.contains(&named) && text.contains(why), "{text}");
        }
        assert_eq!(compared, 1);
    }
}

#[test]
fn sides_that_ask_one_arbiter_begin_whatever_they_call_it() {
    for (here, there) in [
        (found("file:/a", token("1")), found("file:/mnt/b", token("1"))),
        (found("ask", ArbiterStore::Nothing), found("ask", ArbiterStore::Nothing)),
    ] {
        let (primary, standby, compared) = greetings(here, there);
        assert!(primary.is_ok() && standby.is_ok(), "{primary:?} {standby:?}");
        assert_eq!(compared, 1);
    }
}

#[test]
fn arbiter_that_cannot_be_asked_begins_nothing_and_is_named_at_both_sides() {
    let away = || Err::<ArbiterIdentity, _>("the arbiter etcd:http://e is out of reach".to_owned());
    let (primary, standby, _) = greetings(found("file:/a", token("1")), away());
    let (primary, standby) = (primary.expect_err("refused"), standby.expect_err("refused"));
    let ContactError::Arbiter(there) = &primary else { panic!("{primary}") };
    // The arbiter's own sentence is the subject: an operator finds it at both sides.
    assert!(there.contains("the standby cannot ask its arbiter: the arbiter etcd:http://e"), "{there}");
    let ContactError::Arbiter(here) = &standby else { panic!("{standby}") };
    assert_eq!(here, "the arbiter etcd:http://e is out of reach");

    // The primary finds this out before it sends a byte.
    let (near, _far) = Channel::pair().expect("a pair of sockets");
    let (near, claims) = (Arc::new(near), Arc::new(Finds(away(), Arc::default())));
    let begun =
        PrimaryContact::begin(&near, PROTECTION, terms(true), false, &secret(), Guest::running(), claims);
    assert!(matches!(begun.map(|_| ()), Err(ContactError::Arbiter(_))));
    assert_eq!(near.bytes_written(), 0);
}

#[test]
fn times_that_cannot_be_are_refused_before_a_byte_is_sent() {
    let (near, _far) = Channel::pair().expect("a pair of sockets");
    let near = Arc::new(near);
    let arbiter = Arc::<Arbiter>::default();
    let begin = |terms| {
        let claims = arbiter.of("primary");
        PrimaryContact::begin(&near, PROTECTION, terms, false, &secret(), Guest::running(), claims)
            .map(|_| ())
    };
    let short = begin(Terms { lease: Duration::from_millis(30), ..terms(true) });
    assert!(matches!(short, Err(ContactError::Terms(_))), "{short:?}");
    let long = begin(Terms { lease: Duration::from_secs(10_000), ..terms(true) });
    assert!(matches!(long, Err(ContactError::TooLong { .. })), "{long:?}");
    assert_eq!(near.bytes_written(), 0);
}
