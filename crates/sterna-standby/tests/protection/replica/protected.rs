//! A guest that is protected in contact with its primary: which side takes over, and when, and that no other party
//! can.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketType};
use sterna::error::VmError;
use sterna::{Address, Event, Observer};
use sterna_standby::machines::Ruling;
use sterna_standby::machines::standby::{Because, Outcome, State};
use sterna_standby::{
    Claims, ContactRules, HeldGuest, ImageSurvivor, OperatorsWord, Protection, Secret, Standby,
    StandbyOptions, StandbyState, Survivor, TakeoverError,
};
use sterna_wire::PAGE_SIZE;
use sterna_wire::multifd::InitialPacket;
use sterna_wire::replica::{Hello, Message};
use tempfile::TempDir;

use super::heart::{Heart, PROTECTION, secret};
use super::primary::Primary;
use super::{assert_image, options, pages, plan, settings};
use crate::support;
pub(super) use crate::support::{PATIENCE, wait_for};

/// Settings of the arbiter and the fence, and a record of their calls, in order.
#[derive(Default)]
pub(super) struct World {
    ruling: Mutex<Option<Ruling>>,
    /// Number of times that the fence fails.
    fails: AtomicU64,
    log: Mutex<Vec<&'static str>>,
    warnings: Mutex<Vec<String>>,
}

impl World {
    fn ruling(ruling: Ruling) -> Arc<Self> {
        Arc::new(Self { ruling: Mutex::new(Some(ruling)), ..Self::default() })
    }

    fn count(&self, what: &str) -> usize {
        self.log.lock().iter().filter(|done| **done == what).count()
    }

    fn has_warned(&self, words: &str) -> bool {
        self.warnings.lock().iter().any(|warning| warning.contains(words))
    }
}

impl Observer for World {
    fn event(&self, event: &Event) {
        if let Event::Warning(text) = event {
            self.warnings.lock().push(text.clone());
        }
    }
}

/// An image survivor that records its calls.
struct Noted(ImageSurvivor, Arc<World>);

impl Survivor for Noted {
    fn prepare(&self, guest: &HeldGuest) -> Result<(), VmError> {
        self.1.log.lock().push("prepare");
        self.0.prepare(guest)
    }
    fn start(&self) -> Result<(), VmError> {
        self.1.log.lock().push("start");
        self.0.start()
    }
    fn discard(&self) {
        self.1.log.lock().push("discard");
        self.0.discard();
    }
}

pub(super) struct Bench {
    pub(super) standby: Standby,
    world: Arc<World>,
    directory: TempDir,
}

impl Bench {
    pub(super) fn new(world: Arc<World>, lanes: u8, options: &StandbyOptions, is_required: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let survivor = Arc::new(Noted(ImageSurvivor::new(plan(&directory)), world.clone()));
        let (asked, fenced) = (world.clone(), world.clone());
        let claims = move |protection: Protection| -> Arc<dyn Claims> {
            assert_eq!(protection, PROTECTION);
            let asked = asked.clone();
            Arc::new(move || {
                let ruling = *asked.ruling.lock();
                if ruling.is_some() {
                    asked.log.lock().push("ruling");
                }
                ruling.ok_or_else(|| "told to be away".to_owned())
            })
        };
        let fence = move |protection| {
            assert_eq!(protection, PROTECTION);
            fenced.log.lock().push("fence");
            let failed =
                fenced.fails.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            failed.map_or(Ok(()), |_| Err("told to fail".to_owned()))
        };
        let rules = ContactRules {
            secret: secret(),
            is_required,
            claims: Arc::new(claims),
            fence: Arc::new(fence),
            always_fences: false,
        };
        let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
        let (params, capabilities) = settings(lanes);
        let standby =
            Standby::protect(&at, options, params, capabilities, world.clone(), survivor, Some(rules))
                .expect("listening");
        Self { standby, world, directory }
    }

    fn plain(world: Arc<World>) -> Self {
        Self::new(world, 0, &options(), true)
    }

    fn heart(&self, is_long: bool) -> Heart {
        Heart::greet(&self.standby.address(), &secret(), is_long).expect("greeted")
    }

