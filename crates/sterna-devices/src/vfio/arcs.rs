//! The legal transitions (arcs) between migration states, and the paths that consist of them.
//!
//! A path is a list of arcs; a device's driver performs each of them as one step. The shortest path is
//! chosen, under two rules:
//!
//! - A path must not open a save session only to pass through it. States that save are inside a path only if
//!   both its ends save.
//! - No path leads from STOP_COPY to the PRE_COPY states without a running state in between. Otherwise it
//!   would be unclear which part of the state was read already.
//!
//! A device enters ERROR only by a failure, and leaves it only by a reset.

use super::state::{MigState, MigrationFeatures};

use MigState::{PreCopy, PreCopyP2p, Resuming, Running, RunningP2p, Stop, StopCopy};

/// The arcs of a device that has P2P and PRE_COPY.
const ARCS: &[(MigState, MigState)] = &[
    (Running, RunningP2p),
    (Running, PreCopy),
    (RunningP2p, Running),
    (RunningP2p, Stop),
    (RunningP2p, PreCopyP2p),
    (Stop, RunningP2p),
    (Stop, StopCopy),
    (Stop, Resuming),
    (StopCopy, Stop),
    (Resuming, Stop),
    (PreCopy, Running),
    (PreCopy, PreCopyP2p),
    (PreCopyP2p, RunningP2p),
    (PreCopyP2p, PreCopy),
    (PreCopyP2p, StopCopy),
];

/// In a device without P2P states, these arcs replace the paths through those states.
const ARCS_WITHOUT_P2P: &[(MigState, MigState)] = &[(Running, Stop), (Stop, Running), (PreCopy, StopCopy)];

/// Whether a device with these features changes between two states in one step.
pub fn is_arc(features: MigrationFeatures, from: MigState, to: MigState) -> bool {
    arcs(features).any(|arc| arc == (from, to))
}

/// The states on the path from `from` to `to`, ending with `to`. Empty if both are equal, `None` if there is
/// no path.
pub fn path(features: MigrationFeatures, from: MigState, to: MigState) -> Option<Vec<MigState>> {
    if !features.has(from) || !features.has(to) || from == MigState::Error || to == MigState::Error {
        return None;
    }
    if from == StopCopy && matches!(to, PreCopy | PreCopyP2p) {
        return None;
    }
    let both_save = from.saves() && to.saves();
    // Breadth-first search: the first path that arrives is a shortest one. Lists suffice for seven states.
    let mut ways = vec![vec![from]];
    let mut seen = vec![from];
    while let Some(way) = ways.first().cloned() {
        ways.remove(0);
        let at = *way.last()?;
        if at == to {
            return Some(way[1..].to_vec());
        }
        if at != from && at.saves() && !both_save {
            continue;
        }
        for (_, next) in arcs(features).filter(|arc| arc.0 == at) {
            if !seen.contains(&next) {
                seen.push(next);
                ways.push([way.as_slice(), &[next]].concat());
            }
        }
    }
    None
}

fn arcs(features: MigrationFeatures) -> impl Iterator<Item = (MigState, MigState)> {
    let more = if features.p2p { &[] } else { ARCS_WITHOUT_P2P };
    ARCS.iter().chain(more).copied().filter(move |arc| features.has(arc.0) && features.has(arc.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: MigrationFeatures = MigrationFeatures { p2p: true, pre_copy: true };
    const LEAST: MigrationFeatures = MigrationFeatures { p2p: false, pre_copy: false };

    #[test]
    fn path_of_a_full_device_goes_through_p2p() {
        assert_eq!(path(FULL, Running, Stop), Some(vec![RunningP2p, Stop]));
        assert_eq!(path(FULL, PreCopy, StopCopy), Some(vec![PreCopyP2p, StopCopy]));
        assert_eq!(path(FULL, Running, StopCopy), Some(vec![RunningP2p, Stop, StopCopy]));
        assert_eq!(path(FULL, StopCopy, Running), Some(vec![Stop, RunningP2p, Running]));
        assert_eq!(path(FULL, Resuming, Running), Some(vec![Stop, RunningP2p, Running]));
        assert_eq!(path(FULL, PreCopy, Stop), Some(vec![Running, RunningP2p, Stop]));
        assert_eq!(path(FULL, PreCopyP2p, Stop), Some(vec![RunningP2p, Stop]));
        assert_eq!(path(FULL, RunningP2p, PreCopy), Some(vec![Running, PreCopy]));
    }

    #[test]
    fn path_without_p2p_is_direct() {
        assert_eq!(path(LEAST, Running, Stop), Some(vec![Stop]));
        assert_eq!(path(LEAST, Running, Resuming), Some(vec![Stop, Resuming]));
        let pre_copy = MigrationFeatures { p2p: false, pre_copy: true };
        assert_eq!(path(pre_copy, PreCopy, StopCopy), Some(vec![StopCopy]));
        assert_eq!(path(pre_copy, PreCopy, Stop), Some(vec![Running, Stop]));
    }

    #[test]
    fn path_that_must_not_be_taken_is_none() {
        assert_eq!(path(FULL, StopCopy, PreCopy), None);
        assert_eq!(path(FULL, StopCopy, PreCopyP2p), None);
        assert_eq!(path(FULL, Running, MigState::Error), None);
        assert_eq!(path(FULL, MigState::Error, Stop), None);
        assert_eq!(path(LEAST, Running, PreCopy), None);
        assert_eq!(path(LEAST, Running, RunningP2p), None);
    }

    #[test]
    fn path_between_any_two_states_is_made_of_arcs_and_opens_no_session_to_pass_through() {
        for features in [(false, false), (true, false), (false, true), (true, true)] {
            let features = MigrationFeatures { p2p: features.0, pre_copy: features.1 };
            for from in MigState::ALL {
                for to in MigState::ALL {
                    let Some(way) = path(features, from, to) else { continue };
                    let mut at = from;
                    for (index, next) in way.iter().enumerate() {
                        assert!(is_arc(features, at, *next), "{features:?} {from} {to}: {way:?}");
                        let inside = index + 1 < way.len();
                        assert!(
                            !inside || !next.saves() || (from.saves() && to.saves()),
                            "{from} {to}: {way:?}"
                        );
                        at = *next;
                    }
                    assert_eq!(at, to);
                }
            }
        }
    }

    #[test]
    fn path_exists_between_all_other_states_of_a_device() {
        let every = MigState::ALL.into_iter().filter(|state| *state != MigState::Error);
        for from in every.clone() {
            for to in every.clone() {
                let blocked = from == StopCopy && matches!(to, PreCopy | PreCopyP2p);
                assert_eq!(path(FULL, from, to).is_none(), blocked, "{from} {to}");
            }
        }
    }
}
