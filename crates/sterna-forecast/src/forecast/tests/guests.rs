//! Compares the model's formulas with guests that are simulated page by page.

use super::super::fit;
use super::*;

/// A guest of `pages` pages. `write` returns the page of each write.
struct Played {
    dirty: Vec<bool>,
    writes_per_second: f64,
    write: Box<dyn FnMut() -> usize>,
    owed: f64,
}

impl Played {
    fn new(pages: usize, writes_per_second: f64, write: impl FnMut() -> usize + 'static) -> Self {
        Self { dirty: vec![false; pages], writes_per_second, write: Box::new(write), owed: 0.0 }
    }

    fn let_pass(&mut self, seconds: f64) {
        self.owed += seconds * self.writes_per_second;
        while self.owed >= 1.0 {
            self.owed -= 1.0;
            let page = (self.write)();
            self.dirty[page] = true;
        }
    }

    fn count(&self) -> usize {
        self.dirty.iter().filter(|dirty| **dirty).count()
    }

    /// Measures the distinct pages after `seconds`, with all pages clean at the start.
    fn measure(&mut self, seconds: f64) -> Point {
        self.dirty.fill(false);
        self.let_pass(seconds);
        Point { interval: Duration::from_secs_f64(seconds), distinct_bytes: self.count() as u64 * 4096 }
    }

    /// Migrates as the engine does: rounds in address order, tracking re-armed page by page. Returns total time and
    /// downtime.
    fn migrate(&mut self, pages_per_second: f64, sync: f64, limit: f64) -> Option<(f64, f64)> {
        let mut round = vec![true; self.dirty.len()];
        let mut total = 0.0;
        self.dirty.fill(false);
        for _ in 0..500 {
            let mut took = 0.0;
            for page in (0..round.len()).filter(|page| round[*page]) {
                self.dirty[page] = false;
                self.let_pass(1.0 / pages_per_second);
                took += 1.0 / pages_per_second;
            }
            if took < sync {
                self.let_pass(sync - took);
                took = sync;
            }
            total += took;
            round.clone_from(&self.dirty);
            let downtime = sync + self.count() as f64 / pages_per_second;
            self.dirty.fill(false);
            if downtime <= limit {
                return Some((total + downtime, downtime));
            }
        }
        None
    }
}

fn random(pages: usize, seed: u64) -> impl FnMut() -> usize {
    let mut dice = fastrand::Rng::with_seed(seed);
    move || dice.usize(..pages)
}

const PAGES: usize = 60_000;
const SPEED: f64 = 120_000.0;
/// Number of migrations of each guest. The time depends on where a sequential writer is at the start.
const PHASES: u32 = 12;

/// The guests of the issue: a hot set, random writes to all of RAM, a walk, and a mixture.
fn guest(pattern: &str, rate: f64) -> Played {
    match pattern {
        "random" => Played::new(PAGES, rate, random(PAGES, 1)),
        "hot" => Played::new(PAGES, rate, {
            let mut next = random(PAGES / 16, 2);
            move || PAGES / 2 + next()
        }),
        "sequential" => Played::new(PAGES, rate, {
            let mut at = PAGES / 3;
            move || {
                at = (at + 1) % PAGES;
                at
            }
        }),
        _ => Played::new(PAGES, rate, {
            let (mut hot, mut all, mut turn) = (random(PAGES / 16, 3), random(PAGES, 4), 0);
            move || {
                turn += 1;
                if turn % 4 == 0 { all() } else { hot() }
            }
        }),
    }
}

