//! Chooses the message of the handover that a case cuts.

use std::time::Duration;

use sterna_testing::handover::{MESSAGES, Message, Place, When};

/// A message at which every connection is cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageCut {
    pub(super) message: Message,
    pub(super) place: Place,
    /// Time for which the network is down.
    pub(super) down: Duration,
    /// The migration switches to postcopy.
    pub(super) is_postcopy: bool,
}

/// Draws the cut of case `number`, and whether connections are replaced. N consecutive cases cover all N
/// combinations once.
pub(super) fn draw(random: &mut fastrand::Rng, number: u64) -> (MessageCut, bool) {
    let all = combinations();
    // Consecutive numbers are far apart in the list, so that a few cases are a good sample.
    let length = all.len() as u64;
    let step = (length * 618 / 1000..length).find(|step| is_coprime(*step, length)).unwrap_or(1);
    let (message, place, is_postcopy, has_window) = all[(number % length * step % length) as usize];
    let down = Duration::from_millis([0, 0, 3, 50, 250][random.usize(..5)]);
    (MessageCut { message, place, down, is_postcopy }, has_window)
}

/// All combinations: message, place, switch to postcopy, replacement of lost connections.
fn combinations() -> Vec<(Message, Place, bool, bool)> {
    let forms = [(false, false), (false, true), (true, false), (true, true)];
    let has = |message: &Message, (is_postcopy, has_window): (bool, bool)| match message.when {
        When::Always => true,
        When::Precopy => !is_postcopy,
        When::Postcopy => is_postcopy,
        When::Window => has_window,
        When::SameHost => false,
    };
    let mut all = Vec::new();
    for message in MESSAGES {
        for form in forms.into_iter().filter(|form| has(message, *form)) {
            all.extend(Place::ALL.map(|place| (*message, place, form.0, form.1)));
        }
    }
    all
}

fn is_coprime(mut a: u64, mut b: u64) -> bool {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_cases_as_there_are_combinations_have_each_once() {
        let mut random = fastrand::Rng::with_seed(1);
        let count = combinations().len() as u64;
        let mut drawn: Vec<_> = (0..count)
            .map(|number| {
                let (cut, has_window) = draw(&mut random, number);
                (cut.message.name, cut.message.way, cut.place, cut.is_postcopy, has_window)
            })
            .collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len() as u64, count);
    }
}
