//! Seeds of tests that draw at random. A test that fails is run again with the seed that it printed.
#![forbid(unsafe_code)]

/// The seed of `test`: `STERNA_SEED`, or else one that the operating system gives; printed in both cases.
///
/// # Panics
/// `STERNA_SEED` is set and is not a number.
#[allow(clippy::print_stderr, reason = "whoever reads of a failure needs the seed")]
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("STERNA_SEED") {
        Ok(text) => text.parse().expect("STERNA_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("{test}: STERNA_SEED={seed}");
    seed
}

/// How many rounds a test plays: `STERNA_ROUNDS`, or as many as are usual.
///
/// # Panics
/// `STERNA_ROUNDS` is set and is not a number.
pub fn rounds(usual: u32) -> u32 {
    std::env::var("STERNA_ROUNDS").map_or(usual, |text| text.parse().expect("STERNA_ROUNDS is a number"))
}

/// A generator whose numbers follow from the [`seed`] of `test` alone.
pub fn random(test: &str) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed(test))
}
