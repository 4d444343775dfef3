//! Schedules the cases: every stop as often as its weight demands, with every blow at every stop in turn.

use fastrand::Rng;

use crate::stop::Stop;

/// The disturbance of a migration that waits at a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Blow {
    /// The source's operator cancels.
    Cancel,
    /// The destination's operator gives up.
    Abandon,
    /// Every connection is cut; new ones are possible immediately.
    Cut,
    /// Every connection is cut and the network stays down until both sides have settled.
    Outage,
    /// The source's process is killed.
    KillSource,
    /// The destination's process is killed.
    KillDestination,
    /// Unrelated clients connect to the destination. They are silent, send random bytes, or pretend to be
    /// channels of a migration. The migration continues as if they were not there.
    Strangers,
    /// No disturbance. The source is a process that probes its tracking methods and forks, and migrates in
    /// the child, as a VMM that becomes a daemon does.
    ForkSource,
    /// The callback at the stop panics.
    Panic,
    /// The network swallows every byte and closes no connection, so only limits end the wait. It takes
    /// seconds, and is therefore not in [`Blow::ALL`].
    Silence,
}

impl Blow {
    /// The blows of a soak, without [`Blow::Silence`].
    pub const ALL: [Self; 9] = [
        Self::Cancel,
        Self::Abandon,
        Self::Cut,
        Self::Outage,
        Self::KillSource,
        Self::KillDestination,
        Self::Strangers,
        Self::ForkSource,
        Self::Panic,
    ];

    /// Name of the blow in tables.
    pub fn label(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Abandon => "abandon",
            Self::Cut => "cut",
            Self::Outage => "outage",
            Self::KillSource => "kill-src",
            Self::KillDestination => "kill-dst",
            Self::Strangers => "stranger",
            Self::ForkSource => "fork-src",
            Self::Panic => "panic",
            Self::Silence => "silence",
        }
    }

    /// Finds the blow with this label.
    pub fn of_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::Silence]).find(|blow| blow.label() == label)
    }

    /// Whether the migration continues as if it were not disturbed.
    pub fn is_harmless(self) -> bool {
        matches!(self, Self::Strangers | Self::ForkSource)
    }
}

/// One disturbed migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// Number of the case, from 0.
    pub number: u64,
    /// The place at which it is disturbed.
    pub stop: Stop,
    /// The disturbance at that place.
    pub blow: Blow,
    /// Seed of the random choices: lanes, tracking, stop point.
    pub seed: u64,
}

/// Makes `count` cases in an order that `seed` decides.
pub fn schedule(count: u64, seed: u64) -> Vec<Case> {
    let mut stops = Vec::new();
    for &stop in Stop::ALL {
        // Rounded up, so that every state gets at least its share.
        let times = (u64::from(stop.weight()) * count).div_ceil(1000).max(1);
        let blow = |nth| Blow::ALL[((nth + stop as u64) % Blow::ALL.len() as u64) as usize];
        stops.extend((0..times).map(|nth| (stop, blow(nth))));
    }
    let mut random = Rng::with_seed(seed);
    random.shuffle(&mut stops);
    // A small count covers each stop before it repeats one.
    let mut seen = std::collections::HashMap::new();
    let mut order: Vec<_> = stops
        .into_iter()
        .map(|pair| {
            let times = seen.entry(pair.0).or_insert(0u32);
            *times += 1;
            (*times, pair)
        })
        .collect();
    if count < 500 {
        order.sort_by_key(|(times, _)| *times);
    }
    let mut cases: Vec<Case> = order
        .into_iter()
        .map(|(_, (stop, blow))| Case { number: 0, stop, blow, seed: random.u64(..) })
        .collect();
    cases.truncate(count.max(1) as usize);
    cases.iter_mut().zip(0..).for_each(|(case, number)| case.number = number);
    cases
}

/// Cases with [`Blow::Silence`] at every stop.
pub fn silences(seed: u64) -> Vec<Case> {
    let mut random = Rng::with_seed(seed);
    let case = |(&stop, number)| Case { number, stop, blow: Blow::Silence, seed: random.u64(..) };
    Stop::ALL.iter().zip(0..).map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousand_cases_are_exactly_the_weights() {
        let cases = schedule(1000, 3);
        assert_eq!(cases.len(), 1000);
        for &stop in Stop::ALL {
            let hits = cases.iter().filter(|case| case.stop == stop).count();
            assert_eq!(hits, stop.weight() as usize, "{stop:?}");
        }
    }

    #[test]
    fn every_blow_falls_at_every_stop_in_a_thousand() {
        let cases = schedule(1000, 4);
        for &stop in Stop::ALL {
            for blow in Blow::ALL {
                assert!(cases.iter().any(|case| (case.stop, case.blow) == (stop, blow)), "{stop:?} {blow:?}");
            }
        }
    }

    #[test]
    fn small_sample_comes_to_every_stop() {
        let cases = schedule(Stop::ALL.len() as u64, 5);
        assert!(Stop::ALL.iter().all(|stop| cases.iter().any(|case| case.stop == *stop)));
    }
}
