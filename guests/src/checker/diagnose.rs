//! Describes the damage of a wrong page. Words are invertible, so the page shows the step and the page to
//! which they belong.

use super::{Cut, Damage};
use crate::model::words::{overlay, page_of, step_of};
use crate::model::{Fill, PageId, PageWords, WORDS_PER_PAGE};

/// Distance from the cut up to which a later step is plausible. Beyond it, a word is garbage.
const FUTURE_STEPS: u64 = 1 << 40;

/// The known facts about the page.
pub(super) struct Facts<'a> {
    pub cut: &'a Cut,
    pub id: PageId,
    pub expected_step: u64,
    pub newest_step: u64,
}

pub(super) fn diagnose(facts: &Facts<'_>, found: &PageWords, expected: &PageWords) -> Damage {
    steps_of_own_page(facts, found)
        .or_else(|| duplicate(facts.cut, found))
        .or_else(|| (*found == [0; WORDS_PER_PAGE]).then_some(Damage::Zeroed))
        .unwrap_or_else(|| garbage(found, expected))
}

/// Handles a page whose words all belong to steps of this page or to its fill.
fn steps_of_own_page(facts: &Facts<'_>, found: &PageWords) -> Option<Damage> {
    let mut fill = [0; WORDS_PER_PAGE];
    if !is_over_zeros(facts, found) {
        facts.cut.fill.put(facts.id, &mut fill);
    }
    let believed = 1..=facts.newest_step.saturating_add(FUTURE_STEPS);
    let mut first_step = None;
    let mut torn = None;
    let mut without_plan = *found;
    for slot in facts.cut.plan.slots() {
        without_plan[slot] = fill[slot];
        let step = if found[slot] == fill[slot] { 0 } else { step_of(found[slot], facts.id, slot) };
        if step != 0 && !believed.contains(&step) {
            return None;
        }
        match first_step {
            None => first_step = Some(step),
            Some(first) if first != step => torn = torn.or(Some((step, slot * 8))),
            Some(_) => {}
        }
    }
    if without_plan != fill {
        return None;
    }
    let first_step = first_step?;
    Some(match torn {
        Some((other_step, at)) => Damage::Torn { first_step, other_step, at },
        None if first_step <= facts.expected_step => Damage::Stale { found_step: first_step },
        None => Damage::FromFuture { found_step: first_step },
    })
}

/// Whether a step may have zeroed the page first: every other word is zero.
fn is_over_zeros(facts: &Facts<'_>, found: &PageWords) -> bool {
    let (cut, mut others) = (facts.cut, *found);
    cut.plan.slots().for_each(|slot| others[slot] = 0);
    cut.acts.zeroes() && cut.plan.count() < WORDS_PER_PAGE && others == [0; WORDS_PER_PAGE]
}

/// Handles a page whose words name another page and whose whole content is that page's.
fn duplicate(cut: &Cut, found: &PageWords) -> Option<Damage> {
    let exists = |id: &PageId| {
        let worker = usize::try_from(id.worker()).ok().and_then(|worker| cut.workers.get(worker));
        worker.is_some_and(|worker| id.page() < worker.share.pages())
    };
    let of =
        |id: PageId, found_step| Damage::Duplicate { of_worker: id.worker(), of_page: id.page(), found_step };
    let step = found[0];
    let last = WORDS_PER_PAGE - 1;
    let written = Some(page_of(found[last], step, last)).filter(exists);
    let filled = cut.fill.page_of(found[last], last).filter(exists);
    if let Some(id) = written.filter(|&id| {
        content(cut.fill, id, |page| overlay(page, step, id, cut.plan, cut.plan.count())) == *found
    }) {
        return Some(of(id, step));
    }
    filled.filter(|&id| content(cut.fill, id, |_| ()) == *found).map(|id| of(id, 0))
}

fn content(fill: Fill, id: PageId, written: impl FnOnce(&mut PageWords)) -> PageWords {
    let mut page = [0; WORDS_PER_PAGE];
    fill.put(id, &mut page);
    written(&mut page);
    page
}

fn garbage(found: &PageWords, expected: &PageWords) -> Damage {
    let slot = (0..WORDS_PER_PAGE).find(|&slot| found[slot] != expected[slot]).unwrap_or(0);
    Damage::Garbage { at: slot * 8, expected: expected[slot], found: found[slot] }
}
