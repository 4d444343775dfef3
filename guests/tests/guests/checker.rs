//! The checker is proved: it accepts a correct guest, and rejects every single page that is dropped,
//! duplicated, reordered, torn or damaged.
//!
//! The guest here is the model alone: it writes word by word as [`sterna_guests::model`] defines. So every
//! earlier content of every page is known and can be restored.

use fastrand::Rng;
use sterna_guests::Verdict;
use sterna_guests::checker::{CheckError, Cut, Damage, InFlight, Violation, Witness, WorkerCut, check};
use sterna_guests::model::words::{overlay, word};
use sterna_guests::model::{
    Act, Acts, Fill, History, PageId, PageWords, Pattern, Segment, Share, WORDS_PER_PAGE, WordPlan,
};
use sterna_ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};

const SHARE_PAGES: u64 = 30;

/// A guest of two workers in two blocks; the share of worker 0 extends over both.
struct Model {
    ram: GuestRam,
    cut: Cut,
}

impl Model {
    fn new(plan: WordPlan, fill: Fill, pattern: Pattern, working_set: u64) -> Self {
        Self::acting(Acts::WRITES, plan, fill, pattern, working_set)
    }

    fn acting(acts: Acts, plan: WordPlan, fill: Fill, pattern: Pattern, working_set: u64) -> Self {
        let block =
            |name: &str, pages: u64| RamBlock::new(name, pages * PAGE_SIZE as u64, Backing::Memfd).unwrap();
        let ram = GuestRam::new(vec![block("low", 24), block("high", 40)]).unwrap();
        let segment = |block, first_page, pages| Segment { block, first_page, pages };
        let shares = [
            Share::new(vec![segment(0, 2, 22), segment(1, 0, 8)]),
            Share::new(vec![segment(1, 8, SHARE_PAGES)]),
        ];
        let workers = shares.into_iter().enumerate().map(|(index, share)| WorkerCut {
            share,
            steps: 0,
            in_flight: InFlight::Words(0),
            history: History::new(pattern, working_set),
            seed: 77 + index as u64,
            witness: None,
        });
        let model = Self { ram, cut: Cut { plan, fill, acts, workers: workers.collect() } };
        for worker in 0..2 {
            for page in 0..SHARE_PAGES {
                let mut words = [0; WORDS_PER_PAGE];
                fill.put(PageId::new(worker, page), &mut words);
                if !fill.is_zero(PageId::new(worker, page)) {
                    model.put(worker, page, &words);
                }
            }
        }
        model
    }

    fn run(&mut self, worker: usize, steps: u64) {
        for _ in 0..steps {
            self.do_next(worker, usize::MAX);
            self.cut.workers[worker].steps += 1;
        }
    }

    fn act(&self, worker: usize, step: u64) -> Act {
        self.cut.acts.act(self.cut.workers[worker].seed, step)
    }

    /// Number of words that the next step changes one after the other.
    fn next_words(&self, worker: usize) -> usize {
        match self.act(worker, self.cut.workers[worker].steps + 1) {
            Act::Write => self.cut.plan.count(),
            Act::Zero => WORDS_PER_PAGE,
            Act::Discard | Act::Balloon => 1,
        }
    }

    /// Executes the first `count` words of the next step, or the whole step.
    fn do_next(&mut self, worker: usize, count: usize) {
        let step = self.cut.workers[worker].steps + 1;
        let act = self.act(worker, step);
        for page in self.touched(worker, step) {
            let at = &self.cut.workers[worker];
            let (block, block_page) = at.share.locate(page).unwrap();
            let block = &self.ram.blocks()[block];
            let write = |slot: usize, word| {
                block.write_u64(block_page * PAGE_SIZE as u64 + slot as u64 * 8, word).unwrap();
            };
            let id = PageId::new(worker, page);
            match act {
                Act::Write => {
                    self.cut.plan.slots().take(count).for_each(|slot| write(slot, word(step, id, slot)));
                }
                Act::Zero => (0..WORDS_PER_PAGE).take(count).for_each(|slot| write(slot, 0)),
                Act::Discard | Act::Balloon if count > 0 => block.discard_pages(block_page, 1).unwrap(),
                Act::Discard | Act::Balloon => {}
            }
        }
    }

    /// The pages that a step touches.
    fn touched(&self, worker: usize, step: u64) -> std::ops::Range<u64> {
        let at = &self.cut.workers[worker];
        let working_set = at.history.current().working_set_pages;
        let page = at.history.page(at.seed, step);
        page.map_or(0..0, |page| page..page + self.act(worker, step).pages(page, working_set))
    }

    fn get(&self, worker: usize, page: u64) -> PageWords {
        let (block, block_page) = self.cut.workers[worker].share.locate(page).unwrap();
        std::array::from_fn(|slot| {
            self.ram.blocks()[block].read_u64(block_page * PAGE_SIZE as u64 + slot as u64 * 8).unwrap()
        })
    }

