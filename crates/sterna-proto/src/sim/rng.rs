//! Random numbers that depend only on a seed, so that every machine replays a schedule identically.

/// A seeded generator with the draws that schedules need.
#[derive(Clone, Debug)]
pub struct Rng(fastrand::Rng);

impl Rng {
    /// A generator with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A number from 0 to `n - 1`; `n` is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n)
    }

    /// True in `percent` of 100 cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of the choices, each with the same probability.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.0.usize(..choices.len())]
    }
}
