//! Pages that could not be placed. Each failure ends a connection, so a source that connects again by itself would do so for ever. Pure.

/// Pages that are remembered: so many failures are too many, whichever pages they are of.
const MOST: usize = 16;

/// Those of one migration.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Block and page.
    pages: Vec<(usize, u64)>,
    is_again: bool,
}

impl Failures {
    /// A page could not be placed.
    pub(super) fn note(&mut self, page: (usize, u64)) {
        self.is_again |= self.pages.contains(&page) || self.pages.len() >= MOST;
        if self.pages.len() < MOST && !self.pages.contains(&page) {
            self.pages.push(page);
        }
    }

    /// Whether another connection would end as the ones before.
    pub(super) fn is_again(&self) -> bool {
        self.is_again
    }

    /// An operator has seen to it.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_that_fails_twice_fails_again_and_another_does_not() {
        let mut failures = Failures::default();
        failures.note((0, 7));
        failures.note((1, 7));
        failures.note((0, 8));
        assert!(!failures.is_again());
        failures.note((0, 7));
        assert!(failures.is_again());
        failures.forget();
        failures.note((0, 7));
        assert!(!failures.is_again());
    }

    #[test]
    fn many_pages_that_fail_are_as_bad_and_are_not_all_kept() {
        let mut failures = Failures::default();
        (0..MOST as u64).for_each(|page| failures.note((0, page)));
        assert!(!failures.is_again());
        failures.note((0, 1000));
        assert!(failures.is_again() && failures.pages.len() == MOST);
    }
}