    fn put(&self, worker: usize, page: u64, words: &PageWords) {
        let (block, block_page) = self.cut.workers[worker].share.locate(page).unwrap();
        for (slot, word) in words.iter().enumerate() {
            self.ram.blocks()[block]
                .write_u64(block_page * PAGE_SIZE as u64 + slot as u64 * 8, *word)
                .unwrap();
        }
    }

    /// The content of the page after `step` (0: the fill).
    fn version(&self, worker: usize, page: u64, step: u64) -> PageWords {
        let id = PageId::new(worker, page);
        let mut words = [0; WORDS_PER_PAGE];
        self.cut.fill.put(id, &mut words);
        let versions = self.versions(worker, page);
        let before = versions.iter().rev().filter(|before| (1..=step).contains(*before));
        // A version that the page never had is constructed as if the step had written words.
        let other = (!versions.contains(&step)).then_some(step);
        for step in before.copied().chain(other) {
            match self.act(worker, step) {
                Act::Zero | Act::Discard | Act::Balloon if other != Some(step) => words = [0; WORDS_PER_PAGE],
                _ => overlay(&mut words, step, id, self.cut.plan, self.cut.plan.count()),
            }
        }
        words
    }

    /// Steps that touched the page, newest first, and 0.
    fn versions(&self, worker: usize, page: u64) -> Vec<u64> {
        let steps = (1..=self.cut.workers[worker].steps).rev();
        steps.filter(|step| self.touched(worker, *step).contains(&page)).chain([0]).collect()
    }

    fn next_page(&self, worker: usize) -> Option<u64> {
        let at = &self.cut.workers[worker];
        at.history.page(at.seed, at.steps + 1)
    }

    fn verdict(&self) -> Verdict {
        check(&self.ram, &self.cut).unwrap()
    }

    /// Replaces the page with `words`, checks, and restores the page.
    fn damaged(&self, worker: usize, page: u64, words: &PageWords) -> Verdict {
        let good = self.get(worker, page);
        self.put(worker, page, words);
        let verdict = self.verdict();
        self.put(worker, page, &good);
        verdict
    }
}

/// The only damage in the verdict. Panics if there is another one, or another place.
fn only_damage(verdict: &Verdict, worker: usize, page: u64) -> Damage {
    match verdict.violations() {
        [Violation::Page { place, damage, .. }] if (place.worker, place.page) == (worker, page) => {
            damage.clone()
        }
        _ => panic!("worker {worker} page {page} was damaged, the checker says: {verdict}"),
    }
}

/// Models of every configuration, with some words of a next step in flight.
fn all_models(random: &mut Rng) -> Vec<Model> {
    let mut models = Vec::new();
    for plan in [WordPlan::FULL, WordPlan::TIDE, WordPlan::new(2).unwrap()] {
        for fill in [Fill::Zero, Fill::Random(5), Fill::Half(6)] {
            for pattern in Pattern::ALL {
                for acts in [Acts::WRITES, Acts::MIXED] {
                    models.push(model_in_flight(random, acts, plan, fill, pattern));
                }
            }
        }
    }
    models
}

fn model_in_flight(random: &mut Rng, acts: Acts, plan: WordPlan, fill: Fill, pattern: Pattern) -> Model {
    let mut model = Model::acting(acts, plan, fill, pattern, 1 + random.u64(..SHARE_PAGES));
    for worker in 0..2 {
        let steps = random.u64(..200);
        model.run(worker, steps);
        let words = random.usize(..model.next_words(worker));
        model.do_next(worker, words);
        model.cut.workers[worker].in_flight =
            if random.u64(..2) == 0 { InFlight::Unknown } else { InFlight::Words(words) };
    }
    model
}

/// Runs `damage` on every page of every model. It returns the content to put there, or `None` if there is
/// none.
fn damage_every_page(test: &str, mut damage: impl FnMut(&mut Rng, &Model, usize, u64) -> Option<PageWords>) {
    let mut random = sterna_testing::random(test);
    let mut done = 0;
    for model in all_models(&mut random) {
        assert!(model.verdict().is_consistent(), "{}", model.verdict());
        for worker in 0..2 {
            for page in 0..SHARE_PAGES {
                let Some(words) = damage(&mut random, &model, worker, page) else { continue };
                if words == model.get(worker, page) || allowed_in_flight(&model, worker, page, &words) {
                    continue;
                }
                only_damage(&model.damaged(worker, page, &words), worker, page);
                done += 1;
            }
        }
        assert!(model.verdict().is_consistent());
    }
    assert!(done > 400, "only {done} pages could be damaged");
}

