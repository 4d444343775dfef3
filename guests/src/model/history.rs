//! The patterns of a worker over time, from which the last step that wrote each page is computed.

use super::{Act, Acts, Pattern};

/// A pattern over a working set, valid from a step on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    /// The first step of the epoch.
    pub first_step: u64,
    /// The order in which the steps write pages.
    pub pattern: Pattern,
    /// Pages of the working set, which is the beginning of the share. Not 0.
    pub working_set_pages: u64,
}

/// A worker's epochs, the oldest first. Each first step is greater than the previous one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History(Vec<Epoch>);

impl History {
    /// Largest number of epochs in a history.
    pub const LIMIT: usize = 4096;

    /// A history whose first epoch begins with step 1.
    pub fn new(pattern: Pattern, working_set_pages: u64) -> Self {
        Self(vec![Epoch { first_step: 1, pattern, working_set_pages }])
    }

    /// Checks epochs that were read from outside. The error names the broken rule.
    pub fn from_epochs(epochs: Vec<Epoch>, share_pages: u64) -> Result<Self, String> {
        if epochs.first().is_none_or(|epoch| epoch.first_step != 1) {
            return Err("the first epoch does not begin with step 1".into());
        }
        if epochs.len() > Self::LIMIT {
            return Err(format!("{} epochs, more than {}", epochs.len(), Self::LIMIT));
        }
        if let Some(epoch) =
            epochs.iter().find(|e| e.working_set_pages == 0 || e.working_set_pages > share_pages)
        {
            return Err(format!(
                "working set of {} pages in a share of {share_pages}",
                epoch.working_set_pages
            ));
        }
        match epochs.windows(2).find(|pair| pair[0].first_step >= pair[1].first_step) {
            Some(pair) => {
                Err(format!("an epoch of step {} after one of {}", pair[1].first_step, pair[0].first_step))
            }
            None => Ok(Self(epochs)),
        }
    }

    /// All epochs, the oldest first.
    pub fn epochs(&self) -> &[Epoch] {
        &self.0
    }

    /// The epoch of the newest steps.
    pub fn current(&self) -> Epoch {
        self.0[self.0.len() - 1]
    }

    /// Begins an epoch with another pattern at `first_step`. An epoch without steps is replaced.
    ///
    /// Returns false, and changes nothing, if the history is full.
    pub fn change(&mut self, first_step: u64, pattern: Pattern, working_set_pages: u64) -> bool {
        if self.current().first_step >= first_step && self.0.len() > 1 {
            self.0.pop();
        }
        let first_step = if self.0.len() == 1 && self.0[0].first_step >= first_step {
            self.0.pop();
            1
        } else {
            first_step
        };
        if self.0.len() >= Self::LIMIT {
            return false;
        }
        self.0.push(Epoch { first_step, pattern, working_set_pages });
        true
    }

    /// The page that `step` writes.
    pub fn page(&self, seed: u64, step: u64) -> Option<u64> {
        let epoch = self.0.iter().rev().find(|epoch| epoch.first_step <= step)?;
        epoch.pattern.page(seed, step, epoch.working_set_pages)
    }

    /// The last step that touched each page, and the content below its words.
    ///
    /// Considers the steps 1..=`steps`. The search goes back from the newest step until the last
    /// step of every page of the working set is known. That takes `n` steps for a sweep and about
    /// `n ln n` for random steps, however long the guest ran. With `bases` the search goes back
    /// further, until each page with words is known to be over zeros or not.
    pub fn last_steps(&self, seed: u64, steps: u64, share_pages: u64, acts: Acts, bases: bool) -> Vec<Last> {
        let mut last = vec![Last::default(); share_pages as usize];
        let bases = bases && acts.zeroes();
        let mut newest = steps;
        for epoch in self.0.iter().rev() {
            let set = epoch.working_set_pages.min(share_pages);
            let is_open = |last: &Last| last.step == 0 || (bases && !last.is_over_zeros);
            let mut open = last[..set as usize].iter().filter(|last| is_open(last)).count();
            let mut step = newest;
            while open > 0 && step >= epoch.first_step {
                let Some(page) = epoch.pattern.page(seed, step, set) else { break };
                let act = acts.act(seed, step);
                for entry in &mut last[page as usize..(page + act.pages(page, set)) as usize] {
                    let was_open = is_open(entry);
                    entry.found(step, act);
                    open -= usize::from(was_open && !is_open(entry));
                }
                step -= 1;
            }
            newest = newest.min(epoch.first_step - 1);
        }
        last
    }
}

