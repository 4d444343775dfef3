use super::*;
use crate::claim::Role;

/// Returns the answers in order, and repeats the last one.
#[derive(Debug)]
struct Scripted(Mutex<Vec<Result<Ruling, ClaimError>>>);

impl Arbiter for Scripted {
    fn claim(&self, _: &Claim) -> Result<Ruling, ClaimError> {
        let mut answers = self.0.lock();
        if answers.len() > 1 { answers.remove(0) } else { answers[0].clone() }
    }

    fn identity(&self, _: &GuestName, _: Generation) -> Result<Identity, ClaimError> {
        Ok(Identity::Unknown)
    }
}

/// Answers when the other end of the channel is dropped.
#[derive(Debug)]
struct Stuck(Mutex<std::sync::mpsc::Receiver<()>>);

impl Arbiter for Stuck {
    fn claim(&self, _: &Claim) -> Result<Ruling, ClaimError> {
        let _ = self.0.lock().recv();
        Ok(Ruling::Won)
    }

    fn identity(&self, _: &GuestName, _: Generation) -> Result<Identity, ClaimError> {
        panic!("a fault of the test's arbiter")
    }
}

fn claimant(process: &str) -> Claimant {
    Claimant::new(Role::Standby, process).expect("a name")
}

fn claim(process: &str, generation: u64) -> Claim {
    Claim {
        guest: GuestName::new("guest").expect("a name"),
        generation: Generation::new(generation),
        claimant: claimant(process),
    }
}

fn scripted(answers: &[Result<Ruling, ClaimError>]) -> Watched {
    let inner = Arc::new(Scripted(Mutex::new(answers.to_vec())));
    Watched::new(inner, "the arbiter test:", Duration::from_secs(60))
}

fn lost(winner: &str) -> Ruling {
    Ruling::Lost { winner: Some(claimant(winner)) }
}

const UNNAMED: Ruling = Ruling::Lost { winner: None };

#[test]
fn rulings_that_agree_pass() {
    let broken = ClaimError::unreachable("a", "b", "c");
    let watched = scripted(&[
        Err(broken.clone()),
        Ok(Ruling::Won),
        Err(broken.clone()),
        Ok(Ruling::Won),
        Ok(lost("a")),
    ]);

    let answers: Vec<_> = ["a", "a", "a", "a", "b"].map(|who| watched.claim(&claim(who, 1))).into();

    assert_eq!(answers, [Err(broken.clone()), Ok(Ruling::Won), Err(broken), Ok(Ruling::Won), Ok(lost("a"))]);
}

#[test]
fn every_contradiction_ends_the_trust_in_that_generation() {
    let cases: &[(&[(&str, Ruling)], &str)] = &[
        (&[("a", Ruling::Won), ("a", UNNAMED)], "a has lost"),
        (&[("a", UNNAMED), ("a", Ruling::Won)], "a has won"),
        (&[("a", Ruling::Won), ("b", Ruling::Won)], "b has won"),
        (&[("a", lost("b")), ("a", lost("c"))], "c has won"),
        (&[("a", lost("a"))], "a has lost"),
        (&[("a", UNNAMED), ("b", lost("a"))], "a has won"),
        (&[("b", lost("a")), ("a", lost("b"))], "b has won"),
    ];
    for (said, what) in cases {
        let answers: Vec<_> = said.iter().map(|(_, ruling)| Ok(ruling.clone())).collect();
        let watched = scripted(&answers);
        let mut last = Ok(UNNAMED);
        for (who, _) in *said {
            last = watched.claim(&claim(who, 1));
        }

        let error = last.expect_err("a contradiction");
        assert!(error.is_contradictory() && error.to_string().contains(what), "{said:?}: {error}");
        assert_eq!(watched.claim(&claim("z", 1)), Err(error), "{said:?}: believed again");
    }
}

#[test]
fn contradiction_in_one_generation_says_nothing_of_the_next() {
    let watched = scripted(&[Ok(Ruling::Won), Ok(UNNAMED), Ok(Ruling::Won)]);
    watched.claim(&claim("a", 1)).expect("won");
    watched.claim(&claim("a", 1)).expect_err("a contradiction");

    assert_eq!(watched.claim(&claim("a", 2)), Ok(Ruling::Won));
}

#[test]
fn contradiction_that_the_arbiter_reports_itself_stays() {
    let broken = ClaimError::contradictory("a", "b", "c");
    let watched = scripted(&[Err(broken.clone()), Ok(Ruling::Won)]);
    watched.claim(&claim("a", 1)).expect_err("a contradiction");

    assert_eq!(watched.claim(&claim("a", 1)), Err(broken));
}

#[test]
fn calls_that_hang_end_at_the_limit_and_do_not_pile_up() {
    let (release, held) = std::sync::mpsc::channel();
    let inner = Arc::new(Stuck(Mutex::new(held)));
    let watched = Watched::new(inner, "the arbiter test:", Duration::from_millis(5));

    for _ in 0..MOST_HANGING {
        let error = watched.claim(&claim("a", 1)).expect_err("no answer");
        assert!(!error.is_contradictory() && error.to_string().contains("no answer within 5ms"), "{error}");
    }
    let error = watched.claim(&claim("a", 1)).expect_err("no answer");
    assert!(error.to_string().contains("have not returned"), "{error}");

    drop(release);
    while watched.hanging.load(Ordering::Acquire) > 0 {
        std::thread::yield_now();
    }
    let patient = Watched { limit: Duration::from_secs(60), ..watched };
    assert_eq!(patient.claim(&claim("a", 1)), Ok(Ruling::Won));
}

#[test]
fn call_that_panics_gives_no_ruling() {
    let (_release, held) = std::sync::mpsc::channel();
    let inner = Arc::new(Stuck(Mutex::new(held)));
    let watched = Watched::new(inner, "the arbiter test:", Duration::from_secs(60));

    let error = watched.identity(&claim("a", 1).guest, Generation::new(1)).expect_err("a panic");

    assert!(error.to_string().contains("panicked"), "{error}");
}
