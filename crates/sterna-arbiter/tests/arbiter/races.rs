//! Claimants that race in a directory: threads, processes, and processes that are killed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use sterna_arbiter::Ruling;
use tempfile::TempDir;

use crate::{PATIENCE, claim, lost, open};

const ROUNDS: u64 = 1000;
const KILLS: u64 = 100;
/// Environment variables of [`child`]: the directory, and the name of the process.
const DIRECTORY: &str = "STERNA_ARBITER_TEST_DIRECTORY";
const NAME: &str = "STERNA_ARBITER_TEST_NAME";

/// In memory where possible, because the speed of the disk is not under test.
fn directory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory")
}

#[test]
fn of_two_threads_exactly_one_wins_in_each_of_1000_rounds() {
    let directory = directory();
    let spec = format!("file:{}", directory.path().display());
    let barrier = Barrier::new(2);
    let rulings = |name: &str| -> Vec<Ruling> {
        let arbiter = open(&spec, PATIENCE).arbiter;
        let claims = (0..ROUNDS).map(|round| claim(name, round));
        let rule = |claim| {
            barrier.wait();
            arbiter.claim(&claim).expect("a ruling")
        };
        claims.map(rule).collect()
    };

    let (a, b) = std::thread::scope(|scope| {
        let a = scope.spawn(|| rulings("a"));
        (rulings("b"), a.join().expect("no panic"))
    });

    for pair in a.into_iter().zip(b) {
        assert_one_winner(&pair);
    }
}

#[test]
fn of_two_processes_exactly_one_wins_in_each_of_1000_rounds() {
    let directory = directory();
    let mut children = ["a", "b"].map(|name| Process::start(&directory, name));
    for round in 0..ROUNDS {
        // Both processes get the round before the test waits for either ruling.
        children.iter_mut().for_each(|child| child.tell(round));
        let [a, b] = &mut children;
        assert_one_winner(&(b.ruling(round).expect("a ruling"), a.ruling(round).expect("a ruling")));
    }
}

/// Checks the rulings of `b` and `a`, in this order.
fn assert_one_winner(pair: &(Ruling, Ruling)) {
    assert!(*pair == (Ruling::Won, lost("b")) || *pair == (lost("a"), Ruling::Won), "{pair:?}");
}

#[test]
fn process_killed_in_the_middle_of_a_claim_leaves_a_state_that_decides() {
    let mut random =
        sterna_testing::random("process_killed_in_the_middle_of_a_claim_leaves_a_state_that_decides");
    let directory = directory();
    let spec = format!("file:{}", directory.path().display());
    let survivor = open(&spec, PATIENCE).arbiter;
    for kill in 0..KILLS {
        let name = format!("killed-{kill}");
        let mut child = Process::start(&directory, &name);
        // The first ruling shows that the process claims.
        child.tell(kill * ROUNDS);
        assert_eq!(child.ruling(kill * ROUNDS), Some(Ruling::Won));
        let generations = kill * ROUNDS + 1..(kill + 1) * ROUNDS;
        generations.clone().for_each(|generation| child.tell(generation));
        std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
        child.child.kill().expect("killed");
        let won =
            generations.clone().take_while(|generation| child.ruling(*generation).is_some()).count() as u64;

        // Printed rulings are final. For the next generation, the test only requires a ruling.
        let after = generations.start + won;
        for generation in [after.saturating_sub(1), after, after + 1] {
            let ruling = survivor.claim(&claim("survivor", generation)).expect("decidable");
            let is_said = generation < after;
            assert!(
                ruling == lost(&name) || ruling == Ruling::Won && !is_said,
                "{kill}: {generation} {ruling:?}"
            );
            assert_eq!(survivor.claim(&claim("survivor", generation)), Ok(ruling.clone()));
        }
    }
}

/// A process that claims each generation that the test sends.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(directory: &TempDir, name: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "races::child", "--nocapture"]);
        command.env(DIRECTORY, directory.path()).env(NAME, name);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    fn tell(&mut self, generation: u64) {
        writeln!(self.input, "{generation}").expect("told");
    }

    /// Reads the next ruling; `None` if the process has ended.
    fn ruling(&mut self, generation: u64) -> Option<Ruling> {
        loop {
            let mut line = String::new();
            self.output.read_line(&mut line).expect("read");
            // The kill may cut off the last line, which then does not count.
            let line = line.strip_suffix('\n')?;
            let Some((_, said)) = line.split_once("RULING ") else { continue };
            let (number, said) = said.split_once(' ').expect("two words");
            assert_eq!(number.parse(), Ok(generation));
            return Some(if said == "won" { Ruling::Won } else { lost(said) });
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: the program that [`Process`] runs.
#[test]
fn child() {
    let (Ok(directory), Ok(name)) = (std::env::var(DIRECTORY), std::env::var(NAME)) else { return };
    let arbiter = open(&format!("file:{directory}"), PATIENCE).arbiter;
    let mut out = std::io::stdout();
    for line in std::io::stdin().lines() {
        let generation = line.expect("read").parse().expect("a number");
        let said = match arbiter.claim(&claim(&name, generation)).expect("a ruling") {
            Ruling::Won => "won".to_owned(),
            Ruling::Lost { winner } => winner.expect("known").process().to_owned(),
        };
        // One write, so that a kill cannot leave a part of the line.
        out.write_all(format!("RULING {generation} {said}\n").as_bytes()).expect("written");
        out.flush().expect("written");
    }
}