    pub(super) fn seed(&self, lanes: u8) -> Primary {
        Primary::seed(&self.standby.address(), lanes)
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    fn state(&self) -> State {
        self.standby.contact().expect("a contact").state().state
    }

    fn wait_for(&self, state: State) {
        wait_for(&format!("{state:?}"), || self.state() == state);
    }

    pub(super) fn trouble(&self) -> String {
        self.standby.contact().expect("a contact").state().trouble.unwrap_or_default()
    }

    fn outcome(&self) -> Outcome {
        self.standby.contact().expect("a contact").wait(PATIENCE).expect("an outcome")
    }

    fn files(&self) -> usize {
        std::fs::read_dir(self.directory.path()).unwrap().count()
    }
}

#[test]
fn standby_of_a_killed_primary_goes_on_after_claim_and_fence() {
    for lanes in [0, 2] {
        let bench = Bench::new(World::ruling(Ruling::Won), lanes, &options(), true);
        let heart = bench.heart(false);
        let mut primary = bench.seed(lanes);
        primary.checkpoint(&pages(1), 2);

        heart.close();
        let ram = primary.ram.clone();
        drop(primary);

        assert_eq!(bench.outcome(), Outcome::Running(1));
        assert_eq!(*bench.world.log.lock(), ["prepare", "ruling", "fence", "start"]);
        assert_image(&bench.image(), &ram, 2);
        assert!(matches!(bench.standby.state(), StandbyState::TakenOver));
        assert!(bench.standby.contact().expect("it was").take_over(false).is_err(), "it is over");
    }
}

#[test]
fn primary_that_is_silent_is_taken_over_when_patience_is_over_and_promised_nothing_then() {
    // The arbiter cannot be reached.
    let bench = Bench::plain(Arc::default());
    let mut heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    let ram = primary.ram.clone();
    primary.begin_checkpoint();
    // In each case both connections stay open and silent.
    bench.wait_for(State::Claiming);
    primary.send_checkpoint(&pages(2), 3);
    let mut heard = Vec::new();
    let _ = primary.main.read_to_end(&mut heard);
    assert!(heard.is_empty(), "a checkpoint was promised that would be lost");
    assert_eq!(heart.hear_word(), None);

    // The standby waits, and reports the reason.
    wait_for("the reason", || bench.trouble().contains("told to be away"));
    assert!(!bench.image().exists());
    *bench.world.ruling.lock() = Some(Ruling::Won);

    assert_eq!(bench.outcome(), Outcome::Running(1));
    assert_image(&bench.image(), &ram, 2);
}

#[test]
fn checkpoints_that_go_on_do_not_keep_a_primary_alive_that_is_silent() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    let _heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    // Checkpoints continue for longer than the standby's patience, until they are no longer answered.
    let begin = Instant::now();
    let mut rams = vec![primary.ram.clone()];
    for number in 2.. {
        assert!(begin.elapsed() < PATIENCE, "{number} checkpoints are held of a primary that says nothing");
        let is_answered = primary.tries_checkpoint(&pages(number), number as u8 | 1);
        rams.push(primary.ram.clone());
        if !is_answered {
            break;
        }
    }

    let Outcome::Running(held) = bench.outcome() else { panic!("{:?}", bench.outcome()) };
    // The answered checkpoints. The last one may be held although its answer was not read.
    let answered = rams.len() as u64 - 1;
    assert!(held == answered || held == answered + 1, "{held} is held, {answered} were answered");
    assert_image(&bench.image(), &rams[held as usize - 1], if held == 1 { 2 } else { held as u8 | 1 });
}

#[test]
fn lost_claim_discards_everything() {
    let bench = Bench::plain(World::ruling(Ruling::Lost));
    let heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);

    heart.close();

    assert_eq!(bench.outcome(), Outcome::Discarded(Because::ClaimLost));
    assert_eq!(*bench.world.log.lock(), ["prepare", "ruling", "discard"]);
    assert!(matches!(bench.standby.state(), StandbyState::Discarded));
    assert!(bench.standby.held().is_none());
    assert_eq!(bench.files(), 0, "a guest's memory is left behind");
    let refused = bench.standby.takeover(&plan(&bench.directory), &OperatorsWord);
    assert!(matches!(refused, Err(TakeoverError::Protected)), "{refused:?}");
}