/// Whether the page is in flight and a stop can leave this content there.
fn allowed_in_flight(model: &Model, worker: usize, page: u64, words: &PageWords) -> bool {
    let at = &model.cut.workers[worker];
    let now = || model.version(worker, page, model.versions(worker, page)[0]);
    at.in_flight == InFlight::Unknown
        && model.next_page(worker) == Some(page)
        && match model.act(worker, at.steps + 1) {
            Act::Write => (0..=model.cut.plan.count()).any(|count| {
                let mut could_be = now();
                overlay(&mut could_be, at.steps + 1, PageId::new(worker, page), model.cut.plan, count);
                could_be == *words
            }),
            Act::Zero => {
                let zeros = words.iter().take_while(|word| **word == 0).count();
                words[zeros..] == now()[zeros..]
            }
            Act::Discard | Act::Balloon => *words == now(),
        }
}

#[test]
fn correct_copy_of_every_kind_passes() {
    let mut random = sterna_testing::random("correct_copy_of_every_kind_passes");
    for model in all_models(&mut random) {
        let verdict = model.verdict();
        assert!(verdict.is_consistent(), "{verdict}");
        assert_eq!(verdict.pages(), 2 * SHARE_PAGES);
    }
}

#[test]
fn dropped_page_fails() {
    // A page that was never sent: its initial content, or zeros.
    damage_every_page("dropped_page_fails", |random, model, worker, page| {
        Some(if random.u64(..2) == 0 { model.version(worker, page, 0) } else { [0; WORDS_PER_PAGE] })
    });
}

#[test]
fn reordered_page_fails() {
    // An older version that arrived after the newer one.
    damage_every_page("reordered_page_fails", |random, model, worker, page| {
        let versions = model.versions(worker, page);
        Some(model.version(worker, page, *random.choice(&versions).unwrap()))
    });
}

#[test]
fn page_from_the_future_fails() {
    // A version that was written after the cut.
    damage_every_page("page_from_the_future_fails", |random, model, worker, page| {
        Some(model.version(worker, page, model.cut.workers[worker].steps + 1 + random.u64(..1000)))
    });
}

#[test]
fn duplicated_page_fails() {
    damage_every_page("duplicated_page_fails", |random, model, _, _| {
        Some(model.get(random.u64(..2) as usize, random.u64(..SHARE_PAGES)))
    });
}

#[test]
fn torn_page_fails() {
    // The first words of one version before the last words of another, at any word.
    damage_every_page("torn_page_fails", |random, model, worker, page| {
        let mut versions = model.versions(worker, page);
        versions.push(model.cut.workers[worker].steps + 1 + random.u64(..50));
        let (first, second) = (*random.choice(&versions).unwrap(), *random.choice(&versions).unwrap());
        let (mut words, rest) = (model.version(worker, page, first), model.version(worker, page, second));
        let at = 1 + random.u64(..WORDS_PER_PAGE as u64 - 1) as usize;
        words[at..].copy_from_slice(&rest[at..]);
        Some(words)
    });
}

#[test]
fn page_with_one_changed_bit_fails() {
    damage_every_page("page_with_one_changed_bit_fails", |random, model, worker, page| {
        let mut words = model.get(worker, page);
        let any = random.u64(..WORDS_PER_PAGE as u64) as usize;
        let slot = *random.choice(&[0, 1, 73, 255, 510, 511, any]).unwrap();
        words[slot] ^= 1 << random.u64(..64);
        Some(words)
    });
}

#[test]
fn diagnosis_names_what_happened() {
    for plan in [WordPlan::FULL, WordPlan::TIDE] {
        let mut model = Model::new(plan, Fill::Random(3), Pattern::Sequential, SHARE_PAGES);
        model.run(0, 100);
        model.run(1, 45);
        // Steps 9, 39, 69 and 99 wrote page 9 of worker 0. Only step 20 wrote page 20 of worker 1.
        let damage =
            |worker, page, words: PageWords| only_damage(&model.damaged(worker, page, &words), worker, page);
        assert_eq!(damage(0, 9, model.version(0, 9, 39)), Damage::Stale { found_step: 39 });
        assert_eq!(damage(1, 20, model.version(1, 20, 0)), Damage::Stale { found_step: 0 });
        assert_eq!(damage(0, 9, model.version(0, 9, 129)), Damage::FromFuture { found_step: 129 });
        assert_eq!(damage(0, 9, [0; WORDS_PER_PAGE]), Damage::Zeroed);
        assert_eq!(
            damage(0, 9, model.get(1, 20)),
            Damage::Duplicate { of_worker: 1, of_page: 20, found_step: 20 }
        );
        assert_eq!(
            damage(1, 3, model.version(0, 22, 0)),
            Damage::Duplicate { of_worker: 0, of_page: 22, found_step: 0 }
        );
        let mut torn = model.version(0, 9, 69);
        torn[511] = model.version(0, 9, 99)[511];
        assert_eq!(damage(0, 9, torn), Damage::Torn { first_step: 69, other_step: 99, at: 4088 });
        let mut flipped = model.get(0, 9);
        flipped[73] ^= 1;
        let expected = model.get(0, 9)[73];
        assert_eq!(damage(0, 9, flipped), Damage::Garbage { at: 584, expected, found: expected ^ 1 });
    }
}

