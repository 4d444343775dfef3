//! Plays a case in which one side is killed. Both sides live in processes of their own.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::Address;
use sterna_testing::CoreTime;

use super::LONGEST;
use super::cable::{Cable, Hand};
use super::case::Case;
use super::certificates;
use super::judge::{At, may_fail};
use super::play::{End, struck};
use super::process::{Process, word};
use super::trouble::What;
use crate::ledger::{Entry, Ledger};
use crate::stop::Side;

const SIDES: [Side; 2] = [Side::Source, Side::Destination];
/// Time for which a case keeps its bandwidth limits.
const SLOW: Duration = Duration::from_millis(400);
/// Time for which a waiting side is watched after its window. It must not resume by itself.
const STILL: Duration = Duration::from_millis(300);

/// The reports of a side.
#[derive(Debug, Clone, Default)]
struct Said {
    address: Option<String>,
    status: String,
    since: Option<Instant>,
    over: Option<String>,
    verdict: Option<String>,
    answers: Vec<String>,
}

/// State that the readers of both sides' lines share.
struct Shared {
    said: Mutex<[Said; 2]>,
    sides: Mutex<[Option<Arc<Process>>; 2]>,
    ledger: Ledger,
    hand: Hand,
    killed: Mutex<Option<Side>>,
}

struct Play {
    shared: Arc<Shared>,
    cable: Cable,
}

/// Plays the case. `program` runs both sides.
pub(super) fn play(case: &Case, program: &Path) -> Result<End, String> {
    let cable = Cable::new(&case.troubles, None)?;
    let shared = Arc::new(Shared {
        said: Mutex::default(),
        sides: Mutex::default(),
        ledger: Ledger::with_owner(Side::Source),
        hand: cable.hand(),
        killed: Mutex::default(),
    });
    let (input, mut output) = std::io::pipe().map_err(|error| format!("a pipe: {error}"))?;
    let reading = Arc::clone(&shared);
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(input).lines().map_while(Result::ok) {
            if line == "end" {
                return;
            }
            reading.hear(&line);
        }
    });
    let play = Play { shared, cable };
    let ended = play.begin(case, program, &output).and_then(|()| play.settle(case, &mut output));
    let ended = ended.and_then(|survivor| play.judge(case, survivor));
    let ended =
        ended.map_err(|why| format!("{why}; {:?}; {:?}", play.shared.said.lock(), play.cable.struck()));
    // Dropping a side kills its process.
    let sides = std::mem::take(&mut *play.shared.sides.lock());
    drop(sides);
    let _ = output.write_all(b"end\n");
    drop(reader.join());
    ended
}

