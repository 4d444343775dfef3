//! What several tests need.
#![allow(dead_code)]

/// A small generator (xorshift*), so that a printed seed is a whole test case.
pub struct Random(u64);

impl Random {
    /// From STERNA_SEED, or from the clock; printed either way.
    pub fn from_environment(test: &str) -> Self {
        let seed =
            std::env::var("STERNA_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| {
                std::time::SystemTime::now()
                    .duration_since(std::time::UNIX_EPOCH)
                    .map_or(1, |t| t.as_nanos() as u64)
            });
        report(&format!("{test}: STERNA_SEED={seed}"));
        Self(seed | 1)
    }
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

#[allow(clippy::print_stderr)]
pub fn report(line: &str) {
    eprintln!("{line}");
}

/// The one place that says that a test could not run here.
pub fn skipped(test: &str, reason: &str) {
    report(&format!("SKIPPED {test}: {reason}"));
}

/// CPU time of this process, to measure on a machine that others use too.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