#[test]
fn nobody_starts_as_long_as_the_fence_fails() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    bench.world.fails.store(1, Ordering::SeqCst);
    let heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    heart.close();
    bench.wait_for(State::Unfenced);
    assert!(bench.trouble().contains("told to fail"));
    assert!(!bench.image().exists());

    bench.standby.contact().expect("a contact").retry().expect("it waits");

    assert_eq!(bench.outcome(), Outcome::Running(1));
    assert_eq!((bench.world.count("fence"), bench.world.count("start")), (2, 1));
    assert_image(&bench.image(), &primary.ram, 2);
}

#[test]
fn operator_vouches_where_no_fence_works() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    bench.world.fails.store(u64::MAX, Ordering::SeqCst);
    let heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    heart.close();
    bench.wait_for(State::Unfenced);

    bench.standby.contact().expect("a contact").vouch().expect("it waits");

    assert_eq!(bench.outcome(), Outcome::Running(1));
    assert_eq!(bench.world.count("fence"), 1);
}

#[test]
fn image_that_cannot_be_made_leaves_the_claim_to_the_primary() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    let heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    std::fs::write(bench.image(), b"taken").unwrap();
    heart.close();
    bench.wait_for(State::Unready);
    assert!(bench.trouble().contains("still held"), "{}", bench.trouble());
    assert_eq!(bench.world.count("ruling"), 0);

    std::fs::remove_file(bench.image()).unwrap();
    bench.standby.contact().expect("a contact").retry().expect("it waits");

    assert_eq!(bench.outcome(), Outcome::Running(1));
    assert_image(&bench.image(), &primary.ram, 2);
}

#[test]
fn answer_says_that_a_checkpoint_is_held_when_it_is() {
    let bench = Bench::plain(Arc::default());
    let mut heart = bench.heart(true);
    let mut primary = bench.seed(0);
    assert_eq!((heart.beat(), bench.state()), (0, State::Seeding));
    for number in 1..=20 {
        primary.begin_checkpoint();
        assert_eq!(heart.beat(), number - 1);
        primary.send_checkpoint(&pages(number as usize), 2);
        primary.hear("00000005 00000006");
        assert_eq!(heart.beat(), number);
    }
    assert!(matches!(bench.standby.state(), StandbyState::Following));
    assert_eq!(bench.standby.statistics().checkpoints, 20);
}

#[test]
fn planned_takeover_goes_on_with_the_last_checkpoint_and_without_a_fence() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    let mut heart = bench.heart(true);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    bench.standby.contact().expect("a contact").take_over(true).expect("in contact");
    assert_eq!(heart.hear_word(), Some(Message::HandOver));
    primary.checkpoint(&pages(2), 3);

    heart.say(Message::Give);

    assert_eq!(heart.hear_word(), Some(Message::Runs));
    assert_eq!(bench.outcome(), Outcome::Running(2));
    assert_eq!(*bench.world.log.lock(), ["prepare", "ruling", "start"]);
    assert_image(&bench.image(), &primary.ram, 3);
}

#[test]
fn protection_that_its_primary_ends_leaves_nothing() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    let mut heart = bench.heart(true);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);

    heart.say(Message::Unprotect);

    assert_eq!(heart.hear_word(), Some(Message::Never));
    assert_eq!(bench.outcome(), Outcome::Discarded(Because::Unprotected));
    assert_eq!(*bench.world.log.lock(), ["discard"]);
    wait_for("the end of the stream", || matches!(primary.main.read(&mut [0; 1]), Ok(0) | Err(_)));
}

