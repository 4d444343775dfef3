//! Records pages that could not be placed. Each failure ends a connection, so a source that reconnects
//! automatically would repeat the failure without end. Pure.

/// Number of pages that are remembered. More failures are too many, whichever pages they affect.
const MOST: usize = 16;

/// The failures of one migration.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// Each failed page, as its block and its first page in the block.
    pages: Vec<(usize, u64)>,
    is_again: bool,
}

impl Failures {
    /// Records a page that could not be placed.
    pub(super) fn note(&mut self, page: (usize, u64)) {
        self.is_again |= self.pages.contains(&page) || self.pages.len() >= MOST;
        if self.pages.len() < MOST && !self.pages.contains(&page) {
            self.pages.push(page);
        }
    }

    /// Whether another connection would fail in the same way.
    pub(super) fn is_again(&self) -> bool {
        self.is_again
    }

    /// Clears the record after an operator has intervened.
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