#[test]
fn forecast_from_a_measured_curve_meets_what_happens() {
    let mut worst: f64 = 0.0;
    for pattern in ["random", "hot", "sequential", "mixed"] {
        for share in [0.1, 0.3, 0.5, 0.7] {
            let rate = share * SPEED;
            let mut played = guest(pattern, rate);
            let points = [0.03, 0.1, 0.3, 1.0].map(|seconds| played.measure(seconds)).to_vec();
            let inputs = Inputs {
                ram_bytes: PAGES as u64 * 4096,
                first_round_bytes: PAGES as u64 * 4096,
                bandwidth_bytes: (SPEED * 4096.0) as u64,
                dirty: DirtyModel::Curve(points),
                sync: ms(2),
                downtime_limit: ms(30),
                ..steady(0)
            };

            let forecast = Forecast::new(&inputs);

            assert!(forecast.convergent, "{pattern} at {share}");
            let range = forecast.total_time;
            let mut sum = 0.0;
            for _ in 0..PHASES {
                // Start with the writer at another place each time.
                played.let_pass(0.137);
                let (total, downtime) =
                    played.migrate(SPEED, 0.002, 0.03).expect("it ends below the bandwidth");
                assert!(downtime <= 0.03);
                let inside = range.low.unwrap() * 0.9..=range.high.unwrap_or(f64::INFINITY) * 1.1;
                assert!(inside.contains(&total), "{pattern} at {share}: {total} is not in {range:?}");
                sum += total;
            }
            let (expected, total) = (range.expected.unwrap(), sum / f64::from(PHASES));
            let off = (expected - total).abs() / total;
            worst = worst.max(off);
            assert!(off < 0.2, "{pattern} at {share}: total {expected} was {total}");
        }
    }
    eprintln!("total time at worst {:.0} % off", worst * 100.0);
}

#[test]
fn fit_of_a_hot_set_finds_it_again() {
    let hot = Class { pages: 2000.0, writes_per_second: 50_000.0, order: Order::Random };
    let cold = Class { pages: 100_000.0, writes_per_second: 5_000.0, order: Order::Random };
    let model = DirtyModel::WorkingSet(vec![hot, cold]);
    let ram_bytes = 1 << 30;
    let point = |milliseconds| Point {
        interval: ms(milliseconds),
        distinct_bytes: model.distinct_bytes(ms(milliseconds), ram_bytes) as u64,
    };

    let fit = fit::fit(&[20, 100, 300, 1000].map(point), ram_bytes);

    assert!(fit.error < 0.02, "{fit:?}");
    let said = DirtyModel::WorkingSet(fit.classes);
    for milliseconds in [10, 50, 200, 700, 2000] {
        let (one, other) =
            (said.distinct_bytes(ms(milliseconds), ram_bytes), point(milliseconds).distinct_bytes as f64);
        assert!((one - other).abs() < other * 0.1, "{milliseconds} ms: {one} for {other}");
    }
}

#[test]
fn fit_of_a_steady_rate_is_one_rate() {
    let point =
        |milliseconds: u64| Point { interval: ms(milliseconds), distinct_bytes: milliseconds * 100_000 };

    let fit = fit::fit(&[100, 300, 1000].map(point), 1 << 32);

    assert_eq!(fit.classes.len(), 1);
    let rate = fit.classes[0].writes_per_second * 4096.0;
    assert!((rate - 1e8).abs() < 1e5, "{rate}");
}

#[test]
fn fit_of_a_guest_that_does_not_write_is_nothing() {
    let point = |milliseconds: u64| Point { interval: ms(milliseconds), distinct_bytes: 0 };

    assert!(fit::fit(&[100, 300].map(point), 1 << 32).classes.is_empty());
    assert!(fit::fit(&[], 1 << 32).classes.is_empty());
}

#[test]
fn curve_between_its_points_is_concave_and_ends_at_ram() {
    let point = |milliseconds: u64, distinct_bytes| Point { interval: ms(milliseconds), distinct_bytes };
    // The middle point is too low: the curve of a constant guest is concave.
    let curve = DirtyModel::Curve(vec![point(1000, 900_000), point(100, 400_000), point(300, 410_000)]);

    assert_eq!(curve.distinct_bytes(ms(50), 1 << 30), 200_000.0);
    assert!(curve.distinct_bytes(ms(300), 1 << 30) > 500_000.0);
    assert_eq!(curve.distinct_bytes(Duration::from_secs(3600), 1 << 20), f64::from(1 << 20));
}
