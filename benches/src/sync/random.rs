//! Sets random bits in a bitmap.

/// Sets `count` random bits among the first `bits`.
pub fn set_bits(random: &mut fastrand::Rng, words: &mut [u64], bits: u64, count: u64) {
    for _ in 0..count {
        let bit = random.u64(..bits);
        words[(bit / 64) as usize] |= 1 << (bit % 64);
    }
}
