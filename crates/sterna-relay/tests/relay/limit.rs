//! The limit for the sum of all sessions: its rate, its fairness, and who goes first.

use std::time::{Duration, Instant};

use sterna_relay::relay::{Limit, Share};

const BATCH: u64 = 128 << 10;

/// Sessions that ask when they may, in a time that the test counts.
struct Asking {
    now: Instant,
    shares: Vec<(Share, Instant, u64)>,
}

impl Asking {
    fn new(limit: &Limit, count: usize) -> Self {
        let now = Instant::now();
        Self { now, shares: (0..count).map(|_| (limit.share(), now, 0)).collect() }
    }

    /// Lets `time` pass, while the sessions `active` have work. Returns the bytes of each in this time.
    fn run(&mut self, time: Duration, active: &[usize]) -> Vec<u64> {
        let until = self.now + time;
        let before: Vec<u64> = self.shares.iter().map(|share| share.2).collect();
        while self.now < until {
            for index in active {
                let (share, next, sent) = &mut self.shares[*index];
                if *next > self.now {
                    continue;
                }
                match share.ask(self.now) {
                    Ok(()) => {
                        share.sent(BATCH);
                        *sent += BATCH;
                    }
                    Err(wait) => *next = self.now + wait,
                }
            }
            self.now += Duration::from_micros(50);
        }
        self.shares.iter().zip(before).map(|(share, before)| share.2 - before).collect()
    }
}

fn is_about(bytes: u64, wanted: u64) -> bool {
    bytes.abs_diff(wanted) * 20 <= wanted
}

#[test]
fn limit_holds_for_the_sum_and_is_shared_equally() {
    for (rate, count) in [(10_000_000_u64, 2), (100_000_000, 5), (1_000_000_000, 3)] {
        let mut sessions = Asking::new(&Limit::new(rate), count);
        let all: Vec<usize> = (0..count).collect();
        sessions.run(Duration::from_millis(500), &all);

        let sent = sessions.run(Duration::from_secs(4), &all);

        assert!(is_about(sent.iter().sum(), rate * 4), "{rate}: {sent:?}");
        assert!(sent.iter().all(|sent| is_about(*sent, rate * 4 / count as u64)), "{rate}: {sent:?}");
    }
}

#[test]
fn limit_gives_to_others_what_a_session_does_not_use_and_owes_it_nothing_later() {
    let mut sessions = Asking::new(&Limit::new(50_000_000), 3);

    let alone = sessions.run(Duration::from_secs(2), &[0]);
    let both = sessions.run(Duration::from_secs(2), &[0, 1]);

    assert!(is_about(alone[0], 100_000_000), "{alone:?}");
    assert!(is_about(both[0], 50_000_000) && is_about(both[1], 50_000_000), "{both:?}");
}

#[test]
fn limit_serves_a_switchover_first() {
    let mut sessions = Asking::new(&Limit::new(50_000_000), 3);
    sessions.run(Duration::from_secs(1), &[0, 1, 2]);
    sessions.shares[1].0.set_first(true);

    let sent = sessions.run(Duration::from_secs(2), &[0, 1, 2]);

    assert!(sent[1] >= 95_000_000, "{sent:?}");
    sessions.shares[1].0.set_first(false);
    let sent = sessions.run(Duration::from_secs(3), &[0, 1, 2]);
    assert!(sent.iter().all(|sent| *sent > 30_000_000), "{sent:?}");
}

#[test]
fn limit_that_changes_is_followed_and_none_holds_nothing_up() {
    let limit = Limit::new(10_000_000);
    let mut sessions = Asking::new(&limit, 1);
    assert!(is_about(sessions.run(Duration::from_secs(2), &[0])[0], 20_000_000));
    let share = limit.share();

    limit.set(0);
    share.sent(1 << 40);

    assert_eq!((limit.bytes_per_second(), share.ask(Instant::now())), (0, Ok(())));
}