#[test]
fn content_where_zeros_belong_is_named_as_the_step_that_wrote_it() {
    for (plan, fill) in
        [(WordPlan::FULL, Fill::Random(3)), (WordPlan::TIDE, Fill::Random(3)), (WordPlan::TIDE, Fill::Zero)]
    {
        let mut model = Model::acting(Acts::MIXED, plan, fill, Pattern::Random, SHARE_PAGES);
        model.run(0, 400);
        let mut stale = 0;
        for page in 0..SHARE_PAGES {
            let versions = model.versions(0, page);
            let written =
                versions.iter().copied().find(|step| *step > 0 && model.act(0, *step) == Act::Write);
            let (true, Some(written)) = (model.act(0, versions[0]) != Act::Write, written) else { continue };
            let verdict = model.damaged(0, page, &model.version(0, page, written));
            assert_eq!(only_damage(&verdict, 0, page), Damage::Stale { found_step: written }, "{verdict}");
            assert!(
                verdict.to_string().contains(&format!("expected zeros of step {}", versions[0])),
                "{verdict}"
            );
            stale += 1;
        }
        assert!(stale > 2, "{stale} pages");
    }
}

#[test]
fn page_in_flight_may_hold_exactly_the_words_that_are_said() {
    let plan = WordPlan::TIDE;
    for said in 0..plan.count() {
        for written in 0..plan.count() {
            let mut model = Model::new(plan, Fill::Zero, Pattern::Random, SHARE_PAGES);
            model.run(0, 60);
            model.do_next(0, written);
            model.cut.workers[0].in_flight = InFlight::Words(said);
            assert_eq!(model.verdict().is_consistent(), said == written, "{said} {written}");
            model.cut.workers[0].in_flight = InFlight::Unknown;
            assert!(model.verdict().is_consistent());
        }
    }
}

#[test]
fn counter_of_another_instant_fails() {
    let mut model = Model::new(WordPlan::TIDE, Fill::Zero, Pattern::Sequential, SHARE_PAGES);
    model.run(0, 75);
    for steps in [0, 1, 45, 73, 76, 77, 105, 1 << 40] {
        model.cut.workers[0].steps = steps;
        assert!(!model.verdict().is_consistent(), "{steps}");
    }
}

#[test]
fn memory_of_workers_from_two_instants_fails() {
    let mut model = Model::new(WordPlan::TIDE, Fill::Zero, Pattern::Sequential, SHARE_PAGES);
    model.run(0, 10);
    model.run(1, 20);
    model.cut.workers[0].witness = Some(Witness { worker: 1, steps: 20 });
    assert!(model.verdict().is_consistent());
    model.cut.workers[0].witness = Some(Witness { worker: 1, steps: 21 });
    let expected = Violation::Order { worker: 0, other: 1, saw: 21, counted: 20 };
    assert_eq!(model.verdict().violations(), &[expected]);
}

#[test]
fn many_violations_are_counted_and_the_first_listed() {
    let mut model = Model::new(WordPlan::TIDE, Fill::Zero, Pattern::Sequential, SHARE_PAGES);
    model.run(0, 30);
    model.run(1, 30);
    model.ram.blocks().iter().for_each(|block| block.discard_all().unwrap());
    let Verdict::Corrupt { total, violations, .. } = model.verdict() else { panic!("lost RAM passed") };
    assert_eq!((total, violations.len()), (60, 32));
    let text = model.verdict().to_string();
    assert!(text.contains("60 violations") && text.contains("and 28 more"), "{text}");
}

#[test]
fn check_of_a_sparse_guest_leaves_it_sparse() {
    let mut model = Model::new(WordPlan::TIDE, Fill::Zero, Pattern::Sequential, 3);
    model.run(0, 3);
    let resident =
        |model: &Model| model.ram.blocks().iter().map(|b| b.resident_bytes().unwrap()).sum::<u64>();
    let before = resident(&model);
    assert!(model.verdict().is_consistent());
    assert_eq!(resident(&model), before);
}

#[test]
fn share_outside_of_ram_is_an_error() {
    let mut model = Model::new(WordPlan::TIDE, Fill::Zero, Pattern::Sequential, 3);
    model.cut.workers[1].share = Share::new(vec![Segment { block: 1, first_page: 39, pages: 2 }]);
    assert!(matches!(check(&model.ram, &model.cut), Err(CheckError::Control { worker: 1, .. })));
}