#[test]
fn checkpoint_that_this_side_cannot_hold_ends_the_protection_by_word() {
    let small = StandbyOptions { journal_limit_bytes: 2 * PAGE_SIZE as u64, ..options() };
    let bench = Bench::new(World::ruling(Ruling::Won), 0, &small, true);
    let mut heart = bench.heart(true);
    let mut primary = bench.seed(0);
    primary.checkpoint(&[(0, 1, 1)], 2);
    primary.begin_checkpoint();
    primary.send_ram(&[(0, 1, 9), (0, 3, 9), (0, 5, 9), (0, 7, 9)]);

    assert_eq!(heart.hear_word(), Some(Message::Never));

    assert_eq!(bench.outcome(), Outcome::Discarded(Because::LocalFailure));
    assert!(bench.trouble().contains("larger than the journal's limit"), "{}", bench.trouble());
}

#[test]
fn stream_that_ends_alone_ends_the_contact_and_the_claim_decides() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    let mut heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);

    primary.main.shutdown(Shutdown::Both).unwrap();

    assert_eq!(heart.hear_word(), None);
    assert_eq!(bench.outcome(), Outcome::Running(1));
    assert_image(&bench.image(), &primary.ram, 2);
}

#[test]
fn strangers_are_refused_and_harm_nothing() {
    let bench = Bench::plain(Arc::default());
    let address = bench.standby.address();
    let mut heart = bench.heart(true);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);

    let other = Secret::from_bytes([6; 32]);
    assert!(Heart::greet(&address, &other, true).is_err(), "a wrong secret");
    wait_for("the warning", || bench.world.has_warned("after the guest began to arrive"));
    assert!(Heart::greet(&address, &secret(), true).is_err(), "a second primary");
    for rest in [&[][..], &[0; Hello::BYTES - 4], &[7; 200]] {
        let mut socket = TcpStream::connect(("127.0.0.1", support::port(&address))).unwrap();
        socket.write_all(&Hello::MAGIC).unwrap();
        // The standby may refuse before all bytes are written.
        let _ = socket.write_all(rest);
        let _ = socket.shutdown(Shutdown::Write);
        let mut heard = Vec::new();
        let _ = socket.read_to_end(&mut heard);
        assert!(heard.is_empty(), "a stranger was answered");
    }

    assert_eq!(heart.beat(), 1);
    primary.checkpoint(&pages(2), 3);
    assert_eq!(heart.beat(), 2);
}

#[test]
fn wrong_secret_is_refused_and_the_right_one_is_taken_after_it() {
    let bench = Bench::plain(Arc::default());
    let address = bench.standby.address();
    assert!(Heart::greet(&address, &Secret::from_bytes([6; 32]), true).is_err());
    wait_for("the warning", || bench.world.has_warned("give both sides the same one"));
    assert!(bench.standby.contact().is_none());
    assert_eq!(bench.heart(true).beat(), 0);
}

#[test]
fn guest_from_another_host_than_its_contact_is_refused_without_tls() {
    let bench = Bench::new(Arc::default(), 1, &options(), true);
    let address = bench.standby.address();
    let mut heart = bench.heart(true);
    let from_elsewhere = |first: &[u8]| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrV4::new([127, 0, 0, 2].into(), 0)).unwrap();
        rustix::net::connect(&socket, &SocketAddrV4::new([127, 0, 0, 1].into(), support::port(&address)))
            .unwrap();
        let mut socket = TcpStream::from(socket);
        socket.write_all(first).unwrap();
        // The connection may be reset, because unread bytes were discarded.
        let _ = socket.read(&mut [0]);
    };
    let mut lane = Vec::new();
    InitialPacket { uuid: [0; 16], id: 0 }.encode(&mut lane);
    for first in [&b"QEVM\0\0\0\x03"[..], &lane] {
        from_elsewhere(first);
        wait_for("the warning", || bench.world.has_warned("comes from 127.0.0.2"));
        bench.world.warnings.lock().clear();
    }
    assert!(matches!(bench.standby.state(), StandbyState::Waiting));
    let mut primary = bench.seed(1);
    primary.checkpoint(&pages(1), 2);
    assert_eq!(heart.beat(), 1);
}

