//! Two plain QEMUs, two relays and a network, in every order of cuts, delays and deaths.
//!
//! The search visits every state that any order of actions reaches. In none of them both guests run, unless the relay
//! at the source was killed after it had sent the end.

use std::collections::{HashSet, VecDeque};

use super::{Closing, DestinationKeeper, Heard, SourceKeeper, StreamState};
use crate::frame::Verdict;

/// Rules that the search must find to be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PlantedRule {
    /// The source's relay closes although the end may have arrived.
    ForgetsThatItSent,
    /// The source's relay sends the end after it has closed.
    SendsAfterClosing,
    /// The source's relay takes an unknown session for a promise.
    TrustsUnknown,
    /// The destination's relay passes the end on after it has closed.
    PassesAfterClosing,
    /// The destination's relay denies that it passed the end on.
    DeniesThatItPassed,
}

const PLANTED: [PlantedRule; 5] = [
    PlantedRule::ForgetsThatItSent,
    PlantedRule::SendsAfterClosing,
    PlantedRule::TrustsUnknown,
    PlantedRule::PassesAfterClosing,
    PlantedRule::DeniesThatItPassed,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum SourceVmm {
    /// The guest runs, the stream has not ended.
    Precopy,
    /// The guest is stopped, and the whole stream is written.
    Waits,
    /// The migration failed, and the guest runs.
    Failed,
    /// SHUT arrived: the guest never runs again.
    Completed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum DestinationVmm {
    Loads,
    Runs { has_answered: bool },
    Failed,
}

/// A relay at the source: what it holds of its VMM's stream and of the other side's answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Source {
    keeper: SourceKeeper,
    has_end: bool,
    has_answer: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Destination {
    keeper: DestinationKeeper,
    has_end: bool,
    has_answer: bool,
    /// The session is over here: its verdict is final.
    is_over: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    source_vmm: SourceVmm,
    destination_vmm: DestinationVmm,
    source: Option<Source>,
    /// `None`: killed. A new process knows nothing of the session.
    destination: Option<Destination>,
    is_connected: bool,
    end_on_the_way: bool,
    answer_on_the_way: bool,
    /// The source's relay was killed when the destination might have had the end.
    is_excused: bool,
}

impl World {
    fn new(planted: Option<PlantedRule>) -> Self {
        let (mut source, mut destination) = (SourceKeeper::new(), DestinationKeeper::new());
        (source.planted, destination.planted) = (planted, planted);
        Self {
            source_vmm: SourceVmm::Precopy,
            destination_vmm: DestinationVmm::Loads,
            source: Some(Source { keeper: source, has_end: false, has_answer: false }),
            destination: Some(Destination {
                keeper: destination,
                has_end: false,
                has_answer: false,
                is_over: false,
            }),
            is_connected: true,
            end_on_the_way: false,
            answer_on_the_way: false,
            is_excused: false,
        }
    }

    /// Every world that one action leads to.
    fn next(&self) -> Vec<World> {
        let actions: [fn(&mut World) -> bool; 15] = [
            World::vmm_ends,
            World::send_end,
            World::receive_end,
            World::pass_end,
            World::vmm_answers,
            World::send_answer,
            World::receive_answer,
            World::pass_answer,
            World::cut,
            World::connect,
            World::source_gives_up,
            World::destination_gives_up,
            World::destination_breaks,
            World::kill_source,
            World::kill_destination,
        ];
        let changed = |action: fn(&mut World) -> bool| {
            let mut world = self.clone();
            (action(&mut world) && world != *self).then_some(world)
        };
        actions.into_iter().filter_map(changed).collect()
    }

    fn vmm_ends(&mut self) -> bool {
        let Some(source) = &mut self.source else { return false };
        let may = self.source_vmm == SourceVmm::Precopy && source.keeper.state() != StreamState::Closed;
        if may {
            (self.source_vmm, source.has_end) = (SourceVmm::Waits, true);
        }
        may
    }

    fn send_end(&mut self) -> bool {
        let Some(source) = &mut self.source else { return false };
        let may = self.is_connected && source.has_end && source.keeper.may_send_end();
        if may {
            source.keeper.end_sent();
            self.end_on_the_way = true;
        }
        may
    }

    fn receive_end(&mut self) -> bool {
        let Some(destination) = &mut self.destination else { return false };
        if std::mem::take(&mut self.end_on_the_way) {
            destination.has_end = true;
            return true;
        }
        false
    }

    fn pass_end(&mut self) -> bool {
        let Some(destination) = &mut self.destination else { return false };
        // A VMM whose connection was closed before has failed, except with the planted bug of a relay that only
        // closes later.
        let may = destination.has_end && destination.keeper.may_pass_end();
        let is_late = destination.is_over && destination.keeper.planted.is_some();
        if may && (self.destination_vmm == DestinationVmm::Loads || is_late) {
            destination.keeper.end_passed();
            self.destination_vmm = DestinationVmm::Runs { has_answered: false };
            return true;
        }
        false
    }

    fn vmm_answers(&mut self) -> bool {
        let Some(destination) = &mut self.destination else { return false };
        if let DestinationVmm::Runs { has_answered: has_answered @ false } = &mut self.destination_vmm {
            (*has_answered, destination.has_answer) = (true, true);
            return true;
        }
        false
    }

    fn send_answer(&mut self) -> bool {
        let Some(destination) = &mut self.destination else { return false };
        let may = self.is_connected && destination.has_answer && !destination.is_over;
        self.answer_on_the_way |= may;
        may
    }

    fn receive_answer(&mut self) -> bool {
        let Some(source) = &mut self.source else { return false };
        let is_there = std::mem::take(&mut self.answer_on_the_way);
        source.has_answer |= is_there;
        if is_there && let Some(destination) = &mut self.destination {
            // The acknowledgement; that it may be lost makes no difference to the source.
            destination.keeper.answered();
        }
        is_there
    }

    fn pass_answer(&mut self) -> bool {
        let Some(source) = &mut self.source else { return false };
        let may = source.has_answer && self.source_vmm == SourceVmm::Waits && source.keeper.may_send_end();
        if may {
            source.keeper.answered();
            self.source_vmm = SourceVmm::Completed;
        }
        may
    }

    fn cut(&mut self) -> bool {
        (self.is_connected, self.end_on_the_way, self.answer_on_the_way) = (false, false, false);
        true
    }

    /// The source's relay connects again. It does so without limit while its source waits.
    fn connect(&mut self) -> bool {
        let Some(source) = &mut self.source else { return false };
        if self.is_connected {
            return false;
        }
        let heard = match &self.destination {
            None => Heard::Unknown,
            Some(destination) if destination.is_over => match destination.keeper.verdict() {
                Verdict::Never => Heard::Never,
                Verdict::Passed => Heard::Passed,
            },
            Some(_) => {
                self.is_connected = true;
                return true;
            }
        };
        let closing = source.keeper.heard(heard);
        self.close_source(closing);
        true
    }

    fn source_gives_up(&mut self) -> bool {
        let Some(source) = &mut self.source else { return false };
        let closing = source.keeper.give_up();
        self.close_source(closing);
        true
    }

    fn destination_gives_up(&mut self) -> bool {
        let Some(destination) = &mut self.destination else { return false };
        match destination.keeper.give_up() {
            Closing::Close => {
                destination.is_over = true;
                self.is_connected = false;
                self.close_destination();
            }
            Closing::Wait | Closing::Nothing => {}
        }
        true
    }

    /// The destination's relay ends the session because of a frame that breaks the protocol.
    fn destination_breaks(&mut self) -> bool {
        let changed = self.destination_gives_up();
        if let Some(destination) = &mut self.destination {
            destination.is_over = true;
            (self.is_connected, self.answer_on_the_way) = (false, false);
        }
        changed
    }

    fn kill_source(&mut self) -> bool {
        let Some(source) = self.source.take() else { return false };
        self.is_excused |= source.keeper.state() == StreamState::Committed;
        self.is_connected = false;
        self.close_source(Closing::Close);
        true
    }

    fn kill_destination(&mut self) -> bool {
        if self.destination.take().is_none() {
            return false;
        }
        (self.is_connected, self.end_on_the_way) = (false, false);
        self.close_destination();
        true
    }

    fn close_source(&mut self, closing: Closing) {
        if closing == Closing::Close && matches!(self.source_vmm, SourceVmm::Precopy | SourceVmm::Waits) {
            self.source_vmm = SourceVmm::Failed;
        }
    }

    fn close_destination(&mut self) {
        if self.destination_vmm == DestinationVmm::Loads {
            self.destination_vmm = DestinationVmm::Failed;
        }
    }

    /// The rule that this world breaks.
    fn wrong(&self) -> Option<&'static str> {
        let source_runs = matches!(self.source_vmm, SourceVmm::Precopy | SourceVmm::Failed);
        let destination_runs = matches!(self.destination_vmm, DestinationVmm::Runs { .. });
        if source_runs && destination_runs && !self.is_excused {
            return Some("two guests run");
        }
        (self.source_vmm == SourceVmm::Completed && !destination_runs).then_some("the guest is lost")
    }
}

/// Searches every reachable world. Returns their number, or the rule that one breaks.
fn search(planted: Option<PlantedRule>) -> Result<usize, &'static str> {
    let start = World::new(planted);
    let mut seen = HashSet::from([start.clone()]);
    let mut queue = VecDeque::from([start]);
    while let Some(world) = queue.pop_front() {
        if let Some(wrong) = world.wrong() {
            return Err(wrong);
        }
        for next in world.next() {
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    Ok(seen.len())
}

#[test]
fn no_order_of_cuts_delays_and_deaths_makes_two_guests_run() {
    let worlds = search(None).expect("no rule is broken");
    assert!(worlds > 80, "{worlds} worlds");
}

#[test]
fn every_planted_rule_is_found_to_be_wrong() {
    for planted in PLANTED {
        assert!(search(Some(planted)).is_err(), "{planted:?}");
    }
}

#[test]
fn relay_that_dies_in_the_last_bytes_is_the_only_excuse() {
    let mut world = World::new(None);
    assert!(world.vmm_ends() && world.send_end() && world.receive_end() && world.pass_end());
    assert!(world.kill_source());
    assert_eq!(world.source_vmm, SourceVmm::Failed, "the source resumes");
    assert!(world.is_excused);
}

#[test]
fn source_resumes_after_every_outage_before_the_end_was_sent() {
    let mut world = World::new(None);
    assert!(world.vmm_ends() && world.cut() && world.source_gives_up());
    assert_eq!(world.source_vmm, SourceVmm::Failed);
}

#[test]
fn source_that_waits_resumes_as_soon_as_the_destination_promises() {
    let mut world = World::new(None);
    assert!(world.vmm_ends() && world.send_end() && world.cut());
    assert!(world.source_gives_up() && world.source_vmm == SourceVmm::Waits, "it may have arrived");
    assert!(world.destination_gives_up() && world.connect());
    assert_eq!(world.source_vmm, SourceVmm::Failed);
}
