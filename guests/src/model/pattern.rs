//! The patterns: functions from a step to the page that it writes.

/// The order in which a worker writes the `n` pages of its working set.
///
/// `h` means [`hash`]`(seed, s)`. `h ↓ m` means the high 64 bits of `h · m`, a number below `m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u64)]
pub enum Pattern {
    /// No steps. The worker's beat counter advances, but the worker writes no page of its share.
    Idle = 0,
    /// Page after page: `s mod n`.
    Sequential = 1,
    /// A random page: `h ↓ n`.
    Random = 2,
    /// 90 % of the steps write the first 10 % of the pages (`t = max(1, n/10)`). If the low 8 bits of h are
    /// below 230, or if there is no other page, the page is `h ↓ t`. Otherwise it is `t + (h ↓ (n − t))`.
    HotSet = 3,
    /// Alternates by `s mod 4`: 0 sequential over s/4, 1 random, 2 and 3 hot set.
    Mixed = 4,
}

impl Pattern {
    /// Every pattern, in the order of its number.
    pub const ALL: [Self; 5] = [Self::Idle, Self::Sequential, Self::Random, Self::HotSet, Self::Mixed];

    /// The pattern with this number, as tide's control page and saved states contain it.
    pub fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|pattern| *pattern as u64 == number)
    }

    /// The page (less than `pages`, which is not 0) that `step` writes; `None` for [`Pattern::Idle`].
    #[inline]
    pub fn page(self, seed: u64, step: u64, pages: u64) -> Option<u64> {
        match self {
            Self::Idle => None,
            Self::Sequential => Some(step % pages),
            Self::Random => Some(below(hash(seed, step), pages)),
            Self::HotSet => Some(hot(hash(seed, step), pages)),
            Self::Mixed => Some(match step & 3 {
                0 => (step >> 2) % pages,
                1 => below(hash(seed, step), pages),
                _ => hot(hash(seed, step), pages),
            }),
        }
    }
}

impl std::str::FromStr for Pattern {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        Ok(match name {
            "idle" => Self::Idle,
            "sequential" => Self::Sequential,
            "random" => Self::Random,
            "hot-set" | "hot" => Self::HotSet,
            "mixed" => Self::Mixed,
            other => return Err(format!("no pattern `{other}`: idle, sequential, random, hot-set or mixed")),
        })
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::Sequential => "sequential",
            Self::Random => "random",
            Self::HotSet => "hot-set",
            Self::Mixed => "mixed",
        })
    }
}

/// First factor of [`hash`].
pub const HASH_FIRST: u64 = 0xff51_afd7_ed55_8ccd;
/// Second factor of [`hash`].
pub const HASH_SECOND: u64 = 0xc4ce_b9fe_1a85_ec53;
/// Number of steps of 256 that [`Pattern::HotSet`] keeps in the hot pages.
pub const HOT_OF_256: u64 = 230;

/// The integer hash from which the random patterns are derived.
#[inline]
pub fn hash(seed: u64, step: u64) -> u64 {
    let mut x = step.wrapping_add(seed).wrapping_mul(HASH_FIRST);
    x ^= x >> 32;
    x = x.wrapping_mul(HASH_SECOND);
    x ^ (x >> 32)
}

#[inline]
fn below(hash: u64, bound: u64) -> u64 {
    ((u128::from(hash) * u128::from(bound)) >> 64) as u64
}

#[inline]
fn hot(hash: u64, pages: u64) -> u64 {
    let hot = (pages / 10).max(1);
    if hash & 0xff < HOT_OF_256 || hot == pages { below(hash, hot) } else { hot + below(hash, pages - hot) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_of_any_pattern_is_in_the_working_set() {
        for pattern in Pattern::ALL {
            for pages in [1, 2, 9, 10, 11, 1000] {
                for step in 1..2000 {
                    assert!(
                        pattern.page(7, step, pages).is_none_or(|page| page < pages),
                        "{pattern} {pages}"
                    );
                }
            }
        }
    }

    #[test]
    fn hot_set_keeps_nine_of_ten_steps_in_a_tenth_of_the_pages() {
        let inside = (1..=100_000).filter(|&s| Pattern::HotSet.page(3, s, 1000).unwrap() < 100).count();
        assert!((88_000..92_000).contains(&inside), "{inside}");
    }

    #[test]
    fn random_visits_every_page() {
        for pattern in [Pattern::Random, Pattern::HotSet, Pattern::Mixed, Pattern::Sequential] {
            let mut seen = [false; 200];
            (1..=20_000).for_each(|s| seen[pattern.page(99, s, 200).unwrap() as usize] = true);
            assert!(seen.iter().all(|&seen| seen), "{pattern}");
        }
    }

    #[test]
    fn name_parses_to_its_pattern() {
        for pattern in Pattern::ALL {
            assert_eq!(pattern.to_string().parse(), Ok(pattern));
            assert_eq!(Pattern::from_number(pattern as u64), Some(pattern));
        }
        assert!("tidal".parse::<Pattern>().is_err());
        assert_eq!(Pattern::from_number(5), None);
    }
}
