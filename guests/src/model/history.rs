//! Which pattern held for which steps, and from it: which step wrote a page last.

use super::Pattern;

/// From a step on: a pattern over a working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    /// The first step that it holds for.
    pub first_step: u64,
    /// The pattern.
    pub pattern: Pattern,
    /// Pages of the working set: the first ones of the share. Not 0.
    pub working_set_pages: u64,
}

/// A worker's epochs, oldest first, each with a first step above its predecessor's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History(Vec<Epoch>);

impl History {
    /// Most epochs that a history may have.
    pub const LIMIT: usize = 4096;

    /// A history that begins with step 1.
    pub fn new(pattern: Pattern, working_set_pages: u64) -> Self {
        Self(vec![Epoch { first_step: 1, pattern, working_set_pages }])
    }

    /// Takes epochs that were read from outside. The error says which rule they break.
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

    /// The epochs, oldest first.
    pub fn epochs(&self) -> &[Epoch] {
        &self.0
    }

    /// The epoch that holds for the newest steps.
    pub fn current(&self) -> Epoch {
        self.0[self.0.len() - 1]
    }

    /// From `first_step` on another pattern holds. An epoch without steps is replaced. False, and nothing
    /// noted, if the history is full.
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

    /// For each page of the share the last of the steps 1..=`steps` that wrote it; 0 if none did.
    ///
    /// Goes back from the newest step until every page of the working set is known: `n` steps for a
    /// sweep, about `n ln n` for random ones, however long the guest ran.
    pub fn last_steps(&self, seed: u64, steps: u64, share_pages: u64) -> Vec<u64> {
        let mut last = vec![0u64; share_pages as usize];
        let mut newest = steps;
        for epoch in self.0.iter().rev() {
            let set = epoch.working_set_pages.min(share_pages) as usize;
            let mut unknown = last[..set].iter().filter(|&&step| step == 0).count();
            let mut step = newest;
            while unknown > 0 && step >= epoch.first_step {
                let Some(page) = epoch.pattern.page(seed, step, set as u64) else { break };
                let entry = &mut last[page as usize];
                if *entry == 0 {
                    *entry = step;
                    unknown -= 1;
                }
                step -= 1;
            }
            newest = newest.min(epoch.first_step - 1);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forward, the plain way.
    fn replay(history: &History, seed: u64, steps: u64, pages: u64) -> Vec<u64> {
        let mut last = vec![0; pages as usize];
        (1..=steps).for_each(|s| {
            if let Some(page) = history.page(seed, s) {
                last[page as usize] = s;
            }
        });
        last
    }

    #[test]
    fn last_steps_of_every_pattern_equal_plain_replay() {
        for pattern in Pattern::ALL {
            for steps in [0, 1, 5, 63, 64, 65, 1000, 12_345] {
                let history = History::new(pattern, 50);
                assert_eq!(
                    history.last_steps(11, steps, 64),
                    replay(&history, 11, steps, 64),
                    "{pattern} {steps}"
                );
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
            assert_eq!(history.last_steps(5, steps, 64), replay(&history, 5, steps, 64), "{steps}");
        }
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