/// Facts about a page's content, derived from the steps that touched it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Last {
    /// The last step that touched the page; 0 if no step did.
    pub step: u64,
    /// That step has zeroed the whole page.
    pub is_zero: bool,
    /// A step has zeroed the whole page, and only writers of words touched it later.
    pub is_over_zeros: bool,
}

impl Last {
    /// Adds a step that touched the page before every step that is already known.
    fn found(&mut self, step: u64, act: Act) {
        let zeroes = act != Act::Write;
        if self.step == 0 {
            *self = Self { step, is_zero: zeroes, is_over_zeros: zeroes };
        }
        self.is_over_zeros |= zeroes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same computation in forward order, as the reference.
    fn replay(history: &History, seed: u64, steps: u64, pages: u64, acts: Acts) -> Vec<Last> {
        let mut last = vec![Last::default(); pages as usize];
        for step in 1..=steps {
            let Some(page) = history.page(seed, step) else { continue };
            let epoch = history.epochs().iter().rev().find(|epoch| epoch.first_step <= step).unwrap();
            match acts.act(seed, step) {
                Act::Write => {
                    let over_zeros = last[page as usize].is_over_zeros;
                    last[page as usize] = Last { step, is_zero: false, is_over_zeros: over_zeros };
                }
                Act::Balloon => (page..(page + crate::model::act::BALLOON_PAGES)
                    .min(epoch.working_set_pages))
                    .for_each(|page| {
                        last[page as usize] = Last { step, is_zero: true, is_over_zeros: true };
                    }),
                Act::Zero | Act::Discard => {
                    last[page as usize] = Last { step, is_zero: true, is_over_zeros: true };
                }
            }
        }
        last
    }

    fn both(history: &History, seed: u64, steps: u64, acts: Acts) -> [Vec<Last>; 2] {
        [history.last_steps(seed, steps, 64, acts, true), replay(history, seed, steps, 64, acts)]
    }

    #[test]
    fn last_steps_of_every_pattern_equal_plain_replay() {
        for pattern in Pattern::ALL {
            for steps in [0, 1, 5, 63, 64, 65, 1000, 12_345] {
                let history = History::new(pattern, 50);
                for acts in [Acts::WRITES, Acts::MIXED] {
                    let [found, expected] = both(&history, 11, steps, acts);
                    assert_eq!(found, expected, "{pattern} {steps} {acts:?}");
                }
            }
        }
    }

    #[test]
    fn last_steps_over_changing_epochs_equal_plain_replay() {
        let mut history = History::new(Pattern::Sequential, 64);
        assert!(history.change(40, Pattern::Random, 30));
        assert!(history.change(45, Pattern::HotSet, 64));
        assert!(history.change(45, Pattern::Mixed, 20));
        assert!(history.change(400, Pattern::Sequential, 7));
        assert_eq!(history.epochs().len(), 4);
        for steps in [10, 39, 40, 44, 45, 399, 400, 405, 5000] {
            for acts in [Acts::WRITES, Acts::MIXED] {
                let [found, expected] = both(&history, 5, steps, acts);
                assert_eq!(found, expected, "{steps} {acts:?}");
            }
        }
    }

    #[test]
    fn last_steps_that_need_no_bases_are_the_same_steps() {
        let history = History::new(Pattern::Random, 50);
        let steps = |bases| -> Vec<_> {
            let last = history.last_steps(3, 900, 64, Acts::MIXED, bases);
            last.iter().map(|last| (last.step, last.is_zero)).collect()
        };
        assert_eq!(steps(false), steps(true));
    }

    #[test]
    fn change_before_any_step_replaces_the_first_epoch() {
        let mut history = History::new(Pattern::Idle, 4);
        assert!(history.change(1, Pattern::Random, 8));
        assert_eq!(
            history.epochs(),
            &[Epoch { first_step: 1, pattern: Pattern::Random, working_set_pages: 8 }]
        );
    }

    #[test]
    fn epochs_from_outside_that_break_a_rule_are_refused() {
        let epoch =
            |first_step, working_set_pages| Epoch { first_step, pattern: Pattern::Idle, working_set_pages };
        for bad in
            [vec![], vec![epoch(2, 1)], vec![epoch(1, 0)], vec![epoch(1, 9)], vec![epoch(1, 1), epoch(1, 2)]]
        {
            assert!(History::from_epochs(bad, 8).is_err());
        }
        assert!(History::from_epochs(vec![epoch(1, 8), epoch(2, 1)], 8).is_ok());
    }
}