#[test]
fn without_tls_a_standby_that_others_reach_demands_a_secret() {
    let listen = |secret: [u8; 32], is_required| {
        let rules = ContactRules {
            secret: Secret::from_bytes(secret),
            is_required,
            claims: Arc::new(|_| Arc::new(|| Err("nobody asks".to_owned())) as Arc<dyn Claims>),
            fence: Arc::new(|_| Ok(())),
            always_fences: false,
        };
        // An address of no host: an allowed standby fails to listen.
        let at: Address = "tcp:192.0.2.1:0".parse().unwrap();
        let (params, capabilities) = settings(0);
        let directory = tempfile::tempdir().unwrap();
        let survivor = Arc::new(ImageSurvivor::new(plan(&directory)));
        let observer = Arc::<World>::default();
        Standby::protect(&at, &options(), params, capabilities, observer, survivor, Some(rules)).err()
    };
    for (secret, is_required) in [([5; 32], true), ([0; 32], true), ([5; 32], false)] {
        let why = listen(secret, is_required).expect("nothing listens there").to_string();
        let is_allowed = secret == [5; 32] && is_required;
        assert_eq!(why.contains("--secret"), !is_allowed, "{why}");
        assert_eq!(why.contains("192.0.2.1"), is_allowed, "{why}");
    }
}

#[test]
fn contact_without_a_guest_gives_way_to_the_next() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    // A contact that has ended.
    bench.heart(true).close();
    wait_for("its end", || bench.standby.contact().is_none());
    // A contact that may have failed without a message.
    let mut silent = bench.heart(true);
    assert_eq!(silent.beat(), 0);
    let mut heart = bench.heart(true);
    assert_eq!(silent.hear(), None);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    assert_eq!(heart.beat(), 1);
    assert_eq!(*bench.world.log.lock(), Vec::<&str>::new(), "what was never given is not taken back");
}

#[test]
fn guest_without_its_contact_is_refused_or_followed_as_the_rules_say() {
    let bench = Bench::plain(Arc::default());
    let mut alone = Primary::connect(&bench.standby.address(), 0);
    alone.send_seeding(true);
    wait_for("the warning", || bench.world.has_warned("without its primary's contact"));
    assert!(matches!(bench.standby.state(), StandbyState::Waiting));
    let mut heart = bench.heart(true);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    assert_eq!(heart.beat(), 1);

    let bench = Bench::new(Arc::default(), 0, &options(), false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    assert!(Heart::greet(&bench.standby.address(), &secret(), true).is_err());
    wait_for("the warning", || bench.world.has_warned("the contact must be opened first"));
    let taken = bench.standby.takeover(&plan(&bench.directory), &OperatorsWord).expect("nobody else decides");
    assert_image(&taken.path, &primary.ram, 2);
}

#[test]
fn contact_that_is_lost_while_the_guest_comes_ends_both() {
    for is_seeded in [false, true] {
        let bench = Bench::plain(World::ruling(Ruling::Won));
        let heart = bench.heart(true);
        let mut primary = Primary::connect(&bench.standby.address(), 0);
        if is_seeded {
            primary.send_seeding(true);
            primary.hear("00020004 00000001 00010004 00000000 00000000");
        } else {
            primary.send_start();
            wait_for("the seeding", || matches!(bench.standby.state(), StandbyState::Seeding));
        }

        heart.close();

        assert_eq!(bench.outcome(), Outcome::Discarded(Because::NothingHeld));
        wait_for("the end", || {
            // An incomplete seeding is reported as failed, which is more precise.
            matches!(bench.standby.state(), StandbyState::Discarded | StandbyState::Failed(_))
        });
        assert!(bench.standby.held().is_none() && bench.world.count("ruling") == 0);
        // SHUT 1 may arrive first.
        primary.main.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = primary.main.read_to_end(&mut Vec::new());
    }
}

#[test]
fn contact_ends_with_its_standby() {
    let bench = Bench::plain(World::ruling(Ruling::Won));
    let mut heart = bench.heart(false);
    let mut primary = bench.seed(0);
    primary.checkpoint(&pages(1), 2);
    let Bench { standby, world, directory } = bench;

    drop(standby);

    assert_eq!(heart.hear_word(), None);
    drop(directory);
    assert_eq!(world.count("start"), 0);
}