impl Play {
    fn begin(&self, case: &Case, program: &Path, output: &std::io::PipeWriter) -> Result<(), String> {
        let certificates = certificates::directory()?;
        let spawn = |side: Side, to: Option<&Address>| {
            let output = output.try_clone().map_err(|error| format!("a pipe: {error}"))?;
            let process = Arc::new(Process::spawn(program, case.origin, side, &certificates, to, output)?);
            self.shared.sides.lock()[index(side)] = Some(process);
            Ok::<_, String>(())
        };
        spawn(Side::Destination, None)?;
        let mut time = CoreTime::default();
        let address = loop {
            if let Some(address) = &self.shared.said.lock()[1].address {
                break address.parse::<Address>().map_err(|error| format!("{address:?}: {error}"))?;
            }
            if time.look() > LONGEST {
                return Err("the destination's process never listened".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        self.cable.hand().lead_to(&address);
        spawn(Side::Source, Some(&self.cable.address()))
    }

    /// Returns the surviving side when it can make no further progress by itself. `None` if neither side was
    /// killed.
    fn settle(&self, case: &Case, output: &mut std::io::PipeWriter) -> Result<Option<Side>, String> {
        let (began, mut is_switched, mut is_slow) = (Instant::now(), false, true);
        let (mut resumed, mut dead) = (Instant::now(), None);
        let mut time = CoreTime::default();
        while time.look() < LONGEST {
            std::thread::sleep(Duration::from_millis(1));
            if case.is_postcopy() && !is_switched && self.cable.forwarded() >= case.switch {
                is_switched = true;
                self.cable.switched();
                self.say(Side::Source, "switch");
            }
            if is_slow && began.elapsed() > SLOW {
                is_slow = false;
                self.say(Side::Source, "fast");
            }
            for other in self.cable.others.try_iter() {
                match other {
                    What::Kill(side) => self.shared.kill(side),
                    other => return Err(format!("nobody does {other:?} here")),
                }
            }
            let killed = *self.shared.killed.lock();
            if let (Some(side), None) = (killed, dead) {
                // This line follows all lines that the killed side has written, because both use the same
                // pipe.
                let line = format!("{} killed\n", word(side));
                output.write_all(line.as_bytes()).map_err(|error| format!("a pipe: {error}"))?;
                dead = Some(Instant::now());
            }
            let said = self.shared.said.lock().clone();
            let Some(dead) = dead else {
                if said.iter().all(|side| side.over.is_some()) {
                    return Ok(None);
                }
                // The source has ended, and the destination waits for another one.
                if said[0].over.is_some() && ["", "setup"].contains(&said[1].status.as_str()) {
                    self.say(Side::Destination, "abandon");
                }
                let is_paused = said.iter().all(|side| side.status == "postcopy-paused");
                if is_paused && resumed.elapsed() > Duration::from_millis(20) {
                    resumed = Instant::now();
                    self.say(Side::Source, "resume");
                }
                continue;
            };
            let survivor = if killed == Some(Side::Source) { Side::Destination } else { Side::Source };
            let of = &said[index(survivor)];
            if of.over.is_some() {
                return Ok(Some(survivor));
            }
            let still = dead.max(of.since.unwrap_or(began)).elapsed() > STILL + case.window;
            match of.status.as_str() {
                "postcopy-paused" | "undecided" if still => return Ok(Some(survivor)),
                "" | "setup" if survivor == Side::Destination => self.say(survivor, "abandon"),
                _ => {}
            }
        }
        Err("not settled".into())
    }

    fn judge(&self, case: &Case, survivor: Option<Side>) -> Result<End, String> {
        let ledger = &self.shared.ledger;
        let has_started = ledger.has_run(Side::Destination);
        let end = match survivor {
            None => match (self.verdict(Side::Source)?, self.verdict(Side::Destination)?) {
                (At::Gone, At::Runs) => "arrived".to_owned(),
                (At::Runs, At::Gone) if may_fail(case, &self.cable) => "runs at the source".to_owned(),
                other => return Err(format!("the guest is (source, destination) {other:?}")),
            },
            Some(Side::Source) => self.judge_source(has_started)?,
            Some(_) => {
                let at = self.verdict(Side::Destination)?;
                if has_started == (at == At::Gone) {
                    return Err(format!("started at the destination: {has_started}, and it {}", at.label()));
                }
                match at {
                    At::Runs => "destination runs it".to_owned(),
                    At::Gone => "guest died with its source".to_owned(),
                    At::Waits => "destination lacks pages".to_owned(),
                }
            }
        };
        let violations = ledger.violations();
        if !violations.is_empty() {
            return Err(violations.join("; "));
        }
        Ok(End { how: end, struck: struck(&self.cable.struck()), resent_bytes: None })
    }

    /// Checks a surviving source. The operator knows that the destination was killed, and whether it had run
    /// the guest.
    fn judge_source(&self, has_started: bool) -> Result<String, String> {
        let status = self.shared.said.lock()[0].status.clone();
        let is_over = self.shared.said.lock()[0].over.is_some();
        let mut how = String::new();
        if !is_over {
            if self.verdict(Side::Source)? != At::Waits {
                return Err("the source has ended and has not".into());
            }
            how = format!("{status}, then ");
            if status == "postcopy-paused" {
                if !has_started {
                    return Err("the source is paused, and the guest was never started elsewhere".into());
                }
                if self.order(Side::Source, "decide here")? == "ok" {
                    return Err("the source took a guest back that has run elsewhere".into());
                }
            }
            let decision = if has_started { "decide there" } else { "decide here" };
            let answer = self.order(Side::Source, decision)?;
            if answer != "ok" {
                return Err(format!("an operator's decision was refused: {answer}"));
            }
            if status == "undecided" && has_started {
                // In postcopy the source keeps the pages after the first decision.
                self.wait(|said| said[0].over.is_some() || said[0].status.starts_with("postcopy-"))?;
                if self.shared.said.lock()[0].over.is_none() {
                    let answer = self.order(Side::Source, "decide there")?;
                    if answer != "ok" {
                        return Err(format!("the decision to give up the pages was refused: {answer}"));
                    }
                }
            }
            self.wait(|said| said[0].over.is_some())?;
        }
        let at = self.verdict(Side::Source)?;
        match (at, has_started) {
            (At::Runs, false) => Ok(format!("{how}source runs it")),
            (At::Gone, true) => Ok(format!("{how}guest died with its destination")),
            other => {
                Err(format!("at the source it {}, started at the destination: {}", other.0.label(), other.1))
            }
        }
    }

    fn verdict(&self, side: Side) -> Result<At, String> {
        self.shared.said.lock()[index(side)].verdict = None;
        self.say(side, "judge");
        self.wait(|said| said[index(side)].verdict.is_some())?;
        let verdict = self.shared.said.lock()[index(side)].verdict.clone().unwrap_or_default();
        At::of_label(&verdict).ok_or(verdict)
    }

    /// Sends an order and returns the answer.
    fn order(&self, side: Side, what: &str) -> Result<String, String> {
        let before = self.shared.said.lock()[index(side)].answers.len();
        self.say(side, what);
        self.wait(|said| said[index(side)].answers.len() > before)?;
        Ok(self.shared.said.lock()[index(side)].answers.last().cloned().unwrap_or_default())
    }

    fn wait(&self, is_so: impl Fn(&[Said; 2]) -> bool) -> Result<(), String> {
        let until = Instant::now() + LONGEST;
        while !is_so(&self.shared.said.lock()) {
            if Instant::now() > until {
                return Err("a side says nothing".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn say(&self, side: Side, what: &str) {
        if let Some(process) = &self.shared.sides.lock()[index(side)] {
            process.say(what);
        }
    }
}

impl Shared {
    fn hear(&self, line: &str) {
        let Some((side, line)) = line.split_once(' ') else { return };
        let Some(side) = SIDES.into_iter().find(|known| word(*known) == side) else {
            tracing::warn!(line, "a process says");
            return;
        };
        let (what, rest) = line.split_once(' ').unwrap_or((line, ""));
        match what {
            "mark" => self.hear_mark(side, rest),
            "ledger" => {
                if let Some(entry) = Entry::of_label(rest) {
                    self.ledger.enter(side, entry);
                }
            }
            "killed" => self.ledger.stopped(side),
            _ => {
                let mut said = self.said.lock();
                let said = &mut said[index(side)];
                match what {
                    "listening" => said.address = Some(rest.to_owned()),
                    "over" => said.over = Some(rest.to_owned()),
                    "verdict" => said.verdict = Some(rest.to_owned()),
                    "answer" => said.answers.push(rest.to_owned()),
                    other => tracing::warn!(other, rest, "a process says"),
                }
            }
        }
    }

    /// Handles a mark. The side waits for the reply, unless it is killed at this mark.
    fn hear_mark(&self, side: Side, rest: &str) {
        let Some((number, mark)) = rest.split_once(' ') else { return };
        if super::side::is_status(mark) {
            let mut said = self.said.lock();
            said[index(side)].status = mark.to_owned();
            said[index(side)].since = Some(Instant::now());
        }
        if let Some(What::Kill(killed)) = self.hand.told(side, mark) {
            self.kill(killed);
        }
        if let Some(process) = &self.sides.lock()[index(side)] {
            process.say(&format!("go {number}"));
        }
    }

    fn kill(&self, side: Side) {
        let process = self.sides.lock()[index(side)].clone();
        if let Some(process) = process {
            process.kill();
            *self.killed.lock() = Some(side);
        }
    }
}

fn index(side: Side) -> usize {
    usize::from(side != Side::Source)
}
